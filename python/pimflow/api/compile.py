"""The public API: search, compile, run, simulate."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm

from pimflow import frontend
from pimflow.api import decompose as onnx_export
from pimflow.api import fuse as fusion
from pimflow.api import memory, report, timeline
from pimflow.api import run as inference
from pimflow.api import search as network_search
from pimflow.api import select as selecting
from pimflow.api import simulate as simulation
from pimflow.api import trace as tracing
from pimflow.api.option_pairs import require_effect
from pimflow.api.published import occamy_operators
from pimflow.api.search import (
    AnyPlan,
    as_plan,
    by_operators,
    given_regions,
    order_part,
    place,
    planned_modes,
    regions,
    speedups,
)
from pimflow.compiler import artifact, build, phases
from pimflow.compiler.build import Build
from pimflow.compiler.c_code import network as c_network
from pimflow.compiler.measurement import allocations
from pimflow.compiler.measurement.kernel_times import inference_ns, kernel_times
from pimflow.compiler.verification import Verification, require_finite, verify
from pimflow.core.plan import Plan
from pimflow.core.program import PimProgram
from pimflow.decomposition import activations, choice
from pimflow.decomposition import skips as skip_optimisation
from pimflow.decomposition.calibration import Calibration, Data, agreement
from pimflow.decomposition.network import Decomposing, decomposed, requested
from pimflow.errors import UsageError
from pimflow.fusion import kernels
from pimflow.hardware import System, system
from pimflow.pim_backend.runtime import targets
from pimflow.placement import Costs, Goal, Profiling, Searched
from pimflow.placement.candidates.candidates import require_primitives
from pimflow.primitive_selection import options as primitive_options
from pimflow.primitive_selection import report as primitive_report
from pimflow.primitive_selection import selection as primitive_selection
from pimflow.primitive_selection.network_time import network_time

if TYPE_CHECKING:
    from pimflow.frontend import Model

Progress = Callable[[str], None]
search = network_search.search
search_network = network_search.search_network
trace_plan = timeline.trace_plan
trace = tracing.trace
simulate = simulation.simulate
plan_memory = memory.plan_memory
count_operators = occamy_operators.count_operators
torch_peak_bytes = occamy_operators.torch_peak_bytes
measure_allocations = allocations.measure_allocations
fuse = fusion.fuse
infer, run = inference.infer, inference.run
fuse_decomposed = fusion.fuse_decomposed
select = selecting.select
execute_fused = kernels.execute
export_decomposed = onnx_export.export_decomposed


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
    report : dict
        The contents of ``report.json``.
    """

    searched: Searched
    builds: tuple[Build, ...]
    programs: dict[str, PimProgram]
    verification: Verification
    report: dict[str, Any]

    @property
    def plan(self) -> Plan:
        return self.searched.plan


