"""How the threads that run at once access memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tvm import ir, tirx

from pimflow.compiler.kernel_checks.access_log import Accesses, AccessLog, Ints, Report
from pimflow.compiler.kernel_checks.findings import Fault
from pimflow.compiler.kernel_checks.launch import Purpose, nodes
from pimflow.compiler.kernel_checks.memo import Integers, Memo
from pimflow.compiler.kernel_checks.operators import FUNCTIONS, Array
from pimflow.compiler.kernel_checks.threads import (
    SHARED_BYTE,
    WARP,
    Lanes,
    Memory,
    Threads,
    View,
    blank_value,
    element_type,
)
from pimflow.errors import UnsupportedOpError

Expression = Callable[[], Array]
FRAGMENT = 16  # rows, columns and depth of a fragment
# Functions whose values follow from their arguments alone.
_PURE = {*FUNCTIONS, "if_then_else", "likely"}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the threads that run access a memory.

    Attributes
    ----------
    memory : Memory
    data : ndarray
        The memory as elements, in one axis.
    positions : ndarray of int
        In `data`: a row for each thread, or one for all; of threads that do not run, any in `data`.
    active : ndarray of int
        The rows of `positions` of threads that run, one for each.
    row : slice or None
        The elements of each thread in its registers, if they are the same, contiguous ones for all.
    logged : Accesses, optional
    """

    memory: Memory
    data: Array
    positions: Ints
    active: Ints
    row: slice | None
    logged: Accesses | None


