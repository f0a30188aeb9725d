"""Schedules kernels of several convolutions for a CPU: tiles of pixels, with channels in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV

from pimflow.core.fused_tile import VECTOR_LANES, Reach, RunTile, divisors
from pimflow.primitives.primitive import STACK_BYTES
from pimflow.relay_passes.schedules.fused_chain import (
    Stage,
    is_dense,
    pixels_side_by_side,
    reach,
    result_loops,
)
from pimflow.relay_passes.schedules.loops import loop_extent

REGISTERS = 16  # of 128 bits (x86-64, Armv8)
VECTOR = 4  # fp32 elements of such a register
GATHERED = 8  # channels of a vector: their filters are far apart, gathered one by one
CHUNK = 8  # channels, at least, that share the work of reading and writing the last sums
CACHE_BYTES = 8192  # of a tensor of a tile: several share the first level of a cache (32 KiB, assumed)
TASKS = 16  # into which the rows are cut, where each needs a workspace of its own (cores, assumed)
ELEMENT_BYTES = 4


def schedule_chain(sch: s_tir.Schedule, stages: Sequence[Stage]) -> None:
    """Compute a tile of the last result at a time, and in its loop what it needs of the others.

    Pixels lie side by side, so that vectors of them meet scalars of the filters whatever the number of
    channels. Where nothing between needs all channels of a tensor, they are computed a chunk at a time,
    and the last sums grow from chunk to chunk. Every sum keeps its order.
    """
    *before, last = stages
    tile, widths = _tile(sch, stages)
    producers = sch.get_producers(stages[0].main)
    operand = producers[0] if producers else sch.cache_read(stages[0].main, 0, "global")
    fitting = [_lanes(width) % VECTOR == 0 for width in widths]
    by_pixels = _by_pixels(sch, before, fitting)
    pixels_side_by_side(sch, [operand, last.main] if by_pixels[0] else [last.main])
    for stage, side_by_side, vectors in zip(before, fitting, by_pixels, strict=True):
        pixels_side_by_side(sch, [stage.result] if side_by_side else [])
        pixels_side_by_side(sch, [stage.main] if vectors else [])

    loops = result_loops(sch, last.main, tile)
    x, over, window, columns = loops.x, loops.over, loops.window, loops.columns
    block = _block(loop_extent(sch, loops.channel), tile.columns)
    channel, channels = sch.split(loops.channel, [None, block])
    sch.reorder(loops.n, loops.y, x, over, channel, loops.rows, *window, channels, columns)
    sch.reverse_compute_at(last.result, x if loops.summed else over, preserve_unit_loops=True)
    sums, at, following = [(last.main, over if loops.summed else window[0])], over, last
    for stage, vectors in zip(reversed(before), reversed(by_pixels), strict=True):
        at = x if following is not last and is_dense(sch.get(following.main)) else at
        sums.append(_inside(sch, stage, at, vectors))
        following = stage
    sch.compute_at(operand, x, preserve_unit_loops=True)
    sch.unroll(channels)
    sch.vectorize(columns)
    tasks = sch.fuse(loops.n, loops.y)
    tasks, _ = sch.split(tasks, [_tasks(loop_extent(sch, tasks)), None])
    sch.parallel(tasks)
    for nest, loop in sums:
        sch.decompose_reduction(nest, loop)


def _by_pixels(sch: s_tir.Schedule, before: Sequence[Stage], fitting: Sequence[bool]) -> list[bool]:
    """Whether vectors of each stage are of pixels: if they are full; of a pooling as of its operand."""
    by_pixels = list[bool]()
    for stage, fits in zip(before, fitting, strict=True):
        by_pixels.append(fits if is_dense(sch.get(stage.main)) else by_pixels[-1])
    return by_pixels


def _inside(sch: s_tir.Schedule, stage: Stage, at: LoopRV, by_pixels: bool) -> tuple[SBlockRV, LoopRV]:
    """Compute `stage` in the loop `at`, as far as it is read there; returns its sum and its first loop.

    Vectors are of pixels, or of channels.
    """
    sch.compute_at(stage.result, at, preserve_unit_loops=True)
    n, y, *inner = sch.get_loops(stage.result)[-4:]
    vector, scalar = inner if by_pixels else reversed(inner)
    places = loop_extent(sch, vector)
    vector, lanes = sch.split(vector, [None, _lanes(places) if by_pixels else divisors(places, GATHERED)[-1]])
    scalar, places = sch.split(scalar, [None, _block(loop_extent(sch, scalar), loop_extent(sch, lanes))])
    sch.reorder(n, y, vector, scalar, places, lanes)
    sch.compute_at(stage.main, scalar, preserve_unit_loops=True)
    kinds = [axis.iter_type for axis in sch.get(stage.main).iter_vars]
    loops = list(zip(sch.get_loops(stage.main)[-len(kinds) :], kinds, strict=True))
    over = [loop for loop, kind in loops if kind == tirx.IterVar.CommReduce]
    n, y, *inner = (loop for loop, kind in loops if kind == tirx.IterVar.DataPar)
    sum_lanes, sum_places = inner if by_pixels else reversed(inner)
    sch.reorder(*over, n, y, sum_places, sum_lanes)
    for nest in ((places, lanes), (sum_places, sum_lanes)):
        sch.unroll(nest[0])
        sch.vectorize(nest[1])
    return stage.main, over[0]


def _tile(sch: s_tir.Schedule, stages: Sequence[Stage]) -> tuple[RunTile, list[int]]:
    """The tile that costs least, all of it in the nearest memory; columns of the earlier results in it."""
    main = stages[-1].main
    _, height, width, channels, *window = (loop_extent(sch, loop) for loop in sch.get_loops(main))
    channels = window[-1] if is_dense(sch.get(main)) else channels
    reaches = [reach(sch.get(stage.main)) for stage in reversed(stages)]
    columns = _lanes(width)
    extents = [columns]
    for _, horizontal in reaches[:-1]:
        extents.append(horizontal.extent(extents[-1]))

    def places(rows: int) -> int:
        """Places, in one channel, of the largest tensor between the stages."""
        sizes = []
        for (vertical, _), wide in zip(reaches[:-1], extents[1:], strict=True):
            rows = vertical.extent(rows)
            sizes.append(rows * wide)
        return max(sizes)

    def cost(rows: int) -> float:
        too_large = places(rows) * CHUNK * ELEMENT_BYTES / CACHE_BYTES
        return _work([vertical for vertical, _ in reaches], rows) * max(1.0, too_large)

    rows = min(divisors(height, height), key=lambda each: (round(cost(each), 6), each))
    most = (STACK_BYTES - 1) // (places(rows) * ELEMENT_BYTES)
    if divisors(channels, most)[-1:] < [min(channels, CHUNK)]:
        most = max(1, CACHE_BYTES // (places(rows) * ELEMENT_BYTES))
    return RunTile(rows, columns, divisors(channels, most)[-1]), extents[:0:-1]


def _work(reaches: Sequence[Reach], rows: int) -> float:
    """Rows of all stages that a tile of `rows` rows computes, for each of its rows."""
    total, computed, scale = 1.0, rows, 1
    for each in reaches[:-1]:
        computed, scale = each.extent(computed), scale * each.stride
        total += computed / (rows * scale)
    return total


def _lanes(places: int) -> int:
    """Places of a vector; as many as there are if vectors would not be full."""
    full = (lanes for lanes in VECTOR_LANES if places % lanes == 0)
    return next(full, divisors(places, VECTOR_LANES[0])[-1])


def _block(places: int, lanes: int) -> int:
    """How many vectors of sums fit in registers, beside an operand of as many and a scalar."""
    vectors = ceil(lanes / VECTOR)
    return divisors(places, max(1, (REGISTERS - 1 - vectors) // vectors))[-1]


def _tasks(rows: int) -> int:
    few = divisors(rows, TASKS)[-1]
    return few if few > 1 else rows