def compile(
    model: Model,
    out: str | os.PathLike | None = None,
    *,
    target_system: System | None = None,
    target: str = "llvm+pim",
    plan: AnyPlan | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    batch: int | None = None,
    decompose: Decomposing | None = None,
    optimize_skips: str | None = None,
    fuse_activations: bool = False,
    fuse: bool = False,
    select: Mapping[str, Any] | None = None,
    calibration: Data | None = None,
    inputs: Mapping[str, np.ndarray] | None = None,
    tolerance: float | None = None,
    emit_traces: bool = False,
    reorder: bool = False,
    profiling: Profiling | None = None,
    progress: Progress = lambda _: None,
    **goal: Any,
) -> Compiled:
    """Search, rewrite, generate code, run, verify, and write a compiled directory.

    Parameters
    ----------
    model : str, path, ModelProto, IRModule or ExportedProgram
        See `frontend.load`.
    out : path, optional
        Directory to write; nothing is written if None.
    target_system : System, optional
        `pimflow.system()` by default.
    target : str
        ``llvm+pim``: the CPU stands in for the GPU. ``cuda+pim``: CUDA kernels too; they run, and are
        verified and timed, where a CUDA device is. ``c``: everything on the CPU, as C for any compiler, too;
        built, verified and timed where there is a compiler.
    plan : Plan, Searched or path, optional
        Applied instead of searching.
    shapes : mapping of str to tuple of int, optional
        Shapes of inputs that the model leaves open.
    batch : int, optional
        Inferences at once; see `frontend.load`.
    decompose : Request or str, optional
        Layers to decompose before; see `search`. Outputs are then verified against those of the decomposed
        network, and the report says how far these are from the original's, and which layers stay.
    optimize_skips : str, optional
        See `plan_memory`; outputs are still those of the decomposed network.
    fuse_activations : bool
        Of a decomposed network: whether what lies between two chains may be one GPU kernel
        (`relay_passes.kernels.fuse_groups.activation_chains`), where that is faster.
    fuse : bool
        Whether neighbouring layers may be one GPU kernel over shared memory (`placement.candidates.tilings`),
        where that is faster.
    select : mapping of str to object, optional
        Options of `api.select.select_for`, such as ``{"profile": "measured"}``: each
        convolution that stays on the CPU standing in for a GPU is computed by the primitive chosen for it;
        with target ``c``, each in the C code, by times of C on this machine unless the options say others.
        With ``{"device": "cuda"}`` and target ``cuda+pim``, in fp32, primitives for the GPU are candidates of
        the plan beside all others, by its times, and ``memory_budget_bytes`` bounds its memory.
    calibration : path, or mapping of str to ndarray, optional
        With `decompose`: samples on which the decomposed network is compared with the original
        (`calibration.Calibration.read`); the report says how often they agree.
    inputs : mapping of str to ndarray, optional
        What verification runs on; drawn by `zoo.example_arrays` by default.
    tolerance : float, optional
        How far outputs may be from the reference, as a fraction of its largest value. By default 2e-3 for
        fp16 and 1e-5 for fp32, or, if an output is beyond that, twice what roundings move the reference
        (`conditioning`). PIM regions are held to their own rounding bound whatever it is.
    emit_traces : bool
        Whether to write ``.pim`` traces too: one a region and channel, and large.
    reorder : bool
        Whether layers may run in another order, if it takes less memory (docs/memory.md). `plan`, if given,
        says the order.
    profiling : Profiling, optional
        How times are found: the analytic GPU model, and the PIM engines with the system's timing, by
        default, and nothing kept on disk.
    progress : callable
        Told what is being done.
    **goal
        As in `search`.

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
    plan = as_plan(plan)
    if tolerance is not None and not 0 < tolerance < 1:
        raise UsageError(f"tolerance {tolerance:g} is not between 0 and 1")
    # Refused before the work, not after it.
    in_c, target = target == targets.C, targets.executed(target)
    fusing = {"fuse_activations": fuse_activations, "fuse": fuse}
    require_effect(Goal(**goal), plan=plan, in_c=in_c, **fusing)
    if in_c:
        c_network.require_no_pim(plan)
        goal["modes"] = "gpu"
    primitive_options.check_device(select, targets.C if in_c else target)
    goal |= primitive_options.for_plan(select)
    select = None if "primitives" in goal else select
    wanted = Goal(**goal)
    target_system.require_network_dtype()
    profiling = profiling or Profiling()
    profiling.require(target_system, planned_modes(wanted, plan))
    if wanted.primitives:
        require_primitives(target_system, profiling.gpu)
    request = requested(decompose)
    skip_optimisation.check_criterion(optimize_skips)
    if calibration is not None and request is None:
        raise UsageError(
            "--calibration compares a decomposed network with the original: give --decompose too"
        )
    progress("loading")
    network = frontend.load(model, shapes, batch)
    activations.require_decomposed(fuse_activations, request, network)
    samples = None if calibration is None else Calibration.read(calibration, network)
    interface = artifact.Interface(inputs=network.inputs, table_rows=network.table_rows)
    inputs = network.example_inputs() if inputs is None else interface.ordered(inputs)
    other_copies = replace(target_system, copies="made" if target_system.views else "elided")
    given, other_given = (
        given_regions(network, on, request, optimize_skips, **fusing) for on in (target_system, other_copies)
    )
    network, change = decomposed(network, request, progress)
    costs = Costs(target_system, profiling)
    choosing = {"plan": plan, "progress": progress, **fusing}
    change = choice.settled(change, target_system, costs, wanted, **choosing)
    network, given = (change.network, given if change.layers else None) if change else (network, given)
    optimize_skips, fuse_activations = choice.left(change, optimize_skips, fuse_activations)
    progress("computing the reference")
    expected = network.reference(inputs)
    require_finite(expected)
    decomposition = change.summary(inputs, expected) if change else None
    if samples is not None:
        progress(f"comparing {samples.samples} samples")
        decomposition["calibration"], samples = agreement(samples, change), None
    if optimize_skips is not None:
        progress("optimising skip connections")
    reduced = memory.with_reduced_skips(
        network, change, optimize_skips, target_system, target, fuse_activations=fuse_activations
    )
    skips, change = reduced and reduced.summary(), None
    network, reduced = (reduced.network if reduced else network).without_reference(), None
    network = activations.with_phases_apart(network) if fuse_activations else network

    order = None
    if reorder:
        progress("ordering layers")
        order = memory.reordered(network, target_system, target, plan)
        network = order.network
    progress("searching")
    search_begin = time.perf_counter()
    graph = regions(network, target_system, fuse_activations=fuse_activations, fuse=fuse)
    searched = place(graph, target_system, plan, costs, wanted, given)
    search_seconds = time.perf_counter() - search_begin
    other_graph = regions(network, other_copies, fuse_activations=fuse_activations, fuse=fuse)
    compare = speedups(searched, plan, other_graph, other_copies, given and other_given)

    selection = None
    if select is not None:
        progress("selecting primitives")
        own, options = regions(network, target_system), {"cache": costs.profiling.cache, **select}
        selection = primitive_selection.for_compilation(own, options, in_c=in_c)
        if not in_c:
            interface = replace(interface, cpu=targets.cpu_name())

    progress("generating code")
    choices, layouts = (selection.choices, selection.layouts) if selection else (None, None)
    names = dict.fromkeys([target, "llvm+pim"])
    builds = tuple(
        build.build(network, searched, targets.named_target(name), None if in_c else choices, layouts)
        for name in names
    )
    c_part = None
    if in_c:
        progress("building C")
        c_part = c_network.c_network(network, target_system, choices, layouts, inputs, expected, tolerance)

    progress("verifying")
    for built in reversed(builds):
        if built.runs_here:
            verification = verify(network, built, target_system, inputs, expected, tolerance)
            verification.require()

    if selection is not None and builds[-1].calls:
        progress("timing kernels")
        network_ns = network_time(builds[-1].calls, costs.profiling.cache)
        network_ns = replace(network_ns, measured_ns=inference_ns(builds[-1], inputs))
        selection = primitive_selection.with_network(selection, network_ns)

    chosen = selection and primitive_selection.summary(selection)
    if searched.goal.primitives:
        chosen = primitive_report.plan_part(searched, by_operators(searched, plan))
    summary = report.build(
        searched,
        verification,
        gpu_part=_gpu_part(searched, builds[0], inputs),
        memory=report.memory_part(builds[0].target, builds[0].memory, builds[0].copies),
        order=None if order is None else order_part(order, searched, plan, costs),
        decomposition=decomposition,
        skips=skips,
        primitives=chosen,
        c_part=c_part and c_part.summary(),
        speedup_without_launch=compare.pop("launches set to zero"),
        conventions=[{"what": what, "speedup": speedup} for what, speedup in compare.items()],
        search_seconds=search_seconds,
        wall_seconds=time.perf_counter() - begin,
    )
    programs = searched.programs()
    del network  # its weights are in the builds: linking them needs the memory
    if out is not None:
        traced = tracing.traceable(programs, progress) if emit_traces else ()
        progress("writing")
        if c_part:
            source = c_part.source
            interface = replace(interface, outputs=source.outputs, pool_bytes=source.pool_bytes)
        artifact.write(
            out,
            builds=builds,
            interface=interface,
            plan=searched.plan,
            placed=artifact.Placed(
                graph=searched.graph,
                gpu=target_system.gpu.name,
                dtype=target_system.dtype,
                padding=target_system.padding,
                bounds=verification.wider_bounds(target_system.dtype),
            ),
            pim=target_system.pim,
            timeline=timeline.to_json(timeline.trace(searched)),
            report=summary,
            programs=programs,
            traced=traced,
            c_files=c_part and c_part.source.files(),
        )
    return Compiled(
        searched=searched, builds=builds, programs=programs, verification=verification, report=summary
    )


def _gpu_part(searched: Searched, built: Build, inputs: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """What the report says of the GPU's kernels; timed where they run."""
    measured_ns, measured_on = None, ""
    if built.target != "llvm+pim" and built.runs_here:
        measured_ns = sum(kernel.calls * kernel.call_ns for kernel in kernel_times(built, inputs))
        measured_on = str(built.device.device_name)
    kernels = built.kernels
    return report.gpu_part(searched, built.target, kernels.compiler, kernels.flaw, measured_ns, measured_on)


