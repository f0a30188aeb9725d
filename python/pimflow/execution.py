"""Executables of TVM's virtual machine: stored, loaded, run."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tvm
from tvm import relax

from pimflow.errors import ArtifactError


def infer(executable: relax.VMExecutable | tvm.runtime.Module, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Outputs of one inference on the CPU."""
    machine = relax.VirtualMachine(executable, tvm.cpu())
    result = machine["main"](*(tvm.runtime.tensor(np.ascontiguousarray(x)) for x in inputs))
    results = [result] if isinstance(result, tvm.runtime.Tensor) else list(result)
    return [r.numpy() for r in results]


def store(executable: relax.VMExecutable, path: Path) -> None:
    """Write `executable` as a shared library; raises `ArtifactError` where no C++ compiler links it."""
    try:
        with _without_tvm_warnings():
            executable.export_library(str(path))
    except RuntimeError as error:
        reason = (str(error).strip().splitlines() or ["unknown reason"])[-1]
        raise ArtifactError(
            f"{path.name} cannot be linked; is a C++ compiler installed? ({reason})"
        ) from error


def load(path: Path) -> tvm.runtime.Module:
    """Read what `store` wrote; raises `ArtifactError` if it is not that."""
    try:
        with _without_tvm_warnings():
            return tvm.runtime.load_module(str(path))
    except (OSError, RuntimeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or ["unknown reason"])[-1]
        raise ArtifactError(f"{path} cannot be loaded; compile again ({reason})") from error


@contextlib.contextmanager
def _without_tvm_warnings() -> Iterator[None]:
    """Drop what TVM's C++ side prints: it warns of every scope saved or loaded, and no level stops it."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
