"""Compiled networks in memory and as shared libraries: packed, stored, loaded, run."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tvm
import tvm_ffi
from tvm import relax
from tvm.support import cc

from pimflow.errors import ArtifactError
from pimflow.host import native, stderr
from pimflow.pim_backend.runtime.weights_module import weights_apart

_OBJECTS_BYTES = 16 << 20  # an upper bound on the code of a network's kernels

_create_network = native.get("pimflow.runtime.create_network")

Tensors = Mapping[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True, kw_only=True)
class MachineCode:
    """Machine code of CPU kernels, generated once; TVM alone would do so to run and again to store.

    Attributes
    ----------
    running : Module
        The library that replaces TVM's module of kernels in a packed network.
    object : Module
        The same as an object file, to be linked into a library.
    """

    running: tvm.runtime.Module
    object: tvm.runtime.Module

    @classmethod
    def from_network(cls, network: tvm.runtime.Module) -> MachineCode | None:
        """The machine code of a packed network for the CPU; from now on the network runs it.

        None if the network has no kernels because PIM has all layers, or if the folder of temporary files
        does not allow execution: TVM then generates the code twice.

        Raises
        ------
        ArtifactError
            If there is no compiler to link it, or it cannot be written.
        """
        kernels = next((module for module in network.imports[0].imports if module.kind == "llvm"), None)
        if kernels is None:
            return None
        with _link_errors("the network's code"), tempfile.TemporaryDirectory(prefix="pimflow-") as folder:
            if os.statvfs(folder).f_flag & os.ST_NOEXEC:
                return None
            source, library = f"{folder}/kernels.o", f"{folder}/kernels.so"
            _reserve(Path(folder), _OBJECTS_BYTES)
            with stderr.hidden():
                kernels.write_to_file(source)
                cc.create_shared(library, [source])
                code = cls(
                    running=tvm_ffi.load_module(library), object=tvm.runtime.load_static_library(source, [])
                )
        _replace_import(network, kernels, code.running)
        return code

    @contextlib.contextmanager
    def as_object(self, network: tvm.runtime.Module) -> Iterator[None]:
        """Within the block, `network` holds the object file and cannot run."""
        _replace_import(network, self.running, self.object)
        try:
            yield
        finally:
            _replace_import(network, self.object, self.running)


def _replace_import(network: tvm.runtime.Module, old: tvm.runtime.Module, new: tvm.runtime.Module) -> None:
    """Replace a module that the executable of a packed network imports."""
    executable = network.imports[0]
    imports = [new if module.same_as(old) else module for module in executable.imports]
    executable.clear_imports()
    for module in imports:
        executable.import_module(module)


def pack(
    executable: relax.VMExecutable,
    inputs: Tensors,
    outputs: int,
    target: str = "llvm+pim",
    device: tvm.runtime.Device | None = None,
    problem: str = "",
) -> tvm.runtime.Module:
    """An executable with its interface as one module; ``module["default"](device)`` returns an executor.

    Parameters
    ----------
    inputs : mapping of str to (tuple of int, str)
        Shape and dtype of every input, in the order of ``main``.
    outputs : int
        Number of results of ``main``.
    device : Device, optional
        Kind of device that it runs on; the CPU by default.
    problem : str
        Reason why it cannot be executed; empty if it can.
    """
    return _create_network(
        executable.mod,
        list(inputs),
        [tvm.runtime.ShapeTuple(shape) for shape, _ in inputs.values()],
        [dtype for _, dtype in inputs.values()],
        outputs,
        target,
        (device or tvm.cpu()).dlpack_device_type(),
        problem,
    )


def infer(
    network: tvm.runtime.Module, inputs: Mapping[str, np.ndarray], device: tvm.runtime.Device | None = None
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


def store(
    network: tvm.runtime.Module,
    path: Path,
    weight_bytes: int,
    code: MachineCode | None = None,
    **options: object,
) -> None:
    """Write a packed network as a shared library; raises `ArtifactError` if it cannot be linked or written.

    Parameters
    ----------
    weight_bytes : int
        Bytes of the network's weights, which are most of the library.
    code : MachineCode, optional
        Machine code of its kernels, if it was generated before.
    options
        Options of TVM's ``export_library``.
    """
    with (
        _link_errors(path.name, path),
        tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as workspace,
        code.as_object(network) if code else contextlib.nullcontext(),
    ):
        _reserve(Path(workspace), _OBJECTS_BYTES + 2 * weight_bytes)  # as an object, and linked
        with stderr.hidden():
            network.export_library(str(path), fpack_imports=_pack_imports, workspace_dir=workspace, **options)


@contextlib.contextmanager
def _link_errors(subject: str, path: Path | None = None) -> Iterator[None]:
    """Within the block, turn errors of linking `subject`, or of writing it to `path`, into
    `ArtifactError`.
    """
    compiler = cc.get_cc()
    if compiler is None or shutil.which(compiler) is None:
        missing = f"CXX is '{compiler}', which is not there" if compiler else "there is none"
        raise ArtifactError(f"{subject} is linked by a C++ compiler: {missing}; install g++, or set CXX")
    try:
        yield
    except OSError as error:
        place = path or tempfile.gettempdir()
        raise ArtifactError(f"{place}: cannot be written: {error.strerror or error}") from error
    except RuntimeError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        reasons = [line for line in lines if not line.startswith("Command line:")] or ["unknown reason"]
        raise ArtifactError(f"{subject} cannot be linked: {reasons[-1].strip()}") from error


def _pack_imports(network: tvm.runtime.Module, _system: bool, prefix: str, folder: str) -> str:
    """Write the imported modules to an object file in `folder`, as TVM's loader reads them; returns its path.

    TVM would write it with LLVM, which holds the weights in memory four times; the assembler reads them from
    a file.
    """
    contents, source, weights = (Path(folder) / name for name in ("contents", "imports.s", "weights"))
    with weights_apart(network, weights) as weights_symbol:
        content = tvm.get_global_func("runtime.ModulePackImportsToTensor")(network)
    np.from_dlpack(content).tofile(contents)
    files = {f"{prefix}__tvm_ffi__library_bin": contents} | (
        {weights_symbol: weights} if weights_symbol else {}
    )
    # On x86-64, only the section .lrodata may be larger than 2 GiB.
    section = '.lrodata,"al"' if platform.machine() == "x86_64" else '.rodata,"a"'
    lines = [f".section {section},@progbits"]
    for symbol, file in files.items():
        lines += [f".globl {symbol}", ".balign 64", f"{symbol}:", f'.incbin "{file.name}"']
    lines.append('.section .note.GNU-stack,"",@progbits')
    source.write_text("".join(f"\t{line}\n" for line in lines), encoding="utf-8")
    cc.create_executable("imports.obj", [source.name], cwd=folder)
    for file in files.values():
        file.unlink()
    return str(Path(folder) / "imports.obj")


def _reserve(folder: Path, size: int) -> None:
    """Raise `OSError` unless `folder` has room for `size` bytes; LLVM would end the process instead."""
    room = folder / "room"
    with room.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    room.unlink()


def load(path: Path) -> tvm.runtime.Module:
    """Load a library that `store` wrote; raises `ArtifactError` if it is none.

    The system's loader identifies libraries by name: if a loaded library is written again, it would return
    the old one. So each is loaded through a link with a new name.
    """
    with tempfile.TemporaryDirectory(prefix="pimflow-") as folder:
        link = Path(folder) / path.name
        link.symlink_to(path.resolve())
        try:
            with stderr.hidden():
                network = tvm_ffi.load_module(str(link))  # TVM's loading function would resolve the link
            _ = network["default"]
            return network
        except (OSError, RuntimeError, ValueError, AttributeError) as error:
            reason = (str(error).strip().splitlines() or ["unknown reason"])[-1].replace(f"{folder}/", "")
            raise ArtifactError(f"{path} cannot be loaded; compile again ({reason})") from error
