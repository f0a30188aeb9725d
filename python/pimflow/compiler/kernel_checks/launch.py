"""Launches of kernels: their grids, and what decides where their threads write."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import ir, tirx

UNKNOWN_TRIPS = 16  # of a loop whose extent is no constant
_QUOTIENTS = (tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod)


class Purpose(enum.Enum):
    """What an execution computes, and so which accesses it makes."""

    VALUES = "everything"
    RESULTS = "which elements of results are written and read back, without values"
    BOUNDS = "where all accesses lie, without values"


@dataclass(frozen=True, kw_only=True)
class KernelLaunch:
    """A launch of a kernel: its grid and its blocks, by the names of CUDA's axes.

    Attributes
    ----------
    extents : mapping of str to int
        By axis, such as ``blockIdx.x``; axes of extent 1 may be absent.
    borders : tuple of int
        Blocks at the corners of the grid, and at the borders of axes that are fused in one of the grid.
    memories, results : set of Var
        Global memories that the launch accesses, and those of them that it writes.
    """

    extents: Mapping[str, int]
    borders: tuple[int, ...] = ()
    memories: Set[ir.Var] = frozenset()
    results: Set[ir.Var] = frozenset()

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

    def corners(self) -> list[int]:
        """Blocks at all corners of the grid."""
        x, y, z = (self.extent(f"blockIdx.{axis}") for axis in "xyz")
        return sorted({i + x * (j + y * k) for i in (0, x - 1) for j in (0, y - 1) for k in (0, z - 1)})


def nodes(root: tirx.Stmt | ir.Expr, *kinds: type) -> list[Any]:
    """Nodes of `kinds` in `root`, outer ones first."""
    matches: list[Any] = []
    tvm_ffi.structural_walk(root, [(kinds, matches.append)], order="pre")
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


def launch_statements(stmt: tirx.Stmt) -> list[tirx.AttrStmt]:
    """The launches of a lowered function, in order."""
    if isinstance(stmt, tirx.SeqStmt):
        return [launch for part in stmt.seq for launch in launch_statements(part)]
    if isinstance(stmt, tirx.AttrStmt):
        return [stmt] if stmt.attr_key == "thread_extent" else launch_statements(stmt.body)
    return []


def launch_extents(stmt: tirx.Stmt) -> dict[str, int]:
    """The extents of a launch's grid and blocks by axis, such as ``blockIdx.x``."""
    attrs = (attr for attr in nodes(stmt, tirx.AttrStmt) if attr.attr_key == "thread_extent")
    return {str(attr.node.thread_tag): int(attr.value) for attr in attrs}


def digits(stmt: tirx.Stmt) -> Iterator[tuple[ir.Var | None, ir.Expr | str]]:
    """What a launch computes from the numbers of its blocks alone, in the order of execution.

    Each is a variable and its axis or value, or None and a quotient or remainder.
    """
    known: set[ir.Var] = set()
    for node in nodes(stmt, tirx.AttrStmt, tirx.Bind, ir.Call, *_QUOTIENTS):
        if isinstance(node, tirx.AttrStmt) and node.attr_key == "thread_extent":
            if node.node.thread_tag.startswith("blockIdx"):
                known.add(node.node.var)
                yield node.node.var, str(node.node.thread_tag)
        elif isinstance(node, tirx.Bind) and _depends_only_on(known, node.value):
            known.add(node.var)
            yield node.var, node.value
        elif _is_digit(node) and _depends_only_on(known, node):
            yield None, node


def _is_digit(node: object) -> bool:
    if isinstance(node, ir.Call):
        return str(node.op.name).rpartition(".")[2] in ("shift_right", "bitwise_and")
    return isinstance(node, _QUOTIENTS)


def _depends_only_on(known: set[ir.Var], expr: ir.Expr) -> bool:
    """Whether an expression reads no memory and no variables but these."""
    variables = nodes(expr, ir.Var)
    return bool(variables) and known.issuperset(variables) and not nodes(expr, ir.TensorLoad)


