"""Compile a network: prepare, search, select, build, verify, report, write."""

from __future__ import annotations

import html
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pimflow.api import channel_counts
from pimflow.api import compile_steps as steps
from pimflow.api import trace as tracing
from pimflow.api.arguments import public
from pimflow.api.conventions import ALL, ConventionGain, ConventionSearch, convention_names, with_gains
from pimflow.api.options import PlanKeywords, as_system
from pimflow.api.report import Report
from pimflow.api.report_text import summary
from pimflow.api.search import Question
from pimflow.compiler.artifact import WrittenDirectory
from pimflow.compiler.build import Build
from pimflow.compiler.verification import Verification
from pimflow.core.plan import Plan
from pimflow.core.program import PimProgram
from pimflow.decomposition.calibration import Data
from pimflow.errors import UsageError
from pimflow.hardware import System
from pimflow.placement import Searched

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pimflow.frontend import Model

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A compiled and verified network.

    Attributes
    ----------
    searched : Searched
        The plan and what it rests on.
    builds : tuple of Build
        For the target asked for, and for the CPU that stands in for a GPU.
    programs : dict of str to PimProgram
        By region.
    verification : Verification
        Of the target asked for where its device is there, else of the stand-in.
    report : Report
        The contents of ``report.json``, which `Report.to_json` gives.
    convention_search : ConventionSearch
        See `with_conventions`.
    directory : WrittenDirectory, optional
        Where it was written.
    """

    searched: Searched
    builds: tuple[Build, ...]
    programs: dict[str, PimProgram]
    verification: Verification
    report: Report
    convention_search: ConventionSearch
    directory: WrittenDirectory | None

    @property
    def plan(self) -> Plan:
        return self.searched.plan

    def with_conventions(
        self, conventions: str | Sequence[str] = ALL, progress: Progress = lambda _: None
    ) -> Compiled:
        """The same with speed-ups under other conventions in its report, and in that of its directory.

        Parameters
        ----------
        conventions : str or sequence of str
            See `compile`; those that the report has are not searched again.

        Raises
        ------
        KeyboardInterrupt
            If a signal says so. What was found until then is in the directory, which is whole.
        """
        base = self.searched.system
        names = [
            name for name in convention_names(conventions, base) if name in self.report.conventions_missing
        ]
        if not names:
            return self
        begin, gains = time.perf_counter(), dict[str, ConventionGain]()
        progress("searching under other conventions")
        try:
            for name in names:
                gains[name] = self.convention_search.gain(name)
        except KeyboardInterrupt:
            if self.directory is None:
                raise
            self._with_gains(gains, begin)
            missing = ", ".join(name for name in names if name not in gains)
            raise KeyboardInterrupt(
                f"{self.directory.path} is whole, and its report lacks {missing}"
            ) from None
        return self._with_gains(gains, begin)

    def _with_gains(self, gains: Mapping[str, ConventionGain], begin: float) -> Compiled:
        seconds = self.report.wall_seconds + time.perf_counter() - begin
        report = with_gains(replace(self.report, wall_seconds=seconds), self.searched.system, gains)
        if self.directory is not None:
            self.directory.replace_report(report.to_json())
        return replace(self, report=report)

    def __repr__(self) -> str:
        """In a line: networks and programs are long."""
        return f"Compiled({self.report!r})"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return f"<pre>{html.escape(summary(self.report, None))}</pre>"


# The signature and what it says of each argument take the most of its lines.
@public(PlanKeywords)
def compile(
    model: Model,
    out: str | os.PathLike[str] | None = None,
    *,
    target_system: System | None = None,
    pim_channels: str | None = None,
    calibration: Data | None = None,
    inputs: Mapping[str, np.ndarray] | None = None,
    tolerance: float | None = None,
    pareto: int | None = None,
    conventions: str | Sequence[str] = ALL,
    emit_traces: bool = False,
    force: bool = False,
    progress: Progress = lambda _: None,
    **question: Unpack[PlanKeywords],
) -> Compiled:
    """Search, rewrite, generate code, run, verify, and write a compiled directory.

    Parameters
    ----------
    model, target_system, plan, options, goal, profiling, **question
        See `api.search.search`. If layers are decomposed, outputs are verified against those of the
        decomposed network; the report says how far these are from the original's, and which layers stay.
    out : path, optional
        Directory to write; nothing is written if None.
    pim_channels : str, optional
        ``auto``: as many channels have PIM as are best for the network (`choose_channels`), whatever
        `target_system` says. The report has what each number gives.
    target : str
        ``llvm+pim``: the CPU stands in for the GPU. ``cuda+pim``: CUDA kernels too; they run, and are
        verified and timed, where a CUDA device is. ``c``: everything on the CPU, as C for any compiler, too;
        built, verified and timed where there is a compiler.
    select : SelectionOptions, or mapping of str to its fields, optional
        Such as ``{"profile": "measured"}``: each convolution that stays on the CPU standing in for a GPU is
        computed by the primitive chosen for it; with target ``c``, each in the C code, by times of C on this
        machine unless the options say others. With ``{"device": "cuda"}`` and target ``cuda+pim``, in fp32,
        primitives for the GPU are candidates of the plan beside all others, by its times, and
        ``memory_budget_bytes`` bounds its memory.
    calibration : path, or mapping of str to ndarray, optional
        With `decompose`: samples on which the decomposed network is compared with the original
        (`calibration.Calibration.read`); the report says how often they agree.
    inputs : mapping of str to ndarray, optional
        What verification runs on; drawn by `zoo.example_arrays` by default.
    tolerance : float, optional
        How far outputs may be from the reference, as a fraction of its largest value. By default 2e-3 for
        fp16 and 1e-5 for fp32, or, if an output is beyond that, twice what roundings move the reference
        (`conditioning`). PIM regions are held to their own rounding bound whatever it is.
    pareto : int, optional
        Search so many further plans, of which none is as good as another in latency, energy and memory
        (`api.pareto.pareto`). The report has them, and the directory their files.
    conventions : str or sequence of str
        Under which other conventions than the system's the network is searched too, once it is verified and
        written: ``all``, ``none``, or names such as ``pim-launch=0`` (docs/conventions.md), also in one text
        with commas. Each takes some seconds at most. The report has their speed-ups; interrupted, the
        directory is whole, and its report says which are missing (`Compiled.with_conventions`).
    emit_traces : bool
        Whether to write ``.pim`` traces too: one a region and channel, and large.
    force : bool
        Whether other files may lie in `out`, which stay, and files that were changed, which are replaced.
    progress : callable
        Told what is being done.

    Raises
    ------
    PimflowError
        Each kind as its class says: `UsageError` for an unknown keyword, a value of another type or an option
        that would have no effect; `VerificationError` if the result is wrong; then nothing is written.
    """
    begin = time.perf_counter()
    convention_names(conventions, as_system(target_system))  # refused before the work
    choice = None
    if pim_channels:
        choice = _channels(model, target_system, progress, question)
        target_system = choice.system
    asked_for = Question.of(target_system, **question)
    job = steps.Job(
        **vars(asked_for),
        tolerance=tolerance,
        pareto=pareto,
        emit_traces=emit_traces,
        out=out,
        force=force,
        progress=progress,
    )
    job = steps.checked(job, calibration)
    prepared, reference = steps.prepared(job, model, inputs, calibration)
    placed = steps.placed(job, prepared)
    points = steps.front(job, model, prepared, placed)
    selection = steps.selected(job, prepared)
    made = steps.built(job, prepared.network, placed.searched, selection, reference)
    verification = steps.verified(job, prepared.network, made, reference)
    selection = steps.with_kernel_times(job, selection, made.builds[-1], reference)
    changes = steps.changes(job, prepared, placed, reference, selection, made, points)
    report = steps.reported(placed, made, verification, reference, changes, begin)
    if choice is not None:
        report = replace(report, channel_counts=choice.counts)
    programs = placed.searched.programs()
    convention_search = steps.convention_search(job, prepared, placed)
    del prepared  # its weights are in the builds: linking them needs the memory
    directory = None
    if out is not None:
        traced = tracing.traceable(programs, progress) if emit_traces else ()
        progress("writing")
        interface = steps.interface(job, reference, made)
        directory = steps.written(
            job, placed.searched, made, verification, interface, report, programs, traced, points
        )
    compiled = Compiled(
        searched=placed.searched,
        builds=made.builds,
        programs=programs,
        verification=verification,
        report=report,
        convention_search=convention_search,
        directory=directory,
    )
    return compiled.with_conventions(conventions, progress)


def _channels(
    model: Model, target_system: System | None, progress: Progress, question: Mapping[str, Any]
) -> channel_counts.ChannelChoice:
    if question.get("plan") is not None:
        raise UsageError("--pim-channels auto searches plans, and one is given; give a number of channels")
    others = {name: value for name, value in question.items() if name != "plan"}
    return channel_counts.choose_channels(model, target_system, progress=progress, **others)
