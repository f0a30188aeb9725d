"""Matrix products and convolutions on tensor cores."""

from __future__ import annotations

import inspect
import sys
from math import gcd, prod

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.dlight.gpu.matmul import (
    IterKind,
    auto_inline_consumer_chain,
    auto_inline_consumers,
    auto_inline_producers,
    check_sm_version,
    detect_iter_traits,
    make_iter_fusion_index_map,
)
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.target import Target

from pimflow.core.product_tiles import FRAGMENT, ROW_END, STAGES, BlockTile, ProductShape, fastest_tile
from pimflow.relay_passes.schedules.keep_barriers import ASYNC_STAGES
from pimflow.relay_passes.schedules.launch_limits import GpuRule
from pimflow.relay_passes.schedules.loops import (
    ACCESS_BYTES,
    BLOCK,
    WARP,
    bind,
    nodes,
    reduction,
    reduction_axes,
    variables,
)
from pimflow.relay_passes.schedules.lower_kernels import lower_kernels

ASYNC_ARCHITECTURE = 80  # the first whose threads need not wait for copies to shared memory
ASYNC_COPY_SCOPE = "async_commit_queue_scope"  # attribute of lowered statements that are copies
PRODUCT_TILE = "pimflow.product_tile"  # attribute of a scheduled product: `BlockTile.to_text`


class TensorCores(GpuRule):
    """Matrix products and dense or grouped convolutions of fp16 operands on tensor cores.

    A convolution is an implicit matrix product: pixels by filters by taps. A block holds its tile of the
    result in fragments and loads the operands through shared memory; it loads the next slice into registers
    while it multiplies this one. Extents that are no multiples of a tile are padded in shared memory. The
    epilogue reads the accumulators through shared memory and runs in fp32. With split-K, blocks store parts
    of sums in a workspace, and a second launch adds them in a fixed order and has the epilogue.

    DLight's own rule has one tile, 128 x 128; it leaves every product with an extent of 64 or less to the
    scalar units, and its accumulators need more shared memory than a block has on sm_75.
    """

    def apply(self, func: tirx.PrimFunc, target: Target, _: bool) -> s_tir.Schedule | None:
        """The schedule of a product of fp16 operands; None for other kernels."""
        if not self.is_target_available(target) or check_sm_version(str(target.attrs.get("arch", ""))) < 70:
            return None
        can_copy = check_sm_version(str(target.attrs.get("arch", ""))) >= ASYNC_ARCHITECTURE
        scheduled = self._schedule(func, STAGES if can_copy else STAGES[:1])
        if scheduled is None:
            return None
        sch, tile = scheduled
        if tile.stages > STAGES[0] and not _copies_asynchronously(sch.mod["main"], target):
            scheduled = self._schedule(func, STAGES[:1])
            if scheduled is None:
                return None
            sch, tile = scheduled
        return s_tir.Schedule(sch.mod["main"].with_attr(PRODUCT_TILE, tile.to_text()))

    def _schedule(
        self, func: tirx.PrimFunc, stages: tuple[int, ...]
    ) -> tuple[s_tir.Schedule, BlockTile] | None:
        """The schedule of a product with one of these numbers of stages, and its tile."""
        sch = s_tir.Schedule(func)
        main = reduction(sch, operands=2)
        if main is None or not _is_half_product(sch.get(main)):
            return None
        sch = _split_groups(sch, main)
        main = reduction(sch, operands=2)
        shape = _product_shape(sch.get(main))
        tile = self.choose(shape, stages) if shape is not None else None
        if tile is None:
            return None
        total = None
        if tile.split > 1:
            main, total = self._split_sums(sch, main, tile.split)
        block = sch.get(main)
        k_is_last = bool(reduction_axes(block) & variables(block.reads[1].region[-1].min))
        sch = _tensorize(sch, main, tile, k_is_last)
        if total is not None:
            part = sch.get_loops(total)[-1]
            sch.decompose_reduction(total, part)
            sch.unroll(part)
        return sch, tile

    def choose(self, shape: ProductShape, stages: tuple[int, ...] = STAGES[:1]) -> BlockTile | None:
        """The tile of a product, with one of these numbers of stages; None if no tile fits."""
        return fastest_tile(shape, self.limits, stages)

    def _split_sums(self, sch: s_tir.Schedule, main: SBlockRV, split: int) -> tuple[SBlockRV, SBlockRV]:
        """Let `split` parts of a product be summed up apart: returns the block of these, and that which
        adds them up, which has a thread for each result, and the epilogue.
        """
        parts, _ = sch.split(sch.get_loops(main)[-1], [split, None])
        into_parts = sch.rfactor(parts, 0)
        *others, part, inner = sch.get_loops(into_parts)
        sch.reorder(part, *others, inner)  # as the axes of its block, which can be transformed then
        (total,) = sch.get_consumers(into_parts)
        result = sch.cache_write(total, 0, "local")
        *places, _ = sch.get_loops(total)
        thread = bind(sch, places, self.limits.threads_up_to(BLOCK))
        sch.reverse_compute_at(result, thread, preserve_unit_loops=True)
        auto_inline_consumers(sch, result)
        return into_parts, total


