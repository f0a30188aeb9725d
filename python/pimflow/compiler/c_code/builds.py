"""C sources, compiled by this machine's compiler and run."""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import tvm

from pimflow.compiler.c_code.kernels import ALIGNMENT_BYTES
from pimflow.compiler.c_code.source import CSource
from pimflow.compiler.timing import call_times_ns
from pimflow.errors import ArtifactError, last_line
from pimflow.pim_backend.runtime.targets import cpu_name

OPTIONS = ("-O3", "-march=native")
X86 = ("x86_64", "i386", "i486", "i586", "i686")
OPENMP = "-fopenmp"
SHARED = ("-shared", "-fPIC")
CALLS = 5  # timed calls; the median counts
NO_COMPILER = "no C compiler was found: install cc, or name one by the environment variable CC"


@dataclass(frozen=True)
class Compiler:
    """A C compiler on this machine."""

    command: tuple[str, ...]
    options: tuple[str, ...] = OPTIONS

    @property
    def version(self) -> str:
        """First line of its ``--version``."""
        process = subprocess.run([*self.command, "--version"], capture_output=True, text=True, check=False)
        return (process.stdout.strip().splitlines() or [self.command[0]])[0]

    def build(self, sources: Sequence[Path], output: Path, options: Sequence[str] = ()) -> None:
        """Compile `sources` to `output`; raises `ArtifactError` if the compiler fails."""
        command = [*self.command, *self.options, *options, *map(str, sources), "-o", str(output), "-lm"]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode:
            lines = process.stderr.strip().splitlines()
            reason = next((line for line in lines if "error" in line), (lines or ["no reason given"])[0])
            raise ArtifactError(f"{self.command[0]} failed: {reason}")

    def build_library(self, code: str, path: Path) -> None:
        """Compile `code` to the shared library `path`; raises `ArtifactError` if the compiler fails."""
        source = path.with_suffix(".c")
        source.write_text(code)
        self.build([source], path, SHARED)


def local_compiler() -> Compiler | None:
    """The compiler of the environment variable ``CC``, else ``cc``; None if there is none."""
    command = shlex.split(os.environ.get("CC", "")) or ["cc"]
    return Compiler(tuple(command)) if shutil.which(command[0]) else None


def require_compiler() -> Compiler:
    """`local_compiler`; raises `ArtifactError` if there is none."""
    local = local_compiler()
    if local is None:
        raise ArtifactError(NO_COMPILER)
    return local


def compiler_for(triple: str, cpu: str) -> Compiler | None:
    """A compiler on this machine that compiles for `triple`, in LLVM's form; None if there is none.

    Parameters
    ----------
    cpu : str
        The processor to compile for; any of the architecture if empty.
    """
    architecture = triple.partition("-")[0]
    selects = "-march" if architecture in X86 else "-mcpu"
    options = (OPTIONS[0], *([f"{selects}={cpu}"] if cpu else []))
    if architecture in ("", platform.machine()):
        native = local_compiler()
        return native and Compiler(native.command, OPTIONS if cpu == cpu_name() else options)
    prefix = next((name for name in gcc_names(triple) if shutil.which(f"{name}-gcc")), "")
    return Compiler((f"{prefix}-gcc",), options) if prefix else None


def gcc_names(triple: str) -> tuple[str, ...]:
    """Names that GCC may use for `triple`: LLVM's have a vendor, GCC's on Linux often do not."""
    architecture, *rest = triple.split("-")
    return (triple, "-".join([architecture, *rest[1:]])) if len(rest) > 2 else (triple,)


def optimisation_pragmas(target: tvm.target.Target) -> str:
    """First lines of a source, with which GCC optimises for `target` without command-line options."""
    triple, cpu = (str(target.attrs.get(name, "")) for name in ("mtriple", "mcpu"))
    lines = ['#pragma GCC optimize("O3")']
    if cpu:
        selects = "arch" if triple.partition("-")[0] in X86 else "cpu"
        lines.append(f'#pragma GCC target("{selects}={cpu}")')
    # GCC 12 does not define the macros of features that such a pragma turns on.
    has = tvm.get_global_func("target.target_has_feature")
    widths = {"avx512f": 16, "avx": 8}
    lanes = next((n for feature, n in widths.items() if has(feature, target)), 4)
    return "\n".join([*lines, f"#define PIMFLOW_LANES {lanes}", ""])


class Library:
    """A network, compiled from its C source.

    Attributes
    ----------
    max_threads : int
        Threads that it can use on this machine; 1 without OpenMP or parallel loops.

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
            self._build(Path(folder) / "network.c", path)
            try:
                self._library = ctypes.CDLL(str(path))
                self._run = self._library.pimflow_run
            except (OSError, AttributeError) as error:
                raise ArtifactError(f"network.c is not what pimflow writes: {last_line(error)}") from error
        # It is also missing where no loop is parallel.
        self._set_threads = getattr(self._library, "omp_set_num_threads", None)
        self.max_threads = len(os.sched_getaffinity(0)) if self._set_threads else 1
        self._weights = _allocate_aligned(max(len(source.weights), 1))
        self._weights[: len(source.weights)] = np.frombuffer(source.weights, np.uint8)
        self._pool = _allocate_aligned(max(source.pool_bytes, 1))

    def _build(self, code: Path, path: Path) -> None:
        local = require_compiler()
        try:
            local.build([code], path, [*SHARED, OPENMP])
        except ArtifactError:  # the compiler lacks OpenMP, or fails with and without it
            local.build([code], path, SHARED)

    def __call__(self, inputs: Sequence[np.ndarray], threads: int = 1) -> list[np.ndarray]:
        """Outputs for inputs in order, each of its shape and dtype.

        Parameters
        ----------
        threads : int
            Upper bound of threads, where the compiler has OpenMP.
        """
        if self._set_threads:
            self._set_threads(threads)
        input_arrays = [_copy_aligned(np.ascontiguousarray(x)) for x in inputs]
        output_arrays = [np.empty(shape, dtype) for shape, dtype in self.source.outputs]
        arrays = (self._weights, self._pool, *input_arrays, *output_arrays)
        self._run(*(ctypes.c_void_p(array.ctypes.data) for array in arrays))
        return output_arrays

    def call_ns(self, inputs: Sequence[np.ndarray], threads: int = 1, calls: int = CALLS) -> float:
        """Median time of `calls` calls."""
        return float(median(call_times_ns(lambda: self(inputs, threads), calls)))


def load_module(code: str) -> tvm.runtime.Module:
    """Compile and load `code` of `callable_source`; raises `ArtifactError` if the compiler fails."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.so"
        require_compiler().build_library(code, path)
        return tvm.runtime.load_module(str(path))


def _allocate_aligned(size: int) -> np.ndarray:
    buffer = np.empty(size + ALIGNMENT_BYTES, np.uint8)
    begin = -buffer.ctypes.data % ALIGNMENT_BYTES
    return buffer[begin : begin + size]


def _copy_aligned(array: np.ndarray) -> np.ndarray:
    buffer = _allocate_aligned(max(array.nbytes, 1))
    buffer[: array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
    return buffer
