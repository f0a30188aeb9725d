"""Run GPU kernels on the CPU, all threads of many blocks at once, and watch what they access.

A value of a scheduled function is an array of two axes here: a row for each thread of the blocks that run, or
a single row if all threads have the same; and a column for each element of a vector. A branch that some
threads take runs under a mask. So a statement runs for all threads before the next one begins. That order
proves nothing by itself: `AccessLog` finds whatever another order could change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from tvm import ir, tirx

from pimflow.compiler.kernel_checks.access_log import AccessLog, Report
from pimflow.compiler.kernel_checks.async_copies import AsyncCopies, CopyUnderWay
from pimflow.compiler.kernel_checks.findings import Fault
from pimflow.compiler.kernel_checks.fragments import Statement
from pimflow.compiler.kernel_checks.lane_memory import Place
from pimflow.compiler.kernel_checks.launch import (
    KernelLaunch,
    Purpose,
    deciding_variables,
    digits,
    divide_body,
    has_state,
    has_warp_barriers,
    is_copied_in_place,
    launch_extents,
    nodes,
    trips,
)
from pimflow.compiler.kernel_checks.memo import Integers, Memo
from pimflow.compiler.kernel_checks.operators import Array
from pimflow.compiler.kernel_checks.threads import SHARED_BYTE, Lanes, Memory, View, blank_value, coordinates
from pimflow.errors import UnsupportedOpError


@dataclass
class KernelExecution(AsyncCopies):
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
    purpose : Purpose
        Without values, nothing is written but what decides where accesses lie.
    regions_bytes : sequence of (int, int)
        Begin and end of the parts of shared memory that may be accessed; empty if that is all.
    batch : int
        Threads that run at once.
    make_log : callable
        Makes the logs of memories; another than `AccessLog` judges by itself.
    """

    func: tirx.PrimFunc
    arrays: Mapping[ir.Var, Array]
    choose_blocks: Callable[[KernelLaunch, int], npt.NDArray[np.int64]]
    report: Report
    purpose: Purpose = Purpose.VALUES
    regions_bytes: Sequence[tuple[int, int]] = ()
    batch: int = 1 << 16
    make_log: Callable[..., AccessLog] = AccessLog
    logs: dict[ir.Var, list[AccessLog]] = field(default_factory=dict)  # by memory, of launches that write it
    _memories: dict[ir.Var, Memory] = field(default_factory=dict)
    _views: dict[ir.Var, View] = field(default_factory=dict)
    _values: dict[ir.Var, Array] = field(default_factory=dict)
    _lanes: Lanes | None = None
    _needed: set[ir.Var] = field(default_factory=set)
    _repeats_nothing: bool = False  # statements of a loop that are the same in each iteration run once
    _has_warp_barriers: bool = False
    _begun: list[CopyUnderWay] = field(default_factory=list)
    _groups: list[list[CopyUnderWay]] = field(default_factory=list)
    _variables: dict[ir.Var, ir.Var] = field(default_factory=dict)
    _integers: Integers = field(default_factory=Integers)
    _restrictions: Memo[tuple[npt.NDArray[np.bool_] | None, bool]] = field(default_factory=Memo)
    _inverses: Memo[Array] = field(default_factory=Memo)
    _places: dict[int, list[tuple[ir.Expr, Callable[[], Place]]]] = field(default_factory=dict)
    _last_loads: dict[int, list[tuple[Place, int, Array]]] = field(default_factory=dict)

    def run(self) -> None:
        """Execute the function.

        Raises
        ------
        UnsupportedOpError
            For an operator that has no meaning here.
        """
        for variable, array in self.arrays.items():
            self._declare(variable, variable)
            self._memories[variable] = Memory(variable.name, "global", array, array.nbytes)
            if isinstance(variable.elem_offset, ir.Var):  # tensors begin at their first element
                self._values[variable.elem_offset] = np.zeros((1, 1), np.int64)
        if self.purpose is not Purpose.VALUES:
            body, parameters = self.func.body, self.arrays.keys()
            self._needed = deciding_variables(body, parameters, self.purpose)
            is_stateless = not has_state(body, parameters, self._needed)
            self._repeats_nothing = self.purpose is Purpose.BOUNDS and is_stateless
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
            data = np.full(view.elements, blank_value(view.dtype), view.dtype)
            self._memories[stmt.buffer] = Memory(stmt.buffer.name, "global", data, data.nbytes)
        elif isinstance(stmt, tirx.DeclBuffer):
            self._alias(stmt)
        elif isinstance(stmt, tirx.Bind):
            self._values[stmt.var] = self._expression(stmt.value)()
        else:
            raise UnsupportedOpError(f"no meaning for {type(stmt).__name__} around a launch")

    def _launch(self, stmt: tirx.AttrStmt) -> None:
        extents = launch_extents(stmt)
        launch = KernelLaunch(extents=extents, borders=self._borders(stmt, extents))
        self._places, self._last_loads = {}, {}
        self._has_warp_barriers = has_warp_barriers(stmt)
        written = self._roots(stmt)
        for variable, memory in self._memories.items():
            if memory.scope == "global":
                memory.log = None
            if memory.scope == "global" and variable in written:
                memory.log = self._log(memory.name, memory.data.size, False)
                if memory.log is not None:
                    self.logs.setdefault(variable, []).append(memory.log)
        run = self._statement(stmt)
        if run is None:
            return
        blocks = self.choose_blocks(launch, trips(stmt))
        step = max(self.batch // launch.threads, 1)
        for begin in range(0, len(blocks), step):
            self._lanes, self._begun, self._groups = Lanes(launch, blocks[begin : begin + step]), [], []
            run()
        self._lanes = None

    def _borders(self, stmt: tirx.AttrStmt, extents: Mapping[str, int]) -> tuple[int, ...]:
        """Blocks at the first and last values of what is computed from a block's number alone."""
        launch = KernelLaunch(extents=extents)
        axes = coordinates(launch, "blockIdx", np.arange(launch.blocks))
        borders = set(launch.corners())
        for variable, expr in digits(stmt):
            if isinstance(expr, str):
                self._values[variable] = axes[expr]
                continue
            values = self._expression(expr)()
            if variable is not None:
                self._values[variable] = values
            elif len(values) > 1:
                borders |= {int(values.argmin()), len(values) - 1 - int(values[::-1].argmax())}
        return tuple(sorted(borders))

    def shared_elements(self) -> dict[ir.Var, int]:
        """By buffer in shared memory, the elements up to the last one that a block wrote."""
        sizes: dict[ir.Var, int] = {}
        for buffer, written in self._written_bytes().items():
            size_bytes = int(np.flatnonzero(written).max(initial=-1) + 1)
            sizes[buffer] = size_bytes // self._views[buffer].dtype.itemsize
        return sizes

    def written_bytes(self) -> npt.NDArray[np.bool_]:
        """By byte of the only buffer in shared memory, whether a block wrote it."""
        (written,) = self._written_bytes().values()
        return written

    def _written_bytes(self) -> dict[ir.Var, npt.NDArray[np.bool_]]:
        return {
            buffer: memory.log.written().reshape(len(memory.data), -1).any(0).repeat(memory.unit)
            for buffer, memory in self._memories.items()
            if memory.scope == "shared" and memory.log is not None
        }

    def _roots(self, stmt: tirx.Stmt) -> set[ir.Var]:
        """The variables of the memories that the stores of a launch are to, which `stmt` may declare."""
        aliases = {decl.buffer: decl.data.args[0] for decl in nodes(stmt, tirx.DeclBuffer)}
        roots = set()
        for buffer in {store.buffer for store in nodes(stmt, tirx.BufferStore)}:
            while buffer in aliases:
                buffer = aliases[buffer]
            roots.add(self._views[buffer].memory if buffer in self._views else buffer)
        return roots

    # ---- Statements: each becomes a function without arguments; None if it has no effect

    def _statement(self, stmt: tirx.Stmt) -> Statement | None:
        make = getattr(self, f"_{type(stmt).__name__.lower()}", None)
        if make is None:
            raise UnsupportedOpError(f"no meaning for the statement {type(stmt).__name__}")
        statement: Statement | None = make(stmt)
        return statement

    def _seqstmt(self, stmt: tirx.SeqStmt) -> Statement | None:
        return self._sequence(stmt.seq)

    def _sequence(self, stmts: Iterable[tirx.Stmt]) -> Statement | None:
        parts = [part for part in map(self._statement, stmts) if part]

        def _run() -> None:
            for part in parts:
                part()

        return _run if parts else None

    def _attrstmt(self, stmt: tirx.AttrStmt) -> Statement | None:
        body = self._statement(stmt.body)
        if stmt.attr_key != "thread_extent" or body is None:
            return self._asynchronous(stmt, body)
        variable, axis = self._variable(stmt.node.var), stmt.node.thread_tag

        def _run() -> None:
            self._values[variable] = self._running.axes[axis]
            body()

        return _run

    def _allocbuffer(self, stmt: tirx.AllocBuffer) -> Statement | None:
        buffer, scope = stmt.buffer, stmt.buffer.scope()
        if self.purpose is Purpose.RESULTS and buffer not in self._needed:
            self._declare(buffer, buffer)
            return None
        view = self._declare(buffer, buffer)
        last: list[tuple[Lanes, Memory]] = []

        def _run() -> None:
            lanes = self._running
            if last and last[0][0] is lanes:  # in a loop: the same memory, whose values have gone
                memory = last[0][1]
                is_shared = memory.scope == "shared"
                memory.data[...] = SHARED_BYTE if is_shared else blank_value(memory.data.dtype)
                memory.version += 1
                return
            last[:] = [(lanes, self._new_memory(view, buffer.name, scope))]
            self._memories[buffer] = last[0][1]

        return _run

    def _declbuffer(self, stmt: tirx.DeclBuffer) -> None:
        self._alias(stmt)

    def _bind(self, stmt: tirx.Bind) -> Statement | None:
        if self.purpose is not Purpose.VALUES and stmt.var not in self._needed:
            return self._expression_reads(stmt.value)
        value = self._memoize([stmt.value], self._expression(stmt.value))
        variable = self._variable(stmt.var)

        def _run() -> None:
            self._values[variable] = value()

        return _run

    def _for(self, stmt: tirx.For) -> Statement | None:
        if self._repeats_nothing and isinstance(stmt.extent, tirx.IntImm):
            same, others = divide_body(stmt)
            first_run, body = self._sequence(same), self._sequence(others)
        else:
            first_run, body = None, self._statement(stmt.body)
        if body is None:
            return first_run
        begin, extent = self._expression(stmt.min), self._expression(stmt.extent)
        variable = self._variable(stmt.loop_var)

        def _run() -> None:
            if first_run is not None:
                first_run()
            first, count = begin(), extent()
            outer = self._running.mask
            for i in range(int(count.max(initial=0))):
                if len(count) > 1 and not self._restrict(i < count, outer):
                    continue
                self._values[variable] = self._integers.unique(first + first.dtype.type(i))
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
        condition = self._memoize([stmt.condition], self._expression(stmt.condition))

        def _run() -> None:
            outer, holds = self._running.mask, condition()
            for branch, takes in ((then, holds), (other, self._inverse(holds))):
                if branch and self._restrict(takes, outer):
                    branch()
                self._running.mask = outer

        return _run

    def _bufferstore(self, stmt: tirx.BufferStore) -> Statement | None:
        view = self._views[stmt.buffer]
        is_global = view.memory in self._memories and self._memories[view.memory].scope == "global"
        writes = self.purpose is Purpose.VALUES or view.memory in self._needed
        if not writes and not is_global and self.purpose is Purpose.RESULTS:
            return self._expression_reads(stmt.value)
        if writes and is_copied_in_place(stmt):
            return self._read_only(stmt.value)  # TVM's reductions end so
        place = self._place(view, stmt.indices)
        value = self._expression(stmt.value) if writes else None
        reads = None if writes else self._expression_reads(stmt.value)

        def _run() -> None:
            if reads:
                reads()
            stored = value().astype(view.dtype, copy=False) if value else None
            self._store(place(), stored)

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
        if name == "call_extern" and call.args[0].value == "__syncwarp":
            return self._warp_barrier
        if self.purpose is Purpose.RESULTS:
            self._require_no_results(call)
        if self.purpose is not Purpose.VALUES:
            return self._call_accesses(call)
        make = getattr(self, f"_call_{name}", None)
        if make is None:
            raise UnsupportedOpError(f"no meaning for the call of {name}")
        statement: Statement = make(*call.args)
        return statement

    def _require_no_results(self, call: ir.Call) -> None:
        """Raise `UnsupportedOpError` for a call that accesses global memory that the launch writes."""
        for load in nodes(call, ir.TensorLoad):
            if self._is_written(self._views[load.source]):
                raise UnsupportedOpError(f"no meaning for a result in the call of {call.op.name}")

    def _barrier(self, call: ir.Call) -> Statement | None:
        scope = call.args[0].value
        if scope == "warp":
            return None  # TVM 0.27 writes no instruction for it: only ``__syncwarp`` orders a warp
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

    def _warp_barrier(self) -> None:
        """``__syncwarp``: all threads of a warp wait for one another."""
        lanes = self._running
        running = np.ones(lanes.count, bool) if lanes.mask is None else lanes.mask[:, 0]
        reached = np.bincount(lanes.warp_index[running], minlength=lanes.warp_index[-1] + 1)
        mixed = (reached > 0) & (reached < np.bincount(lanes.warp_index))
        if mixed.any():
            self.report(Fault.DIVERGENT_BARRIER, "warp", int(mixed.argmax()))
        lanes.warp_epochs += running
