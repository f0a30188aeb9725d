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
class Comparison:
    """Times of a program in pimflow and in Ramulator.

    Attributes
    ----------
    source, name : str
        Where the program comes from, a network or a layer, and its name there.
    gwrite_hiding : bool
    ours, simulated : TimingResult
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
    progress: Callable[[Comparison], None] = lambda _: None,
) -> list[Comparison]:
    """Time every (source, name, program) with pimflow and Ramulator, with and without GWRITE hiding.

    Raises
    ------
    ProfilerError, SpecError
        As `Ramulator`.
    """
    simulators = {hidden: Ramulator(executable, gwrite_hiding=hidden) for hidden in (True, False)}
    found = []
    for source, name, program in programs:
        for hidden, simulator in simulators.items():
            compared = Comparison(
                source=source,
                name=name,
                gwrite_hiding=hidden,
                ours=time_program(program, pim, TIMING, hidden),
                simulated=simulator.time_program(program, pim),
            )
            found.append(compared)
            progress(compared)
    return found


def table(found: Sequence[Comparison]) -> str:
    """Markdown: a row for each source, with and without GWRITE hiding."""
    head = "programs of | GWRITE latency | programs | channels | cycles there | same cycles | same counts"
    lines = [f"| {head} |", "|---|---|---:|---:|---:|---:|---:|"]
    for source, hidden in dict.fromkeys((each.source, each.gwrite_hiding) for each in found):
        rows = [each for each in found if (each.source, each.gwrite_hiding) == (source, hidden)]
        figures = (
            len(rows),
            sum(len(each.simulated.channel_cycles) for each in rows),
            sum(each.simulated.cycles for each in rows),
            sum(each.cycles_agree for each in rows),
            sum(each.counts_agree for each in rows),
        )
        cells = (source, "hidden" if hidden else "not hidden", *map(str, figures))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
