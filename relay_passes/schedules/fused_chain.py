"""What the rules for kernels of several convolutions share: which they are, and what one reads of another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.dlight.analysis import get_root_block
from tvm.s_tir.schedule import LoopRV, SBlockRV

from pimflow.core.fused_tile import Reach
from pimflow.relay_passes.schedules.loops import reduced


@dataclass(frozen=True)
class Stage:
    """A reduction and the block that takes its sums out of registers: the elementwise operators behind it."""

    main: SBlockRV
    result: SBlockRV


def chain(sch: s_tir.Schedule) -> list[Stage]:
    """The reductions of a kernel that computes one convolution after the other; empty if it is none such.

    The first is a convolution, the last is one or a pooling. Elementwise operators join the last one behind
    each reduction, or before the first.
    """
    mains = [nest for nest in nests(sch) if reduced(sch.get(nest))]
    dense = [is_dense(sch.get(nest)) for nest in mains]
    ends = len(mains) > 1 and dense[0] and (dense[-1] or sum(dense) == 1)
    if not ends or not all(reach(sch.get(nest)) for nest in mains):
        return []
    for nest in nests(sch):
        readers = [reduced(sch.get(reader)) for reader in sch.get_consumers(nest)]
        if not reduced(sch.get(nest)) and readers and not any(readers):
            sch.compute_inline(nest)
    stages = []
    for main, following in zip(mains, [*mains[1:], None], strict=True):
        behind = sch.get_consumers(main)
        alone = len(behind) == 1 and not reduced(sch.get(behind[0]))
        result = behind[0] if alone else sch.cache_write(main, 0, "global")
        if names(sch, sch.get_consumers(result)) != names(sch, [following] if following else []):
            return []
        stages.append(Stage(main, result))
    return stages


def pixels_side_by_side(sch: s_tir.Schedule, writers: Sequence[SBlockRV]) -> None:
    """What `writers` write, NHWC, in the order NCHW."""
    for nest in writers:
        sch.transform_layout(nest, ("write", 0), lambda n, y, x, c: (n, c, y, x))


def is_dense(block: s_tir.SBlock) -> bool:
    """Whether it sums over channels: a convolution, and no pooling, which has each channel for itself."""
    return len(block.reads) == 2 and len(block.iter_vars) == 7 and len(reduced(block)) == 3


def reach(block: s_tir.SBlock) -> tuple[Reach, Reach] | None:
    """Of rows and columns, if its operand and result are maps, and it reads evenly spaced places."""
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


def names(sch: s_tir.Schedule, blocks: Sequence[SBlockRV]) -> list[str]:
    """Of each block, which is unique in its kernel."""
    return [sch.get(block).name_hint for block in blocks]


def nests(sch: s_tir.Schedule) -> list[SBlockRV]:
    """The outermost blocks of a kernel."""
    return sch.get_child_blocks(get_root_block(sch))


def extent(sch: s_tir.Schedule, loop: LoopRV) -> int:
    """Turns of a loop."""
    return int(sch.get(loop).extent)
