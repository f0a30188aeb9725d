"""C sources, built by this machine's compiler and run."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tvm

from pimflow.c_code.c_source import ALIGNMENT_BYTES, PRAGMA, CSource
from pimflow.errors import ArtifactError

OPTIONS = ("-O3", "-march=native")
CALLS = 5  # of which the median counts
NO_COMPILER = "no C compiler was found: install cc, or name one by the environment variable CC"


def compiler() -> list[str]:
    """The command of the environment variable ``CC``, else ``cc``; empty if there is none."""
    named = shlex.split(os.environ.get("CC", "")) or ["cc"]
    return named if shutil.which(named[0]) else []


class Library:
    """A network, built from its C source.

    Parameters
    ----------
    source : CSource

    Raises
    ------
    ArtifactError
        If there is no compiler, or it fails.
    """

    def __init__(self, source: CSource):
        self.source = source
        with tempfile.TemporaryDirectory() as folder:
            for name, content in source.files().items():
                (Path(folder) / name).write_bytes(content)
            path = Path(folder) / "network.so"
            compile_c([Path(folder) / "network.c"], path, ["-shared", "-fPIC"])
            self._run = ctypes.CDLL(str(path)).pimflow_run
        self._weights = _aligned(max(len(source.weights), 1))
        self._weights[: len(source.weights)] = np.frombuffer(source.weights, np.uint8)
        self._pool = _aligned(max(source.pool_bytes, 1))

    def __call__(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Outputs for inputs in order, each of its shape and dtype."""
        taken = [_aligned_copy(np.ascontiguousarray(x)) for x in inputs]
        made = [np.empty(shape, dtype) for shape, dtype in self.source.outputs]
        self._run(*map(_pointer, (self._weights, self._pool, *taken, *made)))
        return made

    def call_ns(self, inputs: Sequence[np.ndarray]) -> float:
        """Median time of a call."""
        times = []
        for _ in range(CALLS):
            begin = time.perf_counter_ns()
            self(inputs)
            times.append(time.perf_counter_ns() - begin)
        return float(np.median(times))


def version() -> str:
    """What the compiler calls itself; raises `ArtifactError` if there is none."""
    command = compiler()
    if not command:
        raise ArtifactError(NO_COMPILER)
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    return (done.stdout.strip().splitlines() or [command[0]])[0]


def loaded(built: tvm.runtime.Executable) -> tvm.runtime.Module:
    """What `tvm.compile` made for ``c``, ready to be called; raises `ArtifactError` if it cannot be built."""
    with tempfile.TemporaryDirectory() as folder:
        path, pragma = Path(folder) / "kernels.so", Path(folder) / "pragma.h"
        pragma.write_text(PRAGMA)
        options = [*OPTIONS, "-include", str(pragma)]
        try:
            built.export_library(str(path), cc=compiler()[0], options=options)
        except RuntimeError as error:
            lines = str(error).strip().splitlines()
            reason = next((line for line in lines if "error:" in line), "no reason given")
            raise ArtifactError(f"{compiler()[0]} failed: {reason}") from error
        return tvm.runtime.load_module(str(path))


def compile_c(sources: Sequence[Path], output: Path, options: Sequence[str] = ()) -> None:
    """Build `output`; raises `ArtifactError` if there is no compiler, or it fails."""
    command = compiler()
    if not command:
        raise ArtifactError(NO_COMPILER)
    whole = [*command, *OPTIONS, *options, *map(str, sources), "-o", str(output), "-lm"]
    done = subprocess.run(whole, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        reason = next((line for line in lines if "error" in line), (lines or ["no reason given"])[0])
        raise ArtifactError(f"{command[0]} failed: {reason}")


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _aligned(size: int) -> np.ndarray:
    whole = np.empty(size + ALIGNMENT_BYTES, np.uint8)
    begin = -whole.ctypes.data % ALIGNMENT_BYTES
    return whole[begin : begin + size]


def _aligned_copy(array: np.ndarray) -> np.ndarray:
    room = _aligned(max(array.nbytes, 1))
    room[: array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
    return room
