"""A TVM back end for GPUs whose DRAM computes.

Importing pimflow makes TVM able to load compiled networks: it registers the runtime of PIM regions.

    >>> import pimflow
    >>> compiled = pimflow.compile("mobilenet-v2", "build/mobilenet-v2")
    >>> outputs = pimflow.run("build/mobilenet-v2")
"""

from __future__ import annotations

from pimflow import native as _native  # noqa: F401  registers the runtime
from pimflow.hardware import GpuSpec, PimSpec, System, system

_LAZY = {name: "pimflow.api" for name in ("Compiled", "compile", "run", "search", "simulate")}

__all__ = ["GpuSpec", "PimSpec", "System", "system", *_LAZY]


def __getattr__(name: str) -> object:
    """TVM is imported on first need: it takes a second."""
    if name not in _LAZY:
        raise AttributeError(f"module 'pimflow' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
