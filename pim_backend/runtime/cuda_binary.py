"""Compiles the CUDA kernels of an executable before it is stored.

TVM keeps CUDA source in the executable and compiles it on the device that first runs it. Only on a machine
with a CUDA driver does it compile at once, for the target's architecture alone; this module makes it keep the
source there too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import tvm
import tvm_ffi

from pimflow.errors import UsageError
from pimflow.host import native
from pimflow.pim_backend.runtime.targets import LOADER

KEEP_SOURCE = "TVM_COMPILE_FORCE_FALLBACK"  # makes TVM behave as on a machine without its CUDA runtime
NO_COMPILER = "neither nvcc nor NVRTC was found: pip install 'pimflow[cuda]', and compile again"
ExecutableT = TypeVar("ExecutableT", bound=tvm.runtime.Executable)


@dataclass(frozen=True, kw_only=True)
class CudaKernels:
    """CUDA source, and whether it was compiled.

    Attributes
    ----------
    source : str
        CUDA C++ of all kernels; empty if there are none.
    compiler : str
        ``nvcc`` or ``nvrtc``; empty if the source was not compiled.
    problem : str
        Why there is no binary; empty if there is one or nothing to compile.
    """

    source: str = ""
    compiler: str = ""
    problem: str = ""


def compile_kernels(
    build: Callable[[], ExecutableT], target: tvm.target.Target
) -> tuple[ExecutableT, CudaKernels]:
    """The executable that `build` returns, with a binary in place of CUDA source.

    If no compiler is found, the source stays. The binary is for the target's architecture; it contains PTX,
    so that newer GPUs run it too.

    Parameters
    ----------
    build : callable
        Builds an executable with TVM for `target`.

    Raises
    ------
    UsageError
        If the environment names an unknown compiler.
    """
    with _environment(KEEP_SOURCE, "1"):
        executable = build()
    for parent in _modules(executable.mod):
        for module in parent.imports:
            if module.kind == "cuda":
                with target:  # the compiler's wrapper reads it
                    kernels = _compile(parent, module, str(target.attrs["arch"]).removeprefix("sm_"))
                return executable, kernels
    return executable, CudaKernels()


def cuda_source(build: Callable[[], tvm.runtime.Executable]) -> str:
    """CUDA source of the executable that `build` returns; empty if it has none."""
    with _environment(KEEP_SOURCE, "1"):
        executable = build()
    modules = [module for parent in _modules(executable.mod) for module in parent.imports]
    return next((module.inspect_source() for module in modules if module.kind == "cuda"), "")


def _compile(parent: tvm.runtime.Module, module: tvm.runtime.Module, arch: str) -> CudaKernels:
    source, compiler = module.inspect_source(), cuda_compiler()
    if not compiler:
        return CudaKernels(source=source, problem=NO_COMPILER)
    try:
        kind, binary = _binary(source, compiler, arch)
    except Exception as error:  # whatever the compiler's parts raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower() or "fatal" in line] or lines
        return CudaKernels(source=source, problem=f"{compiler} failed: {(errors or ['no reason given'])[0]}")
    imports = [_with_binary(m, source, kind, binary) if m.kind == "cuda" else m for m in parent.imports]
    parent.clear_imports()
    for imported in imports:
        parent.import_module(imported)
    return CudaKernels(source=source, compiler=compiler)


def cuda_compiler() -> str:
    """The CUDA compiler, ``nvcc`` or ``nvrtc``; empty if none is found; see ``TVM_CUDA_COMPILE_MODE``."""
    available = {"nvcc": shutil.which("nvcc") is not None, "nvrtc": _has_nvrtc()}
    mode = os.environ.get("TVM_CUDA_COMPILE_MODE", "").lower()
    if mode and mode not in available:
        raise UsageError(f"TVM_CUDA_COMPILE_MODE is '{mode}'; use nvcc or nvrtc")
    return next((name for name in ([mode] if mode else available) if available[name]), "")


def _has_nvrtc() -> bool:
    try:
        return find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:
        return False


def cubin(source: str, arch: str) -> bytes:
    """Machine code of CUDA source for an architecture such as ``sm_75``, as an ELF file.

    Raises
    ------
    UsageError
        If no compiler is found.
    """
    compiler = cuda_compiler()
    if not compiler:
        raise UsageError(NO_COMPILER)
    from tvm.support import nvcc

    with tvm.target.Target({"kind": "cuda", "arch": arch}):  # the compiler's wrapper reads it
        if compiler == "nvrtc":
            return _nvrtc_binary(source, "cubin", arch)
        return bytes(nvcc.compile_cuda(source, "cubin", arch, compiler="nvcc"))


def _binary(source: str, compiler: str, arch: str) -> tuple[str, bytes]:
    """Format and contents of the binary that the CUDA driver loads."""
    from tvm.support import nvcc

    if compiler == "nvcc":
        options = ["-gencode", f"arch=compute_{arch},code=[sm_{arch},compute_{arch}]"]
        return "fatbin", nvcc.compile_cuda(source, "fatbin", options, compiler="nvcc")
    return "ptx", _nvrtc_binary(source, "ptx", f"sm_{arch}")


def _nvrtc_binary(source: str, form: str, arch: str) -> bytes:
    from tvm.support import nvcc

    toolkit = _toolkit_wheels()
    if toolkit is None:
        return bytes(nvcc.compile_cuda(source, form, arch, compiler="nvrtc"))
    with _environment("CUDA_PATH", str(toolkit)):  # where TVM looks for headers
        options = [f"-I{toolkit / 'include' / 'cccl'}"]
        return bytes(nvcc.compile_cuda(source, form, arch, options, compiler="nvrtc"))


def _toolkit_wheels() -> Path | None:
    """Folder that NVIDIA's wheels install in place of a CUDA toolkit; None if they are not installed."""
    package = find_spec("nvidia")
    folders = list(package.submodule_search_locations or ()) if package else []
    headers = (header for place in folders for header in Path(place).glob("cu*/include/cuda_fp16.h"))
    return next((header.parents[1] for header in headers), None)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _with_binary(module: tvm.runtime.Module, source: str, kind: str, binary: bytes) -> tvm.runtime.Module:
    """A CUDA module with another format and contents, made from the bytes that TVM stores of `module`."""
    stored, code = bytes(native.get("pimflow.runtime.save_module")(module)), source.encode()
    table_begin, table_end = len(_text(b"cuda")), len(stored) - len(_text(code))
    if stored[:table_begin] != _text(b"cuda") or stored[table_end:] != _text(code):
        raise ValueError("this TVM stores CUDA modules in another format")
    changed = _text(kind.encode()) + stored[table_begin:table_end] + _text(bytes(binary))
    return tvm_ffi.get_global_func(LOADER)(changed)


def _text(content: bytes) -> bytes:
    return len(content).to_bytes(8, "little") + content


def _modules(module: tvm.runtime.Module) -> Iterator[tvm.runtime.Module]:
    """`module` and all modules that it imports, directly or not."""
    yield module
    for imported in module.imports:
        yield from _modules(imported)
