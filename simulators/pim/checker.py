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
_FOUR_ACTIVATIONS = 4

# A rule, the indices of commands that violate it, and a function from an index to a message.
Finding = tuple[str, np.ndarray, Callable[[int], str]]


def violations(
    issued: np.ndarray,
    spec: PimSpec,
    program: PimProgram | None = None,
    channel: int = 0,
    limit: int = 20,
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
            messages.append(f"{_place(issued, index)}: {describe(index)}")
    return messages + [f"… and {total - limit} more"] * (total > limit)


def count_violations(
    issued: np.ndarray, spec: PimSpec, program: PimProgram | None = None, channel: int = 0
) -> int:
    """Number of violations in the stream; one command can violate several rules."""
    return sum(violations_by_rule(issued, spec, program, channel).values())


def violations_by_rule(
    issued: np.ndarray, spec: PimSpec, program: PimProgram | None = None, channel: int = 0
) -> dict[str, int]:
    """Number of violations by rule, for every rule that was checked; gangs, buffers and latches add up."""
    counts: dict[str, int] = {}
    for rule, where, _ in _findings(issued, spec, program, channel):
        kind = re.sub(r"(gang|buffer|latch) \d+$", r"a \1", rule)
        counts[kind] = counts.get(kind, 0) + len(where)
    return counts


def _place(issued: np.ndarray, index: int) -> str:
    if index == len(issued):
        return "end of the stream"
    command = issued["command"][index]
    name = COMMANDS[command] if 0 <= command < len(COMMANDS) else "unknown"
    return f"command {index} ({name} at clock {issued['clock'][index]})"


def _findings(
    issued: np.ndarray, spec: PimSpec, program: PimProgram | None, channel: int
) -> Iterator[Finding]:
    malformed = _malformed(issued, spec)
    if len(malformed):
        rule = "commands that the device has"
        yield rule, malformed, lambda i: f"no such command on '{spec.name}': {issued[i]}"
        return
    clock = issued["clock"]
    backwards = np.flatnonzero(np.diff(clock, prepend=0) < 1)
    yield "one command a clock", backwards, lambda i: "not after the previous command"
    yield from _gaps(issued, spec)
    yield from _rows(issued, spec, program.computing_gangs if program else spec.gangs)
    yield from _refreshes(issued, spec)
    if spec.comp_starts_at_row:
        yield from _whole_products(issued)
    if program is not None:
        products = np.isin(issued["command"], (_GWRITE, _COMP, _READRES)).any()
        if spec.one_host and products:  # a WRITE is a plain access to its channel
            index, problem = _out_of_step(program, channel)
            yield "channels in step", np.array([index] * bool(problem), dtype=np.int64), lambda i: problem
        index, problem = _first_deviation(issued, program, channel)
        where = np.array([index] * bool(problem), dtype=np.int64)
        yield "the program's own commands", where, lambda i: problem


def _latency(spec: PimSpec, name: str, least: int = 0) -> int:
    if spec.timing.get(name, -1) < least:
        raise SpecError(f"pim '{spec.name}': [timing] needs '{name}', in cycles, at least {least}")
    return spec.timing[name]


def _malformed(issued: np.ndarray, spec: PimSpec) -> np.ndarray:
    command, gang, buffer = issued["command"], issued["gang"], issued["buffer"]
    bad = (command < 0) | (command >= len(COMMANDS))
    bad |= np.isin(command, (_G_ACT, _PRE, _WRITE)) & ((gang < 0) | (gang >= spec.gangs))
    held = np.where(command == _GWRITE, spec.global_buffers, spec.global_buffers * spec.accumulators)
    bad |= np.isin(command, (_GWRITE, _COMP, _READRES, _WRBIAS, _AF)) & ((buffer < 0) | (buffer >= held))
    bad |= np.isin(command, (_GWRITE, _READRES, _WRITE, _WRBIAS)) & (issued["bursts"] < 1)
    bad |= (command == _WRBIAS) & (not spec.latch_initial_value)
    bad |= (command == _AF) & (not spec.activation_unit)
    in_row = np.isin(command, (_COMP, _WRITE))
    bad |= in_row & ((issued["column"] < 0) | (issued["column"] >= spec.columns_per_row))
    of_row = np.isin(command, (_G_ACT, _COMP, _WRITE, _AF))
    bad |= of_row & ((issued["row"] < 0) | (issued["row"] >= spec.rows_per_bank))
    return np.flatnonzero(bad)


def _gaps(issued: np.ndarray, spec: PimSpec) -> Iterator[Finding]:
    """Rules that require a minimum number of cycles between two commands."""
    clock, command = issued["clock"], issued["command"]
    # A latch is one of the buffer that its number names, modulo the number of buffers.
    bursts, gang, buffer = issued["bursts"], issued["gang"], issued["buffer"] % spec.global_buffers
    is_ = [command == c for c in range(len(COMMANDS))]

    def n(name: str) -> int:
        return _latency(spec, name)

    def apart(before: np.ndarray, after: np.ndarray, cycles: int | np.ndarray, rule: str) -> Finding:
        free = np.maximum.accumulate(np.where(before, clock + cycles, _NEVER))
        free = np.concatenate(([_NEVER], free[:-1]))
        where = np.flatnonzero(after & (clock < free))
        return rule, where, lambda i: f"{rule} holds until clock {free[i]}"

    if not len(issued):
        return
    transfer_end = n("nBL") * bursts
    turnaround_end = n("nBL") * (bursts - 1) + n("nTURN")

    yield apart(is_[_G_ACT], is_[_G_ACT], n("nRRD"), "nRRD between activations")
    activations = np.flatnonzero(is_[_G_ACT])
    in_window = max(1, _FOUR_ACTIVATIONS // spec.banks_per_gang)
    crowded = clock[activations[in_window:]] - clock[activations[:-in_window]] < n("nFAW")
    yield "nFAW", activations[in_window:][crowded], lambda i: "more than four banks activated within nFAW"

    for g in range(spec.gangs):
        activate, precharge = is_[_G_ACT] & (gang == g), is_[_PRE] & (gang == g)
        yield apart(activate, is_[_COMP], n("nRCDR"), f"nRCDR of gang {g}")
        yield apart(activate, precharge, n("nRAS"), f"nRAS of gang {g}")
        yield apart(activate, activate, n("nRC"), f"nRC of gang {g}")
        yield apart(precharge, activate | is_[_REF], n("nRP"), f"nRP of gang {g}")
    yield apart(is_[_COMP], is_[_PRE], n("nRTP"), "nRTP after a COMP")
    yield apart(is_[_COMP], is_[_COMP], n("nCCDS"), "nCCDS after a COMP")

    for b in range(spec.global_buffers):
        of_buffer = buffer == b
        write, compute, read = is_[_GWRITE] & of_buffer, is_[_COMP] & of_buffer, is_[_READRES] & of_buffer
        yield apart(compute, read, n("nTREE"), f"the adder tree of latch {b}")
        yield apart(compute, write, n("nCCDS"), f"a COMP that reads buffer {b}")
        yield apart(write, compute, transfer_end, f"the GWRITE of buffer {b}")
        start = is_[_WRBIAS] & of_buffer
        yield apart(start, compute | read, transfer_end, f"the WRBIAS of a latch of buffer {b}")
        added = n("nTREE") if start.any() else 0
        yield apart(compute, start, added, f"a COMP that adds to a latch of buffer {b}")
    writes = is_[_GWRITE] | is_[_WRBIAS]
    yield apart(writes, writes, transfer_end, "a write on the bus")
    yield apart(is_[_READRES], is_[_READRES], transfer_end, "a READRES on the bus")
    yield apart(is_[_READRES], writes, turnaround_end, "the turnaround after a READRES")
    yield apart(writes, is_[_READRES], turnaround_end, "the turnaround after a write")
    if "nMODCH" in spec.timing:
        on_bus, computing = writes | is_[_READRES], is_[_COMP] | is_[_G_ACT] | is_[_AF]
        waited = np.where(is_[_READRES], max(0, spec.timing.get("nHOST", 0) - 1), 0)
        change_end = n("nMODCH") + n("nBL") * (bursts - 1) + waited
        yield apart(on_bus, computing | is_[_PRE], change_end, "the change from registers to banks")
        yield apart(computing, on_bus, n("nMODCH"), "the change from banks to registers")
        first = on_bus & (clock < n("nMODCH")) & (np.arange(len(issued)) == 0)
        wrong = np.flatnonzero(first)
        yield "the first change to registers", wrong, lambda i: "the first change to registers takes longer"
    if "nHOST" in spec.timing:
        yield apart(is_[_READRES], ~(is_[_PRE] | is_[_REF]), n("nHOST"), "the host, which waits for results,")

    yield apart(is_[_REF], np.ones_like(is_[_REF]), n("nRFC"), "nRFC of a refresh")
    if is_[_WRITE].any():
        yield from _writes(issued, spec, apart)
    if is_[_AF].any():
        yield from _activations(issued, spec, apart)


def _activations(issued: np.ndarray, spec: PimSpec, apart: Callable[..., Finding]) -> Iterator[Finding]:
    """Rules of AFs: for the row of their table, which banks read like a COMP, and for their latch."""
    command, gang, buffer = issued["command"], issued["gang"], issued["buffer"] % spec.global_buffers
    apply, comp = command == _AF, command == _COMP

    def n(name: str) -> int:
        return _latency(spec, name)

    for g in range(spec.gangs):
        yield apart((command == _G_ACT) & (gang == g), apply, n("nRCDAF"), f"nRCDAF of gang {g}")
    yield apart(apply, command == _PRE, n("nRTP"), "nRTP after an AF")
    yield apart(apply | comp, apply, n("nCCDS"), "nCCDS before an AF")
    yield apart(apply, comp, n("nCCDS"), "nCCDS after an AF")
    for b in range(spec.global_buffers):
        mine, uses = apply & (buffer == b), np.isin(command, (_READRES, _WRBIAS)) & (buffer == b)
        yield apart(comp & (buffer == b), mine, n("nTREE"), f"the adder tree before an AF of latch {b}")
        yield apart(mine, uses, n("nCCDS"), f"an AF of a latch of buffer {b}")


def _writes(issued: np.ndarray, spec: PimSpec, apart: Callable[..., Finding]) -> Iterator[Finding]:
    """Rules of WRITEs: for their row, their banks, and the bus."""
    command, gang, bursts = issued["command"], issued["gang"], issued["bursts"]
    write, comp = command == _WRITE, command == _COMP

    def n(name: str) -> int:
        return _latency(spec, name)

    later_bursts = n("nBL") * (bursts - 1)
    for g in range(spec.gangs):
        mine = write & (gang == g)
        yield apart((command == _G_ACT) & (gang == g), mine, n("nRCDW"), f"nRCDW of gang {g}")
        yield apart(mine, (command == _PRE) & (gang == g), later_bursts + n("nWRP"), f"nWRP of gang {g}")
    yield apart(write, comp, later_bursts + n("nWTC"), "nWTC after a WRITE")
    yield apart(comp, write, n("nCCDS"), "nCCDS after a COMP")
    others = (command == _GWRITE) | (command == _WRBIAS)
    yield apart(write, write | others, later_bursts + n("nBL"), "a WRITE on the bus")
    yield apart(others, write, later_bursts + n("nBL"), "another write on the bus")
    yield apart(write, command == _READRES, later_bursts + n("nTURN"), "the turnaround after a WRITE")
    yield apart(command == _READRES, write, later_bursts + n("nTURN"), "the turnaround after a READRES")
    if "nMODCH" in spec.timing:
        waited = np.where(command == _READRES, max(0, spec.timing.get("nHOST", 0) - 1), 0)
        on_bus = others | (command == _READRES)
        yield apart(on_bus, write, n("nMODCH") + later_bursts + waited, "the change from registers to banks")
        yield apart(write, on_bus, n("nMODCH"), "the change from banks to registers")


def _rows(issued: np.ndarray, spec: PimSpec, computing: int) -> Iterator[Finding]:
    """COMP and AF need rows open in the first `computing` gangs only; G_ACT and REF need closed banks."""
    command, gang, row = issued["command"], issued["gang"], issued["row"]
    wrong_row = np.zeros(len(issued), dtype=bool)
    closed_row = np.zeros(len(issued), dtype=bool)
    not_closed = np.zeros(len(issued), dtype=bool)
    for g in range(spec.gangs):
        changes = np.isin(command, (_G_ACT, _PRE)) & (gang == g)
        last_change = np.maximum.accumulate(np.where(changes, np.arange(1, len(issued) + 1), 0))
        state = np.concatenate(([-1], np.where(command == _G_ACT, row, -1)))
        before = state[np.concatenate(([0], last_change))[: len(issued)]]
        wrong_row |= np.isin(command, (_COMP, _AF)) & (before != (row if g < computing else -1))
        closed_row |= (command == _WRITE) & (gang == g) & (before != row)
        not_closed |= ((command == _G_ACT) & (gang == g) | (command == _REF)) & (before >= 0)
    at = (np.flatnonzero(each) for each in (wrong_row, closed_row, not_closed))
    yield "the row of a COMP or AF is open", next(at), lambda i: f"row {row[i]} is not open in every bank"
    yield "the row of a WRITE is open", next(at), lambda i: f"row {row[i]} is not open in its gang"
    yield "G_ACT and REF on closed banks", next(at), lambda i: "a row is still open in those banks"


def _whole_products(issued: np.ndarray) -> Iterator[Finding]:
    """Between a G_ACT and the commands that use its row, which are one instruction, come only PRE and REF."""
    kept = np.flatnonzero(~np.isin(issued["command"], (_PRE, _REF)))
    command = issued["command"][kept]
    parted = np.zeros(len(kept), dtype=bool)
    parted[:-1] = (command[:-1] == _G_ACT) & ~np.isin(command[1:], (_G_ACT, _COMP, _WRITE, _AF))
    rule = "an activation and its products are one instruction"
    yield rule, kept[parted], lambda i: "no product follows the activation, which are one instruction"


def _out_of_step(program: PimProgram, channel: int) -> tuple[int, str]:
    """Index of the first command that is not in lockstep with the longest channel, and why.

    An instruction goes to any set of channels: a channel may idle while others work. So its commands must be
    a subsequence of those of the longest channel.
    """
    longest = max(range(len(program.channels)), key=lambda other: length(program.channels[other]))
    if channel == longest:
        return 0, ""
    mine, other = program.table(channel), program.table(longest)
    if np.array_equal(mine, other[: len(mine)]):
        return 0, ""
    following = iter(_runs(other)[1])
    for begin, run in zip(*_runs(mine)):
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
    due = clock // _latency(spec, "nREFI", least=1) - spec.refreshes_ahead
    served = np.cumsum(command == _REF)
    early = np.flatnonzero((command == _REF) & (served > due))
    yield "no refresh before it is due", early, lambda i: f"refresh {served[i]} before it is due"
    late = np.flatnonzero(~np.isin(command, (_PRE, _REF)) & (served < due))
    yield "no refresh overdue", late, lambda i: f"refresh {served[i] + 1} is overdue"


def _first_deviation(issued: np.ndarray, program: PimProgram, channel: int) -> tuple[int, str]:
    """Index of the first command that deviates from the program, and the reason; empty if none does."""
    expected = program.table(channel)
    expected[:, 0] = np.array([COMMANDS.index(name) for name in KINDS])[expected[:, 0]]
    kept = np.flatnonzero(issued["command"] != _PRE)
    stream = np.stack([issued[name][kept] for name in ("command", *FIELDS)], axis=1)
    activations = np.flatnonzero(stream[:, 0] == _G_ACT)
    # By gang: the row opened last, and the row that a refresh closed, until the gang is opened again.
    opened: dict[int, int] = {}
    closed: dict[int, int] = {}

    def open_rows(begin: int, end: int) -> None:
        for index in activations[slice(*np.searchsorted(activations, (begin, end)))]:
            gang, row = int(stream[index, 1]), int(stream[index, 3])
            opened[gang] = row
            closed.pop(gang, None)

    at, taken = 0, 0  # positions in the stream and in the program
    for refresh in (*np.flatnonzero(stream[:, 0] == _REF), len(stream)):
        while True:
            count = min(refresh - at, len(expected) - taken)
            other = (stream[at : at + count] != expected[taken : taken + count]).any(axis=1)
            same = int(other.argmax()) if other.any() else count
            open_rows(at, at + same)
            at, taken = at + same, taken + same
            if at == refresh:
                break
            kind, gang, _, row, *_ = stream[at].tolist()
            if kind != _G_ACT or closed.get(gang) != row:
                return int(kept[at]), f"the program goes on with {_show(expected[taken:])}"
            open_rows(at, at + 1)
            at += 1
        closed.update(opened)
        at += 1
    return len(issued), "" if taken == len(
        expected
    ) else f"the program goes on with {_show(expected[taken:])}"


def _show(left: np.ndarray) -> str:
    """Text of the first of the remaining commands."""
    if not len(left):
        return "nothing"
    command = left[0].tolist()
    operands = zip(FIELDS, command[1:])
    return " ".join([COMMANDS[command[0]], *(f"{name} {value}" for name, value in operands if value >= 0)])
