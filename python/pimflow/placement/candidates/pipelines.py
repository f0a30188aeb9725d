"""Pipelines: runs of regions in stages on both devices at once (PIMFlow, "Pipelined Execution")."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from pimflow.core.candidate import Candidate, Footprint, Task
from pimflow.core.kernel import ConvGeometry, Kernel
from pimflow.core.program import PimProgram
from pimflow.core.region import Region
from pimflow.core.region_graph import RegionGraph
from pimflow.core.rewrite import OPERATOR_KERNELS, Mode, PimRewrite, PipelineRewrite
from pimflow.core.split import WHOLE
from pimflow.core.stages import Pipeline, stage_name
from pimflow.errors import PlanError
from pimflow.pim_backend.programs.lowering import ProgramRequest
from pimflow.placement.candidates.candidates import CandidateGenerator
from pimflow.placement.candidates.tasks import TaskList
from pimflow.placement.costs.pim_runs import LayerPimCost, PimCost
from pimflow.placement.costs.staged_runs import StagedRun, is_chained, staging_obstacle
from pimflow.simulators.pim.bound import min_work_ns

RUN_LENGTHS = (2, 3, 4)  # numbers of regions that are tried
STAGE_COUNTS = (2, 3, 4, 6, 8)  # numbers of stages that are tried
# A run is timed only if this share of `_RunBounds.share_bound_ns` is below the time of its regions in
# sequence. `share_bound_ns` assumes that a part costs at least its share of the region; small kernels may
# cost less.
MARGIN = 0.98


def _staged_run(generator: CandidateGenerator, pipeline: Pipeline) -> StagedRun:
    """`pipeline` as a staged run on the system; raises `PlanError` if it is impossible."""
    system = generator.system
    run = StagedRun.from_pipeline(generator.graph, pipeline, system.dtype)
    reason = "" if system.uses_views else "parts of tensors would be copied (--copies made)"
    if not system.gpu_channels:
        reason = "PIM in all channels leaves the GPU none meanwhile"
    for region, mode in zip(run.regions, pipeline.modes):
        reason = reason or (generator.unsupported_reason(region) if mode is Mode.PIM else "")
    if system.pim.result_lanes > 1 and (Mode.PIM, Mode.PIM) in itertools.pairwise(pipeline.modes):
        reason = reason or "PIM leaves sums of lanes to the GPU, before PIM can go on"
    if reason:
        raise PlanError(f"region '{run.regions[0].name}' cannot begin a PIPELINE: {reason}")
    return run


def make(generator: CandidateGenerator, pipeline: Pipeline, schedules: Sequence[str] = ()) -> Candidate:
    """The candidate that runs `pipeline`; raises `PlanError` if that or a loop order is impossible.

    `schedules` are the loop orders by region; the fastest where they are empty.
    """
    run = _staged_run(generator, pipeline)
    schedules = tuple(schedules) or ("",) * len(run.regions)
    if len(schedules) != len(run.regions):
        raise PlanError(f"region '{run.regions[0].name}': a PIPELINE has a schedule for each of its regions")
    costs = _pim_costs(generator, run, schedules)
    tasks = _tasks(generator, run, costs)
    last, deferred_epilogue = run.regions[-1], tuple[str, ...]()
    if pipeline.modes[-1] is Mode.PIM:
        operators = (*generator.deferred_epilogue(last, WHOLE), *last.epilogue.arithmetic)
        deferred_epilogue = generator.append_epilogue(tasks, last, operators)
    return Candidate(
        name=f"PIPELINE {'-'.join(pipeline.modes)} at {','.join(map(str, pipeline.cuts))}",
        covers=pipeline.regions,
        rewrite=PipelineRewrite(
            cuts=pipeline.cuts,
            modes=pipeline.modes,
            schedules=tuple(
                str(costs[i, 0].schedule) if mode is Mode.PIM else "" for i, mode in enumerate(pipeline.modes)
            ),
        ),
        tasks=tuple(tasks),
        deferred_epilogue=deferred_epilogue,
        footprint=Footprint(
            bank_rows=sum(cost.rows for cost in costs.values()),
            filter_bytes=sum(
                region.weight_bytes(generator.system.dtype, 0 if mode is Mode.PIM else None)
                for region, mode in zip(run.regions, pipeline.modes)
            ),
        ),
    )


def _pim_costs(
    generator: CandidateGenerator, run: StagedRun, schedules: Sequence[str]
) -> dict[tuple[int, int], LayerPimCost]:
    """The cost of every part on PIM. Parts of a region share a loop order, by default the largest's."""
    costs = {}
    for position, mode in enumerate(run.pipeline.modes):
        if mode is Mode.GPU:
            continue
        region, parts = run.regions[position], run.rows[position]
        if text := schedules[position]:
            schedule = generator.costs.pim_target.parse_schedule(text, region.layer, region.name)
        else:
            schedule = generator.costs.pim_cost(run.largest(position), region.name).schedule
        for stage in range(len(parts)):
            costs[position, stage] = generator.costs.pim_cost(
                run.products(position, stage), region.name, schedule=schedule
            )
    return costs


