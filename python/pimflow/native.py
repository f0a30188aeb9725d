"""The C++ core: loading it registers its functions, and the loader of compiled PIM modules, with tvm-ffi."""

from __future__ import annotations

from pathlib import Path

import tvm_ffi

from pimflow import errors

_LIBRARY = Path(__file__).with_name("libpimflow_core.so")

if not _LIBRARY.exists():
    raise ImportError(f"{_LIBRARY.name} is not built; install pimflow with 'pip install -e .'")

_module = tvm_ffi.load_module(str(_LIBRARY))
get = tvm_ffi.get_global_func

# A pass runs below TVM, which hands on only the errors that it knows; others become RuntimeError.
for _error in (
    errors.UsageError,
    errors.ModelError,
    errors.SpecError,
    errors.TraceError,
    errors.PlanError,
    errors.ArtifactError,
    errors.UnsupportedOpError,
    errors.VerificationError,
):
    tvm_ffi.register_error(_error.__name__, _error)
