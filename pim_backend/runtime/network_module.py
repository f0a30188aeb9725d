"""Compiled networks in memory and as shared libraries: packed, stored, loaded, run."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import tvm
import tvm_ffi
from tvm import relax
from tvm.support import cc

from pimflow.errors import ArtifactError
from pimflow.host import native

_OBJECTS_BYTES = 16 << 20  # code of a network's kernels, with room to spare

_create_network = native.get("pimflow.runtime.create_network")

Tensors = Mapping[str, tuple[tuple[int, ...], str]]


def pack(
    executable: relax.VMExecutable,
    inputs: Tensors,
    outputs: int,
    target: str = "llvm+pim",
    device: tvm.runtime.Device | None = None,
    flaw: str = "",
) -> tvm.runtime.Module:
    """An executable with its interface, as one module: ``module["default"](device)`` makes an executor.

    Parameters
    ----------
    inputs : mapping of str to (tuple of int, str)
        Shape and dtype of every input, in the order of ``main``.
    outputs : int
        How many results ``main`` has.
    target : str
        What it was built for, for messages.
    device : Device, optional
        Kind of device that it runs on; the CPU by default.
    flaw : str
        Why it cannot be executed; empty if it can.
    """
    return _create_network(
        executable.mod,
        list(inputs),
        [tvm.runtime.ShapeTuple(shape) for shape, _ in inputs.values()],
        [dtype for _, dtype in inputs.values()],
        outputs,
        target,
        (device or tvm.cpu()).dlpack_device_type(),
        flaw,
    )


def infer(
    network: tvm.runtime.Module,
    inputs: Mapping[str, np.ndarray],
    device: tvm.runtime.Device | None = None,
) -> list[np.ndarray]:
    """Outputs of one inference of a packed network.

    Raises
    ------
    ArtifactError
        If an input is missing or of another shape or dtype, or the device is not there.
    """
    executor = network["default"](device or tvm.cpu())
    for name, value in inputs.items():
        executor["set_input"](name, tvm.runtime.tensor(np.asarray(value, order="C")))
    executor["run"]()
    return [executor["get_output"](i).numpy() for i in range(executor["get_num_outputs"]())]


def store(network: tvm.runtime.Module, path: Path, weight_bytes: int, **options: object) -> None:
    """Write a packed network as a shared library; raises `ArtifactError` if it cannot be linked or written.

    Parameters
    ----------
    weight_bytes : int
        Bytes of the network's weights: what the library will hold, roughly.
    options
        Those of TVM's ``export_library``.
    """
    compiler = cc.get_cc()
    if compiler is None or shutil.which(compiler) is None:
        missing = f"CXX is '{compiler}', which is not there" if compiler else "there is none"
        raise ArtifactError(f"{path.name} is linked by a C++ compiler: {missing}; install g++, or set CXX")
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as workspace:
            _reserve(Path(workspace), _OBJECTS_BYTES + 2 * weight_bytes)  # as an object, and linked
            with without_tvm_warnings():
                network.export_library(
                    str(path), fpack_imports=_packed_imports, workspace_dir=workspace, **options
                )
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be written: {error.strerror or error}") from error
    except RuntimeError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        reasons = [line for line in lines if not line.startswith("Command line:")] or ["unknown reason"]
        raise ArtifactError(f"{path.name} cannot be linked: {reasons[-1].strip()}") from error


def _packed_imports(network: tvm.runtime.Module, _system: bool, prefix: str, folder: str) -> str:
    """Path of an object file in `folder` with the imported modules, in the form that TVM's loader reads.

    TVM has LLVM write it, for which the weights are in memory four times over; the assembler takes a file.
    """
    contents, source = Path(folder) / "contents", Path(folder) / "imports.s"
    # Of the sections of x86-64, the large alone may be larger than 2 GiB.
    section = '.lrodata,"al"' if platform.machine() == "x86_64" else '.rodata,"a"'
    symbol = f"{prefix}__tvm_ffi__library_bin"
    lines = [
        f".section {section},@progbits",
        f".globl {symbol}",
        ".balign 64",
        f"{symbol}:",
        f'.incbin "{contents.name}"',
        '.section .note.GNU-stack,"",@progbits',
    ]
    source.write_text("".join(f"\t{line}\n" for line in lines), encoding="utf-8")
    packed = tvm.get_global_func("runtime.ModulePackImportsToTensor")(network)
    np.from_dlpack(packed).tofile(contents)
    cc.create_executable("imports.obj", [source.name], cwd=folder)
    contents.unlink()
    return str(Path(folder) / "imports.obj")


def _reserve(folder: Path, size: int) -> None:
    """Raise `OSError` unless `folder` has room for `size` bytes: else LLVM would end the process."""
    room = folder / "room"
    with room.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    room.unlink()


def load(path: Path) -> tvm.runtime.Module:
    """Read what `store` wrote; raises `ArtifactError` if it is not that.

    The system's loader knows libraries by their names: of one that was loaded and then written anew, it would
    give the old one. So each is loaded under a name that no other had.
    """
    with tempfile.TemporaryDirectory(prefix="pimflow-") as folder:
        link = Path(folder) / path.name
        link.symlink_to(path.resolve())
        try:
            with without_tvm_warnings():
                return tvm_ffi.load_module(str(link))  # TVM's own function resolves links
        except (OSError, RuntimeError, ValueError) as error:
            reason = (str(error).strip().splitlines() or ["unknown reason"])[-1].replace(f"{folder}/", "")
            raise ArtifactError(f"{path} cannot be loaded; compile again ({reason})") from error


@contextlib.contextmanager
def without_tvm_warnings() -> Iterator[None]:
    """Drop the warnings that TVM's C++ side prints, which no log level stops."""
    sys.stderr.flush()
    stderr = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
