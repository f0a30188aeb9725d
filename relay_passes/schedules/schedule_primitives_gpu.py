"""Schedules convolution primitives for the blocks, threads and shared memory of a GPU."""

from __future__ import annotations

from math import gcd

from tvm import s_tir
from tvm.s_tir.schedule import LoopRV, SBlockRV

from pimflow.primitives.marks import ADDED, SHARED, SPREAD, TILE, UNROLLED
from pimflow.relay_passes.schedules import schedule_primitives
from pimflow.relay_passes.schedules.launch_limits import GpuRule
from pimflow.relay_passes.schedules.loops import (
    BLOCK,
    bind,
    divisors,
    is_result,
    loop_extent,
    outer_nests,
    reduction_axes,
)
from pimflow.relay_passes.schedules.schedule_primitives import mark, result_of

THREAD = 4  # places, and lanes, whose sums a thread holds
DEPTH = 16  # maximum depth of the slices of both operands in shared memory


class PrimitiveStages(GpuRule):
    """Kernels whose stages carry the marks of `pimflow.primitives.kernels`.

    Stages that a workspace separates are separate launches. A block of threads computes a tile of sums, each
    thread `THREAD` x `THREAD` of them in registers. If the primitive requires it, slices of both operands
    come through shared memory, with barriers around them. Each piece (transform of a Winograd tile) has a
    thread. Blocks without a mark are inlined, unless they are results.
    """

    def schedule(self, sch: s_tir.Schedule) -> s_tir.Schedule | None:
        """The schedule of a kernel with marked stages; None for other kernels."""
        if not any(schedule_primitives.is_stage(sch, nest) for nest in outer_nests(sch)):
            return None
        for nest in outer_nests(sch):
            if not schedule_primitives.is_stage(sch, nest) and _can_inline_stage(sch, nest):
                sch.compute_inline(nest)
        for nest in outer_nests(sch):
            if mark(sch, nest, SPREAD) is not None and mark(sch, nest, ADDED) is None:
                bind(sch, sch.get_loops(nest), self.limits.threads_up_to(BLOCK))
            elif pairs := mark(sch, nest, UNROLLED):
                schedule_primitives.schedule_piece(sch, nest, [*pairs[:-1], -1], self._grid)
            elif tile := mark(sch, nest, TILE):
                _tile(sch, nest, tile)
        return sch

    def _grid(self, sch: s_tir.Schedule, loop: LoopRV) -> LoopRV:
        """Bind `loop` to blocks and threads; returns the loop over threads.

        The number of threads divides the iterations: a guard for a rest is not allowed around reductions.
        """
        return bind(sch, [loop], divisors(loop_extent(sch, loop), self.limits.threads_up_to(BLOCK))[-1])


def _can_inline_stage(sch: s_tir.Schedule, nest: SBlockRV) -> bool:
    """Whether to inline `nest`; operands in shared memory are computed when they are copied there."""
    readers = sch.get_consumers(nest)
    if not readers or reduction_axes(sch.get(nest)) or is_result(sch, nest):
        return False
    return not any(mark(sch, r, SHARED) for r in readers)


def _has_threads(sch: s_tir.Schedule, nest: SBlockRV) -> bool:
    """Whether `nest` is bound to threads already, such as the end of a stage that stores a workspace."""
    return any(sch.get(loop).thread_binding is not None for loop in sch.get_loops(nest))


def _tile(sch: s_tir.Schedule, nest: SBlockRV, tile: list[int]) -> None:
    """Compute sums in tiles, one for each block; `tile` is the value of the mark `TILE`."""
    place_axis, places, lane_axis, lanes, _ = tile
    shared = bool(mark(sch, nest, SHARED))
    count = len(reduction_axes(sch.get(nest)))
    loops = sch.get_loops(nest)[-len(sch.get(nest).iter_vars) :]
    spatial, over = loops[:-count], loops[-count:]
    into = result_of(sch, nest)
    place, place_thread, place_inside = sch.split(
        spatial[place_axis], [None, places // gcd(places, THREAD), gcd(places, THREAD)]
    )
    lane, lane_thread, lane_inside = sch.split(
        spatial[lane_axis], [None, lanes // gcd(lanes, THREAD), gcd(lanes, THREAD)]
    )
    others = [loop for i, loop in enumerate(spatial) if i not in (place_axis, lane_axis)]
    depth = divisors(loop_extent(sch, over[-1]), DEPTH)[-1]
    *outer, last = over
    slices, inner = sch.split(last, [None, depth])
    sch.reorder(
        *others, place, lane, place_thread, lane_thread, *outer, slices, inner, place_inside, lane_inside
    )
    block = sch.fuse(*others, place, lane)
    thread = sch.fuse(place_thread, lane_thread)
    threads = loop_extent(sch, thread)
    sch.bind(block, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")
    if shared:
        for index in range(2):
            copy = sch.cache_read(nest, index, "shared")
            sch.compute_at(copy, slices, preserve_unit_loops=True)
            for producer in sch.get_producers(copy):
                done = _has_threads(sch, producer) or is_result(sch, producer)
                if not schedule_primitives.is_stage(sch, producer) and not done:
                    sch.compute_inline(producer)
            elements = sch.fuse(*sch.get_loops(copy)[-len(sch.get(copy).iter_vars) :])
            _, thread_elements = sch.split(elements, [None, threads])
            sch.bind(thread_elements, "threadIdx.x")
    sch.unroll(place_inside)
    sch.unroll(lane_inside)
    schedule_primitives.store_sums_at(sch, into, thread)
    sch.decompose_reduction(nest, ([*outer, slices])[0])
