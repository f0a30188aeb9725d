"""Groups of Deep Fusion that run: each as one TIR function, results verified, traffic counted."""

from pimflow.fused_execution.formula import Computation
from pimflow.fused_execution.generator import generate
from pimflow.fused_execution.operators import computations
from pimflow.fused_execution.parameters import Target
from pimflow.fused_execution.run import (
    NAME,
    Execution,
    GroupRun,
    build,
    build_cuda,
    cuda_source,
    execute,
    lone,
    require_executable,
    run_group,
    summary,
    text,
)

__all__ = [
    "NAME",
    "Computation",
    "Execution",
    "GroupRun",
    "Target",
    "build",
    "build_cuda",
    "computations",
    "cuda_source",
    "execute",
    "generate",
    "lone",
    "require_executable",
    "run_group",
    "summary",
    "text",
]
