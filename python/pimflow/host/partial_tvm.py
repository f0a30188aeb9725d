"""Import of TVM without what pimflow's own commands and workers do not use.

No setting prevents these imports (tvm-ffi 0.1.14, TVM 0.27). A program that imports pimflow may need them, so
the hook is not installed there.

- If PyTorch is installed, tvm-ffi and Relax import it, so that their functions accept its tensors and types.
  That takes over a second; NVIDIA's Python bindings, which PyTorch brings along, take 0.06 s more. Commands
  and their workers pass no such values to TVM.
- TVM's sessions on several machines and its back ends for devices raise over a hundred errors in C++ while
  they are imported; at the first one, the symbols of all libraries are read. That takes 0.2 s. Where there is
  a CUDA driver, the back ends are loaded as in any program; elsewhere `targets` loads that of CUDA before
  code is generated for it.
- Each of TVM's fifty modules of functions lists the names of all registered functions, 5,000 strings. The
  list is kept until their number changes.
- Python compares two variables of Relax by a test of their types, and the passes look up every variable in
  dictionaries. Variables that are the same object are compared without it.
- Methods of TVM's schedules compare all arguments with their annotations, in Python. Tests of the passes run
  with these checks.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

OPTIONAL_PACKAGES = ("torch", "cuda")
SESSIONS = "tvm.runtime.disco"
CUDA_DRIVER = "libcuda.so.1"

Execution = Callable[[ModuleType], None]


def install() -> None:
    """Leave out parts of TVM in imports that are still to come; other packages can be imported as usual."""
    if not any(isinstance(finder, _PartialFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PartialFinder())


def _execute_without_packages(execute: Execution, module: ModuleType) -> None:
    """Load a module while `OPTIONAL_PACKAGES` are hidden."""
    hidden = [name for name in OPTIONAL_PACKAGES if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # makes its import fail
    try:
        execute(module)
    finally:
        for name in hidden:
            del sys.modules[name]


def _execute_with_known_names(execute: Execution, module: ModuleType) -> None:
    """Load tvm-ffi without `OPTIONAL_PACKAGES`; it lists functions once for each number of them."""
    _execute_without_packages(execute, module)
    registry = vars(sys.modules["tvm_ffi.registry"])
    list_names, names_by_count = registry["list_global_func_names"], dict[int, list[str]]()

    def list_global_func_names() -> list[str]:
        """The names of all registered functions."""
        count = registry["get_global_func"]("ffi.FunctionListGlobalNamesFunctor")()(-1)
        if count not in names_by_count:
            names_by_count[count] = list_names()
        return names_by_count[count]

    registry["list_global_func_names"] = list_global_func_names


def _execute_with_fast_variables(execute: Execution, module: ModuleType) -> None:
    """Load Relax without `OPTIONAL_PACKAGES`, with variables that are quickly found to be the same."""
    _execute_without_packages(execute, module)
    variable = vars(module)["DataflowVar"]
    is_equal, is_same = variable.__eq__, variable.same_as
    variable.__eq__ = lambda self, other: is_same(self, other) or is_equal(self, other)


def _execute_without_backends(execute: Execution, module: ModuleType) -> None:
    """Load the module that loads TVM's back ends, with none to load if there is no CUDA driver."""
    execute(module)
    try:
        ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        vars(module)["_BUILTIN_BACKENDS"] = ()


def _execute_without_type_checks(execute: Execution, module: ModuleType) -> None:
    """Load the module that makes type checks of arguments, so that it makes none."""
    execute(module)
    vars(module)["type_checked"] = lambda function: function


_EXECUTIONS: dict[str, Callable[[Execution, ModuleType], None]] = {
    "tvm_ffi": _execute_with_known_names,
    "tvm.relax": _execute_with_fast_variables,
    "tvm.backend._autoload_backends": _execute_without_backends,
    "tvm.s_tir.schedule._type_checker": _execute_without_type_checks,
}


class _PartialFinder:
    """An import hook that loads the modules of `_EXECUTIONS` in their own way, and `SESSIONS` not at all."""

    def __init__(self) -> None:
        self.remaining = set(_EXECUTIONS)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module that is loaded in its own way; raises `ImportError` for `SESSIONS`."""
        if name == SESSIONS:
            raise ImportError("commands of pimflow have no sessions on several machines", name=name)
        if name not in self.remaining:
            return None
        self.remaining.remove(name)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                """Load the module in its own way."""
                _EXECUTIONS[name](execute, module)

            # `exec_module` of this one loader is replaced on purpose.
            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
