"""TVM without PyTorch, for processes that are pimflow's own.

Where PyTorch is installed, tvm-ffi and Relax import it with themselves, so that their functions know its
tensors and types: more than a second, and no setting leaves it out (tvm-ffi 0.1.14, TVM 0.27). Commands and
their workers hand TVM no such values; a program that imports pimflow may, and is left alone.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

TORCH = "torch"
IMPORTERS = ("tvm_ffi", "tvm.relax")


def install() -> None:
    """Keep PyTorch out of what TVM still has to import; others can import it before and after."""
    if TORCH not in sys.modules and not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds `IMPORTERS` as Python would, and hides PyTorch while they are loaded."""

    def __init__(self) -> None:
        self.left = set(IMPORTERS)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.left:
            return None
        self.left.remove(name)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                hidden = TORCH not in sys.modules
                if hidden:
                    sys.modules[TORCH] = None  # type: ignore[assignment]  # what makes an import fail
                try:
                    execute(module)
                finally:
                    if hidden:
                        del sys.modules[TORCH]

            # `exec_module` of this one loader is replaced on purpose.
            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
