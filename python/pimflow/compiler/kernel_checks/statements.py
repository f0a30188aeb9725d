"""Statements of a GPU kernel: each becomes a function without arguments, or None if it has no effect."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from tvm import ir, tirx

from pimflow.compiler.kernel_checks.async_copies import AsyncCopies
from pimflow.compiler.kernel_checks.findings import Fault
from pimflow.compiler.kernel_checks.fragments import Statement
from pimflow.compiler.kernel_checks.launch import Purpose, divide_body, is_copied_in_place, nodes
from pimflow.compiler.kernel_checks.threads import SHARED_BYTE, Lanes, Memory, blank_value
from pimflow.errors import UnsupportedOpError


class LaneStatements(AsyncCopies):
    """What the threads that run do, statement by statement."""

    _needed: set[ir.Var]
    _repeats_nothing: bool

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
