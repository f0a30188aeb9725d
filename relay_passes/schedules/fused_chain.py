"""Analysis that schedules of kernels with several convolutions share: the stages, and what each reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV

from pimflow.core.fused_tile import Reach, RunTile
from pimflow.relay_passes.schedules.loops import outer_nests, reduced


@dataclass(frozen=True)
class Stage:
    """A reduction and the block that takes its sums out of registers: the elementwise operators behind it."""

    main: SBlockRV
    result: SBlockRV


def fused_stages(sch: s_tir.Schedule) -> list[Stage]:
    """The reductions of a kernel that computes one convolution after the other; empty for other kernels.

    The first is a convolution, the last is one or a pooling. Elementwise operators join the last one behind
    each reduction, or before the first.
    """
    mains = [nest for nest in outer_nests(sch) if reduced(sch.get(nest))]
    dense = [is_dense(sch.get(nest)) for nest in mains]
    ends = len(mains) > 1 and dense[0] and (dense[-1] or sum(dense) == 1)
    if not ends or not all(reach(sch.get(nest)) for nest in mains):
        return []
    for nest in outer_nests(sch):
        readers = [reduced(sch.get(reader)) for reader in sch.get_consumers(nest)]
        if not reduced(sch.get(nest)) and readers and not any(readers):
            sch.compute_inline(nest)
    stages = []
    for main, following in zip(mains, [*mains[1:], None], strict=True):
        behind = sch.get_consumers(main)
        alone = len(behind) == 1 and not reduced(sch.get(behind[0]))
        result = behind[0] if alone else sch.cache_write(main, 0, "global")
        if block_names(sch, sch.get_consumers(result)) != block_names(sch, [following] if following else []):
            return []
        stages.append(Stage(main, result))
    return stages


@dataclass(frozen=True)
class ResultLoops:
    """Loops of the last reduction of a kernel, cut into tiles.

    Attributes
    ----------
    n, y, x, channel : LoopRV
        Over images, tiles of rows and of columns, and channels.
    rows, columns : LoopRV
        Over the pixels of a tile.
    over : LoopRV
        Over chunks of channels: of the operand if `summed`, else of the result.
    window : list of LoopRV
        The other reduced loops, innermost a chunk of the operand's channels if `summed`.
    summed : bool
        Whether the reduction is a convolution. A pooling treats each channel alone, so that a chunk of
        channels is finished at once.
    """

    n: LoopRV
    y: LoopRV
    x: LoopRV
    channel: LoopRV
    rows: LoopRV
    columns: LoopRV
    over: LoopRV
    window: list[LoopRV]
    summed: bool


def result_loops(sch: s_tir.Schedule, main: SBlockRV, tile: RunTile) -> ResultLoops:
    """Cut the loops of `main`, the last reduction of a kernel, into tiles."""
    n, y, x, channel, *window = sch.get_loops(main)
    y, rows = sch.split(y, [None, tile.rows])
    x, columns = sch.split(x, [None, tile.columns])
    summed = is_dense(sch.get(main))
    if summed:
        *window, over = window
        over, chunk = sch.split(over, [None, tile.chunk])
        window.append(chunk)
    else:
        over, channel = sch.split(channel, [None, tile.chunk])
    return ResultLoops(n, y, x, channel, rows, columns, over, window, summed)


def pixels_side_by_side(sch: s_tir.Schedule, writers: Sequence[SBlockRV]) -> None:
    """Store what `writers` write in NCHW instead of NHWC."""
    for nest in writers:
        sch.transform_layout(nest, ("write", 0), lambda n, y, x, c: (n, c, y, x))


def is_dense(block: s_tir.SBlock) -> bool:
    """Whether `block` sums over channels: a convolution does, a pooling does not."""
    return len(block.reads) == 2 and len(block.iter_vars) == 7 and len(reduced(block)) == 3


def reach(block: s_tir.SBlock) -> tuple[Reach, Reach] | None:
    """What `block` reads of its operand's rows and columns; None unless places are evenly spaced."""
    axes, (written,) = block.iter_vars, block.writes
    spatial = [axis.var for axis in axes if axis.iter_type == tirx.IterVar.DataPar]
    if len(spatial) != 4 or len(written.region) != 4 or len(block.reads[0].region) != 4:
        return None
    reaches = []
    for axis_var, dim in zip(spatial[1:3], block.reads[0].region[1:3], strict=True):
        factors = tvm.sym.detect_linear_equation(dim.min, [axis.var for axis in axes])
        if not factors or not all(isinstance(f, tirx.IntImm) for f in factors):
            return None
        by_axis = {axis.var: (int(f), int(axis.dom.extent)) for axis, f in zip(axes, factors, strict=False)}
        stride, _ = by_axis.pop(axis_var)
        reaches.append(Reach(stride, 1 + sum(f * (turns - 1) for f, turns in by_axis.values())))
    return reaches[0], reaches[1]


def block_names(sch: s_tir.Schedule, blocks: Sequence[SBlockRV]) -> list[str]:
    """Name of each block, unique in its kernel."""
    return [sch.get(block).name_hint for block in blocks]