def _tasks(
    generator: CandidateGenerator, run: StagedRun, costs: Mapping[tuple[int, int], PimCost]
) -> TaskList:
    """The tasks of all parts, in the order in which the parts are issued.

    A part waits for the part of the previous region of the same stage. Earlier stages have ended by then,
    since one resource does the parts of a region in order.
    """
    tasks, builder = TaskList(), generator.task_builder
    ends: dict[tuple[int, int], tuple[int, ...]] = {}
    for position, stage in run.pipeline.steps:
        region, label = run.regions[position], f"{run.regions[position].name}, stage {stage}"
        waits, cost = ends[position - 1, stage] if position else (), costs.get((position, stage))
        if cost:
            parts = builder.pim_tasks(label, cost, run.geometry(position, stage).input_elements)
        else:
            parts = builder.gpu_tasks_with_traffic(label, label, run.kernel(position, stage))
        results = cost.results if cost else 0
        sum_tasks = builder.partial_sum_tasks(region, WHOLE, results)
        ends[position, stage] = tasks.append_sequence(sum_tasks, tasks.append_after(parts, waits))
    return tasks


def pim_programs(
    generator: CandidateGenerator, covers: tuple[str, ...], rewrite: PipelineRewrite, row_begin: int
) -> Iterator[tuple[str, PimProgram]]:
    """PIM programs of the parts of a pipeline by name (`stage_name`), with weights from row `row_begin` on.

    Each part stores weights of its own, since its products are distributed over the channels differently.
    """
    pipeline = to_pipeline(covers, rewrite)
    run = StagedRun.from_pipeline(generator.graph, pipeline, generator.system.dtype)
    costs = _pim_costs(generator, run, rewrite.schedules)
    for (position, stage), cost in costs.items():
        part = stage_name(run.regions[position].name, stage)
        request = ProgramRequest(part, run.geometry(position, stage), cost.schedule, row_begin=row_begin)
        yield part, generator.costs.pim_target.program(request)
        row_begin += cost.rows


def to_pipeline(regions: tuple[str, ...], rewrite: PipelineRewrite) -> Pipeline:
    """The pipeline of regions that `rewrite` describes."""
    return Pipeline(regions=regions, modes=rewrite.modes, cuts=rewrite.cuts)


def kernels(graph: RegionGraph, pipeline: Pipeline, dtype: str) -> dict[str, list[Kernel]]:
    """By region, the GPU kernels of a pipeline; none for regions on PIM."""
    run = StagedRun.from_pipeline(graph, pipeline, dtype)
    by_region: dict[str, list[Kernel]] = {name: [] for name in pipeline.regions}
    for position, stage in pipeline.steps:
        if pipeline.modes[position] is Mode.GPU:
            by_region[pipeline.regions[position]].append(run.kernel(position, stage))
    return by_region


