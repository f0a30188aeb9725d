"""Schedules kernels for the blocks and threads of a GPU."""

from __future__ import annotations

from collections import Counter
from itertools import product
from math import prod

import tvm
from tvm import s_tir, tirx
from tvm.s_tir import dlight as dl
from tvm.s_tir.dlight.gpu.base import GPUScheduleRule
from tvm.s_tir.dlight.gpu.matmul import (
    IterKind,
    auto_inline_consumer_chain,
    auto_inline_consumers,
    auto_inline_producers,
    detect_iter_traits,
)
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.target import Target

from pimflow.core.blocks import SMALLEST_GPU, KernelLimits
from pimflow.errors import UnsupportedOpError
from pimflow.relay_passes.schedules.launch_limits import GpuRule, broken_limit, with_limits
from pimflow.relay_passes.schedules.loops import (
    BLOCK,
    WARP,
    bind,
    loop_extent,
    nodes,
    outer_nests,
    reduction,
    reduction_axes,
    variables,
)
from pimflow.relay_passes.schedules.rotated_rows import is_row_by_matrix, rotate_rows
from pimflow.relay_passes.schedules.schedule_primitives_gpu import PrimitiveStages
from pimflow.relay_passes.schedules.schedule_tensor_cores import TensorCores
from pimflow.relay_passes.schedules.thread_registers import allocate_in_threads


@tvm.transform.module_pass(opt_level=0, name="ScheduleGpu")
class ScheduleGpu:
    """Schedule each kernel for a GPU by the first rule, ours or DLight's, that accepts it.

    A schedule that breaks a limit of CUDA's launches or of the GPU (`launch_limits`) counts as not accepted.

    Parameters
    ----------
    limits : KernelLimits
        Those of the GPU. Tiles are chosen so that all its multiprocessors have work.

    Rewrite: a PrimFunc of plain loops -> one of ``blockIdx`` and ``threadIdx``, marked as scheduled.
    Preserves: values up to the order of sums, signatures; functions that are marked as scheduled already,
    except for registers that their threads would share (`allocate_in_threads`).

    Raises
    ------
    UnsupportedOpError
        For a kernel that is no loop nest, or whose every schedule breaks a limit.
    """

    def __init__(self, limits: KernelLimits = SMALLEST_GPU):
        gpu = dl.gpu
        self.limits = limits
        self.rules = (
            PrimitiveStages(limits),
            Depthwise(limits),
            *([TensorCores(limits)] if limits.tensor_cores else []),
            PlainProducts(),
            Reduce(limits),
            gpu.GeneralReduction(),
            gpu.Fallback(),
            GpuRule(limits),  # any other kernel, unchanged; `_bind_rest` gives it threads
        )

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        functions = {
            gv: allocate_in_threads(self._schedule(gv.name_hint, f)) if isinstance(f, tirx.PrimFunc) else f
            for gv, f in mod.functions_items()
        }
        return tvm.IRModule(functions, attrs=mod.attrs)

    def _schedule(self, name: str, func: tirx.PrimFunc) -> tirx.PrimFunc:
        attrs = func.attrs or {}
        if attrs.get("tirx.is_scheduled") or attrs.get("tirx.is_host_func"):
            return func
        target = with_limits(attrs.get("target") or Target.current(allow_none=False), self.limits)
        shares = (Reduce, dl.gpu.GeneralReduction) if _reduces_words(func) else ()
        for rule in (rule for rule in self.rules if not isinstance(rule, shares)):
            try:
                sch = rule.apply(func, target, False)
                if sch is not None:
                    _bind_rest(sch, self.limits)
                    if not broken_limit(sch, self.limits, target):
                        return sch.mod["main"].with_attr("tirx.is_scheduled", True)
            except Exception:  # a rule raises what its analyses and primitives raise; the next one may fit
                continue
        raise UnsupportedOpError(f"'{name}' cannot be scheduled for {target.kind.name}")


def _reduces_words(func: tirx.PrimFunc) -> bool:
    """Whether a reduction gives 16-bit integers.

    TVM has no shuffles of them: threads that share such a reduction pass on values in shared memory, and no
    barrier of their warp is between a write and the read by another.
    """
    blocks = nodes(func.body, s_tir.SBlock)
    return any(
        reduction_axes(block) and str(block.writes[0].source.dtype) in ("int16", "uint16") for block in blocks
    )


