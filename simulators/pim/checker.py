"""Checks by brute force that an issued DRAM-PIM stream is legal; shares no code with the timing engine.

The physical rules of ``strict`` are written out here. Only the organisation and the latencies come from the
`PimSpec`, never the constraint table that drives the engine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import numpy as np

from pimflow.core.commands import FIELDS, KINDS
from pimflow.core.program import PimProgram
from pimflow.errors import SpecError
from pimflow.hardware.pim import COMMANDS, PimSpec
from pimflow.simulators.pim.expansion import length

_GWRITE, _G_ACT, _COMP, _READRES, _PRE, _REF, _WRITE, _WRBIAS, _AF = range(len(COMMANDS))
_NEVER = np.iinfo(np.int64).min

# A rule, the indices of commands that violate it, and a function from an index to a message.
Finding = tuple[str, np.ndarray, Callable[[int], str]]


def violations(
    issued: np.ndarray, spec: PimSpec, program: PimProgram | None = None, channel: int = 0, limit: int = 20
) -> list[str]:
    """Messages for the illegal commands among those that one channel issued.

    Parameters
    ----------
    issued : ndarray, [commands], of dtype `timing.ISSUED`
        Clock (cycles), command, gang, buffer, row, column and bursts of each command, in order.
    program : PimProgram, optional
        The program that the stream must execute: without PRE, REF and the G_ACTs that reopen a row closed by
        a refresh, it must be ``program.commands(channel)``, in order.
    limit : int
        Largest number of messages; one more counts those that were left out.
    """
    messages: list[str] = []
    total = 0
    for _, where, describe in _findings(issued, spec, program, channel):
        total += len(where)
        for index in where[: max(0, limit - len(messages))].tolist():
            messages.append(f"{_position_text(issued, index)}: {describe(index)}")
    return messages + [f"… and {total - limit} more"] * (total > limit)


def violations_by_rule(
    issued: np.ndarray, spec: PimSpec, program: PimProgram | None = None, channel: int = 0
) -> dict[str, int]:
    """Number of violations by rule, for every rule that was checked; gangs, buffers and latches add up."""
    counts: dict[str, int] = {}
    for rule, where, _ in _findings(issued, spec, program, channel):
        kind = re.sub(r"(gang|buffer|latch) \d+$", r"a \1", rule)
        counts[kind] = counts.get(kind, 0) + len(where)
    return counts


def _is_any(command: np.ndarray, *kinds: int) -> np.ndarray:
    """Which commands are of one of `kinds`: faster than ``np.isin``, which sorts."""
    result: np.ndarray = command == kinds[0]
    for kind in kinds[1:]:
        result |= command == kind
    return result


def _position_text(issued: np.ndarray, index: int) -> str:
    if index == len(issued):
        return "end of the stream"
    command = issued["command"][index]
    name = COMMANDS[command] if 0 <= command < len(COMMANDS) else "unknown"
    return f"command {index} ({name} at clock {issued['clock'][index]})"


def _findings(
    issued: np.ndarray, spec: PimSpec, program: PimProgram | None, channel: int
) -> Iterator[Finding]:
    malformed = _invalid_commands(issued, spec)
    if len(malformed):
        rule = "commands that the device has"
        yield rule, malformed, lambda i: f"no such command on '{spec.name}': {issued[i]}"
        return
    clock = issued["clock"]
    backwards = np.flatnonzero(np.diff(clock, prepend=0) < 1)
    yield "one command a clock", backwards, lambda i: "not after the previous command"
    yield from _Gaps(issued, spec).findings()
    yield from _rows(issued, spec, program.computing_gangs if program else spec.gangs)
    yield from _refreshes(issued, spec)
    if spec.comp_starts_at_row:
        yield from _split_instructions(issued)
    if program is not None:
        # A WRITE is a plain access to its channel.
        if spec.has_single_host and _is_any(issued["command"], _GWRITE, _COMP, _READRES).any():
            index, problem = _lockstep_deviation(program, channel)
            yield "channels in step", np.array([index] * bool(problem), dtype=np.int64), lambda i: problem
        index, problem = _first_deviation(issued, program, channel)
        where = np.array([index] * bool(problem), dtype=np.int64)
        yield "the program's own commands", where, lambda i: problem


def _latency(spec: PimSpec, name: str, minimum: int = 0) -> int:
    if spec.timing.get(name, -1) < minimum:
        raise SpecError(f"pim '{spec.name}': [timing] needs '{name}', in cycles, at least {minimum}")
    return spec.timing[name]


def _invalid_commands(issued: np.ndarray, spec: PimSpec) -> np.ndarray:
    command, gang, buffer = issued["command"], issued["gang"], issued["buffer"]
    is_invalid = (command < 0) | (command >= len(COMMANDS))
    is_invalid |= _is_any(command, _G_ACT, _PRE, _WRITE) & ((gang < 0) | (gang >= spec.gangs))
    latch_limit = np.where(command == _GWRITE, spec.global_buffers, spec.global_buffers * spec.accumulators)
    is_invalid |= _is_any(command, _GWRITE, _COMP, _READRES, _WRBIAS, _AF) & (
        (buffer < 0) | (buffer >= latch_limit)
    )
    is_invalid |= _is_any(command, _GWRITE, _READRES, _WRITE, _WRBIAS) & (issued["bursts"] < 1)
    is_invalid |= (command == _WRBIAS) & (not spec.latch_initial_value)
    is_invalid |= (command == _AF) & (not spec.activation_unit)
    in_row = _is_any(command, _COMP, _WRITE)
    is_invalid |= in_row & ((issued["column"] < 0) | (issued["column"] >= spec.columns_per_row))
    of_row = _is_any(command, _G_ACT, _COMP, _WRITE, _AF)
    is_invalid |= of_row & ((issued["row"] < 0) | (issued["row"] >= spec.rows_per_bank))
    return np.flatnonzero(is_invalid)


class _Gaps:
    """Rules that require a minimum number of cycles between two commands."""

    def __init__(self, issued: np.ndarray, spec: PimSpec):
        self.spec = spec
        self.clock = issued["clock"]
        self.gang = issued["gang"]
        self.bursts = issued["bursts"]
        # A latch is one of the buffer that its number names, modulo the number of buffers.
        self.buffer = issued["buffer"] % spec.global_buffers
        self.is_command = [issued["command"] == c for c in range(len(COMMANDS))]
        self.bus_writes = self.is_command[_GWRITE] | self.is_command[_WRBIAS]

    def cycles(self, name: str) -> int:
        """A latency of the device."""
        return _latency(self.spec, name)

    def min_gap(self, before: np.ndarray, after: np.ndarray, cycles: int | np.ndarray, rule: str) -> Finding:
        """What breaks the rule that `after` comes at least `cycles` after `before`, masks of commands."""
        free = np.maximum.accumulate(np.where(before, self.clock + cycles, _NEVER))
        free = np.concatenate(([_NEVER], free[:-1]))
        where = np.flatnonzero(after & (self.clock < free))
        return rule, where, lambda i: f"{rule} holds until clock {free[i]}"

    def findings(self) -> Iterator[Finding]:
        """All rules, that of WRITEs and AFs only where there are some."""
        if not len(self.clock):
            return
        yield from self._rows()
        for buffer in range(self.spec.global_buffers):
            yield from self._latches(buffer)
        yield from self._bus()
        refresh = self.is_command[_REF]
        yield self.min_gap(refresh, np.ones_like(refresh), self.cycles("nRFC"), "nRFC of a refresh")
        if self.is_command[_WRITE].any():
            yield from self._writes()
        if self.is_command[_AF].any():
            yield from self._activations()

    def _rows(self) -> Iterator[Finding]:
        """Rules of banks: activations, products and precharges."""
        n, min_gap, is_command = self.cycles, self.min_gap, self.is_command
        yield min_gap(is_command[_G_ACT], is_command[_G_ACT], n("nRRD"), "nRRD between activations")
        activations = np.flatnonzero(is_command[_G_ACT])
        in_window, banks = self.spec.faw_banks // self.spec.banks_per_gang, self.spec.faw_banks
        crowded = activations  # one of them opens more than the window admits
        if in_window:
            gaps = self.clock[activations[in_window:]] - self.clock[activations[:-in_window]]
            crowded = activations[in_window:][gaps < n("nFAW")]
        yield "nFAW", crowded, lambda i: f"more than {banks} banks activated within nFAW"
        for g in range(self.spec.gangs):
            activate, precharge = (is_command[c] & (self.gang == g) for c in (_G_ACT, _PRE))
            yield min_gap(activate, is_command[_COMP], n("nRCDR"), f"nRCDR of gang {g}")
            yield min_gap(activate, precharge, n("nRAS"), f"nRAS of gang {g}")
            yield min_gap(activate, activate, n("nRC"), f"nRC of gang {g}")
            yield min_gap(precharge, activate | is_command[_REF], n("nRP"), f"nRP of gang {g}")
        yield min_gap(is_command[_COMP], is_command[_PRE], n("nRTP"), "nRTP after a COMP")
        yield min_gap(is_command[_COMP], is_command[_COMP], n("nCCDS"), "nCCDS after a COMP")

    def _latches(self, b: int) -> Iterator[Finding]:
        """Rules of a buffer and of its latches."""
        n, min_gap, transfer_end = self.cycles, self.min_gap, self.cycles("nBL") * self.bursts
        write, compute, read, start = (
            self.is_command[c] & (self.buffer == b) for c in (_GWRITE, _COMP, _READRES, _WRBIAS)
        )
        yield min_gap(compute, read, n("nTREE"), f"the adder tree of latch {b}")
        yield min_gap(compute, write, n("nCCDS"), f"a COMP that reads buffer {b}")
        yield min_gap(write, compute, transfer_end, f"the GWRITE of buffer {b}")
        yield min_gap(start, compute | read, transfer_end, f"the WRBIAS of a latch of buffer {b}")
        tree_cycles = n("nTREE") if start.any() else 0
        yield min_gap(compute, start, tree_cycles, f"a COMP that adds to a latch of buffer {b}")

    def _bus(self) -> Iterator[Finding]:
        """Rules of transfers, and of the changes between bus and banks."""
        n, min_gap, timing, is_command = self.cycles, self.min_gap, self.spec.timing, self.is_command
        writes, read, transfer_end = self.bus_writes, is_command[_READRES], n("nBL") * self.bursts
        turnaround_end = n("nBL") * (self.bursts - 1) + n("nTURN")
        yield min_gap(writes, writes, transfer_end, "a write on the bus")
        yield min_gap(read, read, transfer_end, "a READRES on the bus")
        yield min_gap(read, writes, turnaround_end, "the turnaround after a READRES")
        yield min_gap(writes, read, turnaround_end, "the turnaround after a write")
        if "nMODCH" in timing:
            on_bus, computing = writes | read, is_command[_COMP] | is_command[_G_ACT] | is_command[_AF]
            change_end = n("nMODCH") + n("nBL") * (self.bursts - 1) + self._host_wait()
            after_bus = computing | is_command[_PRE]
            yield min_gap(on_bus, after_bus, change_end, "the change from registers to banks")
            yield min_gap(computing, on_bus, n("nMODCH"), "the change from banks to registers")
            first = on_bus & (self.clock < n("nMODCH")) & (np.arange(len(self.clock)) == 0)
            wrong = np.flatnonzero(first)
            yield (
                "the first change to registers",
                wrong,
                lambda i: "the first change to registers takes longer",
            )
        if "nHOST" in timing:
            later = ~(is_command[_PRE] | is_command[_REF])
            yield min_gap(read, later, n("nHOST"), "the host, which waits for results,")

    def _host_wait(self) -> np.ndarray:
        """Cycles that the host waits for the results of each command."""
        return np.where(self.is_command[_READRES], max(0, self.spec.timing.get("nHOST", 0) - 1), 0)

    def _activations(self) -> Iterator[Finding]:
        """Rules of AFs: for the row of their table, which banks read like a COMP, and for their latch."""
        n, min_gap, is_command = self.cycles, self.min_gap, self.is_command
        apply, comp = is_command[_AF], is_command[_COMP]
        for g in range(self.spec.gangs):
            yield min_gap(is_command[_G_ACT] & (self.gang == g), apply, n("nRCDAF"), f"nRCDAF of gang {g}")
        yield min_gap(apply, is_command[_PRE], n("nRTP"), "nRTP after an AF")
        yield min_gap(apply | comp, apply, n("nCCDS"), "nCCDS before an AF")
        yield min_gap(apply, comp, n("nCCDS"), "nCCDS after an AF")
        for b in range(self.spec.global_buffers):
            in_buffer = self.buffer == b
            latch_afs, uses = apply & in_buffer, (is_command[_READRES] | is_command[_WRBIAS]) & in_buffer
            yield min_gap(
                comp & in_buffer, latch_afs, n("nTREE"), f"the adder tree before an AF of latch {b}"
            )
            yield min_gap(latch_afs, uses, n("nCCDS"), f"an AF of a latch of buffer {b}")

    def _writes(self) -> Iterator[Finding]:
        """Rules of WRITEs: for their row, their banks, and the bus."""
        n, min_gap, is_command, others = self.cycles, self.min_gap, self.is_command, self.bus_writes
        write, comp, read = is_command[_WRITE], is_command[_COMP], is_command[_READRES]
        later_bursts = n("nBL") * (self.bursts - 1)
        for g in range(self.spec.gangs):
            activate, gang_writes, precharge = (
                is_command[c] & (self.gang == g) for c in (_G_ACT, _WRITE, _PRE)
            )
            yield min_gap(activate, gang_writes, n("nRCDW"), f"nRCDW of gang {g}")
            yield min_gap(gang_writes, precharge, later_bursts + n("nWRP"), f"nWRP of gang {g}")
        yield min_gap(write, comp, later_bursts + n("nWTC"), "nWTC after a WRITE")
        yield min_gap(comp, write, n("nCCDS"), "nCCDS after a COMP")
        yield min_gap(write, write | others, later_bursts + n("nBL"), "a WRITE on the bus")
        yield min_gap(others, write, later_bursts + n("nBL"), "another write on the bus")
        yield min_gap(write, read, later_bursts + n("nTURN"), "the turnaround after a WRITE")
        yield min_gap(read, write, later_bursts + n("nTURN"), "the turnaround after a READRES")
        if "nMODCH" in self.spec.timing:
            on_bus, change_end = others | read, n("nMODCH") + later_bursts + self._host_wait()
            yield min_gap(on_bus, write, change_end, "the change from registers to banks")
            yield min_gap(write, on_bus, n("nMODCH"), "the change from banks to registers")


def _rows(issued: np.ndarray, spec: PimSpec, computing: int) -> Iterator[Finding]:
    """COMP and AF need rows open in the first `computing` gangs only; G_ACT and REF need closed banks."""
    command, gang, row = issued["command"], issued["gang"], issued["row"]
    wrong_row = np.zeros(len(issued), dtype=bool)
    closed_row = np.zeros(len(issued), dtype=bool)
    not_closed = np.zeros(len(issued), dtype=bool)
    for g in range(spec.gangs):
        changes = _is_any(command, _G_ACT, _PRE) & (gang == g)
        last_change = np.maximum.accumulate(np.where(changes, np.arange(1, len(issued) + 1), 0))
        state = np.concatenate(([-1], np.where(command == _G_ACT, row, -1)))
        before = state[np.concatenate(([0], last_change))[: len(issued)]]
        wrong_row |= _is_any(command, _COMP, _AF) & (before != (row if g < computing else -1))
        closed_row |= (command == _WRITE) & (gang == g) & (before != row)
        not_closed |= ((command == _G_ACT) & (gang == g) | (command == _REF)) & (before >= 0)
    indices = (np.flatnonzero(is_wrong) for is_wrong in (wrong_row, closed_row, not_closed))
    yield (
        "the row of a COMP or AF is open",
        next(indices),
        lambda i: f"row {row[i]} is not open in every bank",
    )
    yield "the row of a WRITE is open", next(indices), lambda i: f"row {row[i]} is not open in its gang"
    yield "G_ACT and REF on closed banks", next(indices), lambda i: "a row is still open in those banks"


def _split_instructions(issued: np.ndarray) -> Iterator[Finding]:
    """Between a G_ACT and the commands that use its row, which are one instruction, come only PRE and REF."""
    places = np.flatnonzero(~_is_any(issued["command"], _PRE, _REF))
    command = issued["command"][places]
    is_split = np.zeros(len(places), dtype=bool)
    is_split[:-1] = (command[:-1] == _G_ACT) & ~_is_any(command[1:], _G_ACT, _COMP, _WRITE, _AF)
    rule = "an activation and its products are one instruction"
    yield rule, places[is_split], lambda i: "no product follows the activation, which are one instruction"


def _lockstep_deviation(program: PimProgram, channel: int) -> tuple[int, str]:
    """Index of the first command that is not in lockstep with the longest channel, and why.

    An instruction goes to any set of channels: a channel may idle while others work. So its commands must be
    a subsequence of those of the longest channel.
    """
    longest = max(range(len(program.channels)), key=lambda peer: length(program.channels[peer]))
    if channel == longest:
        return 0, ""
    commands, peer = program.table(channel), program.table(longest)
    if np.array_equal(commands, peer[: len(commands)]):
        return 0, ""
    following = iter(_runs(peer)[1])
    for begin, run in zip(*_runs(commands)):
        if run not in following:  # `in` consumes the iterator up to the run
            return begin, f"channel {longest} does something else at this step"
    return 0, ""


def _runs(table: np.ndarray) -> tuple[list[int], list[tuple[int, ...]]]:
    """Begin of each run of commands (COMPs of consecutive columns are one), and the run with its length."""
    step = np.diff(table, axis=0)
    column = 1 + FIELDS.index("column")
    same = (np.delete(step, column, axis=1) == 0).all(axis=1) & (step[:, column] == 1)
    begins = np.flatnonzero(np.append(True, ~same)[: len(table)])
    counts = np.diff(np.append(begins, len(table)))
    return begins.tolist(), [tuple(run) for run in np.column_stack([table[begins], counts]).tolist()]


def _refreshes(issued: np.ndarray, spec: PimSpec) -> Iterator[Finding]:
    """The k-th REF comes at or after k*nREFI, with no other access in between.

    Refreshes that the device may serve ahead were served before the stream.
    """
    clock, command = issued["clock"], issued["command"]
    due = clock // _latency(spec, "nREFI", minimum=1) - spec.refreshes_ahead
    served = np.cumsum(command == _REF)
    early = np.flatnonzero((command == _REF) & (served > due))
    yield "no refresh before it is due", early, lambda i: f"refresh {served[i]} before it is due"
    late = np.flatnonzero(~_is_any(command, _PRE, _REF) & (served < due))
    yield "no refresh overdue", late, lambda i: f"refresh {served[i] + 1} is overdue"


def _first_deviation(issued: np.ndarray, program: PimProgram, channel: int) -> tuple[int, str]:
    """Index of the first command that deviates from the program, and the reason; empty if none does."""
    expected = program.table(channel)
    expected[:, 0] = np.array([COMMANDS.index(name) for name in KINDS])[expected[:, 0]]
    places = np.flatnonzero(issued["command"] != _PRE)
    stream = np.stack([issued[name][places] for name in ("command", *FIELDS)], axis=1)
    activations = np.flatnonzero(stream[:, 0] == _G_ACT)
    # By gang: the row opened last, and the row that a refresh closed, until the gang is opened again.
    opened: dict[int, int] = {}
    closed: dict[int, int] = {}

    def open_rows(begin: int, end: int) -> None:
        for index in activations[slice(*np.searchsorted(activations, (begin, end)))]:
            gang, row = int(stream[index, 1]), int(stream[index, 3])
            opened[gang] = row
            closed.pop(gang, None)

    position, matched = 0, 0  # positions in the stream and in the program
    for refresh in (*np.flatnonzero(stream[:, 0] == _REF), len(stream)):
        while True:
            count = min(refresh - position, len(expected) - matched)
            differs = (stream[position : position + count] != expected[matched : matched + count]).any(axis=1)
            equal_count = int(differs.argmax()) if differs.any() else count
            open_rows(position, position + equal_count)
            position, matched = position + equal_count, matched + equal_count
            if position == refresh:
                break
            kind, gang, _, row, *_ = stream[position].tolist()
            if kind != _G_ACT or closed.get(gang) != row:
                return int(places[position]), f"the program goes on with {_command_text(expected[matched:])}"
            open_rows(position, position + 1)
            position += 1
        closed.update(opened)
        position += 1
    return len(issued), "" if matched == len(
        expected
    ) else f"the program goes on with {_command_text(expected[matched:])}"


def _command_text(remaining: np.ndarray) -> str:
    """Text of the first of the remaining commands."""
    if not len(remaining):
        return "nothing"
    command = remaining[0].tolist()
    operands = zip(FIELDS, command[1:])
    return " ".join([COMMANDS[command[0]], *(f"{name} {value}" for name, value in operands if value >= 0)])
