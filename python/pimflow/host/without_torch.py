"""Import of TVM without PyTorch, for pimflow's own commands and workers.

If PyTorch is installed, tvm-ffi and Relax import it, so that their functions accept its tensors and types.
That takes over a second, and no setting prevents it (tvm-ffi 0.1.14, TVM 0.27). Commands and their workers
pass no such values to TVM. A program that imports pimflow may, so the hook is not installed there.
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
    """Hide PyTorch from TVM's imports that are still to come; other code can import it as usual."""
    if TORCH not in sys.modules and not any(
        isinstance(finder, _TorchHidingFinder) for finder in sys.meta_path
    ):
        sys.meta_path.insert(0, _TorchHidingFinder())


class _TorchHidingFinder:
    """An import hook that hides PyTorch while `IMPORTERS` are loaded."""

    def __init__(self) -> None:
        self.remaining = set(IMPORTERS)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of one of `IMPORTERS`, with a loader that hides PyTorch."""
        if name not in self.remaining:
            return None
        self.remaining.remove(name)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                """Load the module without PyTorch."""
                hidden = TORCH not in sys.modules
                if hidden:
                    sys.modules[TORCH] = None  # type: ignore[assignment]  # makes its import fail
                try:
                    execute(module)
                finally:
                    if hidden:
                        del sys.modules[TORCH]

            # `exec_module` of this one loader is replaced on purpose.
            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