class PlainProducts(GPUScheduleRule):
    """DLight's rule for products on scalar units, but for some with an epilogue.

    DLight pads the rows and columns of each product. If an epilogue fuses some of batch, rows and columns
    (heads of attention, a map that is flattened), only the fused axis keeps its bound, and padded rows are
    stored over those of others: a race of threads and blocks.
    """

    TILE = (32, 64)  # rows and columns, to whose multiples DLight pads

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """The schedule of a product; None for other kernels."""
        sch = s_tir.Schedule(func)
        main = reduction(sch, operands=2)
        # DLight's rule for tensor cores of integers pipelines a fragment that TVM then cannot lower.
        if main is not None and any("int" in str(read.source.dtype) for read in sch.get(main).reads):
            return None
        if main is not None and sch.get_consumers(main):
            traits = detect_iter_traits(sch.get(main))
            batch = [int(t.extent) for t in traits[3] if t.kind == IterKind.kIter_S] if traits else []
            if prod(batch) > 1 or (_fuses_axes(sch, main) and self._is_padded(sch.get(main))):
                return None
        return dl.gpu.Matmul().apply(func, target, tunable)

    def _is_padded(self, block: s_tir.SBlock) -> bool:
        """Whether the rows or the columns of a product do not fill tiles; columns are its last axis."""
        *rows, columns = (
            int(axis.dom.extent) for axis in block.iter_vars if axis.iter_type != tirx.IterVar.CommReduce
        )
        return bool(prod(rows) % self.TILE[0] or columns % self.TILE[1])


def _fuses_axes(sch: s_tir.Schedule, block: SBlockRV) -> bool:
    """Whether what follows a block has an axis that runs over several axes of what it reads."""
    pending = [*sch.get_consumers(block)]
    while pending:
        consumer = pending.pop()
        for region in sch.get(consumer).reads:
            uses = Counter(variable for part in region.region for variable in variables(part.min))
            if any(count > 1 for count in uses.values()):
                return True
        pending += sch.get_consumers(consumer)
    return False


class Depthwise(GpuRule):
    """Depthwise convolutions in NHWC.

    A thread computes a strip of pixels for a few channels in registers; its neighbours compute those of the
    next channels, so that a warp reads contiguous memory. There is no shared memory and no barrier: pixels
    that several strips read come from the cache.
    """

    THREADS = 512  # required on a multiprocessor: half of Turing's maximum
    OUTPUTS = 32  # of one thread; more would leave too few registers for the operands
    UNROLLED = 1024  # multiplications of one thread; with more, the loop over filter rows stays

    def schedule(self, sch: s_tir.Schedule) -> s_tir.Schedule | None:
        """The schedule of a depthwise convolution; None for other kernels."""
        main = reduction(sch, operands=2)
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
        count, size = loop_extent(sch, threads), self.limits.threads_up_to(BLOCK)
        while size > WARP and count < size * self.limits.multiprocessors:
            size //= 2
        thread = bind(sch, [threads], min(size, count))
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
        taps = prod(loop_extent(sch, loop) for loop in (ry, rx, xi, ci))
        for loop in (rx, xi, ci) if taps > self.UNROLLED else (ry, rx, xi, ci):
            sch.unroll(loop)
        sch.decompose_reduction(main, ry)
        return sch

    def _tile(self, block: s_tir.SBlock) -> tuple[int, int]:
        """Pixels and channels of a thread: a long strip reads little, many threads hide latency."""
        n, y, x, c, _, kw, _ = (int(i.dom.extent) for i in block.iter_vars)
        required_threads = self.THREADS * self.limits.multiprocessors

        def cost(tile: tuple[int, int]) -> float:
            """Relative time of a tile."""
            strip, vector = tile
            idle = max(1.0, required_threads * strip * vector / (n * y * x * c))
            return idle * (strip + kw - 1) / strip * (1 + 2 / vector)

        strips = (s for s in range(1, 9) if x % s == 0)
        vectors = [v for v in (1, 2, 4) if c % v == 0]  # fp32 in the epilogue: 4 are `ACCESS_BYTES`
        return min((t for t in product(strips, vectors) if prod(t) <= self.OUTPUTS), key=cost)


