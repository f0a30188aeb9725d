"""What the rules for kernels share: finding the reduction of a kernel, and binding loops to threads."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import s_tir, tirx
from tvm.s_tir.dlight.analysis import get_root_block
from tvm.s_tir.schedule import LoopRV, SBlockRV

WARP = 32
BLOCK = 128  # threads, where nothing else decides
ACCESS_BYTES = 16  # that a thread moves at once, at most
STACK_BYTES = 1024  # TVM's kMaxStackAlloca: a kernel on the CPU has what is smaller on its stack


def bind(sch: s_tir.Schedule, loops: Sequence[LoopRV], size: int = BLOCK) -> LoopRV:
    """`loops` as one grid; the loop over a block's threads."""
    sch.reorder(*loops)
    block, thread = sch.split(sch.fuse(*loops), [None, size])
    sch.bind(block, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")
    return thread


def reduction(sch: s_tir.Schedule, operands: int) -> SBlockRV | None:
    """The only reduction of a kernel, if it is one of that many tensors."""
    reductions = [nest for nest in sch.get_child_blocks(get_root_block(sch)) if reduced(sch.get(nest))]
    if len(reductions) != 1:
        return None
    block = sch.get(reductions[0])
    plain = all(i.iter_type in (tirx.IterVar.DataPar, tirx.IterVar.CommReduce) for i in block.iter_vars)
    return reductions[0] if plain and [len(block.reads), len(block.writes)] == [operands, 1] else None


def reduced(block: s_tir.SBlock) -> set[tirx.Var]:
    """Axes that are summed over, or the like."""
    return {i.var for i in block.iter_vars if i.iter_type == tirx.IterVar.CommReduce}


def variables(expr: tirx.Expr) -> set[tirx.Var]:
    """Variables that `expr` depends on."""
    return set(tirx.analysis.undefined_vars(expr))
