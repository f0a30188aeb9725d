"""Compares an installed Ramulator (PIMFlow fork) with the built-in timing of the same rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pimflow.commands.simulate.comparison import ProgramTimes, program_times
from pimflow.core.program import PimProgram
from pimflow.hardware import PimSpec
from pimflow.simulators.ramulator.fork import Ramulator


def compare(
    executable: str,
    programs: Iterable[tuple[str, str, PimProgram]],
    pim: PimSpec,
    progress: Callable[[ProgramTimes], None] = lambda _: None,
) -> list[ProgramTimes]:
    """Time every (source, name, program) with pimflow and Ramulator, with and without GWRITE hiding.

    Raises
    ------
    ProfilerError, SpecError
        As `Ramulator`.
    """
    simulators = [Ramulator(executable, gwrite_hiding=gwrite_hiding) for gwrite_hiding in (True, False)]
    comparisons: list[ProgramTimes] = []
    for program in programs:
        for simulator in simulators:
            comparisons += program_times([program], pim, simulator)
            progress(comparisons[-1])
    return comparisons


def table(comparisons: Sequence[ProgramTimes]) -> str:
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
