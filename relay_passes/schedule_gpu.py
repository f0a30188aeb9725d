"""Loops of every kernel onto the blocks and threads of a GPU."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from itertools import product
from math import ceil, gcd, prod

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.s_tir import dlight as dl
from tvm.s_tir.dlight.analysis import get_max_shared_memory_per_block, get_root_block
from tvm.s_tir.dlight.gpu.base import GPUScheduleRule
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

from pimflow.errors import UnsupportedOpError

WARP = 32
BLOCK = 128  # threads, where nothing else decides
ACCESS_BYTES = 16  # that a thread moves at once, at most
FRAGMENT = 16  # rows, columns and depth that a tensor core multiplies at once
ROW_END = 8  # halves left free behind a row in shared memory, against bank conflicts

Tile = tuple[int, int, int]  # rows, columns and depth of a block's step


@tvm.transform.module_pass(opt_level=0, name="ScheduleGpu")
class ScheduleGpu:
    """Threads for every kernel, by the first of our rules and DLight's that takes it.

    Parameters
    ----------
    multiprocessors : int
        Of the GPU; tiles are chosen so that there is work for all.

    Rewrite: a PrimFunc of plain loops -> one of ``blockIdx`` and ``threadIdx``, marked as scheduled.
    Preserves: values up to the order of sums, signatures, what is marked as scheduled already.

    Raises
    ------
    UnsupportedOpError
        For a kernel that is no loop nest at all.
    """

    def __init__(self, multiprocessors: int = 30):
        gpu = dl.gpu
        self.rules = (
            Depthwise(multiprocessors),
            TensorCores(multiprocessors),
            gpu.Matmul(),
            Reduce(multiprocessors),
            gpu.GeneralReduction(),
            gpu.Fallback(),
            Simple(),
        )

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        functions = {
            gv: self._scheduled(gv.name_hint, f) if isinstance(f, tirx.PrimFunc) else f
            for gv, f in mod.functions_items()
        }
        return tvm.IRModule(functions, attrs=mod.attrs)

    def _scheduled(self, name: str, func: tirx.PrimFunc) -> tirx.PrimFunc:
        attrs = func.attrs or {}
        if attrs.get("tirx.is_scheduled") or attrs.get("tirx.is_host_func"):
            return func
        target = attrs.get("target") or Target.current(allow_none=False)
        for rule in self.rules:
            try:
                sch = rule.apply(func, target, False)
                if sch is not None:
                    _bind_rest(sch)
                    return sch.mod["main"].with_attr("tirx.is_scheduled", True)
            except Exception:  # rules raise whatever their analyses and primitives do; the next one may fit
                continue
        raise UnsupportedOpError(f"'{name}' cannot be scheduled for {target.kind.name}")


class Depthwise(GPUScheduleRule):
    """Depthwise convolutions in NHWC.

    A thread computes a strip of pixels for a few channels in registers, its neighbours those of the next
    channels, so that a warp reads contiguous memory. There is no shared memory and no barrier: what strips
    read in common comes from the cache.

    Parameters
    ----------
    multiprocessors : int
        That there should be threads for.
    """

    THREADS = 512  # wanted on a multiprocessor: half of what Turing holds
    OUTPUTS = 32  # of one thread; more would leave too few registers for the operands
    UNROLLED = 1024  # multiplications of one thread; with more, the loop over filter rows stays

    def __init__(self, multiprocessors: int = 30):
        self.multiprocessors = multiprocessors

    def apply(self, func: tirx.PrimFunc, target: Target, _: bool) -> s_tir.Schedule | None:
        if not self.is_target_available(target):
            return None
        sch = s_tir.Schedule(func)
        main = _reduction(sch, operands=2)
        if main is None or not _is_depthwise(sch.get(main)):
            return None
        strip, vector = self._tile(sch.get(main))
        result = sch.cache_write(main, 0, "local")
        operands = [sch.cache_read(main, index, "local") for index in range(2)]

        n, y, x, c, ry, rx, rc = sch.get_loops(main)
        x, xi = sch.split(x, [None, strip])
        c, ci = sch.split(c, [None, vector])
        sch.reorder(n, y, x, c, ry, rx, rc, xi, ci)
        threads = sch.fuse(n, y, x, c)
        count, size = int(sch.get(threads).extent), BLOCK
        while size > WARP and count < size * self.multiprocessors:
            size //= 2
        thread = _bind(sch, [threads], min(size, count))
        for operand in operands:
            sch.compute_at(operand, ry, preserve_unit_loops=True)
            auto_inline_producers(sch, operand)
        sch.reverse_compute_at(result, thread, preserve_unit_loops=True)
        auto_inline_consumer_chain(sch, result)

        for copy in (*operands, result):
            *outer, inner = sch.get_loops(copy)[-4:]
            for loop in outer:
                sch.unroll(loop)
            sch.vectorize(inner)
        taps = prod(int(sch.get(loop).extent) for loop in (ry, rx, xi, ci))
        for loop in (rx, xi, ci) if taps > self.UNROLLED else (ry, rx, xi, ci):
            sch.unroll(loop)
        sch.decompose_reduction(main, ry)
        return sch

    def _tile(self, block: s_tir.SBlock) -> tuple[int, int]:
        """Pixels and channels of a thread: a long strip reads little, many threads hide latency."""
        n, y, x, c, _, kw, _ = (int(i.dom.extent) for i in block.iter_vars)
        wanted = self.THREADS * self.multiprocessors

        def cost(tile: tuple[int, int]) -> float:
            strip, vector = tile
            idle = max(1.0, wanted * strip * vector / (n * y * x * c))
            return idle * (strip + kw - 1) / strip * (1 + 2 / vector)

        strips = (s for s in range(1, 9) if x % s == 0)
        vectors = [v for v in (1, 2, 4) if c % v == 0]  # fp32 in the epilogue: 4 are `ACCESS_BYTES`
        return min((t for t in product(strips, vectors) if prod(t) <= self.OUTPUTS), key=cost)


def _is_depthwise(block: s_tir.SBlock) -> bool:
    """Whether it is C[n, y, x, c] += A[n, y', x', c] * B[taps, c]."""
    variables = [i.var for i in block.iter_vars]
    used = [[_variables(r.min) for r in region.region] for region in (*block.reads, *block.writes)]
    if [len(variables), *map(len, used)] != [7, 4, 4, 4] or block.iter_vars[-1].dom.extent != 1:
        return False
    n, y, x, c, ry, rx, rc = variables
    image, filters, result = used
    return (
        _reduced(block) == {ry, rx, rc}
        and image == [{n}, {y, ry}, {x, rx}, {c, rc}]
        and set().union(*filters) == {c, ry, rx, rc}
        and result == [{n}, {y}, {x}, {c}]
    )


class TensorCores(GPUScheduleRule):
    """Matrix products and dense or grouped convolutions of fp16 operands on tensor cores.

    A convolution is an implicit matrix product: pixels by filters by taps. A block keeps its tile of the
    result in fragments and brings the operands through shared memory, the next slice into registers while
    it multiplies this one. Extents that are no multiples of a tile are padded on the way. The epilogue
    reads the accumulators through shared memory and runs in fp32.

    DLight's own rule has one tile, 128 x 128; it leaves every product with an extent of 64 or less to the
    scalar units, and its accumulators need more shared memory than a block has on sm_75.

    Parameters
    ----------
    multiprocessors : int
        That there should be blocks for.
    """

    TILES = (16, 32, 64, 128)
    DEPTHS = (16, 32, 48, 64)
    RESIDENT = 2  # blocks of a multiprocessor: one multiplies while the other waits
    SHARED_BYTES = 65536  # of a multiprocessor: Turing tuning guide; later GPUs have more

    def __init__(self, multiprocessors: int = 30):
        self.multiprocessors = multiprocessors

    def apply(self, func: tirx.PrimFunc, target: Target, _: bool) -> s_tir.Schedule | None:
        if not self.is_target_available(target) or check_sm_version(str(target.attrs.get("arch", ""))) < 70:
            return None
        sch = s_tir.Schedule(func)
        main = _reduction(sch, operands=2)
        if main is None or not _is_half_product(sch.get(main)):
            return None
        sch = _groups_split(sch, main)
        main = _reduction(sch, operands=2)
        block = sch.get(main)
        traits = detect_iter_traits(block)
        if traits is None:
            return None
        extents = [prod(int(t.extent) for t in traits[3] if t.kind == kind) for kind in _kinds("SIJK")]
        tile = self._tile(*extents, get_max_shared_memory_per_block(target))
        k_is_last = bool(_reduced(block) & _variables(block.reads[1].region[-1].min))
        return _tensorized(sch, main, tile, k_is_last)

    def _tile(self, s: int, i: int, j: int, k: int, shared_bytes: int) -> Tile:
        """Of `s` products of `i` x `j` x `k`."""

        def cost(tile: Tile) -> int:
            ti, tj, tk = tile
            waves = ceil(s * ceil(i / ti) * ceil(j / tj) / (self.RESIDENT * self.multiprocessors))
            # A Turing multiprocessor multiplies 256 halves a clock and loads 16; a step's latency counts
            # as 16 of its depth.
            return waves * (ti * tj + 16 * (ti + tj)) * ceil(k / tk) * (tk + 16)

        tiles = product(self.TILES, self.TILES, self.DEPTHS)
        limit = min(shared_bytes, self.SHARED_BYTES // self.RESIDENT)
        return min((t for t in tiles if _shared_bytes(t) <= limit), key=cost)


def _is_half_product(block: s_tir.SBlock) -> bool:
    types = [str(region.source.dtype) for region in (*block.reads, *block.writes)]
    return types == ["float16", "float16", "float32"]


def _groups_split(sch: s_tir.Schedule, main: SBlockRV) -> s_tir.Schedule:
    """The channels of a grouped convolution as two axes: group, and channel in the group."""
    block = sch.get(main)
    sizes: dict[tirx.Var, int] = {}

    def visit(quotient: tirx.FloorDiv) -> None:
        if isinstance(quotient.b, tirx.IntImm):
            sizes[quotient.a] = int(quotient.b)

    tvm_ffi.structural_walk(block.reads[0].region[-1].min, [(tirx.FloorDiv, visit)], order="post")
    if not sizes:
        return sch

    def axes(*variables: tirx.Var) -> list[tirx.Expr]:
        split = []
        for iterator, v in zip(block.iter_vars, variables):
            size = sizes.get(iterator.var)
            if iterator.dom.extent != 1:  # a unit axis would be bound to a constant, and transform no more
                split += [v] if size is None else [v // size, v % size]
        return split

    sch.transform_block_layout(main, tirx.IndexMap.from_func(axes, ndim=len(block.iter_vars)))
    return s_tir.Schedule(s_tir.transform.StmtSimplify()(sch.mod))


def _tensorized(sch: s_tir.Schedule, main: SBlockRV, tile: Tile, k_is_last: bool) -> s_tir.Schedule:
    """`main`, some C[S, I, J] += A[S, I, K] * B[S, J, K], in tiles; `k_is_last` if B is stored so."""
    ti, tj, tk = tile
    wi = min(2, ti // FRAGMENT)
    wj = min(4 // wi, tj // FRAGMENT)
    wi = min(4 // wj, ti // FRAGMENT)
    run = int(sch.get(main).iter_vars[-1].dom.extent)
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
        shared = sch.cache_read(fragment, index, "shared.dyn")
        sch.compute_at(shared, k)
        auto_inline_producers(sch, shared)
        lanes = _lanes(run if index == 0 or k_is_last else ACCESS_BYTES, sch.get(shared))
        _, y, x, v = sch.split(sch.fuse(*sch.get_loops(shared)[-2:]), [None, wi * wj, WARP, lanes])
        sch.bind(y, "threadIdx.y")
        sch.bind(x, "threadIdx.x")
        sch.vectorize(v)
        sch.storage_align(shared, 0, axis=-2, factor=16, offset=ROW_END)
        sch.annotate(shared, "tirx.manifest_shared_memory_local_stage", 1)
        sch.annotate(shared, "double_buffer_scope", 0)
    # Steps: load A, store A, load B, store B, multiply. Loads run ahead of the multiplication, stores follow.
    sch.annotate(k, "software_pipeline_stage", [0, 0, 0, 0, 1])
    sch.annotate(k, "software_pipeline_order", [0, 3, 1, 4, 2])

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
        a, b = sch.get_loops(stage)[-2:]
        a, a1 = sch.split(a, [None, FRAGMENT])
        b, b1 = sch.split(b, [None, FRAGMENT])
        sch.reorder(a, b, a1, b1)
        sch.unroll(a)
        sch.unroll(b)
        if stage is write:  # around it: tensorizing drops what is annotated on the block itself
            row = _result_row(tile)
            sch.storage_align(sch.blockize(a), 0, axis=-2, factor=row + 1, offset=row)
        sch.tensorize(a1, names[name])
    sch.tensorize(sch.get_loops(zero)[-2], names["init"])
    sch.tensorize(sch.get_loops(main)[-3], names["compute"])

    auto_inline_consumer_chain(sch, result)
    _, x, v = sch.split(sch.fuse(*sch.get_loops(result)[-2:]), [None, WARP, 4])
    sch.bind(x, "threadIdx.x")
    sch.vectorize(v)
    return sch


def _kinds(letters: str) -> list[IterKind]:
    return [IterKind[f"kIter_{letter}"] for letter in letters]


def _to_matrices(sch: s_tir.Schedule, main: SBlockRV, k_is_last: bool) -> None:
    """Four axes for `main`, three for its operands, which read and write the tensors as they are."""
    sides = [sch.reindex(main, side) for side in (("read", 0), ("read", 1), ("write", 0))]
    orders = map(_kinds, ("SIK", "SJK" if k_is_last else "SKJ", "SIJ", "SIJK"))
    *layouts, whole = map(make_iter_fusion_index_map, detect_iter_traits(sch.get(main)), orders)
    for side, buffer, layout in zip(sides, ("write", "write", "read"), layouts):
        sch.transform_layout(side, (buffer, 0), layout)
    sch.transform_block_layout(main, whole)


def _intrinsics(k_is_last: bool) -> dict[str, str]:
    """Names of TVM's intrinsics for fragments in fp16, accumulated in fp32.

    Importing them parses 250 functions, and `inspect.stack` reads the sources of all callers for each,
    which takes half a minute; nothing looks at those sources.
    """

    def frames(_context: int = 1) -> list[inspect.FrameInfo]:
        frame, found = sys._getframe(1), []
        while frame is not None:
            code = frame.f_code
            found.append(inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, None, None))
            frame = frame.f_back
        return found

    stack, inspect.stack = inspect.stack, frames
    try:
        from tvm.s_tir.tensor_intrin.cuda import get_wmma_intrin_group
    finally:
        inspect.stack = stack
    return get_wmma_intrin_group("shared.dyn", "shared.dyn", "float16", "float32", k_is_last)


def _lanes(run: int, copy: s_tir.SBlock) -> int:
    """Elements that a thread copies at once where `run` lie side by side."""
    widest = max(region.source.dtype.bits // 8 for region in (*copy.reads, *copy.writes))
    return gcd(run, ACCESS_BYTES // widest)


def _shared_bytes(tile: Tile) -> int:
    """Shared memory of a block: two slices of both operands, later the result in their place."""
    ti, tj, tk = tile
    operands = ti * (tk + ROW_END) + tj * tk + max(tj, tk) * ROW_END
    return max(2 * 2 * operands, 4 * ti * _result_row(tile))


def _result_row(tile: Tile) -> int:
    """Length of a row of the result in shared memory.

    Longer than bank conflicts ask for: TVM's StorageRewrite would give an operand's buffer of the same
    size or more to the result, and then refuse its element type.
    """
    ti, tj, tk = tile
    operand = max(ti, tj) * tk + max(ti, tj, tk) * ROW_END
    return max(tj, operand // ti) // 16 * 16 + 20


class Reduce(GPUScheduleRule):
    """Reductions of any kind: pooling, means, matrix-vector products.

    Short ones take a thread each. Of long ones, threads share each result, and neighbours read what lies
    side by side: neighbouring results, or parts of one. An epilogue that would repeat a result many
    times (squeeze and excitation), and operands that are stored too, become kernels of their own, where
    DLight's rules would run them on the few threads of the reduction.

    Parameters
    ----------
    multiprocessors : int
        That there should be blocks for.
    """

    SHORT = 32
    BLOCK = 512

    def __init__(self, multiprocessors: int = 30):
        self.multiprocessors = multiprocessors

    def apply(self, func: tirx.PrimFunc, target: Target, _: bool) -> s_tir.Schedule | None:
        if not self.is_target_available(target):
            return None
        sch = s_tir.Schedule(func)
        main = _reduction(sch, operands=2) or _reduction(sch, operands=1)
        if main is None:
            return None
        block = sch.get(main)
        largest = max(block.reads, key=lambda region: prod(int(d) for d in region.source.shape))
        side_by_side = _reduced(block) & _variables(largest.region[-1].min)
        loops: dict[bool, list[LoopRV]] = {False: [], True: []}
        for variable, loop in zip(block.iter_vars, sch.get_loops(main), strict=True):
            loops[variable.iter_type == tirx.IterVar.CommReduce].append(loop)
        if not loops[False]:
            loops[False].append(sch.add_unit_loop(loops[True][0]))
        result = sch.cache_write(main, 0, "local")
        s, r = sch.fuse(*loops[False]), sch.fuse(*loops[True])
        results, parts = self._threads(int(sch.get(s).extent), int(sch.get(r).extent), bool(side_by_side))
        # No more threads than results: the copy of a scalar would run on all, guarded by nothing.
        s, s1 = sch.split(s, [None, min(results, int(sch.get(s).extent))])
        r, r1 = sch.split(r, [None, parts])
        sch.bind(s, "blockIdx.x")
        sch.bind(s1, "threadIdx.y" if side_by_side and parts > 1 else "threadIdx.x")
        sch.reverse_compute_at(result, s1, preserve_unit_loops=True)
        auto_inline_producers(sch, main)
        auto_inline_consumers(sch, result)
        if parts > 1:
            sch.bind(r1, "threadIdx.x" if side_by_side else "threadIdx.y")
        else:
            sch.decompose_reduction(main, r)
        return sch

    def _threads(self, results: int, length: int, side_by_side: bool) -> tuple[int, int]:
        """Results of a block, and threads for each."""
        if length <= self.SHORT:
            return BLOCK, 1
        if side_by_side:
            return (4, WARP) if results >= 4 * self.multiprocessors else (1, BLOCK)
        width = next((w for w in (WARP, 16) if results >= w * self.multiprocessors), 8)
        return width, min(self.BLOCK // width, 1 << (length - 1).bit_length())


class Simple(GPUScheduleRule):
    """Whatever is left, as it is; see `_bind_rest`."""

    def apply(self, func: tirx.PrimFunc, target: Target, _: bool) -> s_tir.Schedule | None:
        return s_tir.Schedule(func) if self.is_target_available(target) else None


def _bind_rest(sch: s_tir.Schedule) -> None:
    """Threads for loop nests that a rule left alone, such as a second result: kernels of their own."""
    for nest in sch.get_child_blocks(get_root_block(sch)):
        loops = sch.get_loops(nest)
        if any(sch.get(loop).thread_binding is not None for loop in loops) or _has_threads(sch.get(nest)):
            continue
        if loops and all(v.iter_type == tirx.IterVar.DataPar for v in sch.get(nest).iter_vars):
            _bind(sch, loops)
        else:
            _bind(sch, [sch.add_unit_loop(loops[0] if loops else nest)], 1)


def _has_threads(block: s_tir.SBlock) -> bool:
    """Whether `block` launches threads of its own, as sorting does."""
    found: list[bool] = []
    visitors = [
        (tirx.AttrStmt, lambda stmt: found.append(stmt.attr_key == "thread_extent")),
        (tirx.For, lambda stmt: found.append(stmt.thread_binding is not None)),
    ]
    tvm_ffi.structural_walk(block.body, visitors, order="post")
    return any(found)


def _bind(sch: s_tir.Schedule, loops: Sequence[LoopRV], size: int = BLOCK) -> LoopRV:
    """`loops` as one grid; the loop over a block's threads."""
    sch.reorder(*loops)
    block, thread = sch.split(sch.fuse(*loops), [None, size])
    sch.bind(block, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")
    return thread


def _reduction(sch: s_tir.Schedule, operands: int) -> SBlockRV | None:
    """The only reduction of a kernel, if it is one of that many tensors."""
    found = [nest for nest in sch.get_child_blocks(get_root_block(sch)) if _reduced(sch.get(nest))]
    if len(found) != 1:
        return None
    block = sch.get(found[0])
    plain = all(i.iter_type in (tirx.IterVar.DataPar, tirx.IterVar.CommReduce) for i in block.iter_vars)
    return found[0] if plain and [len(block.reads), len(block.writes)] == [operands, 1] else None


def _reduced(block: s_tir.SBlock) -> set[tirx.Var]:
    return {i.var for i in block.iter_vars if i.iter_type == tirx.IterVar.CommReduce}


def _variables(expr: tirx.Expr) -> set[tirx.Var]:
    return set(tirx.analysis.undefined_vars(expr))
