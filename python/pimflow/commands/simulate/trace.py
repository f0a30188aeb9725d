"""Write traces of layers and of compiled directories, in the formats of other tools."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pimflow.commands.shared.arguments import public
from pimflow.commands.simulate import kernel_traces
from pimflow.commands.simulate.kernel_traces import KernelTraces
from pimflow.commands.simulate.trace_formats import COMMANDS, FORMATS, UNSUPPORTED_REASONS
from pimflow.compiler import artifact
from pimflow.compiler.interface import Interface
from pimflow.core.frames import Tabular
from pimflow.core.json_form import JsonTree
from pimflow.core.kernel import ConvGeometry
from pimflow.core.layer_text import FORMS, parse_layer
from pimflow.core.plan import Plan
from pimflow.core.program import PimProgram
from pimflow.core.rewrite import SplitRewrite
from pimflow.core.typed_values import has_type
from pimflow.errors import ArtifactError, UnknownNameError, UsageError
from pimflow.hardware import System
from pimflow.hardware import system as default_system
from pimflow.hardware.constraints import OPTIONAL_COMMANDS
from pimflow.host.directories import DirectoryKind, Seals, check_target, new_directory
from pimflow.host.files import file_sha256
from pimflow.pim_backend.programs.attention import ORDERS
from pimflow.pim_backend.programs.lowering import ProgramRequest
from pimflow.placement.costs.pim_runs import PimRun, PimTarget, check_rows
from pimflow.simulators.pim.expansion import command_counts, pim_unsupported_reason
from pimflow.simulators.pim.timing import check_device
from pimflow.simulators.profiler import BuiltIn

SUMMARY = "trace.json"
Advance = Callable[[float], None]


@dataclass(frozen=True, kw_only=True)
class TracedLayer:
    """A program that was written: its time, its commands, and the sizes of its files by path."""

    layer: str
    dtype: str
    pim_channels: int
    schedule: str
    cycles: int
    time_ns: float
    commands: dict[str, int]
    files_bytes: dict[str, int]

    @classmethod
    def from_run(cls, run: PimRun, files_bytes: dict[str, int]) -> TracedLayer:
        """From a timed program, and the sizes of its files."""
        program = run.program
        counts = command_counts(program)
        return cls(
            layer=program.region,
            dtype=program.dtype,
            pim_channels=len(program.channels),
            schedule=str(program.schedule),
            cycles=run.timing.cycles,
            time_ns=run.timing.time_ns,
            commands={
                name: counts[name] for name in COMMANDS if counts[name] or name not in OPTIONAL_COMMANDS
            },
            files_bytes=files_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class Traces(JsonTree, Tabular, rows="layers"):
    """The contents of ``trace.json``."""

    format: str
    pim: str
    timing: str
    layers: tuple[TracedLayer, ...]

    def text(self, out: str) -> str:
        """The contents as text; `out` is the directory that was written."""
        lines = []
        for layer in self.layers:
            counts = ", ".join(f"{count} {name}" for name, count in layer.commands.items() if count)
            files = layer.files_bytes
            place = Path(out) / (next(iter(files)) if len(files) == 1 else os.path.commonpath(files))
            lines += [
                f"{layer.layer}: {layer.schedule or 'WRITEs'} on {layer.pim_channels} channels",
                f"  {layer.cycles} cycles, {layer.time_ns / 1e3:.3f} us ({self.timing}); {counts}",
                f"  {place}: {len(files)} file{'s'[: len(files) > 1]}, {sum(files.values())} bytes",
            ]
        lines.append("  counts are of programs; a device adds PRE, REF and what refreshes make it repeat")
        return "\n".join(lines)


@public()
def trace(
    layer: str | os.PathLike[str],
    out: str | os.PathLike[str],
    format: str,
    system: System | None = None,
    *,
    force: bool = False,
    advance: Advance = lambda _: None,
) -> Traces | KernelTraces:
    """Write the command traces of a layer, or of a compiled directory; for Accel-Sim, its GPU kernels.

    Parameters
    ----------
    layer : str or path
        ``conv:1x24x56x56,96,1x1,s1,p0``, ``fc:1280,1000`` (`core.layer_text`), or a compiled directory;
        for ``accel-sim`` also a network, as `frontend.load` takes it.
        A layer becomes the program of the fastest loop order of the system's scheduling level.
    out : path
        Directory to write.
    format : str
        One of `FORMATS`, or ``accel-sim``; docs/traces.md describes them.
    system : System, optional
        `pimflow.system()` by default. For a compiled directory, its own PIM device, dtype and channels are
        used.
    force : bool
        Whether to write although `out` has other files, which stay, or changed files, which are replaced.
    advance : callable
        Called with the share that is done, in [0, 1].

    Returns
    -------
    Traces or KernelTraces
        The contents of ``trace.json``, which `to_json` gives: of layers, or of GPU kernels for ``accel-sim``.

    Raises
    ------
    UsageError, UnknownNameError
        For a text that is no layer, an unknown format, or a program or kernel that the format cannot
        represent.
    InfeasibleError
        If the weights do not fit the PIM channels.
    ArtifactError, TraceError
        For a directory that is no compiled one, a damaged program, or an output that cannot be written.
    """
    system = system or default_system()
    check_format(format, system.timing)
    check_target(out, KIND, force=force)
    if format == kernel_traces.FORMAT:
        request = kernel_traces.trace_request(os.fspath(layer), system)
        with new_directory(out, KIND, force=force) as directory:
            kernels = kernel_traces.write(directory, request, advance)
            _write_summary(directory, kernels)
        return kernels
    if Path(layer).is_dir():
        system = _directory_system(Path(layer), system)
    program_runs = source_runs(os.fspath(layer), system, format)
    return write(out, program_runs, system, format, advance, force=force)


def _directory_system(directory: Path, system: System) -> System:
    """Return `system` with the PIM device and the storage type of a compiled directory."""
    pim, dtype = artifact.load_device(directory), artifact.PlacedRegions.load(directory).dtype
    try:
        return dataclasses.replace(system, pim=pim, dtype=dtype)
    except ValueError as error:
        raise ArtifactError(f"{directory}: {error}; compile again") from error


def gpu_parts(directory: Path) -> dict[str, ConvGeometry]:
    """The GPU's part of every split region in a compiled directory."""
    Interface.load(directory).check(directory, artifact.PLAN)
    graph, plan = artifact.PlacedRegions.load(directory).graph, Plan.load(directory / artifact.PLAN)
    parts = {}
    for choice in plan.choices:
        if isinstance(choice.rewrite, SplitRewrite):
            geometry = graph.region(choice.region).layer
            parts[choice.region] = choice.rewrite.split(geometry).gpu_part(geometry)
    return parts


