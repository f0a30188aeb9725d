"""Schedules convolution primitives for the registers, vectors and cores of a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd, prod

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV

from pimflow.primitives.marks import ADDED, INSIDE, SLAB, SPREAD, TILE, UNROLLED
from pimflow.relay_passes.schedules.loops import loop_extent, nodes, outer_nests, reduction_axes

VECTORS = (16, 8, 4)
PIECES = 8  # maximum copies of a loop's body
TASKS = 16  # minimum of a kernel: 2, 4 or 8 cores then have about equal work


def is_stage(sch: s_tir.Schedule, nest: SBlockRV) -> bool:
    """Whether `nest` is a marked stage of a primitive."""
    return any(mark(sch, nest, name) is not None for name in (TILE, SPREAD, UNROLLED, INSIDE))


def schedule(sch: s_tir.Schedule) -> None:
    """Schedule each marked stage; blocks without a mark that are in no tile stay unchanged."""
    for nest in outer_nests(sch):
        if mark(sch, nest, SPREAD) is not None and mark(sch, nest, ADDED) is None:
            _spread(sch, nest)
    for nest in outer_nests(sch):
        if (added := mark(sch, nest, ADDED)) is not None:
            _add(sch, nest, bool(added))
        elif pairs := mark(sch, nest, UNROLLED):
            schedule_piece(sch, nest, pairs)
    for nest in _all_stages(sch):
        tile = mark(sch, nest, TILE)
        if tile:
            _tile(sch, nest, tile)
        elif tile is not None:
            sch.parallel(sch.fuse(*sch.get_loops(nest)[:2]))


def _all_stages(sch: s_tir.Schedule) -> list[SBlockRV]:
    """All stages, including those inside loops of others."""
    stages = list(outer_nests(sch))
    for nest in stages:
        stages += [
            b for b in sch.get_producers(nest) if not any(sch.get(b).same_as(sch.get(f)) for f in stages)
        ]
    return stages


def mark(sch: s_tir.Schedule, nest: SBlockRV, name: str) -> list[int] | int | None:
    """The value of the mark `name` on `nest`; None if it is not marked."""
    value = sch.get(nest).annotations.get(name)
    if value is None:
        return None
    return [int(n) for n in value] if isinstance(value, (list, tuple, tvm.ir.Array)) else int(value)


def _vector(extent: int) -> int:
    """Lanes of the widest vector that `extent` is a multiple of; 1 if there is none."""
    return next((n for n in VECTORS if extent % n == 0), 1)


def _spread(sch: s_tir.Schedule, nest: SBlockRV) -> None:
    """Distribute rows to cores, and vectorise channels."""
    *outer, last = sch.get_loops(nest)
    side_by_side = mark(sch, nest, SPREAD)
    lanes = _vector(side_by_side)
    if lanes > 1 and loop_extent(sch, last) % lanes == 0:
        sch.vectorize(sch.split(last, [None, lanes])[1])
    rows = [loop for loop in outer if loop_extent(sch, loop) > 1][:2] or outer[:1]
    sch.parallel(sch.fuse(*rows) if _is_adjacent(sch, nest, rows) else rows[0])


def _is_adjacent(sch: s_tir.Schedule, nest: SBlockRV, loops: Sequence[LoopRV]) -> bool:
    loop_vars = [sch.get(loop).loop_var for loop in sch.get_loops(nest)]
    positions = [
        next(i for i, v in enumerate(loop_vars) if v.same_as(sch.get(loop).loop_var)) for loop in loops
    ]
    return positions == list(range(positions[0], positions[0] + len(positions)))


def _tile(sch: s_tir.Schedule, nest: SBlockRV, tile: list[int]) -> None:
    """Compute sums in register tiles; `tile` is the value of the mark `TILE`.

    Panels of filters are split along the lanes, if these are channels, else along the places.
    """
    count = len(reduction_axes(sch.get(nest)))
    loops = sch.get_loops(nest)[-len(sch.get(nest).iter_vars) :]
    spatial, over = loops[:-count], loops[-count:]
    over = [part for loop in over for part in _split_at_bounds(sch, nest, loop)]
    place_axis, places, lane_axis, lanes, channels_in_lanes = tile
    into = result_of(sch, nest)
    place, place_inside = sch.split(spatial[place_axis], [None, places])
    lane, lane_inside = sch.split(spatial[lane_axis], [None, lanes])
    vectors, vector = sch.split(lane_inside, [None, _vector(lanes)])
    panel, other_loop = (lane, place) if channels_in_lanes else (place, lane)
    outer = {i: loop for i, loop in enumerate(spatial) if i not in (place_axis, lane_axis)}
    shared, inner = _deal_tasks(sch, mark(sch, nest, SLAB), outer, panel, other_loop)
    sch.reorder(*shared, *inner, *over, place_inside, vectors, vector)
    sch.parallel(sch.fuse(*shared))
    sch.vectorize(vector)
    for loop in (vectors, place_inside):
        sch.unroll(loop)
    store_sums_at(sch, into, inner[-1])
    sch.decompose_reduction(nest, over[0])


def _split_at_bounds(sch: s_tir.Schedule, nest: SBlockRV, loop: LoopRV) -> list[LoopRV]:
    """Split `loop` over channels of several tensors into pieces, so that each piece reads one tensor.

    The loop over pieces is unrolled, so that no piece contains a condition.
    """
    block, loops = sch.get(nest), sch.get_loops(nest)[-len(sch.get(nest).iter_vars) :]
    position = next(i for i, candidate in enumerate(loops) if sch.get(candidate).same_as(sch.get(loop)))
    axis = block.iter_vars[position].var
    compared = nodes(block.body, tirx.LE, tirx.LT, tirx.GE, tirx.GT)
    sides = [pair for expr in compared for pair in ((expr.a, expr.b), (expr.b, expr.a))]
    bounds = [int(b) for a, b in sides if a.same_as(axis) and isinstance(b, tirx.IntImm)]
    extent = loop_extent(sch, loop)
    piece = gcd(extent, *bounds)
    if not bounds or extent // piece > PIECES:
        return [loop]
    pieces, inside = sch.split(loop, [None, piece])
    sch.unroll(pieces)
    return [pieces, inside]


def _deal_tasks(
    sch: s_tir.Schedule,
    slab: Sequence[int] | None,
    outer: dict[int, LoopRV],
    panel: LoopRV,
    other_loop: LoopRV,
) -> tuple[list[LoopRV], list[LoopRV]]:
    """Loops over tasks, and loops inside a task, with enough tasks for equal work on all cores.

    `outer` are those over axes without tiles; `panel` is over panels of filters, `other_loop` over other
    tiles.
    """

    def parts(loop: LoopRV, max_parts: int, beside: Sequence[LoopRV]) -> list[LoopRV]:
        """Split `loop` into enough parts for all cores, each of at most `max_parts` iterations."""
        extent = loop_extent(sch, loop)
        required_parts = -(-TASKS // prod(loop_extent(sch, outer_loop) for outer_loop in beside))
        size = -(-extent // min(extent, max(required_parts, -(-extent // max_parts))))
        # Pieces of equal size need no condition in the innermost loops.
        even_size = next((n for n in range(size, size // 2, -1) if extent % n == 0), size)
        return sch.split(loop, [None, even_size])

    if not slab:
        shared = [panel, *outer.values()]
        several, other_loop = parts(other_loop, loop_extent(sch, other_loop), shared)
        return [*shared, several], [other_loop]
    if slab[0] in outer:
        row = outer.pop(slab[0])
        rows, row = parts(row, slab[1], [*outer.values(), panel])
        return [*outer.values(), rows, panel], [row, other_loop]
    several, other_loop = parts(other_loop, slab[1], [*outer.values(), panel])
    return [*outer.values(), several, panel], [other_loop]


def result_of(sch: s_tir.Schedule, nest: SBlockRV) -> SBlockRV:
    """The block that reads the sums of `nest` from registers: the next stage if it can, else a copy."""
    consumers = sch.get_consumers(nest)
    if len(consumers) == 1 and not reduction_axes(sch.get(consumers[0])):
        _join_axes(sch, nest, consumers[0])
        block, sums = sch.get(consumers[0]), sch.get(nest).writes[0].source
        read = [region.region for region in block.reads if region.source.same_as(sums)]
        axes = [i.var for i in block.iter_vars]
        if (
            len(read) == 1
            and len(axes) == len(read[0])
            and all(dim.extent == 1 and dim.min.same_as(axis) for dim, axis in zip(read[0], axes))
        ):
            return consumers[0]
    return sch.cache_write(nest, 0, "global")


def _join_axes(sch: s_tir.Schedule, nest: SBlockRV, consumer: SBlockRV) -> None:
    """Fuse rows and columns of `consumer` if the sums of `nest` that it reads have one axis for both."""
    block, sums = sch.get(consumer), sch.get(nest).writes[0].source
    axes, extents = [i.var for i in block.iter_vars], [int(i.dom.extent) for i in block.iter_vars]
    read = [[dim.min for dim in region.region] for region in block.reads if region.source.same_as(sums)]
    if len(read) != 1 or len(read[0]) != len(axes) - 1:
        return
    same = tvm_ffi.structural_equal

    def join_at(position: int) -> Callable[..., list[tirx.Expr]]:
        """An index map that fuses axes `position` and `at + 1`."""
        return lambda *i: [
            *i[:position],
            i[position] * extents[position + 1] + i[position + 1],
            *i[position + 2 :],
        ]

    for position in range(len(read[0])):
        if all(map(same, read[0], join_at(position)(*axes))):
            joining = tirx.IndexMap.from_func(join_at(position), len(axes), index_dtype="int64")
            sch.transform_block_layout(consumer, joining)
            return


def store_sums_at(sch: s_tir.Schedule, into: SBlockRV, loop: LoopRV) -> None:
    """Compute `into`, which reads the sums, at the end of each iteration of `loop`; whole rows in vectors."""
    (sums,) = (b for b in sch.get_producers(into) if reduction_axes(sch.get(b)))
    sch.set_scope(sums, 0, "local")
    sch.reverse_compute_at(into, loop, preserve_unit_loops=True)
    inside = sch.get_loops(into)[-len(sch.get(into).iter_vars) :]
    *rows, last = inside
    lanes = _vector(loop_extent(sch, last))
    has_whole_rows = int(sch.get(into).iter_vars[-1].dom.extent) % loop_extent(sch, last) == 0
    if lanes > 1 and has_whole_rows:
        vectors, vector = sch.split(last, [None, lanes])
        sch.vectorize(vector)
        rows.append(vectors)
    for row in rows:
        if loop_extent(sch, row) > 1:
            sch.unroll(row)


def schedule_piece(
    sch: s_tir.Schedule,
    nest: SBlockRV,
    unrolled_mark: list[int],
    deal: Callable[[s_tir.Schedule, LoopRV], LoopRV] = lambda sch, loop: sch.parallel(loop) or loop,
) -> None:
    """Compute a stage, and those marked `INSIDE`, in pieces: unrolled loops with a width of one vector.

    `deal` distributes the loop over pieces to cores or threads, and returns the loop around a piece.
    """
    *pairs, lane_axis = unrolled_mark
    count = len(reduction_axes(sch.get(nest)))
    loops = sch.get_loops(nest)
    spatial, over = loops[:-count], loops[-count:]
    into = result_of(sch, nest)
    unrolled = []
    for axis, size in zip(pairs[::2], pairs[1::2], strict=True):
        if size:
            spatial[axis], piece = sch.split(spatial[axis], [None, size])
        else:
            spatial[axis], piece = sch.split(spatial[axis], [1, None])
        unrolled.append(piece)
    vector = None
    if lane_axis >= 0 and (lanes := _vector(loop_extent(sch, spatial[lane_axis]))) > 1:
        spatial[lane_axis], vector = sch.split(spatial[lane_axis], [None, lanes])
    sch.reorder(*spatial, *unrolled, *over, *([vector] if vector else []))
    home = deal(sch, sch.fuse(*spatial))
    if vector:
        sch.vectorize(vector)
    for loop in (*unrolled, *over):
        sch.unroll(loop)
    store_sums_at(sch, into, home)
    worklist = list(sch.get_producers(nest))
    while worklist:
        block = worklist.pop(0)
        if mark(sch, block, INSIDE) is not None:
            sch.set_scope(block, 0, "local")
            sch.compute_at(block, home, preserve_unit_loops=True)
            worklist += [b for b in sch.get_producers(block) if mark(sch, b, INSIDE) is not None]
            _unroll_inside(sch, block, vector is not None)
    sch.decompose_reduction(nest, over[0])


def _unroll_inside(sch: s_tir.Schedule, nest: SBlockRV, vectors: bool) -> None:
    """Unroll a stage inside a piece; its last axis is as long as a vector if there are `vectors`."""
    count = len(reduction_axes(sch.get(nest)))
    loops = sch.get_loops(nest)[-len(sch.get(nest).iter_vars) :]
    spatial, over = (loops[:-count], loops[-count:]) if count else (loops, [])
    if vectors:
        *spatial, vector = spatial
        sch.reorder(*spatial, *over, vector)
        sch.vectorize(vector)
    for loop in (*spatial, *over):
        sch.unroll(loop)
    if over:
        sch.decompose_reduction(nest, over[0])


def _add(sch: s_tir.Schedule, nest: SBlockRV, one_by_one: bool) -> None:
    """Add up shifted products; if `one_by_one`, each product is computed when it is added."""
    *spatial, position = sch.get_loops(nest)
    vector, lanes = None, _vector(mark(sch, nest, SPREAD))
    if lanes > 1:
        spatial[-1], vector = sch.split(spatial[-1], [None, lanes])
        sch.vectorize(vector)
    if one_by_one:
        (products,) = sch.get_producers(nest)
        sch.reorder(position, *spatial)
        sch.compute_at(products, position, preserve_unit_loops=True)
        loops = sch.get_loops(products)
        if len(loops) == len(sch.get(products).iter_vars):
            sch.add_unit_loop(loops[1])  # in place of the loop over positions, which both share
        sch.parallel(sch.fuse(*spatial[:2]))
    elif vector:
        into = result_of(sch, nest)
        sch.reorder(*spatial, position, vector)
        sch.parallel(sch.fuse(*spatial[:2]))
        store_sums_at(sch, into, spatial[-1])
    else:
        sch.reorder(*spatial[:-1], position, spatial[-1])
        sch.parallel(sch.fuse(*spatial[:2]))
    sch.decompose_reduction(nest, position)


def shrink_products_buffer(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """`func` with a buffer, outside all loops, for one of the products that `_add` computes one by one.

    TVM declares the tensor of all products, in the loop over them, and shrinks it only when it generates
    code, which is after memory planning.
    """
    sums = [block for block in nodes(func.body, s_tir.SBlock) if int(block.annotations.get(ADDED, 0))]
    if not sums:
        return func
    results = {region.source for block in sums for region in block.writes}
    read = [load.source for block in sums for load in nodes(block.body, tvm.ir.TensorLoad)]
    products = next(buffer for buffer in read if buffer not in results)
    single = tirx.decl_buffer([1, *products.shape[1:]], products.dtype, products.name)

    def first(indices: Sequence[tirx.Expr]) -> list[tirx.Expr]:
        """`indices` of the only product in the new buffer."""
        return [tirx.IntImm(indices[0].ty.dtype, 0), *list(indices)[1:]]

    def regions(accessed: Sequence[tirx.BufferRegion]) -> list[tirx.BufferRegion]:
        """`accessed` regions with the new buffer."""
        unit_range = tvm.ir.Range.from_min_extent(tirx.IntImm(products.shape[0].ty.dtype, 0), 1)
        return [
            tirx.BufferRegion(single, [unit_range, *list(r.region)[1:]]) if r.source.same_as(products) else r
            for r in accessed
        ]

    def block(old: s_tir.SBlock) -> s_tir.SBlock:
        """The block `old` with the new buffer."""
        remaining = [b for b in old.alloc_buffers if not b.same_as(products)]
        root = [single] if old.name_hint == "root" else []
        return s_tir.SBlock(
            old.iter_vars, regions(old.reads), regions(old.writes), old.name_hint, old.body, old.init,
            [*remaining, *root], old.match_buffers, old.annotations,
        )  # fmt: skip

    def load(old: tvm.ir.TensorLoad) -> tvm.ir.TensorLoad:
        """A load from the new buffer."""
        return tirx.BufferLoad(single, first(old.indices)) if old.source.same_as(products) else old

    def store(old: tirx.BufferStore) -> tirx.BufferStore:
        """A store to the new buffer."""
        same = old.buffer.same_as(products)
        return tirx.BufferStore(single, old.value, first(old.indices)) if same else old

    visitors = [(tvm.ir.TensorLoad, load), (tirx.BufferStore, store), (s_tir.SBlock, block)]
    return func.with_body(tvm_ffi.structural_map(func.body, visitors))
