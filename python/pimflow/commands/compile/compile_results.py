"""The last steps of `compile`: what is reported, and what is written."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from pimflow.commands.compile.compile_steps import BuildSet, CompileRequest
from pimflow.commands.compile.make_report import PlacedNetwork, make_report
from pimflow.commands.compile.reference_run import ReferenceRun
from pimflow.commands.compile.timeline import PlanTrace
from pimflow.commands.shared.front import ParetoPoint
from pimflow.commands.shared.front import files as front_files
from pimflow.commands.shared.memory_report import PoolReport
from pimflow.commands.shared.prepare import PreparedNetwork
from pimflow.commands.shared.report import ExtraReports, GpuPart, Report
from pimflow.commands.shared.search import order_report, replace_primitives
from pimflow.commands.simulate import trace as tracing
from pimflow.compiler import artifact
from pimflow.compiler.artifact import ArtifactFiles
from pimflow.compiler.build import Build
from pimflow.compiler.interface import Interface
from pimflow.compiler.measurement.kernel_times import kernel_times
from pimflow.compiler.verification import Verification
from pimflow.core.plan import Plan
from pimflow.pim_backend.runtime import targets
from pimflow.placement import SearchResult
from pimflow.primitive_selection import selection as primitive_selection
from pimflow.primitive_selection.report import PlanPrimitives, SelectionReport, plan_primitives
from pimflow.primitive_selection.selection import Selection


def extra_reports(
    request: CompileRequest,
    prepared: PreparedNetwork,
    placed: PlacedNetwork,
    reference: ReferenceRun,
    selection: Selection | None,
    build_set: BuildSet,
) -> ExtraReports:
    """The parts of the report about what was requested beside a plan."""
    search_result, order = placed.search_result, prepared.order
    primitives: SelectionReport | PlanPrimitives | None = None
    if search_result.goal.primitives:
        primitives = plan_primitives(search_result, replace_primitives(search_result, request))
    elif selection is not None:
        primitives = primitive_selection.summary(selection)
    return ExtraReports(
        order=None if order is None else order_report(order, search_result, request),
        decomposition=reference.decomposition,
        skips=None if prepared.skips is None else prepared.skips.summary(),
        primitives=primitives,
        c_part=None if build_set.c_part is None else build_set.c_part.report,
        front=None if placed.front is None else _with_plan_files(request, placed.front),
        channel_counts=request.channel_counts,
        copy_distances=request.copy_distances,
        input_range=reference.input_range,
    )


def _with_plan_files(request: CompileRequest, points: Sequence[ParetoPoint]) -> tuple[ParetoPoint, ...]:
    """`points` with the names of their plan files in place of plans, if they are written."""
    if request.out is None:
        return tuple(points)
    return tuple(
        replace(point, plan=file) for point, file in zip(points, front_files(request.out, len(points)))
    )


def assemble_report(
    placed: PlacedNetwork,
    build_set: BuildSet,
    verification: Verification,
    reference: ReferenceRun,
    extras: ExtraReports,
    begin: float,
) -> Report:
    """The report of a compiled and verified network."""
    target_build = build_set.builds[0]
    return make_report(
        placed,
        verification,
        gpu_part=_gpu_part(placed.search_result, target_build, reference.inputs),
        pool=PoolReport.from_build(target_build, placed.pool, placed.search_result.plan.options),
        extras=extras,
        wall_seconds=time.perf_counter() - begin,
    )


def _gpu_part(search_result: SearchResult, target_build: Build, inputs: Mapping[str, np.ndarray]) -> GpuPart:
    """The part of the report about GPU kernels, with measured times if a device can run them."""
    measured_ns, measured_on = None, ""
    if target_build.target != "llvm+pim" and target_build.can_run_here:
        measured_ns = sum(kernel.calls * kernel.call_ns for kernel in kernel_times(target_build, inputs))
        measured_on = str(target_build.device.device_name)
    return GpuPart.from_search(
        search_result, target_build.target, target_build.kernels, measured_ns, measured_on
    )


def _interface(request: CompileRequest, reference: ReferenceRun, build_set: BuildSet) -> Interface:
    """The interface of the compiled directory: inputs, outputs, caches, and what it was built for."""
    interface, packed = reference.interface, build_set.builds[0].states.to_table()
    states = {
        name: {"output": output} | ({"layout": packed[name]} if name in packed else {})
        for name, output in reference.states.items()
    }
    interface = replace(interface, states=states)
    if build_set.c_part is not None:
        source = build_set.c_part.source
        return replace(interface, outputs=source.outputs, pool_bytes=source.pool_bytes)
    return replace(interface, cpu=targets.cpu_name()) if request.select is not None else interface


def artifact_files(
    request: CompileRequest,
    placed: PlacedNetwork,
    build_set: BuildSet,
    verification: Verification,
    reference: ReferenceRun,
    report: Report,
) -> ArtifactFiles:
    """What the compiled directory holds."""
    search_result = placed.search_result
    system, programs = search_result.system, search_result.programs()
    plans = [point.plan for point in placed.front or ()]
    names = front_files("", len(plans))
    return ArtifactFiles(
        builds=build_set.builds,
        interface=_interface(request, reference, build_set),
        plan=search_result.plan,
        placed_regions=artifact.PlacedRegions(
            graph=search_result.graph,
            gpu=system.gpu.name,
            dtype=system.dtype,
            padding=system.padding,
            bounds=verification.wider_bounds(system.dtype),
        ),
        pim=system.pim,
        timeline=PlanTrace.from_search(search_result).to_perfetto(),
        report=report.to_json(),
        programs=programs,
        traced_regions=tracing.traceable_regions(programs, request.progress) if request.emit_traces else (),
        c_files={} if build_set.c_part is None else build_set.c_part.source.files(),
        front={name: plan for name, plan in zip(names, plans) if isinstance(plan, Plan)},
    )
