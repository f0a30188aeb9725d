"""Run GPU kernels on the CPU, all threads of many blocks at once, and watch what they access.

A value of a scheduled function is an array of two axes here: a row for each thread of the blocks that run, or
a single row if all threads have the same; and a column for each element of a vector. A branch that some
threads take runs under a mask. So a statement runs for all threads before the next one begins. That order
proves nothing by itself: `AccessLog` finds whatever another order could change.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import tvm_ffi
from tvm import ir, tirx

from pimflow.compiler.kernel_checks.access_log import AccessLog, Report
from pimflow.compiler.kernel_checks.findings import Fault
from pimflow.compiler.kernel_checks.launch import KernelLaunch, deciding_variables, nodes, trips
from pimflow.compiler.kernel_checks.operators import BINARY, FUNCTIONS, Array
from pimflow.errors import UnsupportedOpError

WARP = 32
WARPS = 1 << 62  # numbers of warps begin here, where they access memory as a whole
FRAGMENT = 16  # rows, columns and depth of a fragment
Expression = Callable[[], Array]
Statement = Callable[[], None]


def _element_type(text: str) -> tuple[np.dtype[Any], int]:
    """The type of an element, and how many a vector has: ``float16x8``."""
    name, _, lanes = text.rpartition("x") if re.fullmatch(r"\w+x\d+", text) else (text, "", "1")
    return np.dtype({"bool": "bool", "handle": "uint64"}.get(name, name)), int(lanes)


def _type_of(expr: ir.Expr) -> tuple[np.dtype[Any], int]:
    return _element_type(str(expr.ty).removeprefix("T."))


@dataclass
class _Lanes:
    """The threads that run at once: all of some blocks."""

    launch: KernelLaunch
    blocks: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_] | None = None  # (threads, 1): those that take the branch that runs
    epoch: int = 0  # barriers so far

    def __post_init__(self) -> None:
        threads = self.launch.threads
        self.block_index = np.repeat(np.arange(len(self.blocks)), threads)[:, None]
        self.block = np.repeat(self.blocks, threads)
        thread = np.tile(np.arange(threads), len(self.blocks))
        self.number = self.block * threads + thread
        self.axes: dict[str, Array] = {}
        for prefix, index in (("blockIdx", self.block), ("threadIdx", thread)):
            rest = index
            for axis in "xyz":
                extent = self.launch.extent(f"{prefix}.{axis}")
                self.axes[f"{prefix}.{axis}"] = (rest % extent).astype(np.int32)[:, None]
                rest = rest // extent

    @property
    def count(self) -> int:
        """Threads, those included that do not take the branch that runs."""
        return len(self.number)

    def active(self) -> _Threads:
        """The threads that take the branch that runs."""
        index = np.arange(self.count) if self.mask is None else np.flatnonzero(self.mask[:, 0])
        number, block = self.number[index, None], self.block[index, None]
        return _Threads(index[:, None], number, block, self.block_index[index])


@dataclass(frozen=True)
class _Threads:
    """Threads that access a memory: columns of their place in `_Lanes`, number, block, and block's place."""

    index: npt.NDArray[np.int64]
    number: npt.NDArray[np.int64]
    block: npt.NDArray[np.int64]
    block_index: npt.NDArray[np.int64]


@dataclass
class _Memory:
    """A buffer's storage.

    `data` has the axes (element), (block, byte), (thread, element) or (warp, fragment, row, column), for
    global and shared memory, registers, and fragments; `size_bytes` are those of one block or thread.
    """

    name: str
    scope: str
    data: Array
    size_bytes: int = 0
    log: AccessLog | None = None
    unit: int = 2  # bytes of shared memory that are one element of its log


@dataclass(frozen=True)
class _View:
    """A buffer: a memory with the type of an element and the elements that an index stands for."""

    memory: ir.Var
    dtype: np.dtype[Any]
    lanes: int
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape) * self.lanes


