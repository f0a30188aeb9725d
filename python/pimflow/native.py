"""The C++ core: loading it registers its functions, and the loader of compiled PIM modules, with tvm-ffi."""

from __future__ import annotations

from pathlib import Path

import tvm_ffi

from pimflow import errors

LIBRARY = Path(__file__).with_name("libpimflow_core.so")

if not LIBRARY.exists():
    raise ImportError(f"{LIBRARY.name} is not built; install pimflow with 'pip install -e .'")

_module = tvm_ffi.load_module(str(LIBRARY))
get = tvm_ffi.get_global_func


def _restored(kind: type[errors.PimflowError]) -> type[errors.PimflowError]:
    """`kind`, made from its message alone, whatever its constructor takes."""

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)

    return type(kind.__name__, (kind,), {"__init__": __init__})


# A pass runs below TVM, which hands on only the errors that it knows; others become RuntimeError.
tvm_ffi.register_error("KeyboardInterrupt", KeyboardInterrupt)
for _error in (
    errors.UsageError,
    errors.UnknownNameError,
    errors.ModelError,
    errors.SpecError,
    errors.TraceError,
    errors.LifetimeError,
    errors.PlanError,
    errors.ArtifactError,
    errors.UnsupportedOpError,
    errors.InfeasibleError,
    errors.VerificationError,
):
    tvm_ffi.register_error(_error.__name__, _error)  # what it is called on the way down
    tvm_ffi.register_error(_error.__name__, _restored(_error))  # what comes back up
