"""Utilities for rewrites of kernels: finding statements and expressions, binding loops to threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.s_tir.dlight.analysis import get_root_block
from tvm.s_tir.schedule import LoopRV, SBlockRV

WARP = 32
BLOCK = 128  # default number of threads
ACCESS_BYTES = 16  # maximum that a thread moves at once


def rewrite_kernels(mod: tvm.IRModule, rewrite: Callable[[tirx.PrimFunc], tirx.PrimFunc]) -> tvm.IRModule:
    """`mod` with `rewrite` applied to every TIR function."""
    functions = {gv: rewrite(f) if isinstance(f, tirx.PrimFunc) else f for gv, f in mod.functions_items()}
    return tvm.IRModule(functions, attrs=mod.attrs)


def outer_nests(sch: s_tir.Schedule) -> list[SBlockRV]:
    """The outermost blocks of a kernel."""
    return sch.get_child_blocks(get_root_block(sch))


def is_result(sch: s_tir.Schedule, nest: SBlockRV) -> bool:
    """Whether `nest` writes a result of the kernel, not a workspace."""
    result, workspaces = sch.get(nest).writes[0].source, sch.get(get_root_block(sch)).alloc_buffers
    return not any(result.same_as(workspace) for workspace in workspaces)


def loop_extent(sch: s_tir.Schedule, loop: LoopRV) -> int:
    """Iterations of a loop."""
    return int(sch.get(loop).extent)


def divisors(number: int, upper_bound: int) -> list[int]:
    """Divisors of `number` up to `upper_bound`, in ascending order."""
    return [d for d in range(1, min(number, upper_bound) + 1) if number % d == 0]


def bind(sch: s_tir.Schedule, loops: Sequence[LoopRV], size: int = BLOCK) -> LoopRV:
    """Bind `loops` to one grid; returns the loop over a block's threads."""
    sch.reorder(*loops)
    block, thread = sch.split(sch.fuse(*loops), [None, size])
    sch.bind(block, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")
    return thread


def reduction(sch: s_tir.Schedule, operands: int) -> SBlockRV | None:
    """The reduction of a kernel, if it has only one and that reads `operands` tensors; else None."""
    reductions = [nest for nest in outer_nests(sch) if reduction_axes(sch.get(nest))]
    if len(reductions) != 1:
        return None
    block = sch.get(reductions[0])
    plain = all(i.iter_type in (tirx.IterVar.DataPar, tirx.IterVar.CommReduce) for i in block.iter_vars)
    return reductions[0] if plain and [len(block.reads), len(block.writes)] == [operands, 1] else None


def reduction_axes(block: s_tir.SBlock) -> set[tirx.Var]:
    """Axes that `block` reduces."""
    return {i.var for i in block.iter_vars if i.iter_type == tirx.IterVar.CommReduce}


def nodes(root: tirx.Stmt | tirx.Expr, *kinds: type) -> list:
    """Statements and expressions of `kinds` in `root`, outer ones first."""
    matches: list = []
    tvm_ffi.structural_walk(root, [(kinds, matches.append)], order="pre")
    return matches


def variables(expr: tirx.Expr) -> set[tirx.Var]:
    """Variables on which `expr` depends."""
    return set(tirx.analysis.undefined_vars(expr))
