"""A TVM back end for GPUs whose DRAM computes.

Importing pimflow extends TVM: it registers the runtime of PIM regions, so that compiled networks load, and
the targets ``cuda+pim`` and ``llvm+pim``; it brings back ``tvm.relay`` (see `pimflow.tvm_extension.relay`).

    >>> import pimflow
    >>> compiled = pimflow.compile("mobilenet-v2", "build/mobilenet-v2")
    >>> outputs = pimflow.run("build/mobilenet-v2")
"""

from __future__ import annotations

import importlib
import os

from pimflow import moved as _moved
from pimflow.tvm_extension import install as _tvm_extension

# By module, what is handed on: names, or names that are others there.
_FILES = {
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
    "pimflow.api.run": "Inference infer run",
    "pimflow.api.search": "search search_network",
    "pimflow.api.select": "select",
    "pimflow.api.simulate": "simulate",
    "pimflow.api.sweep": "sweep",
    "pimflow.api.timeline": "trace_plan",
    "pimflow.api.trace": "trace",
    "pimflow.compiler.measurement.allocations": "measure_allocations",
    "pimflow.fusion.kernels.execution": "execute_fused=execute",
    "pimflow.hardware": "GpuSpec PimSpec System system",
    "pimflow.placement": "Goal Profiling Searched",
    "pimflow.primitive_selection.options": "SelectionOptions",
}
_LAZY = {
    public: (module, own or public)
    for module, names in _FILES.items()
    for public, _, own in (name.partition("=") for name in names.split())
}

__all__ = list(_LAZY)


def __getattr__(name: str) -> object:
    """What takes a moment is imported on first need: TVM takes a second."""
    if name not in _LAZY:
        raise _moved.missing(__name__, name)
    module, own = _LAZY[name]
    return getattr(importlib.import_module(module), own)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


for _name in ("ORT_DISABLE_TELEMETRY", "ORT_TELEMETRY_DISABLED"):  # its versions ask for different ones
    os.environ.setdefault(_name, "1")  # ONNX Runtime, the reference, tells its maker of every network it runs
_moved.install()
_tvm_extension.install()