class LaneMemory:
    """Accesses to memories; the indices of each access become one function that computes them.

    Attributes
    ----------
    report : callable
        See `AccessLog`.
    """

    report: Report
    purpose: Purpose
    regions_bytes: Sequence[tuple[int, int]]
    make_log: Callable[..., AccessLog]
    _memories: dict[ir.Var, Memory]
    _views: dict[ir.Var, View]
    _values: dict[ir.Var, Array]
    _variables: dict[ir.Var, ir.Var]
    _integers: Integers
    _lanes: Lanes | None
    _has_warp_barriers: bool

    @property
    def _running(self) -> Lanes:
        if self._lanes is None:
            raise UnsupportedOpError("a statement of a thread outside of a launch")
        return self._lanes

    def _expression(self, expr: ir.Expr) -> Expression:
        """A function that computes an expression for all threads that run."""
        raise NotImplementedError

    def _variable(self, variable: ir.Var) -> ir.Var:
        """The one object of Python for a variable: others are equal to it, which takes long to see."""
        return self._variables.setdefault(variable, variable)

    def _memoize(self, exprs: Sequence[ir.Expr], compute: Expression) -> Expression:
        """`compute` with a memory: it computes again only after a variable of `exprs` has changed.

        If `exprs` have other parts than variables and pure functions, `compute` itself is returned.
        """
        variables: set[ir.Var] = set()
        for expr in exprs:
            for node in nodes(expr, ir.Var, ir.TensorLoad, tirx.Let, ir.Call):
                if isinstance(node, ir.Var):
                    variables.add(self._variable(node))
                elif not (isinstance(node, ir.Call) and node.op.name.rpartition(".")[2] in _PURE):
                    return compute
        memo, values = Memo[Array](), self._values

        def _value() -> Array:
            # What a branch computes holds for the threads that take it, and for all if none takes a branch.
            mask = None if self._lanes is None else self._lanes.mask
            arguments = (self._lanes, mask, *[values[variable] for variable in variables])
            return memo.result(arguments, lambda: self._integers.unique(compute()))

        return _value

    def _declare(self, buffer: ir.Var, memory: ir.Var) -> View:
        dtype, lanes = element_type(str(buffer.dtype))
        view = View(memory, dtype, lanes, tuple(int(extent) for extent in buffer.shape))
        self._views[buffer] = view
        return view

    def _alias(self, decl: tirx.DeclBuffer) -> None:
        self._declare(decl.buffer, self._views[decl.data.args[0]].memory)

    def _new_memory(self, view: View, name: str, scope: str) -> Memory:
        """Memory of the blocks that run, shared, of warps or of threads, without values."""
        lanes, size_bytes = self._running, view.elements * view.dtype.itemsize
        if scope.startswith("shared"):
            row_bytes, unit = -(-size_bytes // 16) * 16, 1 if view.dtype.kind == "b" else 2
            data = np.full((len(lanes.blocks), row_bytes), SHARED_BYTE, np.uint8)
            log = self._log(name, data.size // unit, True)
            return Memory(name, "shared", data, size_bytes, log, unit, self._gaps(size_bytes))
        if scope.startswith("wmma"):
            shape = (lanes.count // WARP, view.elements // FRAGMENT**2, FRAGMENT, FRAGMENT)
            return Memory(name, "fragment", np.full(shape, blank_value(view.dtype), view.dtype), size_bytes)
        registers = np.full((lanes.count, view.elements), blank_value(view.dtype), view.dtype)
        return Memory(name, "local", registers, size_bytes)

    def _log(self, name: str, elements: int, is_shared: bool) -> AccessLog | None:
        """A log of accesses; none where only their bounds matter."""
        if self.purpose is Purpose.BOUNDS:
            return None
        return self.make_log(name, elements, is_shared, self.report, self._has_warp_barriers)

    def _gaps(self, size_bytes: int) -> npt.NDArray[np.bool_] | None:
        """By byte of shared memory, whether it lies in none of `regions_bytes`; None if there are none."""
        if not self.regions_bytes:
            return None
        gaps = np.ones(size_bytes, bool)
        for begin, end in self.regions_bytes:
            gaps[begin:end] = False
        return gaps

    def _position(self, view: View, indices: Any) -> Expression:
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

        return self._memoize(list(indices), _position)

    def _place(self, view: View, indices: Any) -> Callable[[], Place]:
        """Where the threads that run access a buffer."""
        position, memo = self._position(view, indices), Memo[Place]()

        def _value() -> Place:
            positions, lanes, memory = position(), self._running, self._memories[view.memory]
            return memo.result(
                (positions, lanes, lanes.mask, memory, memory.log), lambda: self._new_place(view, positions)
            )

        return _value

    def _new_place(self, view: View, positions: Array) -> Place:
        lanes, memory = self._running, self._memories[view.memory]
        positions = self._replace_outside(view, positions, lanes.mask)
        threads, data = lanes.active(), self._elements(view)
        active = np.broadcast_to(positions, (lanes.count, positions.shape[1]))
        if lanes.mask is not None:
            active = active[lanes.mask[:, 0]]
        logged = None if memory.log is None else self._log_entry(view, threads, active)
        row = None
        if memory.scope == "shared":
            positions, active = (
                index * data.shape[1] + place
                for index, place in ((lanes.block_index, positions), (threads.block_index, active))
            )
        elif memory.scope == "local":
            first, width = int(positions[0, 0]), positions.shape[1]
            if len(positions) == 1 and (positions[0] == np.arange(first, first + width)).all():
                row = slice(first, first + width)
            positions = np.arange(lanes.count)[:, None] * data.shape[1] + positions
            active = threads.index * data.shape[1] + active
        return Place(
            memory=memory,
            data=data.reshape(-1),
            positions=positions,
            active=active,
            row=row if lanes.mask is None else None,
            logged=logged,
        )

    def _elements(self, view: View) -> Array:
        """The memory of a buffer as elements of its type; the last axis counts them."""
        memory = self._memories[view.memory]
        return memory.data.view(view.dtype) if memory.scope == "shared" else memory.data

    def _replace_outside(self, view: View, positions: Array, active: npt.NDArray[np.bool_] | None) -> Array:
        """`positions` with those outside of the memory replaced; they are reported where `active`."""
        memory = self._memories[view.memory]
        size = memory.size_bytes // view.dtype.itemsize
        outside = (positions < 0) | (positions >= size)
        if memory.gaps is not None:
            first_bytes = np.where(outside, 0, positions) * view.dtype.itemsize
            outside |= memory.gaps[first_bytes] | memory.gaps[first_bytes + view.dtype.itemsize - 1]
        if not outside.any():
            return positions
        wrong = outside if active is None else outside & active
        if wrong.any():
            element = np.broadcast_to(positions, wrong.shape)[wrong][0]
            self.report(Fault.OUT_OF_BOUNDS, memory.name, int(element))
        return np.where(outside, 0, positions)

    def _log_entry(self, view: View, threads: Threads, positions: Array) -> Accesses:
        """What a log takes of an access; `positions` has a row for each of `threads`."""
        memory = self._memories[view.memory]
        if memory.scope == "shared":
            units = view.dtype.itemsize // memory.unit
            first = threads.block_index * (memory.data.shape[1] // memory.unit) + positions * units
            elements = (first[..., None] + np.arange(units)).reshape(len(positions), -1)
        else:
            elements = positions.reshape(len(positions), -1)
        width = elements.shape[1]
        return Accesses(
            elements=elements.ravel(),
            threads=np.repeat(threads.number, width),
            warps=np.repeat(threads.warp, width),
            blocks=np.repeat(threads.block, width),
            lanes=np.repeat(threads.index[:, 0], width),
        )

    def _record(self, place: Place, is_write: bool) -> None:
        """Log an access, if its memory has a log."""
        log, lanes, unfinished = place.memory.log, self._running, place.memory.unfinished
        if log is not None and place.logged is not None:
            if unfinished is not None and unfinished[place.logged.elements].any():
                index = int(unfinished[place.logged.elements].argmax())
                self.report(Fault.UNFINISHED_COPY, place.memory.name, int(place.logged.elements[index]))
            (log.write if is_write else log.read)(place.logged, lanes.epoch, lanes.warp_epochs)

    def _load(self, place: Place) -> Array:
        self._record(place, False)
        if place.row is not None:
            return place.memory.data[:, place.row].copy()
        result: Array = place.data.take(place.positions)
        return result

    def _store(self, place: Place, values: Array | None) -> None:
        """Write values; none if only what is accessed matters."""
        self._record(place, True)
        if values is None:
            return
        place.memory.version += 1
        if place.row is not None:
            place.memory.data[:, place.row] = values
            return
        mask = self._running.mask
        if mask is not None and len(values) > 1:
            values = values[mask[:, 0]]
        place.data[place.active] = values
