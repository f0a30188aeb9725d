"""Compile a network: prepare, search, select, build, verify, report, write."""

from __future__ import annotations

import functools
import html
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pimflow.commands.compile import compile_results, system_choices
from pimflow.commands.compile import compile_steps as steps
from pimflow.commands.compile.conventions import (
    ConventionGain,
    ConventionSearch,
    convention_names,
    with_gains,
)
from pimflow.commands.compile.options import ALL, CompileOptions
from pimflow.commands.compile.torch_call import Example, ModuleCall
from pimflow.commands.shared.arguments import public
from pimflow.commands.shared.inputs import network_keywords
from pimflow.commands.shared.report import Report
from pimflow.commands.shared.report_text import summary
from pimflow.commands.shared.search import SearchRequest
from pimflow.commands.shared.search_arguments import SEARCH, as_system
from pimflow.compiler import artifact, ir_dump
from pimflow.compiler.artifact import WrittenDirectory
from pimflow.compiler.build import Build
from pimflow.compiler.kernel_checks.check import require_kernels
from pimflow.compiler.verification import Verification
from pimflow.core.plan import Plan
from pimflow.core.program import PimProgram
from pimflow.errors import UsageError
from pimflow.hardware import System
from pimflow.placement import SearchResult
from pimflow.report_page.page import render_page

