"""The C++ core: loading it registers its functions, and the loader of compiled PIM modules, with tvm-ffi.

It is loaded when it is first used: tvm-ffi imports PyTorch if that is installed, which takes over a second.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pimflow import errors

if TYPE_CHECKING:
    import tvm_ffi

LIBRARY = Path(__file__).parents[1] / "libpimflow_core.so"

# Errors of passes go through TVM, which preserves only registered classes; others become RuntimeError.
_ERRORS = (
    errors.UsageError,
    errors.UnknownNameError,
    errors.ModelError,
    errors.SpecError,
    errors.TraceError,
    errors.LifetimeError,
    errors.OutputError,
    errors.PlanError,
    errors.ArtifactError,
    errors.UnsupportedOpError,
    errors.InfeasibleError,
    errors.VerificationError,
)


@functools.cache
def load() -> tvm_ffi.Module:
    """Load the library and register its errors; raises `ImportError` if it is not built."""
    import tvm_ffi

    if not LIBRARY.exists():
        raise ImportError(f"{LIBRARY.name} is not built; install pimflow with 'pip install -e .'")
    tvm_ffi.register_error("KeyboardInterrupt", KeyboardInterrupt)
    for error in _ERRORS:
        tvm_ffi.register_error(error.__name__, error)  # a Python error to its name in C++
        tvm_ffi.register_error(
            error.__name__, _with_message_constructor(error)
        )  # the name back to a Python error
    return tvm_ffi.load_module(str(LIBRARY))


def get(name: str) -> Callable[..., Any]:
    """The function that the library or TVM registers as `name`; looked up at the first call."""

    @functools.cache
    def find_function() -> Callable[..., Any]:
        """Look up the function."""
        load()
        import tvm_ffi

        return tvm_ffi.get_global_func(name)

    return lambda *arguments: find_function()(*arguments)


def _with_message_constructor(kind: type[errors.PimflowError]) -> type[errors.PimflowError]:
    """A subclass of `kind` whose constructor takes only the message."""

    def __init__(self: errors.PimflowError, message: str) -> None:
        Exception.__init__(self, message)

    return type(kind.__name__, (kind,), {"__init__": __init__})
