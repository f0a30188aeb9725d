"""tvm-ffi without PyTorch, for processes that are pimflow's own.

Where PyTorch is installed, tvm-ffi imports it with itself, so that its functions know PyTorch's tensors and
types: that takes more than a second, and no setting of tvm-ffi's leaves it out (0.1.14). The commands and
their workers hand TVM no such values; a program that imports pimflow may, and is left alone.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

TORCH = "torch"


def install() -> None:
    """Keep `TORCH` out of an import of tvm-ffi that is still to come; it can be imported before and after."""
    if "tvm_ffi" not in sys.modules and TORCH not in sys.modules:
        sys.meta_path.insert(0, _TvmFfiFinder())


class _TvmFfiFinder:
    """Finds tvm-ffi as Python would, and hides PyTorch while it is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "tvm_ffi":
            return None
        sys.meta_path.remove(self)
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

            spec.loader.exec_module = exec_module
        return spec
