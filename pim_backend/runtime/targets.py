"""TVM targets with PIM, for which pimflow builds.

TVM is imported where it is used: importing it calls `register`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import tvm_ffi

from pimflow.core.blocks import BLOCK_SHARED_BYTES
from pimflow.errors import UnknownNameError, UsageError
from pimflow.host import native

if TYPE_CHECKING:
    import tvm

# Architectures that LLVM accepts under more names than `llvm_get_targets` lists.
FAMILIES = (r"armv\d\w*", r"thumbv\d\w*", r"i[3-6]86", r"arm64")
CPU_OPTIONS = ("mtriple", "mcpu", "mattr", "mabi", "mfloat-abi")

C_TARGET = "c"  # target of `compile` that adds C sources to the network that runs here
LOADER = "ffi.Module.load_from_bytes.cuda"
TARGETS: dict[str, dict[str, Any]] = {
    "llvm+pim": {"kind": "llvm", "keys": ["cpu", "pim"]},
    "cuda+pim": {
        "kind": "cuda",
        # The oldest that CUDA 13 compiles for, and the part that the PIMFlow paper simulates. The
        # kernels carry PTX, which newer GPUs translate.
        "arch": "sm_75",
        "max_threads_per_block": 1024,
        "max_shared_memory_per_block": BLOCK_SHARED_BYTES,
        "thread_warp_size": 32,
        "keys": ["cuda", "gpu", "pim"],
        "host": {"kind": "llvm"},
    },
}


def register() -> None:
    """Make ``tvm.target.Target`` know the names of `TARGETS`, and CUDA kernels load without a device.

    Without a device they cannot run, but a network then reports the missing device, not a missing loader.
    """
    import tvm

    for name, config in TARGETS.items():
        tvm.target.register_tag(name, config, override=True)
    if tvm_ffi.get_global_func(LOADER, allow_missing=True) is None:
        stored = native.get("pimflow.runtime.saved_module")
        tvm_ffi.register_global_func(LOADER, lambda content: stored("cuda", content))


def target_by_name(name: str) -> tvm.target.Target:
    """The target called `name`; raises `UnknownNameError` if it is none of `TARGETS`."""
    import tvm

    if name not in TARGETS:
        raise UnknownNameError("target", name, TARGETS)
    if TARGETS[name]["kind"] == "cuda":
        _load_cuda_backend()
    return tvm.target.Target(TARGETS[name])


def _load_cuda_backend() -> None:
    """Let TVM generate code for CUDA, which it otherwise does since its import (`host.partial_tvm`)."""
    from tvm.backend import loader

    loader.load("cuda")


def execution_target(name: str) -> str:
    """Name of the target that runs here for target `name`; raises `UnknownNameError` for others."""
    if name not in (*TARGETS, C_TARGET):
        raise UnknownNameError("target", name, (*TARGETS, C_TARGET))
    return "llvm+pim" if name == C_TARGET else name


def this_cpu_target() -> tvm.target.Target:
    """``llvm+pim`` with all instructions of this machine's CPU; the code runs only on CPUs that have them."""
    import tvm

    return tvm.target.Target(TARGETS["llvm+pim"] | {"mcpu": cpu_name()})


def cpu_name() -> str:
    """LLVM's name of this machine's CPU."""
    return str(tvm_ffi.get_global_func("target.llvm_get_system_cpu")())


def local_cuda() -> tvm.target.Target | None:
    """``cuda+pim`` for the architecture of the first CUDA device; None without one."""
    import tvm

    device_zero = tvm.cuda()
    if not device_zero.exist:
        return None
    arch = f"sm_{str(device_zero.compute_version).replace('.', '')}"
    return tvm.target.Target(TARGETS["cuda+pim"] | {"arch": arch})


def cpu_target(text: str) -> tvm.target.Target:
    """The CPU target of an option, such as ``llvm -mtriple=aarch64-linux-gnu -mcpu=cortex-a72``, or ``c``.

    It checks the names: if LLVM does not know one, TVM ends the process or takes a generic CPU.

    Raises
    ------
    UsageError
        If it is of another kind, has an option that is none of `CPU_OPTIONS`, or LLVM does not know it.
    """
    import tvm

    kind, *options = text.split() or [""]
    if kind not in ("llvm", "c") or (options and kind == "c"):
        raise UsageError(f"--target '{text}' is not a CPU: give llvm, with options such as -mtriple=…, or c")
    config: dict[str, str | list[str]] = {}
    for option in options:
        name, equals, value = option.removeprefix("-").partition("=")
        if not option.startswith("-") or not equals or not value or name not in CPU_OPTIONS:
            option_names = ", ".join(f"-{option_name}=…" for option_name in CPU_OPTIONS)
            raise UsageError(f"--target: '{option}' is none of {option_names}")
        config[name] = value.split(",") if name == "mattr" else value
    if kind == "llvm":
        _require_cpu(str(config.get("mtriple", "")), str(config.get("mcpu", "")))
    return tvm.target.Target({"kind": kind, **config})


def _require_cpu(triple: str, cpu: str) -> None:
    import tvm

    architecture = triple.partition("-")[0]
    architectures = [str(name) for name in tvm_ffi.get_global_func("target.llvm_get_targets")()]
    if (
        triple
        and architecture not in architectures
        and not any(re.fullmatch(pattern, architecture) for pattern in FAMILIES)
    ):
        raise UnknownNameError("architecture", architecture, architectures)
    if cpu:
        bare = tvm.target.Target({"kind": "llvm", **({"mtriple": triple} if triple else {})})
        cpus = [str(name) for name in tvm_ffi.get_global_func("target.llvm_get_cpu_archlist")(bare)]
        if cpu not in cpus:
            raise UnknownNameError(f"CPU of '{architecture or 'this machine'}'", cpu, cpus)


def has_pim(target: tvm.target.Target) -> bool:
    """Whether `target` has PIM."""
    return "pim" in list(target.keys)


def target_name(target: tvm.target.Target) -> str:
    """Name of `target` in options and reports."""
    kind = target.kind.name
    return f"{kind}+pim" if has_pim(target) else kind


def target_device(target: tvm.target.Target) -> tvm.runtime.Device:
    """The first device of the kind that runs code for `target`, whether it exists or not."""
    import tvm

    return tvm.device(target.kind.name if target.kind.name != "llvm" else "cpu", 0)
