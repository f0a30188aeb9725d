"""Limits of CUDA's launches and of a GPU, which a schedule must keep."""

from __future__ import annotations

from math import prod

import tvm
from tvm import ir, s_tir, tirx
from tvm.s_tir.dlight.analysis import get_root_block
from tvm.s_tir.dlight.gpu.base import GPUScheduleRule
from tvm.target import Target

from pimflow.core.blocks import (
    MAX_BLOCK_AXIS,
    MAX_GRID_AXIS,
    MAX_THREADS,
    SMALLEST_GPU,
    WARP_THREADS,
    KernelLimits,
)
from pimflow.relay_passes.schedules.loops import nodes
from pimflow.relay_passes.schedules.lower_kernels import lower_kernels

REGISTER_BYTES = 4
OTHER_REGISTERS = 32  # of a thread, besides its buffers: addresses, operands (assumed)


class GpuRule(GPUScheduleRule):
    """A rule that schedules kernels for a GPU with `limits`, whose multiprocessors should all have work."""

    def __init__(self, limits: KernelLimits = SMALLEST_GPU):
        self.limits = limits

    def apply(self, func: tirx.PrimFunc, target: Target, _: bool) -> s_tir.Schedule | None:
        """`schedule` of a kernel for a GPU; None for other targets."""
        return self.schedule(s_tir.Schedule(func)) if self.is_target_available(target) else None

    def schedule(self, sch: s_tir.Schedule) -> s_tir.Schedule | None:
        """The scheduled kernel; None if the rule is for other ones. This one changes nothing."""
        return sch


def with_limits(target: Target, limits: KernelLimits) -> Target:
    """`target` with the limits of a GPU's blocks, which TVM's own schedules read; another kind as it is."""
    if target.kind.name != "cuda":
        return target
    config = {key: value for key, value in target.export().items() if key != "tag"}
    config |= {name: limits.threads for name in ("max_threads_per_block", "max_num_threads")}
    return Target(config | {"max_shared_memory_per_block": limits.shared_bytes})


def broken_limit(sch: s_tir.Schedule, limits: KernelLimits, target: Target) -> str:
    """The limit that a launch of a scheduled function breaks; empty if all are kept.

    Shared memory and registers are looked at where a block may have less than on every GPU that CUDA 13
    compiles for. Otherwise our rules keep them, and so do DLight's; registers beyond that spill.
    """
    body = sch.get(get_root_block(sch)).body
    for launch in body.seq if isinstance(body, tirx.SeqStmt) else [body]:
        extents: dict[str, int] = {}
        for loop in nodes(launch, tirx.For):
            if loop.thread_binding is not None and isinstance(loop.extent, tirx.IntImm):
                tag = str(loop.thread_binding.thread_tag)
                extents[tag] = max(extents.get(tag, 1), int(loop.extent))
        if problem := launch_problem(extents, limits.threads):
            return problem
    return _memory_problem(sch.mod["main"], limits, target) if limits.is_tight else ""


def launch_problem(extents: dict[str, int], max_threads: int = MAX_THREADS) -> str:
    """The limit that a launch breaks, by the extents of its axes, such as ``blockIdx.x``; empty if none."""
    for prefix, limits in (("blockIdx", MAX_GRID_AXIS), ("threadIdx", MAX_BLOCK_AXIS)):
        for axis, limit in limits.items():
            if extents.get(f"{prefix}.{axis}", 1) > limit:
                return f"{prefix}.{axis} is {extents[f'{prefix}.{axis}']}, and CUDA allows {limit}"
    threads = prod(extents.get(f"threadIdx.{axis}", 1) for axis in "xyz")
    return f"{threads} threads in a block, and {max_threads} are allowed" if threads > max_threads else ""


def shared_bytes(launch: tirx.Stmt) -> int:
    """Shared memory of a block of a lowered launch."""
    return sum(_bytes(buffer) for buffer in _buffers(launch) if buffer.scope().startswith("shared"))


def thread_registers(launch: tirx.Stmt) -> int:
    """An estimate of the registers of a thread of a lowered launch: its buffers, and some more.

    Fragments of tensor cores lie in the registers of a warp.
    """
    local = sum(_bytes(buffer) for buffer in _buffers(launch) if buffer.scope() == "local")
    fragments = sum(_bytes(buffer) for buffer in _buffers(launch) if buffer.scope().startswith("wmma"))
    return OTHER_REGISTERS + (local + fragments // WARP_THREADS) // REGISTER_BYTES


def _memory_problem(func: tirx.PrimFunc, limits: KernelLimits, target: Target) -> str:
    """The limit of shared memory or registers that a block breaks; empty if none."""
    (lowered,) = lower_kernels(tvm.IRModule({"main": func}), target).functions.values()
    for launch in launches(lowered.body):
        if (size := shared_bytes(launch)) > limits.shared_bytes:
            return f"{size} bytes of shared memory, and a block has {limits.shared_bytes}"
        size = block_threads(launch) * thread_registers(launch) * REGISTER_BYTES
        if size > limits.register_bytes:
            return f"{size} bytes of registers, and a multiprocessor has {limits.register_bytes}"
    return ""


def launches(stmt: tirx.Stmt) -> list[tirx.AttrStmt]:
    """The launches of a lowered function, in order."""
    if isinstance(stmt, tirx.SeqStmt):
        return [launch for part in stmt.seq for launch in launches(part)]
    if isinstance(stmt, tirx.AttrStmt):
        return [stmt] if stmt.attr_key == "thread_extent" else launches(stmt.body)
    return []


def block_threads(launch: tirx.Stmt) -> int:
    """Threads of a block of a lowered launch."""
    axes = {str(attr.node.thread_tag): attr.value for attr in nodes(launch, tirx.AttrStmt) if _is_axis(attr)}
    return prod(int(extent) for tag, extent in axes.items() if tag.startswith("threadIdx"))


def _is_axis(attr: tirx.AttrStmt) -> bool:
    return attr.attr_key == "thread_extent" and isinstance(attr.value, tirx.IntImm)


def _buffers(launch: tirx.Stmt) -> list[ir.Var]:
    return [alloc.buffer for alloc in nodes(launch, tirx.AllocBuffer)]


def _bytes(buffer: ir.Var) -> int:
    return prod(map(int, buffer.shape)) * int(buffer.dtype.bits) // 8
