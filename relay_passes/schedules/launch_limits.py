"""Limits of CUDA's launches, which a schedule must keep."""

from __future__ import annotations

from math import prod

from tvm import s_tir, tirx
from tvm.s_tir.dlight.analysis import get_root_block

from pimflow.core.blocks import MAX_BLOCK_AXIS, MAX_GRID_AXIS, MAX_THREADS
from pimflow.relay_passes.schedules.loops import nodes


def broken_limit(sch: s_tir.Schedule) -> str:
    """The limit of CUDA that a launch of a scheduled function breaks; empty if all are kept."""
    body = sch.get(get_root_block(sch)).body
    for launch in body.seq if isinstance(body, tirx.SeqStmt) else [body]:
        extents: dict[str, int] = {}
        for loop in nodes(launch, tirx.For):
            if loop.thread_binding is not None and isinstance(loop.extent, tirx.IntImm):
                tag = str(loop.thread_binding.thread_tag)
                extents[tag] = max(extents.get(tag, 1), int(loop.extent))
        if problem := launch_problem(extents):
            return problem
    return ""


def launch_problem(extents: dict[str, int]) -> str:
    """The limit that a launch breaks, by the extents of its axes, such as ``blockIdx.x``; empty if none."""
    for prefix, limits in (("blockIdx", MAX_GRID_AXIS), ("threadIdx", MAX_BLOCK_AXIS)):
        for axis, limit in limits.items():
            if extents.get(f"{prefix}.{axis}", 1) > limit:
                return f"{prefix}.{axis} is {extents[f'{prefix}.{axis}']}, and CUDA allows {limit}"
    threads = prod(extents.get(f"threadIdx.{axis}", 1) for axis in "xyz")
    return f"{threads} threads in a block, and CUDA allows {MAX_THREADS}" if threads > MAX_THREADS else ""