def _is_depthwise(block: s_tir.SBlock) -> bool:
    """Whether it is C[n, y, x, c] += A[n, y', x', c] * B[taps, c]."""
    axes = [i.var for i in block.iter_vars]
    used = [[variables(r.min) for r in region.region] for region in (*block.reads, *block.writes)]
    if [len(axes), *map(len, used)] != [7, 4, 4, 4] or block.iter_vars[-1].dom.extent != 1:
        return False
    n, y, x, c, ry, rx, rc = axes
    image, filters, result = used
    return (
        reduction_axes(block) == {ry, rx, rc}
        and image == [{n}, {y, ry}, {x, rx}, {c, rc}]
        and set().union(*filters) == {c, ry, rx, rc}
        and result == [{n}, {y}, {x}, {c}]
    )


class Reduce(GpuRule):
    """Reductions of any kind: pooling, means, matrix-vector products.

    One thread computes a short reduction. Several threads share each result of a long one, and neighbours
    read adjacent elements: of neighbouring results, or of parts of one. An epilogue that would repeat a
    result many times (squeeze and excitation), and operands that are also stored, become separate kernels;
    DLight's rules would run them on the few threads of the reduction.

    For the product of a row by a matrix with contiguous rows, each block of threads begins further on in its
    rows than the block before it, and wraps around. Otherwise all blocks would read the same part of their
    rows at a time, and rows whose pitch is a multiple of a power of two would lie in few memory channels.
    """

    SHORT = 32  # elements of a reduction that one thread computes
    MAX_THREADS = 512  # of a block

    def schedule(self, sch: s_tir.Schedule) -> s_tir.Schedule | None:
        """The schedule of a kernel with one reduction; None for other kernels."""
        main = reduction(sch, operands=2) or reduction(sch, operands=1)
        if main is None:
            return None
        block = sch.get(main)
        largest = max(block.reads, key=lambda region: prod(int(d) for d in region.source.shape))
        side_by_side = reduction_axes(block) & variables(largest.region[-1].min)
        loops: dict[bool, list[LoopRV]] = {False: [], True: []}
        for variable, loop in zip(block.iter_vars, sch.get_loops(main), strict=True):
            loops[variable.iter_type == tirx.IterVar.CommReduce].append(loop)
        if not loops[False]:
            loops[False].append(sch.add_unit_loop(loops[True][0]))
        result = sch.cache_write(main, 0, "local")
        s, r = sch.fuse(*loops[False]), sch.fuse(*loops[True])
        results, parts = self._threads(loop_extent(sch, s), loop_extent(sch, r), bool(side_by_side))
        # No more threads than results: otherwise all would run the copy of a scalar, without a guard.
        s, s1 = sch.split(s, [None, min(results, loop_extent(sch, s))])
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
        if parts > 1 and is_row_by_matrix(sch.get(main)):
            return s_tir.Schedule(rotate_rows(sch.mod["main"], block.name_hint, results))
        return sch

    def _threads(self, results: int, length: int, side_by_side: bool) -> tuple[int, int]:
        """Results of a block, and threads for each."""
        block, multiprocessors = self.limits.threads_up_to(BLOCK), self.limits.multiprocessors
        if length <= self.SHORT:
            return block, 1
        if side_by_side:
            return (block // WARP, WARP) if results >= block // WARP * multiprocessors else (1, block)
        width = next((w for w in (WARP, 16) if results >= w * multiprocessors), 8)
        most = self.limits.threads_up_to(self.MAX_THREADS) // width
        return width, min(most, 1 << (length - 1).bit_length())


def _bind_rest(sch: s_tir.Schedule, limits: KernelLimits) -> None:
    """Bind loop nests that a rule did not bind, such as a second result: they become separate launches."""
    for nest in outer_nests(sch):
        loops = sch.get_loops(nest)
        if any(sch.get(loop).thread_binding is not None for loop in loops) or _has_threads(sch.get(nest)):
            continue
        if loops and all(v.iter_type == tirx.IterVar.DataPar for v in sch.get(nest).iter_vars):
            bind(sch, loops, limits.threads_up_to(BLOCK))
        else:
            bind(sch, [sch.add_unit_loop(loops[0] if loops else nest)], 1)


def _has_threads(block: s_tir.SBlock) -> bool:
    """Whether `block` contains its own thread bindings, as sorting does."""
    bound = any(loop.thread_binding is not None for loop in nodes(block.body, tirx.For))
    return bound or any(stmt.attr_key == "thread_extent" for stmt in nodes(block.body, tirx.AttrStmt))