def candidates(
    generator: CandidateGenerator, is_requested: Callable[[tuple[str, ...]], bool] = lambda _: True
) -> list[Candidate]:
    """The pipelines that are faster than their regions one after another.

    For every run and every assignment of its regions to devices, the best number of stages. Runs of regions
    that are not `is_requested` are left out. Candidates of single regions must have been timed
    (`CandidateGenerator.prepare`).
    """
    if Mode.PIPELINE not in generator.modes or not generator.system.gpu_channels:
        return []
    bounds = _RunBounds(generator)
    requested_runs = (run for run in _shared_runs(generator) if is_requested(run.pipeline.regions))
    promising_runs = [
        run for run in requested_runs if bounds.share_bound_ns(run) * MARGIN < bounds.sequential_ns(run)
    ]
    # Kernels of parts are priced quickly, PIM programs are not: these are timed for few runs only.
    lower_bounds_ns = generator.costs.batch_kernels(lambda: bounds.lower_bounds_ns(promising_runs))
    evaluated_runs = [
        run for run, ns in zip(promising_runs, lower_bounds_ns) if ns < bounds.sequential_ns(run)
    ]
    layers = {
        run.largest(position): run.regions[position].name
        for run in evaluated_runs
        for position, mode in enumerate(run.pipeline.modes)
        if mode is Mode.PIM
    }
    generator.costs.time_layers([generator.costs.layer(geometry, name) for geometry, name in layers.items()])
    pipeline_candidates = generator.costs.batch_kernels(
        lambda: [make(generator, run.pipeline) for run in evaluated_runs]
    )
    best: dict[tuple[tuple[str, ...], tuple[Mode, ...]], tuple[float, Candidate]] = {}
    for run, candidate in zip(evaluated_runs, pipeline_candidates, strict=True):
        latency_ns = generator.task_builder.standalone_ns(candidate.tasks)
        key = (run.pipeline.regions, run.pipeline.modes)
        if latency_ns < bounds.sequential_ns(run) and (key not in best or latency_ns < best[key][0]):
            best[key] = (latency_ns, candidate)
    return [candidate for _, candidate in best.values()]


def _shared_runs(generator: CandidateGenerator) -> tuple[StagedRun, ...]:
    """`runs`, shared by searches of the same network on systems that allow the same runs."""
    system = generator.system
    is_unsupported = tuple(bool(generator.unsupported_reason(region)) for region in generator.graph.regions)
    key = (generator.graph.digest, is_unsupported, system.uses_views, system.pim.result_lanes, system.dtype)
    if key not in generator.costs.staged_runs:
        generator.costs.staged_runs[key] = tuple(runs(generator))
    return generator.costs.staged_runs[key]


