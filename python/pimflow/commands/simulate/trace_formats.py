"""The formats of traces, and the files that each writes of a PIM program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pimflow.core.program import PimProgram
from pimflow.hardware import System
from pimflow.hardware.constraints import OPTIONAL_COMMANDS
from pimflow.placement.costs.pim_runs import PimRun
from pimflow.simulators.exports import aim_isr, perfetto
from pimflow.simulators.pim.expansion import command_counts, pim_text, pim_unsupported_reason
from pimflow.simulators.ramulator import load_store_trace

COMMANDS = ("GWRITE", "G_ACT", "COMP", "READRES", *OPTIONAL_COMMANDS)
Chunks = Iterator[tuple[bytes, int]]


@dataclass(frozen=True, kw_only=True)
class ProgramTrace:
    """A program to write, and the contents of its files.

    Attributes
    ----------
    files : dict of str to Chunks
        By path, chunks of text, each with the part of `total` that it has.
    total : int
        Number of commands, or of output pixels.
    """

    run: PimRun
    files: dict[str, Chunks]
    total: int


def _pimprog(run: PimRun, stem: str, system: System) -> ProgramTrace:
    def chunks() -> Chunks:
        yield run.program.to_json().encode(), 1

    return ProgramTrace(run=run, files={f"{stem}.pimprog": chunks()}, total=1)


def _pim(run: PimRun, stem: str, system: System) -> ProgramTrace:
    def chunks(channel: int) -> Chunks:
        for text in pim_text(run.program, channel):
            yield text, text.count(b"\n")

    channels = range(len(run.program.channels))
    files = {f"{stem}/channel{channel}.pim": chunks(channel) for channel in channels}
    return ProgramTrace(run=run, files=files, total=_commands(run.program))


def _aim(run: PimRun, stem: str, system: System) -> ProgramTrace:
    files = {f"{stem}.aim": aim_isr.export(run.program)}
    return ProgramTrace(run=run, files=files, total=_commands(run.program))


def _ramulator2(run: PimRun, stem: str, system: System) -> ProgramTrace:
    geometry = run.gpu_part or run.program.geometry
    files = {f"{stem}.ldst": load_store_trace.export(geometry, run.program.dtype)}
    return ProgramTrace(run=run, files=files, total=geometry.pixels)


def _perfetto(run: PimRun, stem: str, system: System) -> ProgramTrace:
    files = {f"{stem}.perfetto.json": perfetto.export(run.program, system.pim)}
    return ProgramTrace(run=run, files=files, total=_commands(run.program))


FORMATS = {"pimprog": _pimprog, "pim": _pim, "aim": _aim, "ramulator2": _ramulator2, "perfetto": _perfetto}


# Formats that cannot represent every program: the name in messages, and a function that gives the reason.
UNSUPPORTED_REASONS = {"pim": (".pim", pim_unsupported_reason), "aim": ("AiM", aim_isr.unsupported_reason)}


def _commands(program: PimProgram) -> int:
    counts = command_counts(program)
    return sum(counts[name] for name in COMMANDS)
