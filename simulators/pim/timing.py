"""Cycles of DRAM-PIM programs and traces, by two sets of timing rules.

``strict`` issues in order, one command a clock, under the constraint table of the `PimSpec`, inserts
PRE and REF, and reopens rows that a refresh closed; ``simulators/src/timing_strict.cc`` states the rules.
``ramulator-pimflow`` reproduces the PIMFlow authors' Ramulator fork cycle for cycle, including what is
physically wrong in it (no precharge on a row switch, a GWRITE that takes one cycle).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pimflow.core.command_forms import encode
from pimflow.core.commands import Affine, Bursts, Comp, GAct, Gwrite, Node, Readres
from pimflow.core.frames import data_frame
from pimflow.core.json_form import JsonTree
from pimflow.core.program import PimProgram
from pimflow.errors import SpecError, TraceError, UnknownNameError, UsageError
from pimflow.hardware.constraints import OPTIONAL_COMMANDS
from pimflow.hardware.pim import BEGIN, COMMANDS, LEVELS, PimSpec
from pimflow.host import native
from pimflow.simulators.pim.streams import is_lockstep, timing_streams
from pimflow.simulators.pim.trace import Progress, Trace, blocks, expand_to_pim, trace_name

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = [
    "TIMINGS",
    "ISSUED",
    "TimingResult",
    "time_program",
    "time_trace",
    "timings",
    "require_timing",
    "check_device",
    "issue_program",
    "expand_to_pim",
]

STRICT = "strict"
TIMINGS = (STRICT, "ramulator-pimflow")
_ISSUED_FIELDS = ("clock", "command", "gang", "buffer", "row", "column", "bursts")
ISSUED = np.dtype([(name, np.int64) for name in _ISSUED_FIELDS])

# Times a piece of one channel's stream, and updates that channel's `_TALLY`.
Engine = Callable[[np.ndarray, np.ndarray], None]

_strict = native.get("pimflow.simulators.time_strict")
_issue = native.get("pimflow.simulators.issue_strict")
_ramulator = native.get("pimflow.simulators.time_ramulator")
_ORGANISATION = native.Record("pimflow.simulators.organisation")
_DEVICE = native.Record("pimflow.simulators.strict_device")
_HOST = native.Record("pimflow.simulators.host")
_CONSTRAINT = native.Record("pimflow.simulators.constraint")
_LATENCIES = native.Record("pimflow.simulators.ramulator_latencies")
_ISSUED_COMMAND = native.Record("pimflow.simulators.issued_command")
_TALLY = native.Record("pimflow.simulators.tally")

_TRACE_GWRITE, _TRACE_READRES, _TRACE_COMP, _TRACE_G_ACT0 = 0, 1, 2, 4  # kinds of words, as in timing.h
_FORK_GANGS = 4
_FORK_LATENCIES = ("nBL", "nCCDS", "nCL", "nRCDR", "nRP", "nRC", "nFAW", "nRFC", "nREFI")
_NO_BOUND = np.iinfo(np.int64).max

Tally = dict[str, int]


@dataclass(frozen=True, kw_only=True)
class TimingResult(JsonTree):
    """Cycles and commands of a program or trace on the channels of one device.

    Attributes
    ----------
    cycles : int
        Command clocks until the last channel is done, including its last data.
    commands : dict of str to int
        Issued commands by canonical name, over all channels, including PRE and REF, and WRITE if there are
        any. A PRE closes one gang in ``strict``, and all banks of the channel in ``ramulator-pimflow``.
    timing : str
        ``"strict"`` or ``"ramulator-pimflow"``.
    utilisation : float
        Share of the clocks in which the multipliers work: COMPs times nCCDS over `cycles`, mean over
        the channels; in [0, 1].
    row_utilisation : float or None
        Share of the columns of opened rows that COMPs use: used columns, each counted once for every time
        that the stream opens the row, over the columns of all opened rows, including rows that are reopened
        after a refresh. None if another simulator does not give it.
    gwrite_bursts : int
        Column-sized bursts of all GWRITEs, over all channels.
    channel_write_bursts : tuple of int
        Column-sized bursts of the WRITEs of each channel.
    violations : int or None
        COMPs of a trace that name a row which is not open in every bank (``strict`` only; in a
        program they are an error).
    refreshes_ahead : int
        Largest number of refreshes that a channel serves before its first command, in place of the first
        that fall due (`PimSpec.refreshes_ahead`). They count in `commands`, not in `cycles`.
    empty_reads : int
        READRESs of a buffer without a COMP since its last READRES. In a trace, which names no buffers, also
        the second of two consecutive READRESs.
    """

    cycles: int
    time_ns: float
    commands: dict[str, int]
    timing: str
    pim: str
    utilisation: float
    gwrite_bursts: int
    channel_cycles: tuple[int, ...]
    channel_commands: tuple[dict[str, int], ...]
    channel_gwrite_bursts: tuple[int, ...]
    channel_write_bursts: tuple[int, ...] = ()
    row_utilisation: float | None = None
    violations: int | None = 0
    empty_reads: int = 0
    refreshes_ahead: int = 0

    def to_pandas(self) -> DataFrame:
        """A table with a row for each channel; raises `UsageError` if pandas is not installed."""
        rows = zip(self.channel_cycles, self.channel_gwrite_bursts, self.channel_commands)
        return data_frame(
            {"cycles": cycles, "gwrite_bursts": bursts, **counts} for cycles, bursts, counts in rows
        )


def time_program(
    program: PimProgram, spec: PimSpec, timing: str = "strict", gwrite_hiding: bool = True
) -> TimingResult:
    """Time every channel of `program` on `spec`.

    Channels that differ only in pixels, output channels or where their rows begin take the same time
    and are timed once.

    Parameters
    ----------
    timing : str
        ``"strict"`` or ``"ramulator-pimflow"``.
    gwrite_hiding : bool
        ``ramulator-pimflow`` only: whether the fork hides the latency of a GWRITE.

    Raises
    ------
    TraceError
        If a COMP is on a row that is not open, or the device lacks a gang or buffer, with the index of the
        command in its channel; see also `timing_streams`; under ``ramulator-pimflow``, if more than 32
        refreshes are pending.
    SpecError
        If the device does not have the organisation that the program was lowered for.
    """
    spec = spec.with_weights_of(program)
    _check_organisation(program, spec)
    streams = timing_streams(program, spec)
    keys = {id(words): words.tobytes() for words in {id(words): words for words in streams}.values()}
    tallies: dict[bytes, Tally] = {}
    for channel, words in enumerate(streams):
        key = keys[id(words)]
        if key not in tallies:
            place = _place_text(program, channel)
            engine = _engine(spec, timing, gwrite_hiding, program.bursts, _NO_BOUND, program.computing_gangs)
            tallies[key] = _feed(engine, words, place)
            if timing == "strict":
                _raise_on_closed_row(tallies[key], place)
    return _result([tallies[keys[id(words)]] for words in streams], spec, timing)


def time_trace(
    trace: Trace | str | os.PathLike[str] | bytes,
    spec: PimSpec,
    timing: str = "strict",
    gwrite_hiding: bool = True,
    progress: Progress = lambda _: None,
) -> TimingResult:
    """Time a ``.pim`` trace of one channel with one buffer: a parsed one, a file, or the text as bytes.

    A GWRITE writes a whole buffer and a READRES is one burst. Under ``strict``, PRE and REF are
    inserted, and COMPs on a row that is not open are counted in `TimingResult.violations`. A file need not
    fit in memory.

    Parameters
    ----------
    progress : callable
        Called repeatedly with the share of a file that is done.

    Raises
    ------
    TraceError
        See `trace.blocks`; if the device lacks a gang, row or column, with the line; under
        ``ramulator-pimflow``, if more than 32 refreshes are pending.
    """
    name, pieces = (
        (trace.name, iter([trace.words]))
        if isinstance(trace, Trace)
        else (trace_name(trace), blocks(trace, progress))
    )
    engine = _engine(spec, timing, gwrite_hiding, Bursts(1), spec.rows_per_bank, spec.gangs)
    tally = _feed(engine, np.empty(0, dtype=np.uint32), str)
    for words in pieces:
        tally = _feed(engine, words, lambda index: f"{name}:{index + 1}")
    return _result([tally], spec, timing)


def timings(spec: PimSpec) -> tuple[str, ...]:
    """The timings of `TIMINGS` that support the organisation of `spec`."""
    return TIMINGS if spec.gangs == _FORK_GANGS else ("strict",)


def require_timing(spec: PimSpec, timing: str) -> None:
    """Raise `UsageError` unless `timing` is one of `timings` of `spec`."""
    if timing not in timings(spec):
        raise UsageError(
            f"pim '{spec.name}': timing '{timing}', which --accounting paper implies, knows {_FORK_GANGS} "
            f"gangs, not {spec.gangs}; use --timing {' or '.join(timings(spec))}"
        )


def check_device(program: PimProgram, spec: PimSpec) -> None:
    """Raise `SpecError` unless `spec` has the parts of the device that `program` was lowered for.

    The engines require less: they also time a program on devices whose differences do not affect time.
    """
    spec = spec.with_weights_of(program)
    if program.dtype not in spec.dtypes:
        takes = ", ".join(spec.dtypes)
        raise SpecError(f"region '{program.region}' is of {program.dtype}; pim '{spec.name}' takes {takes}")
    if program.sets_latches and not spec.can_write_latches:
        raise SpecError(
            f"region '{program.region}' sums from values on; the latches of pim '{spec.name}' start "
            "from zero; name the device that it was lowered for, or its file, as --pim"
        )
    if program.activation and not spec.can_activate:
        raise SpecError(
            f"region '{program.region}' applies '{program.activation}'; pim '{spec.name}' has no AF; name "
            "the device that it was lowered for, or its file, as --pim"
        )
    for label, required, available, fits in (
        ("gangs", program.gangs, spec.gangs, int.__eq__),
        ("banks", program.banks, spec.banks * program.lanes, int.__eq__),
        ("columns a row", program.columns_per_row, spec.columns_per_row, int.__eq__),
        (
            "elements a column",
            program.elements_per_column * program.lanes,
            spec.elements_per_column(program.dtype),
            int.__eq__,
        ),
        ("bursts a column of a vector", program.vector_bursts, spec.vector_bursts(program.dtype), int.__eq__),
        ("columns a buffer", program.buffer_columns, spec.vector_columns(program.lanes), int.__eq__),
        (
            "bursts a READRES",
            program.readres_bursts,
            spec.readres_bursts(program.dtype, program.lanes),
            int.__eq__,
        ),
        ("buffers", program.buffers, spec.global_buffers, int.__le__),
        ("accumulators", program.accumulators, spec.accumulators, int.__le__),
        ("rows a bank", program.row_begin + program.rows, spec.rows_per_bank, int.__le__),
    ):
        if not fits(required, available):
            raise SpecError(
                f"region '{program.region}' was lowered for pim '{program.pim}' and {required} {label}; "
                f"pim '{spec.name}' has {available}; name the device, or its file, as --pim"
            )


def issue_program(program: PimProgram, spec: PimSpec, channel: int) -> np.ndarray:
    """Commands of one channel as ``strict`` issues them, for the checker and for timelines.

    Returns
    -------
    ndarray, [commands], of dtype `ISSUED`
        Clock (cycles), command (index into `COMMANDS`), gang, buffer, row, column (-1 where the
        command has none) and bursts of each, including PRE, REF and G_ACTs that reopen rows.
    """
    spec = spec.with_weights_of(program)
    _check_organisation(program, spec)
    words, place = program.channel_words(channel), _place_text(program, channel)
    if is_lockstep(program, spec):
        words = timing_streams(program, spec)[channel]
    engine = _engine(spec, "strict", True, program.bursts, _NO_BOUND, program.computing_gangs)
    tally = _feed(engine, words, place)
    _raise_on_closed_row(tally, place)
    return _issued_commands(words, spec, program.bursts, tally)


def issue_trace(words: np.ndarray, spec: PimSpec) -> np.ndarray:
    """Commands of a ``.pim`` trace as ``strict`` issues them, by the rules of `time_trace`.

    Parameters
    ----------
    words : ndarray, [commands], uint32
        See `trace.Trace`.
    """
    stream: list[int] = []
    for word in words.tolist():
        encode(_trace_node(word, spec), stream)
    encoded = np.asarray(stream, dtype=np.int64)
    tally = _feed(_engine(spec, "strict", True, Bursts(1), spec.rows_per_bank, spec.gangs), encoded, str)
    return _issued_commands(encoded, spec, Bursts(1), tally)


def _issued_commands(words: np.ndarray, spec: PimSpec, bursts: Bursts, tally: Tally) -> np.ndarray:
    """The commands of a stream that takes `tally`, [commands], of dtype `ISSUED`."""
    count = sum(tally[name] for name in COMMANDS)
    issued = _ISSUED_COMMAND.zeros(_ISSUED_FIELDS, count)
    _issue(words, *_strict_tables(spec, bursts), issued)
    return issued.view(ISSUED)[:, 0]


def _trace_node(word: int, spec: PimSpec) -> Node:
    """A word of a trace as a command of a program; ``simulators/src/timing.h`` has its layout."""
    kind, row, column = word >> 29, Affine(word >> 11 & 0x3FFF), Affine(word >> 6 & 0x1F)
    if kind == _TRACE_GWRITE:
        return Gwrite(buffer=0, pixel=Affine(0), pixels=1, k=Affine(0), columns=spec.buffer_columns)
    if kind == _TRACE_READRES:
        return Readres(buffer=0, pixel=Affine(0), channel=Affine(0))
    if kind == _TRACE_COMP:
        return Comp(buffer=0, row=row, column=column, count=1)
    return GAct(gang=kind - _TRACE_G_ACT0, row=row)


def _engine(spec: PimSpec, timing: str, gwrite_hiding: bool, bursts: Bursts, rows: int, gangs: int) -> Engine:
    """A function that times a stream piece by piece: encoded words (int64) or trace words (uint32).

    `rows` limits the rows that the stream may name; a COMP needs its row open in the first `gangs` gangs.
    """
    if timing not in TIMINGS:
        raise UnknownNameError("timing", timing, TIMINGS)
    organisation = _organisation(spec, rows, gangs)
    if timing == "strict":
        engine: Engine = _strict(organisation, *_strict_tables(spec, bursts))
        return engine
    require_timing(spec, timing)
    latencies = _LATENCIES.row(
        **_latencies(spec, _FORK_LATENCIES), gwrite_hiding=gwrite_hiding, readres_bursts=bursts.readres
    )
    engine = _ramulator(organisation, latencies)
    return engine


# Cached, as the tables below: a search times thousands of streams.
@functools.lru_cache(maxsize=64)
def _organisation(spec: PimSpec, rows: int, gangs: int) -> np.ndarray:
    """The parts of the device that both engines know."""
    return _ORGANISATION.row(
        gangs=gangs,
        buffers=spec.global_buffers,
        latches=spec.global_buffers * spec.accumulators,
        columns_per_row=spec.columns_per_row,
        rows=rows,
        gwrite_columns=spec.buffer_columns,
    )


def _feed(engine: Engine, stream: np.ndarray, place: Callable[[int], str]) -> Tally:
    """Tally of `stream` and all streams before it; `place` returns the text for a command's index."""
    tally = np.zeros(len(_TALLY.fields), _TALLY.dtype)
    try:
        engine(stream, tally)
    except ValueError as error:
        index, _, problem = str(error).partition(":")
        raise TraceError(f"{place(int(index))}: {problem}") from error
    return dict(zip(_TALLY.fields, tally.tolist()))


