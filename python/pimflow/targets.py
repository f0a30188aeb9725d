"""What pimflow builds for: TVM targets with PIM.

TVM is imported where it is used: importing it calls `register`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import tvm_ffi

from pimflow import native
from pimflow.errors import UnknownNameError

if TYPE_CHECKING:
    import tvm

LOADER = "ffi.Module.load_from_bytes.cuda"
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


def register() -> None:
    """Make ``tvm.target.Target`` know the names of `TARGETS`, and CUDA kernels load without a device.

    They cannot run there, but whoever tries is told so by the network, not by a missing loader.
    """
    import tvm

    for name, config in TARGETS.items():
        tvm.target.register_tag(name, config, override=True)
    if tvm_ffi.get_global_func(LOADER, allow_missing=True) is None:
        stored = native.get("pimflow.runtime.stored_module")
        tvm_ffi.register_global_func(LOADER, lambda content: stored("cuda", content))


def named_target(name: str) -> tvm.target.Target:
    """The target of that name; raises `UnknownNameError` if it is none of `TARGETS`."""
    import tvm

    if name not in TARGETS:
        raise UnknownNameError("target", name, TARGETS)
    return tvm.target.Target(TARGETS[name])


def this_cpu() -> tvm.target.Target:
    """``llvm+pim`` with all that this machine's CPU knows: what is built for it runs on its like alone."""
    import tvm

    return tvm.target.Target(TARGETS["llvm+pim"] | {"mcpu": cpu_name()})


def cpu_name() -> str:
    """What LLVM calls this machine's CPU."""
    return str(tvm_ffi.get_global_func("target.llvm_get_system_cpu")())


def local_cuda() -> tvm.target.Target | None:
    """``cuda+pim`` for the architecture of the first CUDA device; None without one."""
    import tvm

    here = tvm.cuda()
    if not here.exist:
        return None
    arch = f"sm_{str(here.compute_version).replace('.', '')}"
    return tvm.target.Target(TARGETS["cuda+pim"] | {"arch": arch})


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
