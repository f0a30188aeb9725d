"""Compares an installed Ramulator (PIMFlow fork) with the built-in timing of the same rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pimflow.core.program import PimProgram
from pimflow.hardware import PimSpec
from pimflow.simulators.pim.timing import TimingResult, time_program
from pimflow.simulators.ramulator.fork import Ramulator

TIMING = "ramulator-pimflow"


@dataclass(frozen=True, kw_only=True)
class RamulatorComparison:
    """Times of a program in pimflow and in Ramulator.

    Attributes
    ----------
    source, name : str
        Where the program comes from, a network or a layer, and its name there.
    """

    source: str
    name: str
    gwrite_hiding: bool
    ours: TimingResult
    simulated: TimingResult

    @property
    def cycles_agree(self) -> bool:
        """Whether the cycles of every channel are equal."""
        return self.ours.channel_cycles == self.simulated.channel_cycles

    @property
    def counts_agree(self) -> bool:
        """Whether all command counts of every channel are equal, refreshes and precharges included."""
        return self.ours.channel_commands == self.simulated.channel_commands


def compare(
    executable: str,
    programs: Iterable[tuple[str, str, PimProgram]],
    pim: PimSpec,
    progress: Callable[[RamulatorComparison], None] = lambda _: None,
) -> list[RamulatorComparison]:
    """Time every (source, name, program) with pimflow and Ramulator, with and without GWRITE hiding.

    Raises
    ------
    ProfilerError, SpecError
        As `Ramulator`.
    """
    simulators = {
        gwrite_hiding: Ramulator(executable, gwrite_hiding=gwrite_hiding) for gwrite_hiding in (True, False)
    }
    comparisons = []
    for source, name, program in programs:
        for gwrite_hiding, simulator in simulators.items():
            comparison = RamulatorComparison(
                source=source,
                name=name,
                gwrite_hiding=gwrite_hiding,
                ours=time_program(program, pim, TIMING, gwrite_hiding),
                simulated=simulator.time_program(program, pim),
            )
            comparisons.append(comparison)
            progress(comparison)
    return comparisons


def table(comparisons: Sequence[RamulatorComparison]) -> str:
    """Markdown: a row for each source, with and without GWRITE hiding."""
    head = "programs of | GWRITE latency | programs | channels | cycles there | same cycles | same counts"
    lines = [f"| {head} |", "|---|---|---:|---:|---:|---:|---:|"]
    for source, gwrite_hiding in dict.fromkeys(
        (comparison.source, comparison.gwrite_hiding) for comparison in comparisons
    ):
        rows = [
            comparison
            for comparison in comparisons
            if (comparison.source, comparison.gwrite_hiding) == (source, gwrite_hiding)
        ]
        figures = (
            len(rows),
            sum(len(comparison.simulated.channel_cycles) for comparison in rows),
            sum(comparison.simulated.cycles for comparison in rows),
            sum(comparison.cycles_agree for comparison in rows),
            sum(comparison.counts_agree for comparison in rows),
        )
        cells = (source, "hidden" if gwrite_hiding else "not hidden", *map(str, figures))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
