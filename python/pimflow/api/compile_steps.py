"""The steps of `compile`, in order: check, prepare, place, select, build, verify, report, write."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pimflow.api import prepare
from pimflow.api.conventions import ConventionSearch
from pimflow.api.front import FrontPoint
from pimflow.api.front import files as front_files
from pimflow.api.make_report import make_report
from pimflow.api.options import planned_modes, require_effect, require_type
from pimflow.api.pareto import front_of, require_points
from pimflow.api.prepare import Prepared
from pimflow.api.report import Changes, GpuPart, PoolReport, Report
from pimflow.api.search import Question, by_operators, order_report
from pimflow.api.timeline import PlanTrace
from pimflow.compiler import artifact, build
from pimflow.compiler.artifact import Interface, WrittenDirectory
from pimflow.compiler.build import Build
from pimflow.compiler.c_code import network as c_code
from pimflow.compiler.c_code.network import CNetwork
from pimflow.compiler.measurement.kernel_times import inference_ns, kernel_times
from pimflow.compiler.plan_pools import PoolChoice
from pimflow.compiler.verification import Verification, require_finite, verify
from pimflow.core.plan import Plan
from pimflow.core.program import PimProgram
from pimflow.decomposition.calibration import Calibration, Data, agreement
from pimflow.decomposition.network import DecomposedNetwork
from pimflow.decomposition.report import DecompositionReport
from pimflow.errors import UsageError
from pimflow.frontend import Network
from pimflow.host.directories import check_target
from pimflow.pim_backend.runtime import targets
from pimflow.placement import Searched
from pimflow.placement.candidates.candidates import require_primitives
from pimflow.primitive_selection import selection as primitive_selection
from pimflow.primitive_selection.network_time import network_time
from pimflow.primitive_selection.options import CUDA, check_device, goal_with_primitives
from pimflow.primitive_selection.report import PlanPrimitives, SelectionReport, plan_primitives
from pimflow.primitive_selection.selection import Selection
from pimflow.report_page.page import page_of

if TYPE_CHECKING:
    from pimflow.frontend import Model

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Job(Question):
    """The request of a compilation: that of a search, and what is built and written."""

    tolerance: float | None
    pareto: int | None
    emit_traces: bool
    out: str | os.PathLike[str] | None
    force: bool
    progress: Progress


def checked(job: Job, calibration: Data | None) -> Job:
    """Check a request before any work, and return it with its final goal."""
    if job.out is not None:
        check_target(job.out, artifact.KIND, force=job.force)
    require_type("tolerance", job.tolerance, (Real, type(None)), "a number between 0 and 1 or None")
    if job.tolerance is not None and not 0 < job.tolerance < 1:
        raise UsageError(f"tolerance {job.tolerance:g} is not between 0 and 1")
    if job.pareto is not None:
        require_points(job.pareto)
    job = _with_budget(job)
    require_effect(job.goal, plan=job.plan, in_c=job.in_c, options=job.options, pareto=job.pareto)
    goal = job.goal
    if job.in_c:
        c_code.require_no_pim(job.plan)
        goal = replace(goal, modes="gpu")
    check_device(job.select, targets.C if job.in_c else job.target)
    goal = goal_with_primitives(goal, job.select)
    job.system.require_network_dtype()
    job.profiling.require(job.system, planned_modes(goal, job.plan))
    if job.emit_traces and set(planned_modes(goal, job.plan)) <= {"GPU"}:
        raise UsageError("--emit-traces has no effect where nothing runs on PIM; leave it out")
    if goal.primitives:
        require_primitives(job.system, job.profiling.gpu)
    if calibration is not None and job.options.request is None:
        raise UsageError(
            "--calibration compares a decomposed network with the original: give --decompose too"
        )
    # Primitives of the GPU are part of the plan; those of a CPU are selected later, for its code.
    return replace(job, goal=goal, select=None if goal.primitives else job.select)


def _with_budget(job: Job) -> Job:
    """Apply the bound on memory to the selection for a CPU too; for C code to the selection only."""
    budget, select = job.goal.max_memory_bytes, job.select
    if budget is None or select is None or select.device == CUDA:
        return job
    if select.memory_budget_bytes is None:
        select = replace(select, memory_budget_bytes=budget)
    goal = replace(job.goal, max_memory_bytes=None) if job.in_c else job.goal
    return replace(job, goal=goal, select=select)


@dataclass(kw_only=True)
class ReferenceRun:
    """What the build is verified against: inputs, and the outputs of the reference.

    `prepare` calls `inspect` once layers are decomposed, which computes the outputs.

    Attributes
    ----------
    samples : Calibration, optional
        Calibration samples; None once the networks were compared on them.
    states : mapping of str to int
        By input that is a resident cache, the index of the output that is its content after a step.
    decomposition : DecompositionReport, optional
        The decomposed layers, and the difference of these outputs from the original's.
    """

    interface: Interface
    inputs: Mapping[str, np.ndarray]
    samples: Calibration | None
    progress: Progress
    states: Mapping[str, int]
    expected: Sequence[np.ndarray] = ()
    decomposition: DecompositionReport | None = None

    def inspect(self, network: Network, change: DecomposedNetwork | None) -> None:
        """Compute the outputs of `network`, and compare a decomposed network with its original."""
        self.progress("computing the reference")
        self.expected = network.reference(self.inputs)
        require_finite(self.expected)
        if change is None:
            return
        self.decomposition = change.summary(self.inputs, self.expected)
        if self.samples is not None:
            self.progress(f"comparing {self.samples.samples} samples")
            calibration = agreement(self.samples, change)
            self.decomposition = replace(self.decomposition, calibration=calibration)
            self.samples = None


def prepared(
    job: Job, model: Model, inputs: Mapping[str, np.ndarray] | None, calibration: Data | None
) -> tuple[Prepared, ReferenceRun]:
    """Load and prepare the network of `model`, and compute its reference."""
    job.progress("loading")
    network = prepare.load(model, job.options)
    prepare.require_decomposed(network, job.options)
    network.require_memory()
    interface = Interface(
        inputs=network.inputs, table_rows=network.table_rows, output_names=network.output_names
    )
    reference = ReferenceRun(
        interface=interface,
        inputs=network.example_inputs() if inputs is None else interface.ordered(inputs),
        samples=None if calibration is None else Calibration.read(calibration, network),
        progress=job.progress,
        states={state.name: state.result for state in network.states},
    )
    prepared = job.prepared(network, reference.inspect, job.progress, reference.samples)
    return prepared, reference


@dataclass(frozen=True, kw_only=True)
class PlacedNetwork:
    """The plan of a network; see `Question.placed` for `pool`, and `Report` for `gpu_known`."""

    searched: Searched
    search_seconds: float
    gpu_known: dict[str, int]
    pool: PoolChoice | None


def placed(job: Job, prepared: Prepared) -> PlacedNetwork:
    """Search the plan of a network, or apply the one that is given."""
    job.progress("searching")
    begin = time.perf_counter()
    searched, pool = job.placed(prepared)
    seconds, known = time.perf_counter() - begin, searched.maker.costs.known_kernels()
    return PlacedNetwork(searched=searched, search_seconds=seconds, gpu_known=known, pool=pool)


def convention_search(job: Job, prepared: Prepared, placed: PlacedNetwork) -> ConventionSearch:
    """The search of the network under other conventions."""
    copies = prepare.with_other_copies(job.system)
    return ConventionSearch(
        searched=placed.searched,
        plan=job.plan,
        copies_graph=prepared.regions_for(copies),
        copies_given=prepared.given_for(copies),
    )


def front(job: Job, model: Model, prepared: Prepared, placed: PlacedNetwork) -> tuple[FrontPoint, ...] | None:
    """The front of plans, if requested; `model` is loaded again if objectives decompose other layers."""
    if job.pareto is None:
        return None
    job.progress("searching the front")
    return front_of(
        job, lambda: prepare.load(model, job.options), prepared.network, placed.searched, job.pareto
    )


def selected(job: Job, prepared: Prepared) -> Selection | None:
    """Select primitives for the layers of a CPU, if requested; with target ``c`` by times of C code."""
    if job.select is None:
        return None
    job.progress("selecting primitives")
    options = job.select
    if job.in_c and not options.target:
        options = replace(options, target=targets.C)
    own = prepare.regions(prepared.network, job.system)
    return primitive_selection.select_for(own, options, cache=job.profiling.cache)


@dataclass(frozen=True, kw_only=True)
class Made:
    """The builds, that of the requested target first, and the network in C."""

    builds: tuple[Build, ...]
    c_part: CNetwork | None


def built(
    job: Job, network: Network, searched: Searched, selection: Selection | None, reference: ReferenceRun
) -> Made:
    """Build the network for the requested target, for the stand-in, and in C if that is the target."""
    job.progress("generating code")
    choices, layouts = (selection.choices, selection.layouts) if selection else (None, None)
    taken = None if job.in_c else choices
    stored = job.out is not None
    builds = tuple(
        build.build(network, searched, targets.named_target(name), taken, layouts, stored=stored)
        for name in dict.fromkeys([job.target, "llvm+pim"])
    )
    if not job.in_c:
        return Made(builds=builds, c_part=None)
    job.progress("building C")
    inputs, expected = reference.inputs, reference.expected
    c_part = c_code.c_network(network, job.system, choices, layouts, inputs, expected, job.tolerance)
    return Made(builds=builds, c_part=c_part)


def verified(job: Job, network: Network, made: Made, reference: ReferenceRun) -> Verification:
    """Verify every build that runs on this machine; returns the result of the first that does."""
    job.progress("verifying")
    for built in reversed(made.builds):
        if built.runs_here:
            verification = verify(
                network, built, job.system, reference.inputs, reference.expected, job.tolerance
            )
            verification.require()
    return verification


def with_kernel_times(
    job: Job, selection: Selection | None, built: Build, reference: ReferenceRun
) -> Selection | None:
    """Return `selection` with times of the kernels of the whole network."""
    if selection is None or not built.calls:
        return selection
    job.progress("timing kernels")
    network_ns = network_time(built.calls, job.profiling.cache)
    if network_ns is not None:
        network_ns = replace(network_ns, measured_ns=inference_ns(built, reference.inputs))
    return primitive_selection.with_network(selection, network_ns)


def changes(
    job: Job,
    prepared: Prepared,
    placed: PlacedNetwork,
    reference: ReferenceRun,
    selection: Selection | None,
    made: Made,
    points: Sequence[FrontPoint] | None,
) -> Changes:
    """The parts of the report that are not about placement."""
    searched, order = placed.searched, prepared.order
    primitives: SelectionReport | PlanPrimitives | None = None
    if searched.goal.primitives:
        primitives = plan_primitives(searched, by_operators(searched, job.plan))
    elif selection is not None:
        primitives = primitive_selection.summary(selection)
    return Changes(
        order=None if order is None else order_report(order, searched, job.plan, job.costs),
        decomposition=reference.decomposition,
        skips=None if prepared.skips is None else prepared.skips.summary(),
        primitives=primitives,
        c_part=None if made.c_part is None else made.c_part.report,
        front=None if points is None else _in_files(job, points),
    )


def _in_files(job: Job, points: Sequence[FrontPoint]) -> tuple[FrontPoint, ...]:
    """`points` with the names of their plan files in place of plans, if they are written."""
    if job.out is None:
        return tuple(points)
    return tuple(replace(point, plan=file) for point, file in zip(points, front_files(job.out, len(points))))


def reported(
    placed: PlacedNetwork,
    made: Made,
    verification: Verification,
    reference: ReferenceRun,
    changes: Changes,
    begin: float,
) -> Report:
    """The report of a compiled and verified network."""
    built = made.builds[0]
    return make_report(
        placed.searched,
        verification,
        gpu_part=_gpu_part(placed.searched, built, reference.inputs),
        memory=PoolReport.of(built, placed.pool, placed.searched.plan.options),
        changes=changes,
        gpu_known=placed.gpu_known,
        search_seconds=placed.search_seconds,
        wall_seconds=time.perf_counter() - begin,
    )


def _gpu_part(searched: Searched, built: Build, inputs: Mapping[str, np.ndarray]) -> GpuPart:
    """The part of the report about GPU kernels, with measured times if a device can run them."""
    measured_ns, measured_on = None, ""
    if built.target != "llvm+pim" and built.runs_here:
        measured_ns = sum(kernel.calls * kernel.call_ns for kernel in kernel_times(built, inputs))
        measured_on = str(built.device.device_name)
    kernels = built.kernels
    return GpuPart.of(searched, built.target, kernels.compiler, kernels.flaw, measured_ns, measured_on)


def interface(job: Job, reference: ReferenceRun, made: Made) -> Interface:
    """The interface of the compiled directory: inputs, outputs, caches, and what it was built for."""
    interface, packed = reference.interface, made.builds[0].states.to_table()
    states = {
        name: {"output": output} | ({"layout": packed[name]} if name in packed else {})
        for name, output in reference.states.items()
    }
    interface = replace(interface, states=states)
    if made.c_part is not None:
        source = made.c_part.source
        return replace(interface, outputs=source.outputs, pool_bytes=source.pool_bytes)
    return replace(interface, cpu=targets.cpu_name()) if job.select is not None else interface


def written(
    job: Job,
    searched: Searched,
    made: Made,
    verification: Verification,
    interface: Interface,
    summary: Report,
    programs: Mapping[str, PimProgram],
    traced: Collection[str],
    points: Sequence[FrontPoint] | None,
) -> WrittenDirectory:
    """Write the compiled directory."""
    assert job.out is not None
    system, plans = searched.system, [point.plan for point in points or ()]
    names = front_files("", len(plans))
    others = {name: plan for name, plan in zip(names, plans) if isinstance(plan, Plan)}
    return artifact.write(
        job.out,
        builds=made.builds,
        interface=interface,
        plan=searched.plan,
        placed=artifact.PlacedRegions(
            graph=searched.graph,
            gpu=system.gpu.name,
            dtype=system.dtype,
            padding=system.padding,
            bounds=verification.wider_bounds(system.dtype),
        ),
        pim=system.pim,
        timeline=PlanTrace.of(searched).to_perfetto(),
        report=summary.to_json(),
        programs=programs,
        traced=traced,
        c_files=None if made.c_part is None else made.c_part.source.files(),
        others=others,
        page=functools.partial(page_of, name=Path(job.out).name),
        force=job.force,
    )