if TYPE_CHECKING:
    from pimflow.frontend import Model

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A compiled and verified network.

    Attributes
    ----------
    search_result : SearchResult
        The plan, with the region graph, candidates and costs that it was chosen from.
    builds : tuple of Build
        For the requested target, and for the CPU that stands in for a GPU.
    programs : dict of str to PimProgram
        By region.
    verification : Verification
        Of the requested target if its device is present, else of the stand-in.
    report : Report
        The contents of ``report.json``, which `Report.to_json` gives.
    """

    search_result: SearchResult
    builds: tuple[Build, ...]
    programs: dict[str, PimProgram]
    verification: Verification
    report: Report
    convention_search: ConventionSearch
    module_call: ModuleCall
    directory: WrittenDirectory | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a network that came from PyTorch, with the arguments and results of its module.

        See `ModuleCall`, which says what is raised.
        """
        return self.module_call(*args, **kwargs)

    @property
    def plan(self) -> Plan:
        """The plan that was compiled."""
        return self.search_result.plan

    def with_conventions(
        self, conventions: str | Sequence[str] = ALL, progress: Progress = lambda _: None
    ) -> Compiled:
        """Return a copy whose report has speed-ups under other conventions; its directory's report too.

        Parameters
        ----------
        conventions : str or sequence of str
            See `compile`. Conventions that the report has already are not searched again.

        Raises
        ------
        KeyboardInterrupt
            On an interrupt. The directory is complete, and its report has the conventions searched so far.
        """
        base = self.search_result.system
        names = [
            name for name in convention_names(conventions, base) if name in self.report.conventions.missing
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
        report = with_gains(replace(self.report, wall_seconds=seconds), self.search_result.system, gains)
        if self.directory is not None:
            self.directory.replace_report(report.to_json())
        return replace(self, report=report)

    def __repr__(self) -> str:
        """One line, since networks and programs are long."""
        return f"Compiled({self.report!r})"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return f"<pre>{html.escape(summary(self.report, None))}</pre>"


@public(CompileOptions, *SEARCH)
def compile(  # `args`, `kwargs` and `dynamic_shapes` are those of ``torch.export.export``
    model: Model,
    args: Sequence[Any] | str | os.PathLike[str] | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    system: System | None = None,
    force: bool = False,
    progress: Progress = lambda _: None,
    **keywords: Any,
) -> Compiled:
    """Search, rewrite, generate code, run, verify, and write a compiled directory.

    Parameters
    ----------
    model, system, plan, options, goal, profiling, **keywords
        See `pimflow.search`. If layers are decomposed, outputs are verified against those of the
        decomposed network; the report says how far these are from the original's, and which layers stay.
        A ``torch.nn.Module`` is exported first, for `args`.
    args, kwargs, dynamic_shapes
        Of a ``torch.nn.Module``, what ``torch.export.export`` takes: ``compile(module, (x,))``. The arguments
        are what the network is verified on, and say the shapes that `dynamic_shapes` leaves open. Of any
        other network, `out` may stand in the second place: ``compile("toy", "build/toy")``.
    out : path, optional
        Directory to write; nothing is written if None.
    pim_channels : str, optional
        ``auto``: the number of PIM channels that is best for the network (`choose_channels`), in place of
        that of `system`. The report has the figures for each number.
    copy_ahead : str, optional
        ``auto``: the distance of copies of streamed weights that is best for the network and within the bound
        on memory (`choose_copy_ahead`), in place of that of `system`; the report has the figures for each.
    target : str
        ``llvm+pim``: the CPU stands in for the GPU. ``cuda+pim``: CUDA kernels too, which run, are verified
        and timed if there is a CUDA device. ``c``: C source of the whole network too, for any compiler; it
        is built, verified and timed if there is a compiler.
    select : SelectionOptions, or mapping of str to its fields, optional
        Such as ``{"profile": "measured"}``: choose a primitive for each convolution that the stand-in CPU
        computes; with target ``c``, for each convolution in the C code, by times of C on this machine unless
        the options name others. With ``{"device": "cuda"}`` and target ``cuda+pim``, in fp32, primitives of
        the GPU are candidates of the plan, and ``memory_budget_bytes`` bounds the plan's memory.
    calibration : path, or mapping of str to ndarray, optional
        With `decompose`: samples on which the decomposed network is compared with the original
        (`calibration.Calibration.read`); the report says how often they agree.
    inputs, input_values
        Inputs of the verification, of one sample or several; drawn by default
        (`commands.shared.inputs.InputOptions`). Arrays also fix the shapes that the model leaves open.
    tolerance : float, optional
        Largest error of outputs, as a fraction of the reference's largest value. By default 2e-3 for fp16 and
        1e-5 for fp32; if an output exceeds that, twice the deviation that roundings alone cause in the
        reference (`conditioning`). PIM regions always have a rounding bound of their own.
    pareto : int, optional
        Number of plans of a front of latency, energy and memory to search too (`pimflow.pareto`). The
        report lists them, and the directory has their files.
    conventions : str or sequence of str
        Further conventions to search the network under, after it is verified and written: ``all``, ``none``,
        or names such as ``pim-launch=0`` (docs/conventions.md), as a list or in one text with commas. Each
        takes a few seconds at most. The report has their speed-ups. After an interrupt the directory is
        complete, and its report lists those that are missing (`Compiled.with_conventions`).
    force : bool
        Whether to write although `out` or `dump_ir` has other files, which stay, or changed files, which are
        replaced.
    progress : callable
        Called with a text that says what is being done.

    Raises
    ------
    PimflowError
        `UsageError` for an unknown keyword, a value of another type or an option without effect;
        `VerificationError` if a result is wrong, and then nothing is written; others as their classes say.
    """
    begin = time.perf_counter()
    if isinstance(args, str | os.PathLike):
        if out is not None:
            raise UsageError("out is given twice: by its name, and in the second place")
        args, out = None, args
    example = Example.from_arguments(model, args, kwargs, dynamic_shapes)
    settings = CompileOptions.pop_from(keywords)
    inputs, search_keywords = example.with_example(settings, keywords)
    settings, model = replace(settings, **inputs), example.model
    convention_names(settings.conventions, as_system(system))  # raises before the work
    search_keywords = network_keywords(model, settings, search_keywords)
    counts = distances = None
    if settings.pim_channels:
        channels = system_choices.choose_channels(
            model, system, progress=progress, **_without_plan(search_keywords, "--pim-channels auto")
        )
        system, counts = channels.system, channels.counts
    if settings.copy_ahead:
        copies = system_choices.choose_copy_ahead(
            model, system, progress=progress, **_without_plan(search_keywords, "--copy-ahead auto")
        )
        system, distances = copies.system, copies.distances
    request = steps.CompileRequest(
        **vars(SearchRequest.from_arguments(system, **search_keywords)),
        **vars(settings),
        channel_counts=counts,
        copy_distances=distances,
        out=out,
        force=force,
        progress=progress,
    )
    request = steps.check_request(request)
    with ir_dump.dump_ir(request.dump_ir, force=force):
        compiled = _compile(request, example, begin)
    return compiled.with_conventions(settings.conventions, progress)


def _compile(request: steps.CompileRequest, example: Example, begin: float) -> Compiled:
    """Compile a network without searches under other conventions; `begin` is when it began."""
    model = example.model
    prepared, reference = steps.prepare_network(request, model)
    placed = steps.place_network(request, model, prepared)
    selection = steps.select_primitives(request, prepared)
    build_set = steps.build_targets(request, prepared.network, placed.search_result, selection, reference)
    checked_kernels = 0
    if request.check_kernels:
        request.progress("checking kernels")
        checked_kernels = require_kernels(prepared.network, placed.search_result)
    verification = steps.verify_builds(request, model, prepared.network, build_set, reference)
    selection = steps.with_kernel_times(request, selection, build_set.builds[-1], reference)
    extras = compile_results.extra_reports(request, prepared, placed, reference, selection, build_set)
    part = steps.decoder_part(model, prepared.network, placed.search_result, request.options.context)
    extras = replace(extras, part=part)
    report = compile_results.assemble_report(placed, build_set, verification, reference, extras, begin)
    report = replace(report, gpu_part=replace(report.gpu_part, checked_kernels=checked_kernels))
    convention_search = steps.convention_search(request, prepared, placed)
    del prepared  # linking needs the memory of its weights, which the builds contain
    directory = None
    if request.out is not None:
        files = compile_results.artifact_files(request, placed, build_set, verification, reference, report)
        request.progress("writing")
        page = functools.partial(render_page, name=Path(request.out).name)
        directory = artifact.write(request.out, files, page=page, force=request.force)
    return Compiled(
        search_result=placed.search_result,
        builds=build_set.builds,
        programs=placed.search_result.programs(),
        verification=verification,
        report=report,
        convention_search=convention_search,
        module_call=ModuleCall(
            example=example,
            build=next(built for built in build_set.builds if built.can_run_here),
            interface=reference.interface,
            search_result=placed.search_result,
        ),
        directory=directory,
    )


def _without_plan(keywords: Mapping[str, Any], option: str) -> dict[str, Any]:
    """The keywords of searches for `option`, which needs to search; raises if there is a plan."""
    if keywords.get("plan") is not None:
        raise UsageError(f"{option} searches plans, and one is given; give a number")
    return {name: value for name, value in keywords.items() if name != "plan"}
