"""The public API: search, compile, run, simulate."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tvm
from tvm import relax

from pimflow import artifact, frontend, pipeline, report, zoo
from pimflow.core.plan import Plan
from pimflow.core.program import PimProgram
from pimflow.core.region import RegionGraph
from pimflow.errors import UsageError
from pimflow.hardware import PimSpec, System, system
from pimflow.placement import Candidates, Searched
from pimflow.placement import apply as apply_plan
from pimflow.placement import search as search_graph
from pimflow.relay_passes.extract_regions import extract_regions, filters
from pimflow.simulators.timing import TimingResult, time_program, time_trace
from pimflow.verify import Verification, program_violations, verify

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A compiled and verified network.

    Attributes
    ----------
    searched : Searched
        The plan and what it rests on.
    executable : VMExecutable
        For the CPU, PIM regions included.
    programs : dict of str to PimProgram
        By region.
    verification : Verification
    report : dict
        The contents of ``report.json``.
    """

    searched: Searched
    executable: relax.VMExecutable
    programs: dict[str, PimProgram]
    verification: Verification
    report: dict[str, Any]

    @property
    def plan(self) -> Plan:
        return self.searched.plan


def search(
    model: str | os.PathLike | onnx.ModelProto | tvm.IRModule,
    target_system: System | None = None,
    *,
    plan: Plan | str | os.PathLike | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> Searched:
    """The best plan for a network on a system, with the candidates it was chosen from.

    Parameters
    ----------
    model : str, path, ModelProto or IRModule
        Name of the embedded zoo, ONNX file or model, or a canonical Relax module.
    target_system : System, optional
        `pimflow.system()` by default.
    plan : Plan or path, optional
        Applied instead of searching.
    shapes : mapping of str to tuple of int, optional
        Shapes of inputs that an ONNX file leaves open.
    """
    if isinstance(model, tvm.IRModule):
        graph = extract_regions(model, "module")
    else:
        graph = extract_regions(frontend.load(model, shapes)[1], _name(model))
    return _search(graph, target_system or system(), _plan(plan))


def _plan(plan: Plan | str | os.PathLike | None) -> Plan | None:
    return plan if plan is None or isinstance(plan, Plan) else Plan.load(plan)


def _search(
    graph: RegionGraph, target_system: System, plan: Plan | None, simulated: Candidates | None = None
) -> Searched:
    """Searched, or with `plan` applied."""
    if plan is None:
        return search_graph(graph, target_system, simulated)
    return apply_plan(graph, target_system, plan, simulated)


def compile(
    model: str | os.PathLike | onnx.ModelProto,
    out: str | os.PathLike | None = None,
    *,
    target_system: System | None = None,
    target: str = "llvm+pim",
    plan: Plan | str | os.PathLike | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    inputs: Mapping[str, np.ndarray] | None = None,
    emit_traces: bool = False,
    progress: Progress = lambda _: None,
) -> Compiled:
    """Search, rewrite, generate code, run, verify, and write a compiled directory.

    Parameters
    ----------
    model : str, path or ModelProto
        Name of the embedded zoo, or an ONNX file or model.
    out : path, optional
        Directory to write; nothing is written if None.
    target_system : System, optional
        `pimflow.system()` by default.
    target : str
        ``llvm+pim``: the CPU stands in for the GPU.
    plan : Plan or path, optional
        Applied instead of searching.
    shapes : mapping of str to tuple of int, optional
        Shapes of inputs that an ONNX file leaves open.
    inputs : mapping of str to ndarray, optional
        What verification runs on; `zoo.example_inputs` by default.
    emit_traces : bool
        Whether to write ``.pim`` traces too: one a region and channel, and large.
    progress : callable
        Told what is being done.

    Raises
    ------
    PimflowError
        Each kind as its class says. `VerificationError` if the result is wrong; then nothing is
        written.
    """
    begin = time.perf_counter()
    target_system = target_system or system()
    if out is not None:
        artifact.check_target(out)
    plan = _plan(plan)
    pipeline.named_target(target)  # refused before the work, not after it
    progress("loading")
    proto, mod = frontend.load(model, shapes)
    examples = zoo.example_inputs(proto)
    interface = artifact.Interface(inputs={n: (x.shape, str(x.dtype)) for n, x in examples.items()})
    inputs = examples if inputs is None else interface.ordered(inputs)
    graph = extract_regions(mod, _name(model))

    progress("searching")
    search_begin = time.perf_counter()
    searched = _search(graph, target_system, plan)
    search_seconds = time.perf_counter() - search_begin
    compare = _comparison(searched, plan)

    progress("generating code")
    programs = place(searched)
    rows = split_rows(searched)
    applied = pipeline.apply_plan(mod, rows, programs)
    executable = pipeline.build(applied, target)

    progress("verifying")
    symbols = pipeline.symbols(mod, rows, programs)
    verification = verify(proto, executable, symbols, filters(mod), target_system, inputs)
    verification.require()

    summary = report.build(
        searched,
        verification,
        speedup_without_launch=compare.pop("launches set to zero"),
        conventions=[{"what": what, "speedup": speedup} for what, speedup in compare.items()],
        search_seconds=search_seconds,
        wall_seconds=time.perf_counter() - begin,
    )
    if out is not None:
        progress("writing")
        artifact.write(
            out,
            executable=executable,
            interface=interface,
            plan=searched.plan,
            report=summary,
            programs=programs,
            traces=emit_traces,
        )
    return Compiled(
        searched=searched, executable=executable, programs=programs, verification=verification, report=summary
    )


def run(
    directory: str | os.PathLike, inputs: Mapping[str, np.ndarray] | np.ndarray | None = None
) -> list[np.ndarray]:
    """Outputs of a compiled directory, the PIM part computed by its command streams.

    Parameters
    ----------
    inputs : mapping of str to ndarray, or ndarray, optional
        By name; an array alone for a network of one input; example inputs if None.
    """
    interface = artifact.Interface.load(Path(directory))
    if inputs is None:
        inputs = zoo.example_arrays(interface.inputs)
    elif isinstance(inputs, np.ndarray):
        if len(interface.inputs) != 1:
            raise UsageError(f"the network has inputs {', '.join(interface.inputs)}: give each by name")
        inputs = {next(iter(interface.inputs)): inputs}
    return artifact.run(directory, inputs)


def simulate(
    path: str | os.PathLike,
    pim: str | os.PathLike | PimSpec = "newton-gddr6",
    *,
    timing: str = "strict",
    gwrite_hiding: bool = True,
) -> TimingResult:
    """Cycles of a ``.pim`` trace or a ``.pimprog`` program.

    Returns
    -------
    TimingResult
        `violations` counts what the independent checker finds in a program, and the COMPs of a trace on
        rows that are not open; None under the published timing, which is not legal.

    Raises
    ------
    TraceError, UnknownNameError, SpecError, UsageError
        For a malformed file, an unknown device or timing, a device that does not fit the program, and a
        file of another kind.
    """
    spec = pim if isinstance(pim, PimSpec) else PimSpec.load(pim)
    path = Path(path)
    if path.suffix == ".pimprog":
        program = PimProgram.load(path)
        result = time_program(program, spec, timing, gwrite_hiding)
        return replace(result, violations=program_violations(program, spec) if timing == "strict" else None)
    if path.suffix != ".pim":
        raise UsageError(f"{path}: neither a .pim trace nor a .pimprog program")
    result = time_trace(path, spec, timing, gwrite_hiding)
    return result if timing == "strict" else replace(result, violations=None)


def place(searched: Searched) -> dict[str, PimProgram]:
    """The program of every region on PIM, weights at rows of their own."""
    programs, row_begin = {}, 0
    for region, candidate in zip(searched.graph.regions, searched.candidates):
        if candidate.rewrite.mode != "GPU":
            programs[region.name] = searched.maker.placed(region, candidate, row_begin)
            row_begin += candidate.placed_rows
    return programs


def split_rows(searched: Searched) -> dict[str, int]:
    """The GPU's output rows of every split region."""
    return {
        region.name: candidate.rewrite.gpu_rows
        for region, candidate in zip(searched.graph.regions, searched.candidates)
        if candidate.rewrite.mode == "SPLIT"
    }


def _comparison(searched: Searched, plan: Plan | None) -> dict[str, float]:
    """Speed-ups of the same network under other conventions, each searched (or applied) anew."""

    def speedup(other: System, shares: bool) -> float:
        found = _search(searched.graph, other, plan, searched.maker if shares else None)
        return found.gpu_only.latency_ns / found.evaluation.latency_ns

    base = searched.system
    gpu_ns = base.gpu.launch_ns
    other = "paper" if base.accounting == "full" else "full"
    timing = {"paper": "ramulator-pimflow", "full": "strict"}[other]
    converted = replace(base, accounting=other, timing=timing)
    return {
        "launches set to zero": speedup(base.with_launches(gpu_ns=0.0, pim_ns=0.0), True),
        "PIM launch 0": speedup(base.with_launches(gpu_ns=gpu_ns, pim_ns=0.0), True),
        "PIM launch as the GPU's": speedup(base.with_launches(gpu_ns=gpu_ns, pim_ns=gpu_ns), True),
        f"accounting {other}, timing {timing}": speedup(converted, False),
    }


def _name(model: object) -> str:
    if isinstance(model, onnx.ModelProto):
        return model.graph.name or "model"
    text = os.fspath(model)
    return text if text in zoo.names() else Path(text).stem
