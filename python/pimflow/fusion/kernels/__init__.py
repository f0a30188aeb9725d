"""Groups of Deep Fusion that run: each as one TIR function, results verified, traffic counted."""

from pimflow.fusion.kernels.execution import (
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
from pimflow.fusion.kernels.formula import Computation
from pimflow.fusion.kernels.generator import generate
from pimflow.fusion.kernels.onnx_formulas import computations
from pimflow.fusion.kernels.parameters import Target

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
