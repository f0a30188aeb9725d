"""A TVM back end for GPUs whose DRAM computes.

The import of pimflow extends TVM. It registers the runtime of PIM regions, so that compiled networks can be
loaded, and the targets ``cuda+pim`` and ``llvm+pim``; it restores ``tvm.relay`` (see
`pimflow.tvm_extension.relay`).

    >>> import pimflow
    >>> compiled = pimflow.compile("mobilenet-v2", "build/mobilenet-v2")
    >>> outputs = pimflow.run("build/mobilenet-v2")
"""

from __future__ import annotations

import sys as _sys

if _sys.argv[:1] == ["-m"]:  # set by Python while it looks for `pimflow.__main__`
    import pimflow_signals as _signals

    _signals.leave_when_interrupted()

import importlib
import os
from typing import TYPE_CHECKING as _TYPE_CHECKING

from pimflow.tvm_extension import install as _tvm_extension

if _TYPE_CHECKING:  # the names of `_NAMES_BY_MODULE`, for type checkers and editors
    from pimflow.commands.compile.compile import Compiled, compile
    from pimflow.commands.compile.pareto import pareto
    from pimflow.commands.compile.relax_pipeline import relax_pipeline
    from pimflow.commands.compile.system_choices import choose_channels, choose_copy_ahead
    from pimflow.commands.compile.timeline import trace_plan
    from pimflow.commands.compile.torch_backend import torch_backend
    from pimflow.commands.fuse.fuse import fuse, fuse_decomposed
    from pimflow.commands.generate.generate import generate
    from pimflow.commands.generate.generation import Generation
    from pimflow.commands.memory.decompose import export_decomposed
    from pimflow.commands.memory.memory import NetworkMemory, plan_memory
    from pimflow.commands.primitives.select import select
    from pimflow.commands.run.run import Inference, Session, infer, run
    from pimflow.commands.serve.report import Serving
    from pimflow.commands.serve.serve import serve_sim
    from pimflow.commands.shared.options import NetworkOptions
    from pimflow.commands.shared.report import Report
    from pimflow.commands.shared.search import search, search_network
    from pimflow.commands.simulate.simulate import simulate
    from pimflow.commands.simulate.trace import trace
    from pimflow.commands.sweep.sweep import sweep
    from pimflow.compiler.measurement.allocations import measure_allocations
    from pimflow.fusion.kernels.execution import execute as execute_fused
    from pimflow.hardware import GpuSpec, PimSpec, System, system
    from pimflow.placement import Goal, Profiling, SearchResult
    from pimflow.primitive_selection.options import SelectionOptions

    __version__: str

# By module, the public names that come from it; ``public=name`` if the name differs there.
_NAMES_BY_MODULE = {
    "pimflow.commands.compile.system_choices": "choose_channels choose_copy_ahead",
    "pimflow.commands.compile.compile": "Compiled compile",
    "pimflow.commands.memory.decompose": "export_decomposed",
    "pimflow.commands.fuse.fuse": "fuse fuse_decomposed",
    "pimflow.commands.generate.generate": "generate",
    "pimflow.commands.generate.generation": "Generation",
    "pimflow.commands.memory.memory": "NetworkMemory plan_memory",
    "pimflow.commands.shared.options": "NetworkOptions",
    "pimflow.commands.compile.pareto": "pareto",
    "pimflow.commands.compile.relax_pipeline": "relax_pipeline",
    "pimflow.commands.shared.report": "Report",
    "pimflow.commands.run.run": "Inference Session infer run",
    "pimflow.commands.serve.report": "Serving",
    "pimflow.commands.serve.serve": "serve_sim",
    "pimflow.commands.shared.search": "search search_network",
    "pimflow.commands.primitives.select": "select",
    "pimflow.commands.simulate.simulate": "simulate",
    "pimflow.commands.sweep.sweep": "sweep",
    "pimflow.commands.compile.timeline": "trace_plan",
    "pimflow.commands.compile.torch_backend": "torch_backend",
    "pimflow.commands.simulate.trace": "trace",
    "pimflow.compiler.measurement.allocations": "measure_allocations",
    "pimflow.fusion.kernels.execution": "execute_fused=execute",
    "pimflow.hardware": "GpuSpec PimSpec System system",
    "pimflow.placement": "Goal Profiling SearchResult",
    "pimflow.primitive_selection.options": "SelectionOptions",
}
_LAZY = {
    public: (module, source_name or public)
    for module, names in _NAMES_BY_MODULE.items()
    for public, _, source_name in (name.partition("=") for name in names.split())
}

__all__ = [  # explicit, for type checkers
    "choose_channels",
    "choose_copy_ahead",
    "Compiled",
    "compile",
    "export_decomposed",
    "fuse",
    "fuse_decomposed",
    "generate",
    "Generation",
    "NetworkMemory",
    "plan_memory",
    "NetworkOptions",
    "pareto",
    "relax_pipeline",
    "Report",
    "Inference",
    "Session",
    "infer",
    "run",
    "Serving",
    "serve_sim",
    "search",
    "search_network",
    "select",
    "simulate",
    "sweep",
    "trace_plan",
    "torch_backend",
    "trace",
    "measure_allocations",
    "execute_fused",
    "GpuSpec",
    "PimSpec",
    "System",
    "system",
    "Goal",
    "Profiling",
    "SearchResult",
    "SelectionOptions",
]


def __getattr__(name: str) -> object:
    """Import a public name at its first use: the import of TVM takes a second."""
    if name == "__version__":
        from importlib.metadata import version

        return version("pimflow")
    if name not in _LAZY:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    module, source_name = _LAZY[name]
    return getattr(importlib.import_module(module), source_name)


def __dir__() -> list[str]:
    """The public names and those that every module has, without imports of this file."""
    return sorted({*__all__, "__version__", *(name for name in globals() if name.startswith("__"))})


for _name in ("ORT_DISABLE_TELEMETRY", "ORT_TELEMETRY_DISABLED"):  # the name depends on the version
    os.environ.setdefault(_name, "1")  # else ONNX Runtime, the reference, reports every network to its vendor
_tvm_extension.install()