def _product_shape(block: s_tir.SBlock) -> ProductShape | None:
    """The shape of a product; None if `block` is none."""
    traits = detect_iter_traits(block)
    if traits is None:
        return None
    s, i, j, k = (prod(int(t.extent) for t in traits[3] if t.kind == kind) for kind in _kinds("SIJK"))
    last = block.iter_vars[-1]
    run = int(last.dom.extent) if last.iter_type == tirx.IterVar.CommReduce else 1
    return ProductShape(batch=s, rows=i, columns=j, depth=k, run=run)


def _copies_asynchronously(func: tirx.PrimFunc, target: Target) -> bool:
    """Whether TVM can write all loads of a scheduled product as asynchronous copies.

    It cannot where something is computed on the way, or where a thread has less than 4 bytes.
    """
    module = lower_kernels(tvm.IRModule({"main": func.with_attr("tirx.is_scheduled", True)}), target)
    ((_, lowered),) = module.functions_items()
    scopes = [attr for attr in nodes(lowered.body, tirx.AttrStmt) if attr.attr_key == ASYNC_COPY_SCOPE]
    return not any(nodes(scope, tirx.BufferStore) for scope in scopes)


def _is_half_product(block: s_tir.SBlock) -> bool:
    types = [str(region.source.dtype) for region in (*block.reads, *block.writes)]
    return types == ["float16", "float16", "float32"]


