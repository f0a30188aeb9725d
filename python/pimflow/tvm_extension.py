"""What importing pimflow adds to TVM, as soon as TVM itself is imported.

Targets with PIM, options of the search in `PassContext`, and the Relay entry points that TVM dropped
in 0.20. TVM is not imported for it: that takes a second, which ``pimflow --help`` need not spend.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

# Name in TVM -> what stands there.
_FACADE = {
    "tvm.relay": "pimflow.relay",
    "tvm.relay.frontend": "pimflow.relay.frontend",
    "tvm.contrib.graph_executor": "pimflow.relay.graph_executor",
}

_PARTS = ("build_module", "frontend", "graph_executor")  # of pimflow.relay


def install() -> None:
    """Extend TVM now if it is there, else when it comes."""
    sys.meta_path.insert(0, _RelayFinder())
    if "tvm" in sys.modules:
        _extend()
    else:
        sys.meta_path.insert(0, _TvmFinder())


def _extend() -> None:
    from pimflow import pass_options, targets

    targets.register()
    pass_options.register()
    for name, source in _FACADE.items():
        module = importlib.import_module(source)
        sys.modules[name] = module
        parent, _, leaf = name.rpartition(".")
        setattr(importlib.import_module(parent), leaf, module)


class _TvmFinder:
    """Finds TVM as Python would, and extends it once it is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "tvm":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _extend()

            spec.loader.exec_module = exec_module
        return spec


class _RelayFinder:
    """Says what to use instead of the parts of Relay that are gone."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent, _, leaf = name.rpartition(".")
        if parent in ("tvm.relay", "pimflow.relay") and leaf not in _PARTS:
            from pimflow.relay import instead_of

            raise ImportError(instead_of(leaf), name=name)
        return None