def check_format(name: str, timing: str) -> None:
    """Raise `UsageError` for an unknown format, or one that does not support `timing`."""
    formats = [*FORMATS, kernel_traces.FORMAT]
    if name not in formats:
        raise UnknownNameError("format", name, formats)
    if name == "perfetto" and timing != "strict":
        raise UsageError(f"format 'perfetto' shows the clocks of timing 'strict', not of '{timing}'")


def layer_run(text: str, system: System, format: str) -> PimRun:
    """The fastest program of a layer given by its shape, among those that `format` can represent.

    Raises
    ------
    UsageError
        If `text` is no layer, there are no PIM channels, or `format` can represent none of the programs.
    InfeasibleError
        If the weights do not fit the PIM channels.
    """
    geometry = parse_layer(text)
    if not system.pim_channels:
        raise UsageError("a trace needs PIM channels; --pim-channels is 0")
    pim = system.pim
    if format == "aim":  # AiM has one global buffer
        pim = dataclasses.replace(pim, global_buffers=1)
    pim_target = PimTarget(
        pim=pim,
        channels=system.pim_channels,
        dtype=system.dtype,
        profiler=BuiltIn(system.timing, system.hides_gwrites),
        level=system.scheduling,
    )
    requests = [
        ProgramRequest(text, geometry, schedule) for schedule in pim_target.rank_schedules(geometry, text)
    ]
    if format in UNSUPPORTED_REASONS:
        form, unsupported_reason = UNSUPPORTED_REASONS[format]
        problems = {request: unsupported_reason(pim_target.program(request)) for request in requests}
        requests = [request for request, problem in problems.items() if not problem]
        if not requests:
            raise UsageError(f"layer '{text}' has no {form} form: {next(iter(problems.values()))}")
    run = min(map(pim_target.run, requests[:2]), key=lambda run: run.timing.time_ns)
    check_rows(f"weights of layer '{text}'", run.program.rows, system.pim)
    return run


def directory_runs(directory: Path, system: System, format: str) -> list[PimRun]:
    """Load and time the programs of a compiled directory; for ``ramulator2`` only those of split regions.

    Raises
    ------
    ArtifactError, TraceError
        If it is no compiled directory, or a program is damaged.
    UsageError
        If there is nothing to write.
    """
    Interface.load(directory)
    programs = [PimProgram.load(path) for path in sorted((directory / "programs").glob("*.pimprog"))]
    parts = gpu_parts(directory) if format == "ramulator2" else {}
    if format == "ramulator2":
        programs = [program for program in programs if program.region in parts]
        if not programs:
            raise UsageError(f"{directory}: no region is split, so the GPU computes nothing while PIM works")
    if not programs:
        raise UsageError(f"{directory}: no region runs on PIM; nothing can be traced")
    for program in programs:
        if not system.pim.is_target_of(program):
            raise ArtifactError(
                f"{directory}: '{program.region}' was lowered for another pim '{program.pim}' than the "
                f"directory's '{system.pim.name}'; compile again"
            )
        check_device(program, system.pim)
        if problem := _unsupported_reason(program, format):
            raise UsageError(f"{directory}: {problem}")
    timer = BuiltIn(system.timing, system.hides_gwrites)
    return [
        PimRun(program=p, timing=timer.time_program(p, system.pim), gpu_part=parts.get(p.region))
        for p in programs
    ]


