"""The C++ core: loading it registers its functions, and the loader of compiled PIM modules, with tvm-ffi.

It is loaded when it is first used: tvm-ffi imports PyTorch if that is installed, which takes over a second.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

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
        # the name back to a Python error
        tvm_ffi.register_error(error.__name__, _with_message_constructor(error))
    # ctypes never unloads what it loads. Else the library may go when Python ends, before tvm-ffi, which then
    # calls the deleters of functions that the library registered.
    ctypes.CDLL(str(LIBRARY))
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


class Record:
    """A record of numbers that crosses to C++ by name; the library lists its fields (``host/src/records.h``).

    Parameters
    ----------
    name : str
        Under which the library registers it.

    Raises
    ------
    ImportError
        By the methods, if the names given are not those of the library, which then is of another version.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._definition = get(f"{name}.fields")

    @functools.cached_property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields, in the order of C++."""
        return tuple(str(self._definition()[1]).split(", "))

    @functools.cached_property
    def dtype(self) -> np.dtype:
        """The type of all fields."""
        return np.dtype(str(self._definition()[0]))

    def table(self, names: Sequence[str], rows: Sequence[Sequence[float]] | Sequence[float]) -> np.ndarray:
        """Records as an array, [rows, fields], from rows of numbers in the order of `names`, or one row
        after the other.
        """
        self._check(sorted(names), sorted(self.fields))
        columns = [names.index(field) for field in self.fields]
        return np.ascontiguousarray(np.array(rows, self.dtype).reshape(-1, len(names))[:, columns])

    def row(self, **numbers: float) -> np.ndarray:
        """One record as an array, [fields]."""
        (record,) = self.table(tuple(numbers), [tuple(numbers.values())])
        return np.asarray(record)

    def zeros(self, names: Sequence[str], count: int) -> np.ndarray:
        """Records of zeros, [count, fields], which C++ fills; the fields are `names`, in this order."""
        self._check(list(names), list(self.fields))
        records: np.ndarray = np.zeros((count, len(names)), self.dtype)
        return records

    def _check(self, names: list[str], fields: list[str]) -> None:
        if names != fields:
            raise ImportError(
                f"{LIBRARY.name} is of another version: the fields of '{self.name}' are {', '.join(fields)}, "
                f"not {', '.join(names)}; install pimflow again with 'pip install -e .'"
            )


def _with_message_constructor(kind: type[errors.PimflowError]) -> type[errors.PimflowError]:
    """A subclass of `kind` whose constructor takes only the message."""

    def __init__(self: errors.PimflowError, message: str) -> None:
        Exception.__init__(self, message)

    return type(kind.__name__, (kind,), {"__init__": __init__})
