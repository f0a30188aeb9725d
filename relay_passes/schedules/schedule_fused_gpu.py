"""Schedules kernels of several convolutions for a GPU: a block computes a tile through shared memory."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.dlight.gpu.base import GPUScheduleRule
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.target import Target

from pimflow.core.fused_tile import RunTile, TiledLayer, divisors, gpu_tile
from pimflow.relay_passes.schedules.fused_chain import (
    Stage,
    fused_stages,
    is_dense,
    pixels_side_by_side,
    reach,
    result_loops,
)
from pimflow.relay_passes.schedules.loops import loop_extent

THREADS = 128  # of a block


class FusedRun(GPUScheduleRule):
    """Runs of convolutions, such as ``lconv``, activation, pooling, ``fconv`` (TeMCO, Listing 1).

    A block computes all channels of a tile of pixels, so that earlier results are not computed again for
    other channels. Its threads form a chunk of channels of each earlier result in shared memory, then add its
    products to sums in registers; neighbouring threads have neighbouring pixels.
    """

    def apply(self, func: tirx.PrimFunc, target: Target, _: bool) -> s_tir.Schedule | None:
        if not self.is_target_available(target):
            return None
        sch = s_tir.Schedule(func)
        stages = fused_stages(sch)
        if not stages:
            return None
        tile = _tile(sch, stages)
        if tile is None:
            return None
        _schedule(sch, stages, tile)
        return sch


def _schedule(sch: s_tir.Schedule, stages: Sequence[Stage], tile: RunTile) -> None:
    *before, last = stages
    producers = sch.get_producers(stages[0].main)
    operand = producers[0] if producers else sch.cache_read(stages[0].main, 0, "shared")
    pixels_side_by_side(sch, [operand, *(stage.result for stage in before)])
    loops = result_loops(sch, last.main, tile)
    over, window = loops.over, loops.window
    pixels = tile.rows * tile.columns
    beside = divisors(loop_extent(sch, loops.channel), max(1, THREADS // pixels))[-1]
    # Channels of a thread lie side by side, so that the range that it writes has no other thread's in it.
    lane, channels = sch.split(loops.channel, [beside, None])
    places = (lane, loops.rows, loops.columns)
    tiles = (loops.n, loops.y, loops.x)
    sch.reorder(*tiles, *places, over, *window, channels)
    block, thread = sch.fuse(*tiles), sch.fuse(*places)
    sch.bind(block, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")
    threads = loop_extent(sch, thread)
    sch.unroll(channels)
    sch.set_scope(last.main, 0, "local")
    sch.reverse_compute_at(last.result, thread if loops.summed else over, preserve_unit_loops=True)
    sums, at, following = [(last.main, over if loops.summed else window[0])], over, last
    for stage in reversed(before):
        at = thread if following is not last and is_dense(sch.get(following.main)) else at
        sums.append(_shared(sch, stage, at, threads))
        following = stage
    _spread(sch, operand, thread, threads)
    for nest, loop in sums:
        # Where threads are more than elements TVM refuses; then a branch in the loop begins the sum.
        with contextlib.suppress(s_tir.ScheduleError):
            sch.decompose_reduction(nest, loop)


def _shared(sch: s_tir.Schedule, stage: Stage, at: LoopRV, threads: int) -> tuple[SBlockRV, LoopRV]:
    """Compute `stage` in shared memory in the loop `at`; returns its sum and its first loop."""
    turn = _spread(sch, stage.result, at, threads)
    sch.set_scope(stage.main, 0, "local")
    sch.compute_at(stage.main, turn, preserve_unit_loops=True)
    kinds = [axis.iter_type for axis in sch.get(stage.main).iter_vars]
    loops = sch.get_loops(stage.main)[-len(kinds) :]
    over = [loop for loop, kind in zip(loops, kinds, strict=True) if kind == tirx.IterVar.CommReduce]
    return stage.main, over[0]


def _spread(sch: s_tir.Schedule, nest: SBlockRV, at: LoopRV, threads: int) -> LoopRV:
    """Compute `nest` in shared memory with all threads of a block; returns the loop over threads."""
    sch.set_scope(nest, 0, "shared")
    sch.compute_at(nest, at, preserve_unit_loops=True)
    n, y, x, channel = sch.get_loops(nest)[-4:]
    sch.reorder(n, channel, y, x)
    _, thread = sch.split(sch.fuse(n, channel, y, x), [None, threads])
    sch.bind(thread, "threadIdx.x")
    return thread


def _tile(sch: s_tir.Schedule, stages: Sequence[Stage]) -> RunTile | None:
    """The tile of a block; None if none fits."""
    _, height, width, *_ = (loop_extent(sch, loop) for loop in sch.get_loops(stages[-1].main))
    steps = []
    for stage in stages:
        block = sch.get(stage.main)
        vertical, horizontal = reach(block)
        operand = block.reads[0].source
        steps.append(
            TiledLayer(
                rows=vertical,
                columns=horizontal,
                channels=int(operand.shape[-1]),
                dense=is_dense(block),
                element_bytes=tvm.DataType(str(operand.dtype)).itemsize,
            )
        )
    return gpu_tile(height, width, steps)