def _split_groups(sch: s_tir.Schedule, main: SBlockRV) -> s_tir.Schedule:
    """Split the channels of a grouped convolution into two axes: group, and channel in the group."""
    block = sch.get(main)
    quotients = nodes(block.reads[0].region[-1].min, tirx.FloorDiv)
    sizes = {quotient.a: int(quotient.b) for quotient in quotients if isinstance(quotient.b, tirx.IntImm)}
    if not sizes:
        return sch

    def axes(*variables: tirx.Var) -> list[tirx.Expr]:
        """The axes with channels split by group."""
        split = []
        for iterator, v in zip(block.iter_vars, variables):
            size = sizes.get(iterator.var)
            if iterator.dom.extent != 1:  # a unit axis would be bound to a constant, and transform no more
                split += [v] if size is None else [v // size, v % size]
        return split

    sch.transform_block_layout(main, tirx.IndexMap.from_func(axes, ndim=len(block.iter_vars)))
    return s_tir.Schedule(s_tir.transform.StmtSimplify()(sch.mod))


def _tensorize(sch: s_tir.Schedule, main: SBlockRV, tile: BlockTile, k_is_last: bool) -> s_tir.Schedule:
    """Schedule `main`, C[S, I, J] += A[S, I, K] * B[S, J, K], in tiles; `k_is_last` if B is stored so."""
    ti, tj, tk = tile.rows, tile.columns, tile.depth
    wi, wj = tile.warps
    contiguous = int(sch.get(main).iter_vars[-1].dom.extent)
    _to_matrices(sch, main, k_is_last)
    sch.pad_einsum(main, [1, ti, tj, tk])

    batch, i, j, k = sch.get_loops(main)
    i, iw, i1, i2 = sch.split(i, [None, wi, ti // wi // FRAGMENT, FRAGMENT])
    j, jw, j1, j2 = sch.split(j, [None, wj, tj // wj // FRAGMENT, FRAGMENT])
    k, k1, k2 = sch.split(k, [None, tk // FRAGMENT, FRAGMENT])
    sch.reorder(i, j, iw, jw, k, k1, i1, j1, i2, j2, k2)
    warp = sch.fuse(iw, jw)
    fragment = sch.blockize(i2)
    for loop, axis in ((batch, "blockIdx.z"), (i, "blockIdx.x"), (j, "blockIdx.y"), (warp, "threadIdx.y")):
        sch.bind(loop, axis)

    for index in range(2):
        run = contiguous if index == 0 or k_is_last else ACCESS_BYTES
        shared = sch.cache_read(fragment, index, "shared.dyn")
        _load_shared(sch, shared, k, run, wi * wj)
        if tile.stages == STAGES[0]:
            sch.annotate(shared, "tirx.manifest_shared_memory_local_stage", 1)
            sch.annotate(shared, "double_buffer_scope", 0)
    if tile.stages == STAGES[0]:
        # Load A, store A, load B, store B, multiply. Loads run ahead of the multiplication, stores follow.
        stages, order = [0, 0, 0, 0, 1], [0, 3, 1, 4, 2]
    else:  # copy A, copy B, multiply
        stages, order = [0, 0, tile.stages - 1], [0, 1, 2]
        sch.annotate(k, ASYNC_STAGES, [0])
    sch.annotate(k, "software_pipeline_stage", stages)
    sch.annotate(k, "software_pipeline_order", order)

    reads = [sch.cache_read(fragment, index, f"wmma.matrix_{'ab'[index]}") for index in range(2)]
    result = sch.cache_write(fragment, 0, "shared.dyn")
    write = sch.cache_write(fragment, 0, "wmma.accumulator")
    for read in reads:
        sch.compute_at(read, k1)
    for stage in (write, result):
        sch.reverse_compute_at(stage, warp)
    zero = sch.get_child_blocks(sch.decompose_reduction(fragment, k))[0]
    sch.unroll(i1)
    sch.unroll(j1)

    names = _intrinsics(k_is_last)
    for stage, name in ((reads[0], "load_a"), (reads[1], "load_b"), (write, "store")):
        a, a1 = _split_fragments(sch, stage)
        if stage is write:  # on the outer block: tensorizing drops annotations of the block itself
            row = tile.result_row
            sch.storage_align(sch.blockize(a), 0, axis=-2, factor=row + 1, offset=row)
        sch.tensorize(a1, names[name])
    sch.tensorize(sch.get_loops(zero)[-2], names["init"])
    sch.tensorize(sch.get_loops(main)[-3], names["compute"])

    _store_result(sch, result, tile.split)
    return sch


def _store_result(sch: s_tir.Schedule, result: SBlockRV, split: int) -> None:
    """Inline what follows the product, and store a tile by all threads of a warp, four elements each.

    What follows parts of split-K is the block that adds them up, which is not inlined.
    """
    # The block that crops the padding takes over the epilogue and is inlined last: then a predicate bounds
    # each axis by itself. In the other order TVM keeps only that of an axis that the epilogue fuses.
    for crop in sch.get_consumers(result):
        (auto_inline_consumers if split > 1 else auto_inline_consumer_chain)(sch, crop)
        sch.reverse_compute_inline(crop)
    _, x, v = sch.split(sch.fuse(*sch.get_loops(result)[-2:]), [None, WARP, 4])
    sch.bind(x, "threadIdx.x")
    sch.vectorize(v)


def _load_shared(sch: s_tir.Schedule, shared: SBlockRV, step: LoopRV, run: int, warps: int) -> None:
    """Let all threads load an operand's slice of a `step`, of which `run` elements are contiguous."""
    sch.compute_at(shared, step)
    auto_inline_producers(sch, shared)
    lanes = _lanes(run, sch.get(shared))
    _, y, x, v = sch.split(sch.fuse(*sch.get_loops(shared)[-2:]), [None, warps, WARP, lanes])
    sch.bind(y, "threadIdx.y")
    sch.bind(x, "threadIdx.x")
    sch.vectorize(v)
    sch.storage_align(shared, 0, axis=-2, factor=16, offset=ROW_END)


def _split_fragments(sch: s_tir.Schedule, stage: SBlockRV) -> tuple[LoopRV, LoopRV]:
    """Split the loops of a copy by fragments; the outermost loop over fragments, and that inside one."""
    a, b = sch.get_loops(stage)[-2:]
    a, a1 = sch.split(a, [None, FRAGMENT])
    b, b1 = sch.split(b, [None, FRAGMENT])
    sch.reorder(a, b, a1, b1)
    sch.unroll(a)
    sch.unroll(b)
    return a, a1


def _kinds(letters: str) -> list[IterKind]:
    return [IterKind[f"kIter_{letter}"] for letter in letters]


def _to_matrices(sch: s_tir.Schedule, main: SBlockRV, k_is_last: bool) -> None:
    """Give `main` four axes and its operands three; reindexing blocks read and write the original tensors."""
    sides = [sch.reindex(main, side) for side in (("read", 0), ("read", 1), ("write", 0))]
    orders = map(_kinds, ("SIK", "SJK" if k_is_last else "SKJ", "SIJ", "SIJK"))
    *layouts, block_layout = map(make_iter_fusion_index_map, detect_iter_traits(sch.get(main)), orders)
    for side, buffer, layout in zip(sides, ("write", "write", "read"), layouts):
        sch.transform_layout(side, (buffer, 0), layout)
    sch.transform_block_layout(main, block_layout)


def _intrinsics(k_is_last: bool) -> dict[str, str]:
    """Names of TVM's intrinsics for fragments in fp16, accumulated in fp32.

    Importing them parses 250 functions, and `inspect.stack` reads the sources of all callers for each,
    which takes half a minute; nothing looks at those sources.
    """

    def frames(_context: int = 1) -> list[inspect.FrameInfo]:
        """The frames of `inspect.stack` without source lines."""
        frame, infos = sys._getframe(1), []
        while frame is not None:
            code = frame.f_code
            infos.append(inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, None, None))
            frame = frame.f_back
        return infos

    stack, inspect.stack = inspect.stack, frames
    try:
        from tvm.s_tir.tensor_intrin.cuda import get_wmma_intrin_group
    finally:
        inspect.stack = stack
    return get_wmma_intrin_group("shared.dyn", "shared.dyn", "float16", "float32", k_is_last)


def _lanes(run: int, copy: s_tir.SBlock) -> int:
    """Elements that a thread copies at once where `run` elements are contiguous."""
    widest = max(region.source.dtype.bits // 8 for region in (*copy.reads, *copy.writes))
    return gcd(run, ACCESS_BYTES // widest)
