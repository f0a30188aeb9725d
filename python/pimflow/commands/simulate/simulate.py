"""Simulate a single PIM program or trace: cycles and energy."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from pimflow.commands.shared.arguments import public
from pimflow.compiler import artifact
from pimflow.core.frames import Tabular
from pimflow.core.json_form import JsonTree, report_from
from pimflow.core.program import PimProgram
from pimflow.errors import UsageError
from pimflow.hardware import PimSpec, spec_names
from pimflow.simulators.pim.coverage import ProductCoverage, program_coverage
from pimflow.simulators.pim.energy import CommandCounts, channel_energies_pj, total_energy_pj
from pimflow.simulators.pim.expansion import command_counts
from pimflow.simulators.pim.legality import first_violations, program_violations, trace_violations
from pimflow.simulators.pim.store_coverage import StoreCoverage
from pimflow.simulators.pim.timing import TimingResult, check_device
from pimflow.simulators.profiler import BuiltIn, PimProfiler

# The checker needs some 300 bytes for each command: 1.2 GB for a channel of this length.
MAX_CHECKED_COMMANDS = 4_000_000
MAX_VIOLATIONS = 5
TRACE_DEVICE = "newton-gddr6"  # the device that the authors' fork, which reads .pim traces, models


@public()
def simulate(
    path: str | os.PathLike[str],
    pim: str | os.PathLike[str] | PimSpec | None = None,
    *,
    timing: str = "strict",
    gwrite_hiding: bool = True,
    profiler: PimProfiler | None = None,
    progress: Callable[[float], None] = lambda _: None,
) -> TimingResult:
    """Cycles of a ``.pim`` trace or a ``.pimprog`` program.

    Parameters
    ----------
    pim : str, path or PimSpec, optional
        Device; by default the one that `default_device` finds for the file.
    timing, gwrite_hiding
        Options of the engines (`timing.time_program`); without effect if there is a `profiler`.
    profiler : PimProfiler, optional
        Times the file in place of the engines.
    progress : callable
        Called now and then with the share of a trace that is done, in [0, 1].

    Returns
    -------
    TimingResult
        `violations` is the number that the independent checker finds in a program, or the number of COMPs of
        a trace on rows that are not open. It is None under the published timing, which is not legal, under a
        `profiler`, and for a program with a channel of more than `MAX_CHECKED_COMMANDS` commands.

    Raises
    ------
    TraceError, UnknownNameError, SpecError, UsageError, ProfilerError
        For a malformed file, an unknown device or timing, a device that does not fit the program, a
        file of another kind, or a profiler that fails.
    """
    spec, path = _device(path, pim), Path(path)
    is_checked = profiler is None and timing == "strict"
    profiler = profiler or BuiltIn(timing, gwrite_hiding)
    if path.suffix == ".pimprog":
        program = PimProgram.load(path)
        check_device(program, spec)
        result = profiler.time_program(program, spec)
        longest = max(sum(commands.values()) for commands in result.channel_commands)
        is_checked = is_checked and longest <= MAX_CHECKED_COMMANDS
        return replace(result, violations=program_violations(program, spec) if is_checked else None)
    if path.suffix != ".pim":
        inside = "a directory; give a program in it, of 'programs'" if path.is_dir() else ""
        raise UsageError(f"{path}: {inside or 'neither a .pim trace nor a .pimprog program'}")
    return profiler.time_trace(path, spec, progress)


def default_device(path: str | os.PathLike[str]) -> PimSpec:
    """The default device of a file.

    It is the device of the compiled directory that has the file; of another program, the device of its name
    in the catalogue; of another trace, which names no device, `TRACE_DEVICE`.

    Raises
    ------
    UsageError
        If a program was lowered for another device.
    TraceError, ArtifactError
        For a malformed program or a damaged directory.
    """
    path = Path(path)
    directory = artifact.enclosing_directory(path)
    stored = artifact.load_device(directory) if directory else None
    if path.suffix != ".pimprog":
        return stored or PimSpec.load(TRACE_DEVICE)
    program = PimProgram.load(path)
    if stored is None and program.pim not in spec_names("pim"):
        raise UsageError(f"{path} was lowered for pim '{program.pim}'; give the file of that as --pim")
    spec = stored or PimSpec.load(program.pim)
    if not spec.is_target_of(program):
        whose = f"that of {directory}" if directory else "the catalogue's"
        raise UsageError(
            f"{path} was lowered for another pim '{program.pim}' than {whose}; give the file of it as --pim"
        )
    return spec


def _device(path: str | os.PathLike[str], pim: str | os.PathLike[str] | PimSpec | None) -> PimSpec:
    if pim is None:
        return default_device(path)
    return pim if isinstance(pim, PimSpec) else PimSpec.load(pim)


@dataclass(frozen=True, kw_only=True)
class ChannelReport:
    """Cycles, commands by name, and energy by consumer of a channel."""

    cycles: int
    commands: dict[str, int]
    energy_pj: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class SimulationReport(JsonTree, Tabular, rows="channels"):
    """The result of a simulation, in total and by channel.

    Attributes
    ----------
    utilisation, row_utilisation : float
        Shares of the time in which multipliers work, and of used columns in opened rows; None if unknown.
    timing_violations : int or None
        None if they were not checked.
    first_violations : tuple of str
        The first ones, each with rule, command and clock.
    added : dict of str to int, or None
        Of `commands`, those that the device issues beside the program's: PRE, REF, and G_ACTs that open rows
        again after a refresh. None for a trace.
    energy_pj : dict of str to float
        By consumer.
    empty_reads : int
        READRES of a latch without a sum.
    refreshes_ahead : int
        Largest number of refreshes of a channel before the program: they are in `commands`, not in `cycles`.
    products : ProductCoverage, StoreCoverage or None
        Products of its layer that the program computes; None if unknown.
    """

    cycles: int
    time_ns: float
    commands: dict[str, int]
    timing: str
    pim: str
    utilisation: float
    row_utilisation: float | None
    timing_violations: int | None
    first_violations: tuple[str, ...]
    added: dict[str, int] | None
    refreshes_ahead: int
    energy_pj: dict[str, float]
    empty_reads: int
    products: ProductCoverage | StoreCoverage | None
    channels: tuple[ChannelReport, ...]

    def _device_command_lines(self) -> list[str]:
        """A line about commands that the device adds, which `pimflow trace` does not count."""
        if not self.added or not any(self.added.values()):
            return []
        texts = {name: f"{count} {name}" for name, count in self.added.items() if count}
        if "G_ACT" in texts:
            texts["G_ACT"] += " that open rows again after a refresh"
        return [f"  of these the device adds {', '.join(texts.values())}; the others are the program's"]

    def _early_refresh_lines(self) -> list[str]:
        if not self.refreshes_ahead:
            return []
        return [f"  up to {self.refreshes_ahead} REF of a channel come before the program, not in the cycles"]

    def text(self) -> str:
        """The report as text."""
        counts = ", ".join(f"{count} {name}" for name, count in self.commands.items())
        total_pj = sum(self.energy_pj.values())
        parts = ", ".join(f"{name} {100 * pj / total_pj:.1f} %" for name, pj in self.energy_pj.items() if pj)
        lines = [
            f"{self.cycles} cycles, {self.time_ns / 1e3:.3f} us on {self.pim} ({self.timing})",
            f"{counts}; multipliers busy {100 * self.utilisation:.1f} %",
            *self._device_command_lines(),
            *self._early_refresh_lines(),
            f"{total_pj / 1e6:.3f} uJ{': ' * bool(parts)}{parts}",
        ]
        if self.row_utilisation is not None:
            lines.append(f"{100 * self.row_utilisation:.1f} % of the columns of opened rows used")
        if self.timing_violations is not None:
            lines.append(f"{self.timing_violations} timing violations")
            lines += [f"  {violation}" for violation in self.first_violations]
        elif self.timing == "strict":
            lines.append(f"legality not checked: a channel has more than {MAX_CHECKED_COMMANDS} commands")
        else:
            lines.append("legality not checked: the published timing has no precharge")
        if self.products is not None:
            lines.append(str(self.products))
        return "\n".join(lines)


def simulation_report(
    path: str | os.PathLike[str], result: TimingResult, pim: str | os.PathLike[str] | PimSpec | None = None
) -> SimulationReport:
    """The report of a result of `simulate`, with energy, first violations, and products of a program.

    Energy under the published timing is the sum that the authors' fork prints; otherwise it has all terms of
    the device's file, and static power of the channels. A ``.pim`` trace has no storage type: the first of
    the device is taken.
    """
    spec, path = _device(path, pim), Path(path)
    dtype, bursts, banks, products, added = spec.dtypes[0], 1, None, None, None
    first: list[str] = []
    if path.suffix == ".pimprog":
        program = PimProgram.load(path)
        dtype, bursts, banks = program.dtype, program.readres_bursts, program.tile_banks // program.lanes
        products = program_coverage(program)
        program_counts = command_counts(program)
        added = {name: count - program_counts[name] for name, count in result.commands.items()}
        if result.violations:
            first = first_violations(program, spec, MAX_VIOLATIONS)
    elif result.violations:
        first = trace_violations(path, spec, MAX_VIOLATIONS)
    channel_counts = [
        CommandCounts(
            commands=commands,
            gwrite_bursts=gwrite_bursts,
            write_bursts=write_bursts,
            readres_bursts=bursts,
            banks=banks,
        )
        for commands, gwrite_bursts, write_bursts in zip(
            result.channel_commands, result.channel_gwrite_bursts, result.channel_write_bursts, strict=True
        )
    ]
    mode = "full" if result.timing == "strict" else "ramulator-pimflow"
    channels_pj = channel_energies_pj(channel_counts, spec, dtype, time_ns=result.time_ns, mode=mode)
    channels = zip(result.channel_cycles, result.channel_commands, channels_pj)
    return report_from(
        SimulationReport,
        result,
        timing_violations=result.violations,
        first_violations=tuple(first),
        added=added,
        energy_pj=dict(total_energy_pj(channels_pj)),
        products=products,
        channels=tuple(
            ChannelReport(cycles=cycles, commands=dict(commands), energy_pj=dict(pj))
            for cycles, commands, pj in channels
        ),
    )