def _place_text(program: PimProgram, channel: int) -> Callable[[int], str]:
    return lambda index: f"region '{program.region}', channel {channel}: command {index}"


@functools.lru_cache(maxsize=64)
def _strict_tables(spec: PimSpec, bursts: Bursts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The device, its host and its constraints, as ``simulators/src/timing_strict.cc`` reads them."""
    rules = {rule.before: rule for rule in spec.constraints if rule.level == "host"}

    def cycles(*before: str) -> int:
        return spec.timing[rules[before].latency] if before in rules else 0

    after = rules.get(("GWRITE",))
    device = _DEVICE.row(
        gangs=spec.gangs,
        buffers=spec.global_buffers,
        readres_bursts=bursts.readres,
        lanes=bursts.lanes,
        vector_bursts=bursts.vector,
        nCL=spec.timing.get("nCL", 0),
        **_latencies(spec, ("nBL", "nREFI")),
        refreshes_ahead=spec.refreshes_ahead,
    )
    host = _HOST.row(
        after_result=cycles("READRES"),
        next=cycles("GWRITE"),
        per_burst=spec.timing[after.per_burst] if after and after.per_burst else 0,
        queue=after.queue if after else 0,
        turnaround=cycles("COMP"),
    )
    return device, host, _constraint_table(spec)


def _constraint_table(spec: PimSpec) -> np.ndarray:
    """The rules of one channel; sets of commands are bit masks.

    After a READRES the host waits, whatever comes next, so that this rule is one of every channel; the engine
    gets the other rules of the host separately (`_strict_tables`).
    """
    starts = (*COMMANDS, BEGIN)
    rows = [
        (
            LEVELS.index("channel" if rule.level == "host" else rule.level),
            sum(1 << starts.index(command) for command in set(rule.before)),
            sum(1 << COMMANDS.index(command) for command in set(rule.after)),
            spec.timing[rule.latency],
            spec.timing[rule.per_burst] if rule.per_burst else 0,
            rule.window,
        )
        for rule in spec.constraints
        if rule.level != "host" or rule.before == ("READRES",)
    ]
    names = ("level", "before", "after", "cycles", "per_burst_cycles", "window")
    return _CONSTRAINT.table(names, rows)


def _latencies(spec: PimSpec, names: tuple[str, ...]) -> dict[str, int]:
    for name in names:
        if spec.timing.get(name, 0) < 1:
            raise SpecError(f"pim '{spec.name}': [timing] needs '{name}', in cycles, above zero")
    return {name: spec.timing[name] for name in names}


def _check_organisation(program: PimProgram, spec: PimSpec) -> None:
    if program.latches > spec.global_buffers * spec.accumulators and program.accumulators > 1:
        raise SpecError(
            f"region '{program.region}' was lowered for {program.accumulators} accumulators; "
            f"pim '{spec.name}' has {spec.accumulators}; lower it again for this device"
        )
    if program.gangs != spec.gangs or program.buffers > spec.global_buffers:
        raise SpecError(
            f"region '{program.region}' was lowered for {program.gangs} gangs and {program.buffers} buffers; "
            f"pim '{spec.name}' has {spec.gangs} and {spec.global_buffers}; lower it again for this device"
        )


def _raise_on_closed_row(tally: Tally, place: Callable[[int], str]) -> None:
    if tally["violations"]:
        raise TraceError(
            f"{place(tally['first_violation'])}: COMP on a row that is not open in every gang, or AF on such "
            f"a row, or WRITE on one that is not open in its gang ({tally['violations']} such commands)"
        )


def _command_counts(tally: Mapping[str, int]) -> dict[str, int]:
    return {name: tally[name] for name in COMMANDS if tally[name] or name not in OPTIONAL_COMMANDS}


def _result(per_channel: list[Tally], spec: PimSpec, timing: str) -> TimingResult:
    cycles = max(tally["cycles"] for tally in per_channel)
    ahead = [0] * len(per_channel)
    if timing == "strict":
        nREFI, max_ahead = spec.timing["nREFI"], spec.refreshes_ahead
        ahead = [min(max_ahead, tally["last_issue"] // nREFI) for tally in per_channel]
        per_channel = [{**tally, "REF": tally["REF"] + n} for tally, n in zip(per_channel, ahead)]
    totals = {name: sum(tally[name] for tally in per_channel) for name in per_channel[0]}
    busy_cycles = totals["COMP"] * spec.timing.get("nCCDS", 1)
    opened_columns = totals["G_ACT"] * spec.columns_per_row
    return TimingResult(
        cycles=cycles,
        time_ns=cycles * spec.tCK_ns,
        commands=_command_counts(totals),
        timing=timing,
        pim=spec.name,
        utilisation=busy_cycles / (cycles * len(per_channel)) if cycles else 0.0,
        row_utilisation=totals["used_columns"] / opened_columns if opened_columns else 0.0,
        gwrite_bursts=totals["gwrite_bursts"],
        channel_cycles=tuple(tally["cycles"] for tally in per_channel),
        channel_commands=tuple(_command_counts(tally) for tally in per_channel),
        channel_gwrite_bursts=tuple(tally["gwrite_bursts"] for tally in per_channel),
        channel_write_bursts=tuple(tally["write_bursts"] for tally in per_channel),
        violations=totals["violations"] if timing == "strict" else None,
        empty_reads=totals["empty_reads"],
        refreshes_ahead=max(ahead),
    )