@dataclass
class KernelExecution:
    """Executes a scheduled function, launch by launch.

    Parameters
    ----------
    arrays : dict
        By parameter (its variable): a flat array, which the function reads or writes.
    choose_blocks : callable
        Takes a `KernelLaunch` and the statements that one of its threads runs; returns the numbers of the
        blocks that run.
    report : callable
        See `AccessLog`.
    addresses_only : bool
        Compute only what decides which elements of global memory are written, and write nothing.
    batch : int
        Threads that run at once.
    """

    func: tirx.PrimFunc
    arrays: Mapping[ir.Var, Array]
    choose_blocks: Callable[[KernelLaunch, int], npt.NDArray[np.int64]]
    report: Report
    addresses_only: bool = False
    batch: int = 1 << 16
    logs: dict[ir.Var, list[AccessLog]] = field(default_factory=dict)  # by memory, of launches that write it
    _memories: dict[ir.Var, _Memory] = field(default_factory=dict)
    _views: dict[ir.Var, _View] = field(default_factory=dict)
    _values: dict[ir.Var, Array] = field(default_factory=dict)
    _lanes: _Lanes | None = None
    _needed: set[ir.Var] = field(default_factory=set)

    def run(self) -> None:
        """Execute the function.

        Raises
        ------
        UnsupportedOpError
            For an operator that has no meaning here.
        """
        for variable, array in self.arrays.items():
            self._declare(variable, variable)
            self._memories[variable] = _Memory(variable.name, "global", array, array.nbytes)
        if self.addresses_only:
            self._needed = deciding_variables(self.func.body, self.arrays.keys())
        with np.errstate(all="ignore"):
            self._host(self.func.body)

    # ---- Host: allocations and launches

    def _host(self, stmt: tirx.Stmt) -> None:
        if isinstance(stmt, tirx.SeqStmt):
            for part in stmt.seq:
                self._host(part)
        elif isinstance(stmt, tirx.AttrStmt) and stmt.attr_key == "thread_extent":
            self._launch(stmt)
        elif isinstance(stmt, tirx.AttrStmt):
            self._host(stmt.body)
        elif isinstance(stmt, tirx.AllocBuffer):
            view = self._declare(stmt.buffer, stmt.buffer)
            data = np.full(view.elements, np.nan if view.dtype.kind == "f" else 0, view.dtype)
            self._memories[stmt.buffer] = _Memory(stmt.buffer.name, "global", data, data.nbytes)
        elif isinstance(stmt, tirx.DeclBuffer):
            self._alias(stmt)
        elif isinstance(stmt, tirx.Bind):
            self._values[stmt.var] = self._expression(stmt.value)()
        else:
            raise UnsupportedOpError(f"no meaning for {type(stmt).__name__} around a launch")

    def _launch(self, stmt: tirx.AttrStmt) -> None:
        extents: dict[str, int] = {}
        for attr in nodes(stmt, tirx.AttrStmt):
            if attr.attr_key == "thread_extent":
                extents[attr.node.thread_tag] = int(attr.value)
        launch = KernelLaunch(extents=extents)
        written = {self._root(store.buffer, stmt) for store in nodes(stmt, tirx.BufferStore)}
        for variable, memory in self._memories.items():
            if memory.scope == "global":
                memory.log = None
            if memory.scope == "global" and variable in written:
                memory.log = AccessLog(memory.name, memory.data.size, False, self.report)
                self.logs.setdefault(variable, []).append(memory.log)
        run = self._statement(stmt)
        if run is None:
            return
        blocks = self.choose_blocks(launch, trips(stmt))
        step = max(self.batch // launch.threads, 1)
        for begin in range(0, len(blocks), step):
            self._lanes = _Lanes(launch, blocks[begin : begin + step])
            run()
        self._lanes = None

    def _root(self, buffer: ir.Var, stmt: tirx.Stmt) -> ir.Var:
        """The variable of the memory that a buffer lies in, which `stmt` may declare."""
        aliases = {decl.buffer: decl.data.args[0] for decl in nodes(stmt, tirx.DeclBuffer)}
        while buffer in aliases:
            buffer = aliases[buffer]
        return self._views[buffer].memory if buffer in self._views else buffer

    def _declare(self, buffer: ir.Var, memory: ir.Var) -> _View:
        dtype, lanes = _element_type(str(buffer.dtype))
        view = _View(memory, dtype, lanes, tuple(int(extent) for extent in buffer.shape))
        self._views[buffer] = view
        return view

    def _alias(self, decl: tirx.DeclBuffer) -> None:
        self._declare(decl.buffer, self._views[decl.data.args[0]].memory)

    # ---- Statements: each becomes a function without arguments; None if it has no effect

    def _statement(self, stmt: tirx.Stmt) -> Statement | None:
        make = getattr(self, f"_{type(stmt).__name__.lower()}", None)
        if make is None:
            raise UnsupportedOpError(f"no meaning for the statement {type(stmt).__name__}")
        statement: Statement | None = make(stmt)
        return statement

    def _seqstmt(self, stmt: tirx.SeqStmt) -> Statement | None:
        parts = [part for part in map(self._statement, stmt.seq) if part]

        def _run() -> None:
            for part in parts:
                part()

        return _run if parts else None

    def _attrstmt(self, stmt: tirx.AttrStmt) -> Statement | None:
        body = self._statement(stmt.body)
        if stmt.attr_key != "thread_extent" or body is None:
            return body
        variable, axis = stmt.node.var, stmt.node.thread_tag

        def _run() -> None:
            self._values[variable] = self._running.axes[axis]
            body()

        return _run

    def _allocbuffer(self, stmt: tirx.AllocBuffer) -> Statement | None:
        buffer, scope = stmt.buffer, stmt.buffer.scope()
        if self.addresses_only and buffer not in self._needed:
            self._declare(buffer, buffer)
            return None
        view, name = self._declare(buffer, buffer), buffer.name
        size_bytes = view.elements * view.dtype.itemsize
        unit = 1 if view.dtype.kind == "b" else 2

        def _run() -> None:
            lanes = self._running
            if scope.startswith("shared"):
                data = np.full(
                    (len(lanes.blocks), -(-size_bytes // 16) * 16), 0xFF, np.uint8
                )  # NaN as a float
                log = AccessLog(name, data.size // unit, True, self.report)
                self._memories[buffer] = _Memory(name, "shared", data, size_bytes, log, unit)
            elif scope.startswith("wmma"):
                warps = lanes.count // WARP
                fragments = np.full((warps, view.elements // FRAGMENT**2, FRAGMENT, FRAGMENT), np.nan)
                self._memories[buffer] = _Memory(name, "fragment", fragments.astype(view.dtype), size_bytes)
            else:
                blank = np.nan if view.dtype.kind == "f" else 0
                data = np.full((lanes.count, view.elements), blank, view.dtype)
                self._memories[buffer] = _Memory(name, "local", data, size_bytes)

        return _run

    def _declbuffer(self, stmt: tirx.DeclBuffer) -> None:
        self._alias(stmt)

    def _bind(self, stmt: tirx.Bind) -> Statement | None:
        if self.addresses_only and stmt.var not in self._needed:
            return None
        variable, value = stmt.var, self._expression(stmt.value)

        def _run() -> None:
            self._values[variable] = value()

        return _run

    def _for(self, stmt: tirx.For) -> Statement | None:
        body = self._statement(stmt.body)
        if body is None:
            return None
        variable, begin, extent = stmt.loop_var, self._expression(stmt.min), self._expression(stmt.extent)

        def _run() -> None:
            first, count = begin(), extent()
            outer = self._running.mask
            for i in range(int(count.max(initial=0))):
                if len(count) > 1 and not self._restrict(i < count, outer):
                    continue
                self._values[variable] = first + first.dtype.type(i)
                body()
                self._running.mask = outer

        return _run

    def _while(self, stmt: tirx.While) -> Statement | None:
        body, condition = self._statement(stmt.body), self._expression(stmt.condition)
        if body is None:
            return None

        def _run() -> None:
            outer = self._running.mask
            while self._restrict(condition(), self._running.mask):
                body()
            self._running.mask = outer

        return _run

    def _ifthenelse(self, stmt: tirx.IfThenElse) -> Statement | None:
        then = self._statement(stmt.then_case)
        other = self._statement(stmt.else_case) if stmt.else_case is not None else None
        if then is None and other is None:
            return None
        condition = self._expression(stmt.condition)

        def _run() -> None:
            outer, holds = self._running.mask, condition()
            for branch, takes in ((then, holds), (other, ~holds)):
                if branch and self._restrict(takes, outer):
                    branch()
                self._running.mask = outer

        return _run

    def _bufferstore(self, stmt: tirx.BufferStore) -> Statement | None:
        view = self._views[stmt.buffer]
        is_global = view.memory in self._memories and self._memories[view.memory].scope == "global"
        writes = not self.addresses_only or view.memory in self._needed
        if not writes and not is_global:
            return None
        if writes and _is_copied_in_place(stmt):
            return self._read_only(stmt.value)  # TVM's reductions end so
        position = self._position(view, stmt.indices)
        value = self._expression(stmt.value) if writes else None

        def _run() -> None:
            stored = value().astype(view.dtype) if value else None
            self._store(view, position(), stored)

        return _run

    def _read_only(self, value: ir.Expr) -> Statement:
        """Evaluate an expression for what it reads."""
        expression = self._expression(value)

        def _run() -> None:
            expression()

        return _run

    def _evaluate(self, stmt: tirx.Evaluate) -> Statement | None:
        call = stmt.value
        if not isinstance(call, ir.Call):
            return None
        name = call.op.name.rpartition(".")[2]
        if name == "tvm_storage_sync":
            return self._barrier(call)
        if self.addresses_only:
            return None
        make = getattr(self, f"_call_{name}", None)
        if make is None:
            raise UnsupportedOpError(f"no meaning for the call of {name}")
        statement: Statement = make(*call.args)
        return statement

    def _barrier(self, call: ir.Call) -> Statement | None:
        scope = call.args[0].value
        if not scope.startswith("shared"):
            raise UnsupportedOpError(f"no meaning for a barrier of '{scope}'")

        def _run() -> None:
            lanes = self._running
            lanes.epoch += 1
            if lanes.mask is not None:
                reached = lanes.mask.reshape(len(lanes.blocks), -1)
                mixed = reached.any(1) & ~reached.all(1)
                if mixed.any():
                    self.report(Fault.DIVERGENT_BARRIER, "block", int(lanes.blocks[mixed.argmax()]))

        return _run

    # ---- Fragments of tensor cores: operations of a warp

    def _call_tvm_fill_fragment(self, target: ir.Expr, *arguments: ir.Expr) -> Statement:
        index, value = (self._expression(argument) for argument in arguments[3:])

        def _run() -> None:
            data, warps = self._fragments(target), self._active_warps()
            data[warps, int(index()[0, 0])] = value()[0, 0]

        return _run

    def _call_tvm_load_matrix_sync(self, target: ir.Expr, *arguments: ir.Expr) -> Statement:
        index, elements = self._expression(arguments[3]), self._tile(*arguments[4:])

        def _run() -> None:
            data, warps = self._fragments(target), self._active_warps()
            view, positions = elements(warps)
            data[warps, int(index()[0, 0])] = self._warp_access(view, positions, warps, None)

        return _run

    def _call_tvm_store_matrix_sync(self, source: ir.Expr, *arguments: ir.Expr) -> Statement:
        index, elements = self._expression(arguments[3]), self._tile(*arguments[4:])

        def _run() -> None:
            data, warps = self._fragments(source), self._active_warps()
            view, positions = elements(warps)
            self._warp_access(view, positions, warps, data[warps, int(index()[0, 0])])

        return _run

    def _call_tvm_mma_sync(self, *arguments: ir.Expr) -> Statement:
        indices = [self._expression(argument) for argument in arguments[1::2]]

        def _run() -> None:
            warps = self._active_warps()
            d, a, b, c = (
                (self._fragments(argument), int(index()[0, 0]))
                for argument, index in zip(arguments[::2], indices)
            )
            product = np.matmul(a[0][warps, a[1]].astype(np.float32), b[0][warps, b[1]].astype(np.float32))
            d[0][warps, d[1]] = c[0][warps, c[1]] + product

        return _run

    def _fragments(self, data: ir.Expr) -> Array:
        return self._memories[data.args[0]].data

    def _active_warps(self) -> npt.NDArray[np.int64]:
        """The warps whose threads all run; a warp of which only some do is a fault."""
        lanes = self._running
        if lanes.mask is None:
            return np.arange(lanes.count // WARP)
        active = lanes.mask.reshape(-1, WARP)
        mixed = active.any(1) & ~active.all(1)
        if mixed.any():
            self.report(Fault.DIVERGENT_BARRIER, "warp", int(mixed.argmax()))
        return np.flatnonzero(active.all(1))

    def _tile(self, address: ir.Expr, stride: ir.Expr, order: ir.Expr) -> Callable[..., tuple[_View, Array]]:
        """By warp, the elements of a tile in memory, in the rows and columns of the fragment."""
        load = address.args[0]
        view = self._views[load.source]
        position, pitch = self._position(view, load.indices), self._expression(stride)

        def _elements(warps: npt.NDArray[np.int64]) -> tuple[_View, Array]:
            first = np.broadcast_to(position()[:, :1], (self._running.count, 1)).reshape(-1, WARP)
            row, column = np.indices((FRAGMENT, FRAGMENT))
            if order.value == "col_major":
                row, column = column, row
            inside = row * int(pitch()[0, 0]) + column
            return view, first[warps, :1, None] + inside[None]

        return _elements

    def _warp_access(
        self, view: _View, positions: Array, warps: npt.NDArray[np.int64], values: Array | None
    ) -> Array:
        """Read or write a tile of shared or global memory for each warp."""
        lanes, data = self._running, self._elements(view)
        first = warps * WARP
        # A warp is a thread of its own: what its threads wrote before, a barrier has to order.
        threads = _Threads(
            first[:, None],
            WARPS + lanes.number[first, None],
            lanes.block[first, None],
            lanes.block_index[first],
        )
        tiles = self._bounded(view, positions.reshape(len(warps), -1), None)
        self._record(view, threads, tiles, values is not None)
        place: Any = (threads.block_index, tiles) if self._memories[view.memory].scope == "shared" else tiles
        if values is not None:
            data[place] = values.reshape(tiles.shape)
        result: Array = data[place].reshape(positions.shape)
        return result

    # ---- Accesses

    def _position(self, view: _View, indices: Any) -> Expression:
        """The position of the first element of an access, or of each element if the index is a vector."""
        expressions = [self._expression(index) for index in indices]
        strides = [math.prod(view.shape[i + 1 :]) * view.lanes for i in range(len(view.shape))]
        within = np.arange(view.lanes)[None, :]

        def _position() -> Array:
            total: Array = np.zeros((1, 1), np.int64)
            for expression, stride in zip(expressions, strides):
                total = total + expression().astype(np.int64) * stride
            if view.lanes == 1:
                return total
            return (total[:, :, None] + within[:, None]).reshape(len(total), -1)

        return _position

    def _elements(self, view: _View) -> Array:
        """The memory of a buffer as elements of its type; the last axis counts them."""
        memory = self._memories[view.memory]
        return memory.data.view(view.dtype) if memory.scope == "shared" else memory.data

    def _bounded(self, view: _View, positions: Array, active: npt.NDArray[np.bool_] | None) -> Array:
        """`positions` with those outside of the memory replaced; they are reported where `active`."""
        memory = self._memories[view.memory]
        size = memory.size_bytes // view.dtype.itemsize
        outside = (positions < 0) | (positions >= size)
        if not outside.any():
            return positions
        wrong = outside if active is None else outside & active
        if wrong.any():
            element = np.broadcast_to(positions, wrong.shape)[wrong][0]
            self.report(Fault.OUT_OF_BOUNDS, memory.name, int(element))
        return np.where(outside, 0, positions)

    def _record(self, view: _View, threads: _Threads, positions: Array, is_write: bool) -> None:
        """Log an access; `positions` has a row for each of `threads`."""
        memory = self._memories[view.memory]
        if memory.log is None:
            return
        if memory.scope == "shared":
            units = view.dtype.itemsize // memory.unit
            first = threads.block_index * (memory.data.shape[1] // memory.unit) + positions * units
            elements = (first[..., None] + np.arange(units)).reshape(len(positions), -1)
        else:
            elements = positions.reshape(len(positions), -1)
        shape = elements.shape
        access = memory.log.write if is_write else memory.log.read
        access(
            elements.ravel(),
            np.broadcast_to(threads.number.reshape(-1, 1), shape).ravel(),
            np.broadcast_to(threads.block.reshape(-1, 1), shape).ravel(),
            self._running.epoch,
        )

    def _load(self, view: _View, positions: Array) -> Array:
        lanes, memory = self._running, self._memories[view.memory]
        positions = self._bounded(view, positions, lanes.mask)
        data = self._elements(view)
        if memory.log is not None:
            threads, every = lanes.active(), np.broadcast_to(positions, (lanes.count, positions.shape[1]))
            self._record(view, threads, every if lanes.mask is None else every[lanes.mask[:, 0]], False)
        result: Array
        if memory.scope == "global":
            result = data[positions]
        elif memory.scope == "shared":
            result = data[lanes.block_index, positions]
        else:
            result = data[np.arange(lanes.count)[:, None], positions]
        return result

    def _store(self, view: _View, positions: Array, values: Array | None) -> None:
        lanes, memory = self._running, self._memories[view.memory]
        positions = self._bounded(view, positions, lanes.mask)
        width = positions.shape[1] if values is None else max(positions.shape[1], values.shape[1])
        positions = np.broadcast_to(positions, (lanes.count, width))
        threads, mask = lanes.active(), lanes.mask
        if mask is not None:
            positions = positions[mask[:, 0]]
        self._record(view, threads, positions, True)
        if values is None:
            return
        values = np.broadcast_to(values, (lanes.count, width))
        if mask is not None:
            values = values[mask[:, 0]]
        data = self._elements(view)
        if memory.scope == "global":
            data[positions] = values
        elif memory.scope == "shared":
            data[threads.block_index, positions] = values
        else:
            data[threads.index, positions] = values

    # ---- Expressions: each becomes a function that returns an array of rows and columns

    def _expression(self, expr: ir.Expr) -> Expression:
        if isinstance(expr, tirx.IntImm | tirx.FloatImm):
            constant = np.full((1, 1), expr.value, _type_of(expr)[0])
            return lambda: constant
        if isinstance(expr, ir.Var):
            return lambda: self._values[expr]
        operator = BINARY.get(type(expr))
        if operator is not None:
            return self._operation(operator, expr)
        make = getattr(self, f"_{type(expr).__name__.lower()}", None)
        if make is None:
            raise UnsupportedOpError(f"no meaning for the expression {type(expr).__name__}")
        expression: Expression = make(expr)
        return expression

    def _operation(self, operator: Callable[[Array, Array], Array], expr: ir.Expr) -> Expression:
        a, b = self._expression(expr.a), self._expression(expr.b)
        return lambda: operator(a(), b())

    def _div(self, expr: tirx.Div) -> Expression:
        a, b = self._expression(expr.a), self._expression(expr.b)
        if _type_of(expr)[0].kind == "f":
            return lambda: a() / b()

        def _quotient() -> Array:
            x, y = a(), b()
            result: Array = np.floor_divide(x - np.fmod(x, y), y)
            return result

        return _quotient

    def _and(self, expr: tirx.And) -> Expression:
        return self._short_circuit(expr, needs_right=True)

    def _or(self, expr: tirx.Or) -> Expression:
        return self._short_circuit(expr, needs_right=False)

    def _short_circuit(self, expr: ir.Expr, needs_right: bool) -> Expression:
        """``a && b`` or ``a || b``: `b` runs only where `a` is `needs_right`."""
        a, b = self._expression(expr.a), self._expression(expr.b)

        def _value() -> Array:
            left = a()
            right = self._under(left == needs_right, b)
            if right is None:
                return left
            return left & right if needs_right else left | right

        return _value

    def _under(self, condition: Array, expression: Expression) -> Array | None:
        """The value of an expression for the threads for which `condition` holds; None if for none."""
        outer = self._running.mask
        value = expression() if self._restrict(condition, outer) else None
        self._running.mask = outer
        return value

    def _restrict(self, condition: Array, outer: npt.NDArray[np.bool_] | None) -> bool:
        """Let only threads run for which `condition` holds, of those of `outer`; whether there are any."""
        if len(condition) == 1:
            self._running.mask = outer
            return bool(condition[0, 0])
        if condition.all():
            self._running.mask = outer
            return True
        self._running.mask = condition if outer is None else condition & outer
        return bool(self._running.mask.any())

    def _not(self, expr: tirx.Not) -> Expression:
        a = self._expression(expr.a)
        return lambda: ~a()

    def _cast(self, expr: tirx.Cast) -> Expression:
        value, dtype = self._expression(expr.value), _type_of(expr)[0]
        return lambda: value().astype(dtype)

    def _ramp(self, expr: tirx.Ramp) -> Expression:
        base, stride = self._expression(expr.base), self._expression(expr.stride)
        steps = np.arange(int(expr.lanes), dtype=_type_of(expr)[0])[None, :]
        return lambda: base() + stride() * steps

    def _broadcast(self, expr: tirx.Broadcast) -> Expression:
        return self._expression(expr.value)  # one column stands for all

    def _shuffle(self, expr: tirx.Shuffle) -> Expression:
        vectors = [(self._expression(vector), _type_of(vector)[1]) for vector in expr.vectors]
        columns = [int(index) for index in expr.indices]

        def _value() -> Array:
            parts = [vector() for vector, _ in vectors]
            rows = max(map(len, parts))
            wide = [np.broadcast_to(part, (rows, lanes)) for part, (_, lanes) in zip(parts, vectors)]
            return np.concatenate(wide, axis=1)[:, columns]

        return _value

    def _let(self, expr: tirx.Let) -> Expression:
        bound, body = self._expression(expr.value), self._expression(expr.body)

        def _value() -> Array:
            self._values[expr.var] = bound()
            return body()

        return _value

    def _select(self, expr: tirx.Select) -> Expression:
        """A choice; CUDA evaluates both sides of a vector, and one of a scalar."""
        if _type_of(expr)[1] == 1:
            return self._choice(expr.condition, expr.true_value, expr.false_value)
        condition, a, b = map(self._expression, (expr.condition, expr.true_value, expr.false_value))
        return lambda: np.where(condition(), a(), b())

    def _choice(self, condition: ir.Expr, true_value: ir.Expr, false_value: ir.Expr) -> Expression:
        """A choice of which each thread evaluates one side."""
        test, a, b = map(self._expression, (condition, true_value, false_value))

        def _value() -> Array:
            holds = test()
            chosen, other = self._under(holds, a), self._under(~holds, b)
            if chosen is None or other is None:
                result = other if chosen is None else chosen
                assert result is not None, "a branch runs only where a thread takes it"
                return result
            return np.where(holds, chosen, other)

        return _value

    def _tensorload(self, expr: ir.Expr) -> Expression:
        view = self._views[expr.source]
        position = self._position(view, expr.indices)
        return lambda: self._load(view, position())

    def _call(self, expr: ir.Call) -> Expression:
        name, arguments = expr.op.name.rpartition(".")[2], list(expr.args)
        if name == "if_then_else":
            return self._choice(*arguments)
        if name in ("call_pure_extern", "call_extern"):
            name, arguments = arguments[0].value, arguments[1:]
        if name == "__activemask":
            return self._active_mask
        if name == "__shfl_down_sync":
            return self._shuffled_down(*map(self._expression, arguments[1:4]))
        if name == "likely":
            return self._expression(arguments[0])
        if name == "reinterpret":
            bits, dtype = self._expression(arguments[0]), _type_of(expr)[0]
            return lambda: bits().view(dtype)
        known = (name, name.removesuffix("f"), name.removeprefix("h"))
        function = next((FUNCTIONS[word] for word in known if word in FUNCTIONS), None)
        if function is None:
            raise UnsupportedOpError(f"no meaning for the function {name}")
        values = list(map(self._expression, arguments))
        return lambda: function(*(value() for value in values))

    def _shuffled_down(self, value: Expression, offset: Expression, width: Expression) -> Expression:
        """``__shfl_down_sync``: the value of a later thread of the warp; its own where there is none."""

        def _shuffled() -> Array:
            lanes, extent = self._running, int(width()[0, 0])
            values = np.broadcast_to(value(), (lanes.count, 1))
            place = np.arange(lanes.count)[:, None]
            source = place + offset()
            inside = place % extent + offset() < extent
            source = np.where(inside, source, place)
            result: Array = values[source[:, 0]]
            if lanes.mask is not None:
                idle = ~lanes.mask[source[:, 0]]
                result = np.where(idle, np.full(1, np.nan).astype(result.dtype), result)
            return result

        return _shuffled

    def _active_mask(self) -> Array:
        """``__activemask``: a bit for each thread of the warp that runs."""
        lanes = self._running
        running = np.ones(lanes.count, bool) if lanes.mask is None else lanes.mask[:, 0]
        bits = np.left_shift(np.uint32(1), np.arange(WARP, dtype=np.uint32))
        room = -(-lanes.count // WARP) * WARP
        padded = np.zeros(room, bool)
        padded[: lanes.count] = running
        masks = (padded.reshape(-1, WARP) * bits).sum(1, dtype=np.uint32)
        return np.repeat(masks, WARP)[: lanes.count, None]

    @property
    def _running(self) -> _Lanes:
        if self._lanes is None:
            raise UnsupportedOpError("a statement of a thread outside of a launch")
        return self._lanes


def _is_copied_in_place(store: tirx.BufferStore) -> bool:
    """Whether a statement stores to an element what it has."""
    value = store.value
    if not isinstance(value, ir.TensorLoad) or not value.source.same_as(store.buffer):
        return False
    return all(map(tvm_ffi.structural_equal, value.indices, store.indices))
