"""Copies from global to shared memory that threads do not wait for: ``cp.async`` of sm_80 and later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from tvm import ir, tirx

from pimflow.compiler.kernel_checks.access_log import Bools
from pimflow.compiler.kernel_checks.fragments import FragmentCalls, Statement
from pimflow.compiler.kernel_checks.lane_memory import Place
from pimflow.compiler.kernel_checks.launch import Purpose
from pimflow.compiler.kernel_checks.operators import Array
from pimflow.errors import UnsupportedOpError

COMMIT, WAIT = "async_commit_queue_scope", "async_wait_inflight_count"  # attributes of TVM


@dataclass(frozen=True, kw_only=True)
class CopyUnderWay:
    """A copy that was begun: where its values go, and the threads that copy; None for all."""

    place: Place
    values: Array
    mask: Bools | None


class AsyncCopies(FragmentCalls):
    """Copies that take effect where their threads wait for them.

    From its begin until then, an access to an element of a copy is a fault, also of the thread that began
    it. What a copy writes counts as written where it is begun, and again where it is waited for: so other
    threads need a barrier before the first, and one behind the second.
    """

    _begun: list[CopyUnderWay]
    _groups: list[list[CopyUnderWay]]

    def _call_cp_async_raw(self, *arguments: ir.Expr) -> Statement:
        into, source, test = self._copy_parts(arguments)

        def _run() -> None:
            outer, target = self._running.mask, into()
            values: Array = np.zeros((1, target.positions.shape[1]), target.data.dtype)
            holds = None if test is None else test()
            if holds is None or self._restrict(holds, outer):
                loaded = self._load(source())
                values = loaded if holds is None else np.where(holds, loaded, values)
            self._running.mask = outer
            self._record(target, True)
            self._mark(target, True)
            values = np.broadcast_to(values, (self._running.count, values.shape[1]))
            self._begun.append(CopyUnderWay(place=target, values=values, mask=outer))

        return _run

    def _copy_parts(
        self, arguments: Sequence[ir.Expr]
    ) -> tuple[Callable[[], Place], Callable[[], Place], Callable[[], Array] | None]:
        """Where a copy goes and what it reads, and for which threads; the others store zeros."""
        target, offset, source, source_offset, size_bytes, *predicates = arguments
        into, origin = (self._views[data.args[0]] for data in (target, source))
        if self._is_written(origin):
            raise UnsupportedOpError("no meaning for an asynchronous copy of a result")
        lanes = int(size_bytes) // into.dtype.itemsize
        places = [
            self._place(view, [tirx.Ramp(first, tirx.const(1, "int32"), lanes)])
            for view, first in ((into, offset), (origin, source_offset))
        ]
        tests = [self._memoize([test], self._expression(test)) for test in predicates]
        return places[0], places[1], tests[0] if tests else None

    def _call_accesses(self, call: ir.Call) -> Statement | None:
        """The watched accesses of a call, without its effect."""
        if not call.op.name.endswith("cp_async_raw") or self.purpose is not Purpose.BOUNDS:
            return self._expression_reads(call)
        into, source, test = self._copy_parts(call.args)

        def _run() -> None:
            outer = self._running.mask
            if test is None or self._restrict(test(), outer):
                source()
            self._running.mask = outer
            into()

        return _run

    def _asynchronous(self, stmt: tirx.AttrStmt, body: Statement | None) -> Statement | None:
        """The statement of an attribute: of copies that are a group, or of what waits for groups."""
        if self.purpose is not Purpose.VALUES or stmt.attr_key not in (COMMIT, WAIT):
            return body
        if stmt.attr_key == COMMIT:

            def _commit() -> None:
                if body is not None:
                    body()
                self._groups.append(self._begun)
                self._begun = []

            return _commit
        allowed_groups = self._expression(stmt.value)

        def _wait() -> None:
            while len(self._groups) > int(allowed_groups()[0, 0]):
                for copy in self._groups.pop(0):
                    self._finish(copy)
            if body is not None:
                body()

        return _wait

    def _finish(self, copy: CopyUnderWay) -> None:
        self._mark(copy.place, False)
        outer, self._running.mask = self._running.mask, copy.mask
        self._store(copy.place, copy.values)
        self._running.mask = outer

    def _mark(self, place: Place, is_unfinished: bool) -> None:
        """Mark elements of shared memory as written by copies that are under way, or no longer."""
        memory = place.memory
        if place.logged is None:
            return
        if memory.unfinished is None:
            memory.unfinished = np.zeros(memory.data.size // memory.unit, bool)
        memory.unfinished[place.logged.elements] = is_unfinished
