"""Runs AiM traces in the public AiM simulator, and compares its times with those of pimflow.

The simulator prints its clock as ``memory_system_cycles: N`` among its statistics. It issues no refresh, so
times are compared without refresh.

Source: github.com/arkhadem/aim_simulator, ``src/main.cpp`` (arguments), ``test/example.yaml`` (the parts of
a configuration) and ``aim_DRAM_system.cpp`` (statistics), read 2026-11.
"""

from __future__ import annotations

import hashlib
import os
import re
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pimflow.core.program import PimProgram
from pimflow.errors import ProfilerError
from pimflow.hardware import PimSpec
from pimflow.simulators.exports.aim_isr import export
from pimflow.simulators.installed import InstalledSimulator
from pimflow.simulators.pim.timing import time_program

TIMEOUT_SECONDS = 3600.0
CONFIG = """\
Frontend: {impl: AiMTrace, clock_ratio: 1, Translation: {impl: NoTranslation, max_addr: 2147483648}}
MemorySystem:
  impl: AiMDRAM
  clock_ratio: 1
  DRAM: {impl: GDDR6, org: {preset: GDDR6_AiM_org}, timing: {preset: GDDR6_AiM_timing}}
  Controller: {impl: AiM, clock_ratio: 1, Scheduler: {impl: FRFCFS}, RefreshManager: {impl: AllBank}}
  AddrMapper: {impl: RoBaRaCoCh}
"""
_CLOCK = re.compile(rb"^\s*memory_system_cycles:\s*(\d+)", re.MULTILINE)
_NEVER_CYCLES = 1 << 40
BEGIN, END = "<!-- aim begin: scripts/compare_aim.py -->", "<!-- aim end -->"


@dataclass(frozen=True, kw_only=True)
class AimComparison:
    """Times of a program in pimflow and in the AiM simulator, both without refresh.

    Attributes
    ----------
    kind, name : str
        What the program computes: a ``layer``, in its fastest loop order, or a ``region`` of a plan.
    instructions : int
        Lines of the trace.
    digest : str
        SHA-256 of the trace.
    """

    kind: str
    name: str
    schedule: str
    channels: int
    instructions: int
    digest: str
    cycles: int
    simulated_cycles: int

    @property
    def error(self) -> float:
        """Relative error: cycles of pimflow over those of the simulator, less 1."""
        return self.cycles / self.simulated_cycles - 1


def disable_refresh(pim: PimSpec) -> PimSpec:
    """The same device, with a refresh interval that no program reaches."""
    return replace(pim, timing=pim.timing | {"nREFI": _NEVER_CYCLES})


def compare(
    executable: str | os.PathLike[str],
    programs: Iterable[tuple[str, str, PimProgram]],
    pim: PimSpec,
    progress: Callable[[AimComparison], None] = lambda _: None,
) -> list[AimComparison]:
    """Time every (kind, name, program) with pimflow and with the AiM simulator.

    Raises
    ------
    UsageError
        If AiM's instructions cannot express a program.
    ProfilerError
        As from `simulate_cycles`.
    """
    path = Path(executable).resolve()
    if not path.is_file() or not os.access(path, os.X_OK):
        raise ProfilerError(f"aim simulator '{executable}': not an executable file")
    spec, comparisons = disable_refresh(pim), []
    for kind, name, program in programs:
        with tempfile.TemporaryDirectory(prefix="pimflow-") as folder:
            trace, digest, lines = Path(folder, "program.aim"), hashlib.sha256(), 0
            with trace.open("wb") as file:
                for text, _ in export(program):
                    file.write(text)
                    digest.update(text)
                    lines += text.count(b"\n")
            comparison = AimComparison(
                kind=kind,
                name=name,
                schedule=str(program.schedule),
                channels=len(program.channels),
                instructions=lines,
                digest=digest.hexdigest(),
                cycles=time_program(program, spec).cycles,
                simulated_cycles=simulate_cycles(path, trace),
            )
        comparisons.append(comparison)
        progress(comparison)
    return comparisons


def simulate_cycles(executable: Path, trace: Path) -> int:
    """Cycles that the AiM simulator takes for a trace.

    Raises
    ------
    ProfilerError
        If it cannot be run, fails, takes longer than an hour, or prints no clock.
    """
    who = f"aim simulator '{executable.name}'"
    config, output = trace.with_name("config.yaml"), trace.with_name("output.txt")
    config.write_text(CONFIG, encoding="ascii")
    command = [str(executable), "-f", str(config), "-t", str(trace)]
    InstalledSimulator(name=who, timeout_seconds=TIMEOUT_SECONDS).run(command, output)
    clock = _CLOCK.search(output.read_bytes())
    if clock is None:
        raise ProfilerError(f"{who}: prints no 'memory_system_cycles'")
    return int(clock[1])


def summary(comparisons: Sequence[AimComparison]) -> dict[str, Any]:
    """By kind: number of traces, and median and largest absolute error, as fractions."""
    kinds: dict[str, list[float]] = {}
    for comparison in comparisons:
        kinds.setdefault(comparison.kind, []).append(abs(comparison.error))
    return {
        kind: {"traces": len(errors), "median": statistics.median(errors), "largest": max(errors)}
        for kind, errors in kinds.items()
    }


def table(comparisons: Sequence[AimComparison]) -> str:
    """Markdown: a summary, and a row for each trace."""
    lines = ["| traces of | count | median error | largest error |", "|---|---:|---:|---:|"]
    lines += [
        f"| {kind}s | {row['traces']} | {row['median']:.2%} | {row['largest']:.2%} |"
        for kind, row in summary(comparisons).items()
    ]
    head = ("trace", "loop order", "cycles here", "in the simulator", "error")
    lines += ["", f"| {' | '.join(head)} |", "|---|---|---:|---:|---:|"]
    lines += [
        f"| {comparison.name} | {comparison.schedule} | {comparison.cycles} | "
        f"{comparison.simulated_cycles} | {comparison.error:+.1%} |"
        for comparison in comparisons
    ]
    return "\n".join(lines)


def replace_table(page: str, comparisons: Sequence[AimComparison]) -> str:
    """`page` with the table between its marks replaced; raises `ProfilerError` if it has no such marks."""
    if BEGIN not in page or END not in page:
        raise ProfilerError(f"the page has no marks {BEGIN} and {END}")
    before, rest = page.split(BEGIN, 1)
    return f"{before}{BEGIN}\n{table(comparisons)}\n{END}{rest.split(END, 1)[1]}"