def relax_pipeline(
    target_system: System | None = None,
    plan: AnyPlan | None = None,
    **options: Any,
) -> tvm.transform.Pass:
    """A pipeline for ``tvm.compile(mod, target="cuda+pim", relax_pipeline=…)``.

    Parameters
    ----------
    target_system : System, optional
        `pimflow.system()` by default.
    plan : Plan, Searched or path, optional
        Made by `search` for the same module; searched for if None.
    **options
        ``reorder``, ``decompose``, ``optimize_skips``, ``fuse_activations``, ``fuse``, ``profiling`` and the
        goal, as in `search`.

    Raises
    ------
    UsageError
        When it runs: if the target has no PIM.
    """
    target_system, plan = target_system or system(), as_plan(plan)

    @tvm.transform.module_pass(opt_level=0, name="pimflow.relax_pipeline")
    def run_pipeline(mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        target = tvm.target.Target.current(allow_none=True)
        if target is None or not targets.has_pim(target):
            raise UsageError(f"the target has no PIM; use one of {', '.join(targets.TARGETS)}")
        own = {"target": targets.name_of(target), **options}
        network, searched = search_network(frontend.load(mod), target_system, plan, **own)
        return phases.lower(build.planned(network.module, searched), target, target_system)

    return run_pipeline
