"""A TVM back end for GPUs whose DRAM computes.

Importing pimflow extends TVM: it registers the runtime of PIM regions, so that compiled networks load, and
the targets ``cuda+pim`` and ``llvm+pim``; it brings back ``tvm.relay`` (see `pimflow.tvm_extension.relay`).

    >>> import pimflow
    >>> compiled = pimflow.compile("mobilenet-v2", "build/mobilenet-v2")
    >>> outputs = pimflow.run("build/mobilenet-v2")
"""

from __future__ import annotations

from pimflow.tvm_extension import install as _tvm_extension

_PUBLIC = (
    *("Compiled", "compile", "fuse", "infer", "relax_pipeline"),
    *("run", "search", "select", "simulate", "trace"),
)
_DEVICES = ("GpuSpec", "PimSpec", "System", "system")
_LAZY = dict.fromkeys(_PUBLIC, "pimflow.api.compile") | dict.fromkeys(_DEVICES, "pimflow.hardware")

__all__ = list(_LAZY)


def __getattr__(name: str) -> object:
    """What takes a moment is imported on first need: TVM takes a second."""
    if name not in _LAZY:
        raise AttributeError(f"module 'pimflow' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)


_tvm_extension.install()
