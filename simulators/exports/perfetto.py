"""A timeline of all commands of a PIM program as JSON, for Perfetto and Chrome's tracing.

The commands are those that ``strict`` issues, including PRE, REF and G_ACTs that reopen rows. A process is a
channel; its threads are the bus (GWRITE, WRITE, WRBIAS, READRES), every gang (G_ACT for as long as its row is
open, PRE, REF) and the multipliers (COMP, AF). A command lasts as long as the gap that the device file
requires until the next of its kind on that thread. Timestamps are in microseconds, as the format requires,
with picosecond resolution.

Source of the format: "Trace Event Format", complete (``X``) and metadata (``M``) events.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np

from pimflow.core.program import PimProgram
from pimflow.hardware.pim import COMMANDS, PimSpec
from pimflow.simulators.pim.timing import issue_program

BUS, FIRST_GANG = 1, 2
_PS_PER_US = 10**6
_CHUNK_COMMANDS = 1 << 12


def export(program: PimProgram, pim: PimSpec) -> Iterator[tuple[bytes, int]]:
    """The text, in chunks, each with its number of commands.

    The issued commands of one channel are held in memory, 56 bytes each.

    Raises
    ------
    TraceError, SpecError
        As `timing.issue_program`.
    """
    about = {"region": program.region, "pim": pim.name, "tCK_ps": pim.tCK_ps, "timing": "strict"}
    yield f'{{"displayTimeUnit": "ns", "otherData": {json.dumps(about)}, "traceEvents": [\n'.encode(), 0
    for channel in range(len(program.channels)):
        names = _metadata(program, channel)
        yield ("" if channel == 0 else ",\n").encode() + ",\n".join(names).encode(), 0
        tracks = _Tracks(pim, channel)
        stream = issue_program(program, pim, channel)
        for first in range(0, len(stream), _CHUNK_COMMANDS):
            part = stream[first : first + _CHUNK_COMMANDS]
            yield _event_text(tracks.events(part)), len(part)
        yield _event_text(tracks.close()), 0
    yield b"\n]}\n", 0


def _metadata(program: PimProgram, channel: int) -> list[str]:
    gangs = {FIRST_GANG + gang: f"gang {gang}" for gang in range(program.gangs)}
    threads = {BUS: "bus", **gangs, FIRST_GANG + program.gangs: "multipliers"}
    rows = [("process_name", 0, f"channel {channel}")]
    rows += [("thread_name", thread, name) for thread, name in threads.items()]
    return [
        json.dumps({"ph": "M", "name": record, "pid": channel, "tid": thread, "args": {"name": name}})
        for record, thread, name in rows
    ]


def _event_text(events: list[str]) -> bytes:
    return "".join(f",\n{event}" for event in events).encode()


class _Tracks:
    """The threads of one channel; makes events of its commands, in order."""

    def __init__(self, pim: PimSpec, channel: int):
        self.pim, self.channel = pim, channel
        self.open_rows: dict[int, tuple[int, int]] = {}  # gang to the clock of its G_ACT, and the row
        self.end = 0
        self.bus_cycles = {name: _gap(pim, name, name) for name in ("GWRITE", "READRES", "WRITE", "WRBIAS")}
        self.comp, self.af = _gap(pim, "COMP", "COMP")[0], _gap(pim, "AF", "AF")[0]
        self.pre, self.ref = _gap(pim, "PRE", "G_ACT")[0], _gap(pim, "REF", "G_ACT")[0]

    def events(self, part: np.ndarray) -> list[str]:
        """Events of the next commands of the channel."""
        comps = part["command"] == COMMANDS.index("COMP")
        texts = self._comps(part[comps])
        for clock, command, gang, buffer, row, _, bursts in part[~comps].tolist():
            name = COMMANDS[command]
            if name in self.bus_cycles:
                first, burst = self.bus_cycles[name]
                place = f'"gang": {gang}, "row": {row}' if name == "WRITE" else f'"buffer": {buffer}'
                arguments = f'{place}, "bursts": {bursts}'
                texts.append(self._event(name, BUS, clock, first + burst * (bursts - 1), arguments))
            elif name == "G_ACT":
                texts += self._close(gang, clock)
                self.open_rows[gang] = clock, row
            elif name == "AF":
                arguments = f'"buffer": {buffer}, "row": {row}'
                texts.append(self._event(name, FIRST_GANG + self.pim.gangs, clock, self.af, arguments))
            else:
                for closing_gang in range(self.pim.gangs) if name == "REF" else [gang]:
                    texts += self._close(closing_gang, clock)
                    duration = self.ref if name == "REF" else self.pre
                    texts.append(
                        self._event(
                            name, FIRST_GANG + closing_gang, clock, duration, f'"gang": {closing_gang}'
                        )
                    )
        return texts

    def close(self) -> list[str]:
        """Events of the rows that are open at the end."""
        return [event for gang in sorted(self.open_rows) for event in self._close(gang, self.end)]

    def _comps(self, part: np.ndarray) -> list[str]:
        """Events of COMPs, which are nearly all commands: their clocks are converted at once."""
        start, end = (
            np.rint(t * self.pim.tCK_ps).astype(int) for t in (part["clock"], part["clock"] + self.comp)
        )
        self.end = max(self.end, int(part["clock"].max(initial=-self.comp)) + self.comp)
        numbers = (
            *np.divmod(start, _PS_PER_US),
            *np.divmod(end - start, _PS_PER_US),
            *(part[name] for name in ("clock", "buffer", "row", "column")),
        )
        form = (
            f'{{"ph": "X", "name": "COMP", "pid": {self.channel}, "tid": {FIRST_GANG + self.pim.gangs}, '
            '"ts": %d.%06d, "dur": %d.%06d, '
            '"args": {"clock": %d, "buffer": %d, "row": %d, "column": %d}}'
        )
        return [form % values for values in zip(*(n.tolist() for n in numbers))]

    def _close(self, gang: int, clock: int) -> list[str]:
        if gang not in self.open_rows:
            return []
        opened, row = self.open_rows.pop(gang)
        arguments = f'"gang": {gang}, "row": {row}'
        return [self._event("G_ACT", FIRST_GANG + gang, opened, max(1, clock - opened), arguments)]

    def _event(self, name: str, thread: int, clock: int, cycles: int, arguments: str) -> str:
        self.end = max(self.end, clock + cycles)
        start, end = (round(t * self.pim.tCK_ps) for t in (clock, clock + cycles))
        return (
            f'{{"ph": "X", "name": "{name}", "pid": {self.channel}, "tid": {thread}, "ts": {_us(start)}, '
            f'"dur": {_us(end - start)}, "args": {{"clock": {clock}, {arguments}}}}}'
        )


def _us(ps: int) -> str:
    return f"{ps // _PS_PER_US}.{ps % _PS_PER_US:06d}"


def _gap(pim: PimSpec, before: str, after: str) -> tuple[int, int]:
    """Cycles that must lie between two commands, and further cycles for each burst beyond the first."""
    rules = [rule for rule in pim.constraints if before in rule.before and after in rule.after]
    gaps = [(pim.timing[r.latency], pim.timing[r.per_burst] if r.per_burst else 0) for r in rules]
    return max(gaps, default=(1, 0))
