"""Runs load/store traces in an installed Ramulator 2, to check that it reads them completely.

It prints its requests and its clock among its statistics, as ``total_num_read_requests: N`` and so on. The
memory is DDR4, whose requests have 64 bytes, like the lines of a trace. It stops when the last request is in
flight.

Source: CMU-SAFARI/ramulator2, branch legacy/v2.0a: ``src/main.cpp`` (arguments),
``src/frontend/impl/memory_trace/loadstore_trace.cpp`` (the frontend), ``example_config.yaml``, read 2026-11.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pimflow.errors import ProfilerError
from pimflow.simulators.installed import InstalledSimulator
from pimflow.simulators.ramulator.load_store_trace import counts

TIMEOUT_SECONDS = 3600.0
CONFIG = """\
Frontend: {impl: LoadStoreTrace, clock_ratio: 1, path: trace.ldst}
MemorySystem:
  impl: GenericDRAM
  clock_ratio: 1
  DRAM: {impl: DDR4, org: {preset: DDR4_8Gb_x8, channel: 1, rank: 2}, timing: {preset: DDR4_2400R}}
  Controller:
    impl: Generic
    Scheduler: {impl: FRFCFS}
    RefreshManager: {impl: AllBank}
    RowPolicy: {impl: OpenRowPolicy}
  AddrMapper: {impl: RoBaRaCoCh}
"""
BURST_CYCLES = 4  # of DDR4: a request is a burst of 8
PRINTED = ("total_num_read_requests", "total_num_write_requests", "memory_system_cycles")


@dataclass(frozen=True, kw_only=True)
class Ramulator2Run:
    """A trace, and the statistics of Ramulator 2 for it."""

    name: str
    loads: int
    stores: int
    reads: int
    writes: int
    cycles: int

    @property
    def agrees(self) -> bool:
        """Whether every line became a request."""
        return (self.loads, self.stores) == (self.reads, self.writes)

    @property
    def bus_share(self) -> float:
        """Share of cycles in which the bus moves data."""
        return (self.reads + self.writes) * BURST_CYCLES / self.cycles


def simulate(executable: str | os.PathLike[str], name: str, trace: Path) -> Ramulator2Run:
    """Run Ramulator 2 on the file `trace`.

    Raises
    ------
    ProfilerError
        If Ramulator cannot be run, fails, takes longer than an hour, or does not print its statistics.
    TraceError
        If the file is not a load/store trace.
    """
    path, who = Path(executable).resolve(), f"ramulator2 '{executable}'"
    if not path.is_file() or not os.access(path, os.X_OK):
        raise ProfilerError(f"{who}: not an executable file")
    lines = counts(trace)
    with tempfile.TemporaryDirectory(prefix="pimflow-") as folder:
        config, output = Path(folder, "config.yaml"), Path(folder, "output.txt")
        config.write_text(CONFIG, encoding="ascii")
        Path(folder, "trace.ldst").symlink_to(trace.resolve())
        simulator = InstalledSimulator(name=who, timeout_seconds=TIMEOUT_SECONDS)
        simulator.run([str(path), "-f", str(config)], output)
        reads, writes, cycles = parse_output(output.read_text(encoding="utf-8", errors="replace"), who)
    return Ramulator2Run(
        name=name, loads=lines["LD"], stores=lines["ST"], reads=reads, writes=writes, cycles=cycles
    )


def parse_output(text: str, who: str = "ramulator2") -> tuple[int, ...]:
    """Reads, writes and cycles from the output of Ramulator 2.

    Raises
    ------
    ProfilerError
        If one is missing, or there is no clock.
    """
    values = []
    for name in PRINTED:
        match = re.search(rf"^\s*{name}:\s*([0-9]{{1,18}})\s*$", text, re.MULTILINE)
        if match is None:
            raise ProfilerError(f"{who}: it printed no line '{name}: <number>'; is it Ramulator 2?")
        values.append(int(match[1]))
    if not values[-1]:
        raise ProfilerError(f"{who}: it printed 0 cycles")
    return tuple(values)


def traffic_table(runs: Sequence[Ramulator2Run]) -> str:
    """Markdown: a row for each trace."""
    head = "trace | LD | ST | reads there | writes there | cycles there | bus busy"
    lines = [f"| {head} |", "|---|---:|---:|---:|---:|---:|---:|"]
    for run in runs:
        counted = (run.loads, run.stores, run.reads, run.writes, run.cycles)
        lines.append(f"| `{run.name}` | {' | '.join(map(str, counted))} | {run.bus_share:.0%} |")
    return "\n".join(lines)
