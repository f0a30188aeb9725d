"""What pimflow builds for: TVM targets with PIM, and the CUDA compiler behind one of them.

TVM is imported where it is used: importing it calls `register`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import tvm_ffi

from pimflow.errors import UnknownNameError, UsageError

if TYPE_CHECKING:
    import tvm

TARGETS = {
    "llvm+pim": {"kind": "llvm", "keys": ["cpu", "pim"]},
    "cuda+pim": {
        "kind": "cuda",
        # The oldest that CUDA 13 compiles for, and the part that the PIMFlow paper simulates. The
        # kernels carry PTX, which newer GPUs translate.
        "arch": "sm_75",
        "max_threads_per_block": 1024,
        "max_shared_memory_per_block": 49152,
        "thread_warp_size": 32,
        "keys": ["cuda", "gpu", "pim"],
        "host": {"kind": "llvm"},
    },
}
NO_COMPILER = "neither nvcc nor NVRTC was found: pip install 'pimflow[cuda]', and compile again"


def register() -> None:
    """Make ``tvm.target.Target`` know the names of `TARGETS`, and compile their kernels."""
    import tvm
    from tvm.support import nvcc  # noqa: F401  registers the callback that ours replaces

    for name, config in TARGETS.items():
        tvm.target.register_tag(name, config, override=True)
    tvm_ffi.register_global_func("tvm_callback_cuda_compile", _compile_kernels, override=True)


def named_target(name: str) -> tvm.target.Target:
    """The target of that name; raises `UnknownNameError` if it is none of `TARGETS`."""
    import tvm

    if name not in TARGETS:
        raise UnknownNameError("target", name, TARGETS)
    return tvm.target.Target(TARGETS[name])


def has_pim(target: tvm.target.Target) -> bool:
    """Whether PIM takes part."""
    return "pim" in list(target.keys)


def name_of(target: tvm.target.Target) -> str:
    """What users call `target`."""
    kind = target.kind.name
    return f"{kind}+pim" if has_pim(target) else kind


def device(target: tvm.target.Target) -> tvm.runtime.Device:
    """The first device that runs what was built for `target`, whether it is there or not."""
    import tvm

    return tvm.device(target.kind.name if target.kind.name != "llvm" else "cpu", 0)


@dataclass
class Kernels:
    """CUDA source that was compiled, or why it was not.

    Attributes
    ----------
    source : str
        CUDA C++ of all kernels; empty if the target has none.
    compiler : str
        ``nvcc`` or ``nvrtc``; empty if the source was not compiled.
    flaw : str
        Why there is no binary; empty if there is one or nothing to compile.
    """

    source: str = ""
    compiler: str = ""
    flaw: str = ""


_kernels: ContextVar[Kernels | None] = ContextVar("kernels", default=None)


@contextlib.contextmanager
def collected_kernels() -> Iterator[Kernels]:
    """Kernels compiled inside the block; a missing compiler is then noted, not warned of."""
    kernels = Kernels()
    token = _kernels.set(kernels)
    try:
        yield kernels
    finally:
        _kernels.reset(token)


def cuda_compiler() -> str:
    """``nvcc`` or ``nvrtc``, whichever is there, or empty; ``TVM_CUDA_COMPILE_MODE`` decides if set."""
    there = {"nvcc": shutil.which("nvcc") is not None, "nvrtc": _has_nvrtc()}
    wanted = os.environ.get("TVM_CUDA_COMPILE_MODE", "").lower()
    if wanted and wanted not in there:
        raise UsageError(f"TVM_CUDA_COMPILE_MODE is '{wanted}'; use nvcc or nvrtc")
    order = [wanted] if wanted else ["nvcc", "nvrtc"]
    return next((name for name in order if there[name]), "")


def _has_nvrtc() -> bool:
    try:
        return find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:
        return False


def _compile_kernels(code: str) -> bytes:
    """TVM's callback: a binary for the target's architecture, with PTX for newer ones."""
    import tvm
    from tvm.support import nvcc

    target = tvm.target.Target.current(allow_none=True)
    if target is None or not has_pim(target):
        return nvcc.tvm_callback_cuda_compile(code)
    number = str(target.attrs["arch"]).removeprefix("sm_")
    compiler = cuda_compiler()
    binary, flaw = b"", "" if compiler else NO_COMPILER
    try:
        if compiler == "nvcc":
            arch = ["-gencode", f"arch=compute_{number},code=[sm_{number},compute_{number}]"]
            binary = nvcc.compile_cuda(code, target_format="fatbin", arch=arch, compiler="nvcc")
        elif compiler == "nvrtc":
            binary = nvcc.compile_cuda(code, target_format="ptx", arch=f"sm_{number}", compiler="nvrtc")
    except Exception as error:  # whatever the compiler's parts raise
        lines = [
            line.strip() for line in str(error).splitlines() if "error" in line.lower() or "fatal" in line
        ]
        flaw = f"{compiler} failed: {(lines or [str(error).strip() or 'no reason given'])[0]}"
    kernels = _kernels.get()
    if kernels is not None:
        kernels.source, kernels.compiler, kernels.flaw = code, "" if flaw else compiler, flaw
    elif flaw:
        warnings.warn(f"the CUDA kernels stay source: {flaw}", stacklevel=2)
    return bytes(binary)
