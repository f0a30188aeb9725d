"""Schedules kernels for the registers, vectors and cores of a CPU."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd, prod

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.schedule import SBlockRV

from pimflow.primitives.primitive import STACK_BYTES
from pimflow.relay_passes.schedules import schedule_primitives
from pimflow.relay_passes.schedules.loops import (
    is_result,
    loop_extent,
    nodes,
    outer_nests,
    reduction_axes,
    rewrite_kernels,
    variables,
)
from pimflow.relay_passes.structure_cache import StructureCache

# Sums of a tile: as many as 16 registers of 128 bits (x86-64, Armv8) can hold besides the operands.
STRIDED = (4, 8)  # lanes, neighbouring places: a vector of strided loads must serve many places
CONTIGUOUS = (8, 4)
ROW = (64, 1)  # for a single place: whole cache lines of the matrix, which is read once
VECTOR_LANES = (16, 8, 4)
PARALLEL = 1 << 18  # minimum operations; with fewer, waking threads takes longer (assumed)
CHEAP = ("prim.if_then_else", "prim.likely")
_PLACED = tvm.transform.Sequential(
    [s_tir.transform.LowerInitBlock(), s_tir.transform.PlanAndUpdateBufferAllocationLocation()]
)
COSTLY = (tirx.Div, tirx.FloorDiv, tirx.FloorMod)
# Maximum of ``Select`` in one expression. Each names its operands several times, so that chains of them grow
# exponentially, and the time in which TVM simplifies them even faster: 0.1 s for 15, 120 s for 255.
MAX_CHOICES = 15


@tvm.transform.module_pass(opt_level=0, name="ScheduleCpu")
class ScheduleCpu:
    """Schedule kernels for a CPU: registers for inner tensors, vectors along channels, cores along rows.

    Cheap operators are inlined: paddings, layouts, sums of two tensors. A reduction is computed one tile at a
    time; the sums of a tile go from registers through the elementwise operators behind it into the result.

    Rewrite: ``p = pad(x); c = conv(p, w); y = relu(c + b) -> for tile: c' = conv(x, w); y = relu(c' + b)``,
    marked as scheduled.
    Preserves: values exactly, since the order of sums stays; signatures; functions that are already marked as
    scheduled, or are no nests of loops with static extents.

    Parameters
    ----------
    cache : StructureCache, optional
        Schedules that are used again for equal kernels.
    """

    def __init__(self, cache: StructureCache | None = None):
        self.cache = cache

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        cache = self.cache

        def schedule(func: tirx.PrimFunc) -> tirx.PrimFunc:
            """The schedule of `func`, from the cache if it has that."""
            return _schedule(func) if cache is None else cache.result("ScheduleCpu", func, _schedule)

        return rewrite_kernels(mod, schedule)


def _schedule(func: tirx.PrimFunc) -> tirx.PrimFunc:
    if (func.attrs or {}).get("tirx.is_scheduled"):
        return func
    sch = s_tir.Schedule(func)
    nests = outer_nests(sch)
    if not nests or not all(_is_plain(sch, nest) for nest in nests):
        return func
    for nest in nests:
        if schedule_primitives.is_stage(sch, nest) or _can_pad(sch, nest):
            continue
        if _can_inline(sch, nest):
            sch = _try_rule(sch, s_tir.Schedule.compute_inline, nest)
    schedule_primitives.schedule(sch)
    for nest in outer_nests(sch):
        if len(sch.get_loops(nest)) == len(sch.get(nest).iter_vars):  # not yet part of a tile
            rule = _planes if _is_plane(sch, nest) else _tile if reduction_axes(sch.get(nest)) else _spread
            sch = _try_rule(sch, rule, nest)
    # The sums of a tile are declared inside its loop: only there are they as small as a tile.
    return schedule_primitives.shrink_products_buffer(_PLACED(sch.mod)["main"]).with_attr(
        "tirx.is_scheduled", True
    )


def _try_rule(sch: s_tir.Schedule, rule: Callable[..., None], nest: SBlockRV) -> s_tir.Schedule:
    """`sch` after `rule`; the original if `rule` does not apply."""
    attempt = sch.copy()
    try:
        rule(attempt, nest)
    except s_tir.ScheduleError:
        return sch
    return attempt


def _is_plain(sch: s_tir.Schedule, nest: SBlockRV) -> bool:
    """Whether `nest` has one serial loop of known extent for every axis, and one result."""
    block, loops = sch.get(nest), [sch.get(loop) for loop in sch.get_loops(nest)]
    axes = (tirx.IterVar.DataPar, tirx.IterVar.CommReduce)
    return (
        len(loops) == len(block.iter_vars) > 0
        and len(block.writes) == 1
        and isinstance(block.body, tirx.BufferStore)
        and all(i.iter_type in axes for i in block.iter_vars)
        and all(isinstance(loop.extent, tirx.IntImm) for loop in loops)
        and all(loop.kind == tirx.ForKind.SERIAL for loop in loops)
    )


def _can_inline(sch: s_tir.Schedule, nest: SBlockRV) -> bool:
    """Whether `nest` may be inlined into its readers, and that is cheap."""
    consumers = sch.get_consumers(nest)
    if reduction_axes(sch.get(nest)) or not consumers or is_result(sch, nest):
        return False
    if len(nodes(sch.get(nest).body.value, tirx.Select)) > MAX_CHOICES:  # each reader would repeat them
        return False
    once = len(consumers) == 1 and _size(sch, nest) == _size(sch, consumers[0])
    return (once and not reduction_axes(sch.get(consumers[0]))) or not _is_costly(sch.get(nest))


def _is_costly(block: s_tir.SBlock) -> bool:
    called = (getattr(call.op, "name", "") for call in nodes(block.body.value, tvm.ir.Call))
    return bool(nodes(block.body.value, *COSTLY)) or any(name not in CHEAP for name in called)


def _size(sch: s_tir.Schedule, nest: SBlockRV) -> int:
    """Elements that `nest` computes; for a reduction, its operations."""
    return prod(loop_extent(sch, loop) for loop in sch.get_loops(nest))


def _spread(sch: s_tir.Schedule, nest: SBlockRV) -> None:
    """Deal rows of an elementwise kernel to the cores; LLVM vectorises them itself."""
    rows = [loop for loop in sch.get_loops(nest)[:-1] if loop_extent(sch, loop) > 1]
    if rows and _size(sch, nest) >= PARALLEL:
        sch.parallel(rows[0])


def _is_plane(sch: s_tir.Schedule, nest: SBlockRV) -> bool:
    """Whether `nest` pools windows of adjacent pixels, in rows that fit on the stack."""
    block = sch.get(nest)
    over = reduction_axes(block)
    if len(over) != 2 or len(block.iter_vars) != 6 or len(block.reads) != 1:
        return False
    *_, column = (i for i in block.iter_vars if i.var not in over)
    if int(column.dom.extent) < max(VECTOR_LANES) and not sch.get_producers(nest):
        return False  # LLVM does not vectorise short rows that are read in place
    last = list(block.reads[0].region)[-1]
    pixels = variables(last.min)
    row_bytes = 4 * int(block.reads[0].source.shape[-1])
    return column.var in pixels and bool(over & pixels) and row_bytes < STACK_BYTES


def _can_pad(sch: s_tir.Schedule, nest: SBlockRV) -> bool:
    """Whether `nest` pads for a pool; `_planes` then recomputes it for each row that the pool reads."""
    readers = sch.get_consumers(nest)
    cheap = not reduction_axes(sch.get(nest)) and not _is_costly(sch.get(nest))
    return cheap and len(readers) == 1 and _is_plane(sch, readers[0])


def _planes(sch: s_tir.Schedule, main: SBlockRV) -> None:
    """Compute a pool one row of one plane at a time, so that LLVM makes vectors of pixels.

    Rows of the operand are padded when they are read, so that the innermost loop tests no bounds.
    """
    loops, size = sch.get_loops(main), _size(sch, main)
    *outer, column, row_over, column_over = loops
    padded = [nest for nest in sch.get_producers(main) if _can_pad(sch, nest)]
    result = _epilogue(sch, main, prod(loop_extent(sch, loop) for loop in (*outer, column)))
    sch.reorder(*outer, row_over, column_over, column)
    sch.reverse_compute_at(result, outer[-1], preserve_unit_loops=True)
    for pad in padded:
        sch.compute_at(pad, row_over, preserve_unit_loops=True)
    sch.unroll(column_over)
    if size >= PARALLEL:
        sch.parallel(sch.fuse(*outer[:-1]))
    sch.decompose_reduction(main, row_over)


def _tile(sch: s_tir.Schedule, main: SBlockRV) -> None:
    """Compute a reduction a tile at a time: sums in registers, then the operators behind it."""
    block, loops, size = sch.get(main), sch.get_loops(main), _size(sch, main)
    axes = dict(zip(loops, (i.var for i in block.iter_vars), strict=True))
    over = [loop for loop in loops if axes[loop] in reduction_axes(block)]
    free = [loop for loop in loops if axes[loop] not in reduction_axes(block)]
    if not free or not over:
        return
    result = _epilogue(sch, main, prod(loop_extent(sch, loop) for loop in free))
    *before, channel = [loop for loop in free if loop_extent(sch, loop) > 1] or free[-1:]
    place = before[-1] if before else sch.add_unit_loop(loops[0])
    lanes, places = _tile_shape(block, axes[channel], loop_extent(sch, channel), loop_extent(sch, place))

    outer = [loop for loop in free if loop not in (channel, place)]
    place, place_inside = sch.split(place, [None, places])
    channel, channel_inside = sch.split(channel, [None, lanes])
    outer += [place, channel]
    sch.reorder(*outer, *over, place_inside, channel_inside)
    sch.reverse_compute_at(result, channel, preserve_unit_loops=True)
    for nest in ([place_inside, channel_inside], sch.get_loops(result)[len(outer) :]):
        for loop in nest[:-1]:
            sch.unroll(loop)
        sch.vectorize(nest[-1])
    if size >= PARALLEL:
        sch.parallel(sch.fuse(*outer[:-1]))
    sch.decompose_reduction(main, over[0])


def _tile_shape(block: s_tir.SBlock, channel: tirx.Var, channels: int, places: int) -> tuple[int, int]:
    """Lanes, along the axis `channel`, and places of a tile."""
    dims = (dim for region in block.reads for dim in list(region.region)[:-1])
    strided = any(channel in variables(dim.min) for dim in dims)
    lanes, max_places = STRIDED if strided else CONTIGUOUS if places > 1 else ROW
    return _divisor(gcd(channels, *_periods(block, channel)), lanes), _divisor(places, max_places)


def _periods(block: s_tir.SBlock, axis: tirx.Var) -> list[int]:
    """Divisors of `axis` in indices, such as the channels of a group, which a vector should not cross."""
    divisions = nodes(block.body, tirx.FloorDiv, tirx.FloorMod)
    return [int(e.b) for e in divisions if axis in variables(e.a) and isinstance(e.b, tirx.IntImm)]


def _epilogue(sch: s_tir.Schedule, main: SBlockRV, results: int) -> SBlockRV:
    """The block that reads the sums of `main` from registers: the operators behind it, or a copy."""
    consumers = sch.get_consumers(main)
    if (
        len(consumers) == 1
        and _size(sch, consumers[0]) == results
        and not reduction_axes(sch.get(consumers[0]))
    ):
        block, sums = sch.get(consumers[0]), sch.get(main).writes[0].source
        axes = {i.var for i in block.iter_vars}
        (read,) = (region.region for region in block.reads if region.source.same_as(sums))
        # For a flattened tile, TVM would use its whole range, with sums that are not complete yet.
        if all(dim.extent == 1 and (dim.min in axes or isinstance(dim.min, tirx.IntImm)) for dim in read):
            return consumers[0]
    return sch.cache_write(main, 0, "global")


def _divisor(extent: int, upper_bound: int) -> int:
    """The largest divisor of `extent` up to `upper_bound`; multiples of 4 come first."""
    divisors = [d for d in range(1, upper_bound + 1) if extent % d == 0]
    return max(divisors, key=lambda d: (d % 4 == 0, d))
