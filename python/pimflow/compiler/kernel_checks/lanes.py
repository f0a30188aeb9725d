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
from pimflow.compiler.kernel_checks.async_copies import CopyUnderWay
from pimflow.compiler.kernel_checks.fragments import Statement
from pimflow.compiler.kernel_checks.lane_memory import Place
from pimflow.compiler.kernel_checks.launch import (
    KernelLaunch,
    Purpose,
    deciding_variables,
    digits,
    has_state,
    has_warp_barriers,
    launch_extents,
    memory_roots,
    nodes,
    trips,
)
from pimflow.compiler.kernel_checks.memo import Integers, Memo
from pimflow.compiler.kernel_checks.operators import Array
from pimflow.compiler.kernel_checks.statements import LaneStatements
from pimflow.compiler.kernel_checks.threads import Lanes, Memory, View, blank_value, coordinates
from pimflow.errors import UnsupportedOpError


@dataclass
class KernelExecution(LaneStatements):
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
    written: dict[ir.Var, npt.NDArray[np.bool_]] = field(default_factory=dict)  # elements, by memory
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
            self._needed = deciding_variables(self.func.body, self.purpose)
            is_stateless = not has_state(self.func.body, self._needed)
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
        launch = KernelLaunch(
            extents=extents,
            borders=self._borders(stmt, extents),
            memories=self._roots(stmt, nodes(stmt, ir.Var)),
            results=self._roots(stmt, [store.buffer for store in nodes(stmt, tirx.BufferStore)]),
        )
        self._places, self._last_loads = {}, {}
        self._has_warp_barriers = has_warp_barriers(stmt)
        results = [self._memories[variable] for variable in launch.results]
        for memory in results:
            memory.log = self._log(memory.name, memory.data.size, False)
        run = self._statement(stmt)
        if run is not None:
            self._run_blocks(launch, run, trips(stmt))
        for variable, memory in zip(launch.results, results):
            if memory.log is not None:  # of which only what was written is kept
                self.written[variable] = memory.log.written() | self.written.get(variable, False)
            memory.log = None

    def _run_blocks(self, launch: KernelLaunch, run: Statement, statements: int) -> None:
        """Run the blocks that are chosen, of which a thread runs so many statements."""
        blocks, step = self.choose_blocks(launch, statements), max(self.batch // launch.threads, 1)
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

    def _roots(self, stmt: tirx.Stmt, variables: Iterable[ir.Var]) -> set[ir.Var]:
        """The global memories of these variables of a launch, which `stmt` may declare."""
        declared = memory_roots(stmt)
        buffers = {declared.get(variable, variable) for variable in variables}
        roots = {self._views[buffer].memory if buffer in self._views else buffer for buffer in buffers}
        return {root for root in roots & self._memories.keys() if self._memories[root].scope == "global"}