def deciding_variables(body: tirx.Stmt, purpose: Purpose) -> set[ir.Var]:
    """Variables and buffers that decide where accesses lie that an execution makes without values."""
    roots = memory_roots(body)
    expressions = [branch.condition for branch in nodes(body, tirx.IfThenElse)]
    written = {roots.get(store.buffer, store.buffer) for store in nodes(body, tirx.BufferStore)}

    def is_made(load: ir.TensorLoad) -> bool:
        """Whether this is read, and not only what it would give."""
        source = roots.get(load.source, load.source)
        return purpose is Purpose.BOUNDS or (source in written and source.scope() == "global")

    for load in filter(is_made, nodes(body, ir.TensorLoad)):
        expressions += list(load.indices)
    for choice in filter(is_choice, nodes(body, ir.Expr)):
        if any(map(is_made, nodes(choice, ir.TensorLoad))):
            expressions.append(choice_parts(choice)[0])
    for call in nodes(body, ir.Call):
        if call.op.name.endswith("cp_async_raw") and purpose is Purpose.BOUNDS:
            expressions += [call.args[1], call.args[3], *call.args[5:]]
    expressions += [loop.condition for loop in nodes(body, tirx.While)]
    for loop in nodes(body, tirx.For):
        expressions += [loop.min, loop.extent]
    stores = nodes(body, tirx.BufferStore)
    for store in stores:
        if purpose is Purpose.BOUNDS or roots.get(store.buffer, store.buffer).scope() == "global":
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


def divide_body(loop: tirx.For) -> tuple[list[tirx.Stmt], list[tirx.Stmt]]:
    """The statements of a loop that have the same indices in each iteration, and the others.

    Only for executions that compute no values but of variables, see `has_state`.
    """
    parts = list(loop.body.seq) if isinstance(loop.body, tirx.SeqStmt) else [loop.body]
    changing, same, others = {loop.loop_var}, list[tirx.Stmt](), list[tirx.Stmt]()
    for part in parts:
        found = nodes(part, ir.Var, tirx.Bind)
        if changing.isdisjoint(node for node in found if isinstance(node, ir.Var)):
            same.append(part)
        else:
            others.append(part)
            changing.update(node.var for node in found if isinstance(node, tirx.Bind))
    return same, others


def has_state(body: tirx.Stmt, needed: Set[ir.Var]) -> bool:
    """Whether launches write what decides where accesses lie: `deciding_variables`."""
    roots = memory_roots(body)
    return any(roots.get(store.buffer, store.buffer) in needed for store in nodes(body, tirx.BufferStore))


def operands(expr: ir.Expr) -> list[ir.Expr]:
    """The expressions that an expression consists of, in the order of its fields."""
    children: list[ir.Expr] = []

    def visit(node: ir.Expr) -> tvm_ffi.structural.WalkResult:
        """Keep what lies directly in `expr`."""
        if node.same_as(expr):
            return tvm_ffi.structural.WalkResult.ADVANCE
        children.append(node)
        return tvm_ffi.structural.WalkResult.SKIP

    tvm_ffi.structural_walk(expr, [((ir.Expr,), visit)], order="pre")
    return children


def is_choice(expr: ir.Expr) -> bool:
    """Whether an expression evaluates one of two others."""
    if isinstance(expr, ir.Call):
        return str(expr.op.name).rpartition(".")[2] == "if_then_else"
    return isinstance(expr, tirx.Select)


def choice_parts(choice: ir.Expr) -> tuple[ir.Expr, ir.Expr, ir.Expr]:
    """The condition of a choice, and what it gives if that holds and if not."""
    if isinstance(choice, tirx.Select):
        return choice.condition, choice.true_value, choice.false_value
    condition, true_value, false_value = choice.args
    return condition, true_value, false_value


def has_warp_barriers(stmt: tirx.Stmt) -> bool:
    """Whether threads of a warp wait for one another in a launch."""
    calls = (node.value for node in nodes(stmt, tirx.Evaluate) if isinstance(node.value, ir.Call))
    return any(call.op.name.endswith("call_extern") and call.args[0].value == "__syncwarp" for call in calls)


def is_copied_in_place(store: tirx.BufferStore) -> bool:
    """Whether a statement stores to an element what it has."""
    value = store.value
    if not isinstance(value, ir.TensorLoad) or not value.source.same_as(store.buffer):
        return False
    return all(map(tvm_ffi.structural_equal, value.indices, store.indices))


def memory_roots(body: tirx.Stmt) -> dict[ir.Var, ir.Var]:
    """By buffer that lies in the memory of another one, that one."""
    roots: dict[ir.Var, ir.Var] = {}
    for decl in nodes(body, tirx.DeclBuffer):
        source = decl.data.args[0]
        roots[decl.buffer] = roots.get(source, source)
    return roots