def _unsupported_reason(program: PimProgram, format: str) -> str:
    """Why the format cannot represent a directory's program, and what to do; empty if it can."""
    form, unsupported_reason = UNSUPPORTED_REASONS.get(format, ("", lambda _: ""))
    problem = unsupported_reason(program)
    if not problem:
        return ""
    supported_formats = [
        name for name, (_, reason_function) in UNSUPPORTED_REASONS.items() if not reason_function(program)
    ]
    formats = ", ".join([*supported_formats, "pimprog", "perfetto"])
    by_shape = "" if program.schedule in ("", *ORDERS) else "; or trace the layer by its shape"
    order = f" ({program.schedule})" * bool(program.schedule)
    return f"'{program.region}'{order} has no {form} form: {problem}; formats that do: {formats}{by_shape}"


def source_runs(layer: str, system: System, format: str) -> list[PimRun]:
    """The programs of a layer or of a compiled directory; raises as `layer_run` and `directory_runs`."""
    if Path(layer).is_dir():
        return directory_runs(Path(layer), system, format)
    if ":" not in layer:
        raise ArtifactError(f"'{layer}' is no compiled directory, and no layer: {FORMS}")
    return [layer_run(layer, system, format)]


def write(
    out: str | os.PathLike[str],
    runs: list[PimRun],
    system: System,
    format: str,
    advance: Advance,
    *,
    force: bool = False,
) -> Traces:
    """Write the files to directory `out`, all or none; returns the contents of ``trace.json``.

    Parameters
    ----------
    advance : callable
        Called with the share that is done, in [0, 1].

    Raises
    ------
    ArtifactError
        If `out` has other files than those of an earlier trace, or cannot be written.
    UsageError
        If the format cannot represent a program.
    """
    stems = artifact.file_stems(run.program.region for run in runs)
    traces = [FORMATS[format](run, stems[run.program.region], system) for run in runs]
    total, written = sum(trace.total for trace in traces), 0
    layers = []
    with new_directory(out, KIND, force=force) as directory:
        for trace in traces:
            files = {}
            for name, chunks in trace.files.items():
                path = directory / name
                path.parent.mkdir(exist_ok=True)
                with path.open("wb") as file:
                    for text, share in chunks:
                        file.write(text)
                        written += share
                        advance(min(1.0, written / total))
                files[name] = path.stat().st_size
            layers.append(TracedLayer.from_run(trace.run, files))
        summary = Traces(format=format, pim=system.pim.name, timing=system.timing, layers=tuple(layers))
        _write_summary(directory, summary)
    return summary


def _write_summary(directory: Path, traces: Traces | KernelTraces) -> None:
    """Write ``trace.json`` with the digests of all files."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    digests = {str(path.relative_to(directory)): file_sha256(path) for path in files}
    text = json.dumps({**traces.to_json(), "sha256": digests}, indent=1)
    (directory / SUMMARY).write_text(f"{text}\n", encoding="utf-8")


def _seals(directory: Path) -> Seals:
    """The files that ``trace.json`` names: by digests, or by sizes in what older versions wrote."""
    try:
        table = json.loads((directory / SUMMARY).read_text(encoding="utf-8"))
        check_format(table["format"], "strict")
        sizes = {
            name: size
            for entry in table.get("layers", table.get("kernels"))
            for name, size in entry["files_bytes"].items()
        }
        seals = table.get("sha256", sizes)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, UsageError):
        return {}
    return {**seals, SUMMARY: None} if has_type(seals, dict[str, str | int]) else {}


KIND = DirectoryKind(name="a trace of pimflow", mark=SUMMARY, seals=_seals)


def traceable_regions(programs: Mapping[str, PimProgram], progress: Callable[[str], None]) -> list[str]:
    """Regions whose programs have a ``.pim`` form; `progress` is called with the reason for the others."""
    if not programs:
        progress("no .pim traces: the plan has nothing on PIM")
    unsupported = {
        region: problem
        for region, program in programs.items()
        if (problem := pim_unsupported_reason(program))
    }
    for region, problem in unsupported.items():
        progress(f"no .pim trace of '{region}': {problem}; its .pimprog says all")
    return [region for region in programs if region not in unsupported]
