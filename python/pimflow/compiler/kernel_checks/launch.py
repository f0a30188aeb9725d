"""Launches of kernels: their grids, and what decides where their threads write."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import ir, tirx

UNKNOWN_TRIPS = 16  # of a loop whose extent is no constant


@dataclass(frozen=True, kw_only=True)
class KernelLaunch:
    """A launch of a kernel: its grid and its blocks, by the names of CUDA's axes.

    Attributes
    ----------
    extents : dict of str to int
        By axis, such as ``blockIdx.x``; axes of extent 1 may be absent.
    """

    extents: dict[str, int]

    def extent(self, axis: str) -> int:
        return self.extents.get(axis, 1)

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return math.prod(self.extent(f"blockIdx.{axis}") for axis in "xyz")

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return math.prod(self.extent(f"threadIdx.{axis}") for axis in "xyz")

    def border_blocks(self) -> list[int]:
        """Blocks at all corners of the grid."""
        x, y, z = (self.extent(f"blockIdx.{axis}") for axis in "xyz")
        return sorted({i + x * (j + y * k) for i in (0, x - 1) for j in (0, y - 1) for k in (0, z - 1)})


def nodes(root: tirx.Stmt | ir.Expr, kind: type) -> list[Any]:
    """Nodes of `kind` in `root`, outer ones first."""
    matches: list[Any] = []
    tvm_ffi.structural_walk(root, [((kind,), matches.append)], order="pre")
    return matches


def trips(stmt: tirx.Stmt) -> int:
    """Statements that a thread runs, if it takes all branches."""
    if isinstance(stmt, tirx.SeqStmt):
        return sum(map(trips, stmt.seq))
    if isinstance(stmt, tirx.For):
        return trips(stmt.body) * (
            int(stmt.extent) if isinstance(stmt.extent, tirx.IntImm) else UNKNOWN_TRIPS
        )
    if isinstance(stmt, tirx.IfThenElse):
        return trips(stmt.then_case) + (trips(stmt.else_case) if stmt.else_case is not None else 0)
    if isinstance(stmt, tirx.While):
        return trips(stmt.body) * UNKNOWN_TRIPS
    return trips(stmt.body) if isinstance(stmt, tirx.AttrStmt) else 1


def deciding_variables(body: tirx.Stmt, parameters: Iterable[ir.Var]) -> set[ir.Var]:
    """Variables and buffers on which it depends which elements of global memory are written."""
    roots = _memory_roots(body, parameters)
    expressions = [branch.condition for branch in nodes(body, tirx.IfThenElse)]
    expressions += [loop.condition for loop in nodes(body, tirx.While)]
    for loop in nodes(body, tirx.For):
        expressions += [loop.min, loop.extent]
    stores = nodes(body, tirx.BufferStore)
    for store in stores:
        if roots.get(store.buffer, store.buffer).scope() == "global":
            expressions += list(store.indices)
    sources: dict[ir.Var, list[ir.Expr]] = {}
    for bind in nodes(body, tirx.Bind):
        sources.setdefault(bind.var, []).append(bind.value)
    for store in stores:
        root = roots.get(store.buffer, store.buffer)
        sources.setdefault(root, []).extend([store.value, *store.indices])
    needed: set[ir.Var] = set()
    while expressions:
        for variable in nodes(expressions.pop(), ir.Var):
            root = roots.get(variable, variable)
            if root not in needed:
                needed |= {root, variable}
                expressions += sources.get(root, [])
    return needed


def _memory_roots(body: tirx.Stmt, parameters: Iterable[ir.Var]) -> dict[ir.Var, ir.Var]:
    """By buffer that lies in the memory of another one, that one."""
    roots: dict[ir.Var, ir.Var] = {}
    for decl in nodes(body, tirx.DeclBuffer):
        source = decl.data.args[0]
        roots[decl.buffer] = roots.get(source, source)
    return roots
