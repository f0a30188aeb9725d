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
    import pimflow_command as _command

    _command.leave_when_interrupted()

import importlib
import os
from typing import TYPE_CHECKING as _TYPE_CHECKING

from pimflow.tvm_extension import install as _tvm_extension

if _TYPE_CHECKING:  # the names of `_NAMES_BY_MODULE`, for type checkers and editors
    from pimflow.api.channel_counts import choose_channels
    from pimflow.api.compile import Compiled, compile
    from pimflow.api.decompose import export_decomposed
    from pimflow.api.fuse import fuse, fuse_decomposed
    from pimflow.api.generate import generate
    from pimflow.api.generation import Generation
    from pimflow.api.memory import NetworkMemory, plan_memory
    from pimflow.api.options import NetworkOptions
    from pimflow.api.pareto import pareto
    from pimflow.api.relax_pipeline import relax_pipeline
    from pimflow.api.report import Report
    from pimflow.api.run import Inference, Session, infer, run
    from pimflow.api.search import search, search_network
    from pimflow.api.select import select
    from pimflow.api.simulate import simulate
    from pimflow.api.sweep import sweep
    from pimflow.api.timeline import trace_plan
    from pimflow.api.trace import trace
    from pimflow.compiler.measurement.allocations import measure_allocations
    from pimflow.fusion.kernels.execution import execute as execute_fused
    from pimflow.hardware import GpuSpec, PimSpec, System, system
    from pimflow.placement import Goal, Profiling, SearchResult
    from pimflow.primitive_selection.options import SelectionOptions

    __version__: str

# By module, the public names that come from it; ``public=name`` if the name differs there.
_NAMES_BY_MODULE = {
    "pimflow.api.channel_counts": "choose_channels",
    "pimflow.api.compile": "Compiled compile",
    "pimflow.api.decompose": "export_decomposed",
    "pimflow.api.fuse": "fuse fuse_decomposed",
    "pimflow.api.generate": "generate",
    "pimflow.api.generation": "Generation",
    "pimflow.api.memory": "NetworkMemory plan_memory",
    "pimflow.api.options": "NetworkOptions",
    "pimflow.api.pareto": "pareto",
    "pimflow.api.relax_pipeline": "relax_pipeline",
    "pimflow.api.report": "Report",
    "pimflow.api.run": "Inference Session infer run",
    "pimflow.api.search": "search search_network",
    "pimflow.api.select": "select",
    "pimflow.api.simulate": "simulate",
    "pimflow.api.sweep": "sweep",
    "pimflow.api.timeline": "trace_plan",
    "pimflow.api.trace": "trace",
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
    "search",
    "search_network",
    "select",
    "simulate",
    "sweep",
    "trace_plan",
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