def runs(generator: CandidateGenerator) -> Iterator[StagedRun]:
    """All runs of `RUN_LENGTHS` regions in `STAGE_COUNTS` stages, on both devices."""
    graph = generator.graph
    for begin, length in itertools.product(range(len(graph.regions)), RUN_LENGTHS):
        regions = graph.regions[begin : begin + length]
        names = tuple(region.name for region in regions)
        if len(regions) < length or any(staging_obstacle(region) for region in regions):
            continue
        if not all(is_chained(graph, *pair) for pair in itertools.pairwise(regions)):
            continue
        devices = [
            (Mode.GPU,) if generator.unsupported_reason(region) else (Mode.GPU, Mode.PIM)
            for region in regions
        ]
        rows = regions[-1].layer.oh
        for modes, stages in itertools.product(itertools.product(*devices), STAGE_COUNTS):
            if len(set(modes)) == 2 and stages <= rows:
                cuts = tuple(rows * stage // stages for stage in range(1, stages))
                try:
                    yield _staged_run(generator, Pipeline(regions=names, modes=modes, cuts=cuts))
                except PlanError:
                    continue


class _RunBounds:
    """Bounds of the times of staged runs, from their regions' candidates, before stages are timed."""

    def __init__(self, generator: CandidateGenerator):
        self.generator = generator
        self._tasks: dict[tuple[str, Mode], Task] = {}
        self._fastest: dict[str, dict[tuple[bool, bool], float]] = {}
        self._sequential_ns: dict[tuple[str, ...], float] = {}

    def sequential_ns(self, run: StagedRun) -> float:
        """Time of the regions of `run` one after another, deferred epilogues included.

        A candidate that fuses a deferred epilogue does it in its own kernel; else it is a kernel by itself.
        """
        if run.pipeline.regions not in self._sequential_ns:
            best_ns, previous = {False: 0.0}, run.regions[0]
            for region in run.regions:
                next_best_ns: dict[bool, float] = {}
                steps = itertools.product(best_ns.items(), self._fastest_ns(region).items())
                for (is_deferred, until_ns), ((accepts, defers), ns) in steps:
                    until_ns += ns + (self._transition_ns(previous, accepts) if is_deferred else 0.0)
                    next_best_ns[defers] = min(next_best_ns.get(defers, math.inf), until_ns)
                best_ns, previous = next_best_ns, region
            self._sequential_ns[run.pipeline.regions] = min(best_ns.values())
        return self._sequential_ns[run.pipeline.regions]

    def _transition_ns(self, region: Region, is_fused: bool) -> float:
        """Time of the deferred epilogue of a region."""
        generator = self.generator
        edge = generator.fused_epilogue_cost(region) if is_fused else generator.epilogue_cost(region)
        return generator.task_builder.standalone_ns([edge.task] if edge.task else [])

    def _fastest_ns(self, region: Region) -> dict[tuple[bool, bool], float]:
        """Time of the fastest candidate, by whether it fuses a deferred epilogue and whether it defers."""
        if region.name not in self._fastest:
            fastest = self._fastest[region.name] = {}
            for candidate in self.generator.candidates(region):
                key = candidate.fuses_epilogue, bool(candidate.deferred_epilogue)
                candidate_ns = self.generator.task_builder.standalone_ns(candidate.tasks)
                fastest[key] = min(fastest.get(key, math.inf), candidate_ns)
        return self._fastest[region.name]

    def share_bound_ns(self, run: StagedRun) -> float:
        """Approximate lower bound: parts take a launch and their share of the region; no device waits."""
        busy_ns: dict[str, float] = defaultdict(float)
        for region, mode, rows in zip(run.regions, run.pipeline.modes, run.rows):
            task, computed_rows = self._task(region, mode), sum(end - begin for begin, end in rows)
            parts_ns = len(rows) * self._min_launch_ns(task.launch_ns)
            busy_ns[task.resource] += parts_ns + task.execution_ns * computed_rows / region.layer.oh
        return max(busy_ns.values())

    def _task(self, region: Region, mode: Mode) -> Task:
        """The task of a whole region on a device."""
        if (region.name, mode) not in self._tasks:
            rewrite, resource = (PimRewrite(), "pim") if mode is Mode.PIM else (OPERATOR_KERNELS, "gpu")
            tasks = self.generator.make(region, rewrite).tasks
            self._tasks[region.name, mode] = next(task for task in tasks if task.resource == resource)
        return self._tasks[region.name, mode]

    def lower_bounds_ns(self, runs: Sequence[StagedRun]) -> list[float]:
        """Lower bounds of runs: the times of their kernels, and the least work of PIM for their products."""
        task_builder = self.generator.task_builder
        pim_target = self.generator.costs.pim_target
        work = [run.work for run in runs]
        distinct = dict.fromkeys(itertools.chain.from_iterable(run_work.values() for run_work in work))
        task_builder.time_kernels(work_item for work_item in distinct if isinstance(work_item, Kernel))

        def part_bounds(part: Kernel | ConvGeometry) -> list[tuple[str, float]]:
            """The resources of a part, and lower bounds of their times."""
            if isinstance(part, Kernel):
                parts = task_builder.gpu_tasks_with_traffic("", "", part)
                return [
                    (task.resource, self._min_launch_ns(task.launch_ns) + task.execution_ns) for task in parts
                ]
            work_ns = min_work_ns(part, pim_target.pim, pim_target.dtype, pim_target.channels)
            return [("pim", self._min_launch_ns(task_builder.submission_ns) + work_ns)]

        bounds_ns = {part: part_bounds(part) for part in distinct}
        return [
            _staged_ns(run, {step: bounds_ns[part] for step, part in parts.items()})
            for run, parts in zip(runs, work)
        ]

    def _min_launch_ns(self, launch_ns: float) -> float:
        """The least that a launch is charged: 0 if launches are issued ahead, as they may be hidden."""
        return 0.0 if self.generator.system.overlaps_launches else launch_ns


def _staged_ns(run: StagedRun, parts: Mapping[tuple[int, int], Sequence[tuple[str, float]]]) -> float:
    """Time of `run`, with the resources and durations of its `parts` by region and stage.

    A part begins when that of the previous region has ended; see `_tasks`.
    """
    ends: dict[tuple[int, int], float] = {}
    free: dict[str, float] = {}
    for position, stage in run.pipeline.steps:
        begin, part_end_ns = ends[position - 1, stage] if position else 0.0, 0.0
        for resource, duration_ns in parts[position, stage]:
            free[resource] = end = max(free.get(resource, 0.0), begin) + duration_ns
            part_end_ns = max(part_end_ns, end)
        ends[position, stage] = part_end_ns
    return max(ends.values())
