"""Pipelines: runs of regions in stages on both devices at once (PIMFlow, "Pipelined Execution")."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from pimflow.core.candidate import Candidate, Port, Rewrite, Task
from pimflow.core.plan import Choice
from pimflow.core.program import PimProgram
from pimflow.core.region import ConvGeometry, Kernel, Region, RegionGraph
from pimflow.core.split import WHOLE
from pimflow.core.stages import Pipeline, stage_name
from pimflow.errors import PlanError
from pimflow.pim_backend.programs.schedule import Schedule
from pimflow.placement.candidates.candidates import Candidates
from pimflow.placement.candidates.tasks import weight_bytes
from pimflow.placement.costs.pim_runs import PimCost
from pimflow.placement.costs.staged_runs import StagedRun, chained, unstaged
from pimflow.placement.solvers.capacity import row_bytes
from pimflow.simulators.pim.bound import least_work_ns

LENGTHS = (2, 3, 4)  # numbers of regions that are tried
STAGES = (2, 3, 4, 6, 8)  # numbers of stages that are tried
# A run is timed only if this share of `_Bounds.shares_ns` is below the time of its regions in sequence.
# `shares_ns` assumes that a part costs at least its share of the region; small kernels may cost less.
MARGIN = 0.98


def _of(maker: Candidates, pipeline: Pipeline) -> StagedRun:
    """`pipeline` as a staged run on the system; raises `PlanError` if it is impossible."""
    run, system = StagedRun.of(maker.graph, pipeline), maker.system
    problem = "" if system.views else "parts of tensors would be copied (--copies made)"
    if not system.gpu_channels:
        problem = "PIM in all channels leaves the GPU none meanwhile"
    for region, mode in zip(run.regions, pipeline.modes):
        problem = problem or (maker.refusal(region) if mode == "PIM" else "")
    if system.pim.result_lanes > 1 and ("PIM", "PIM") in itertools.pairwise(pipeline.modes):
        problem = problem or "PIM leaves sums of lanes to the GPU, before PIM can go on"
    if problem:
        raise PlanError(f"region '{run.regions[0].name}' cannot begin a PIPELINE: {problem}")
    return run


def make(maker: Candidates, pipeline: Pipeline, schedules: Sequence[str] = ()) -> Candidate:
    """The candidate that runs `pipeline`.

    Parameters
    ----------
    schedules : sequence of str
        Loop orders by region; the fastest where they are empty.

    Raises
    ------
    PlanError
        If the pipeline or a loop order is impossible.
    """
    run = _of(maker, pipeline)
    schedules = tuple(schedules) or ("",) * len(run.regions)
    if len(schedules) != len(run.regions):
        raise PlanError(f"region '{run.regions[0].name}': a PIPELINE has a schedule for each of its regions")
    costs = _pim_costs(maker, run, schedules)
    tasks = _tasks(maker, run, costs)
    last = run.regions[-1]
    pending = (*maker.pending(last, WHOLE), *last.made_behind) if pipeline.modes[-1] == "PIM" else ()
    defers = bool(pending) and maker.defers(last)
    if pending and not defers and (settle := maker.settle(last).task):
        tasks.append(settle.waiting_for(tuple(range(len(tasks)))))
    rows = sum(cost.rows for cost in costs.values())
    port = Port(dtype=maker.system.dtype)
    return Candidate(
        name=f"PIPELINE {'-'.join(pipeline.modes)} at {','.join(map(str, pipeline.cuts))}",
        covers=pipeline.regions,
        gpu_share=None,
        input=port,
        output=replace(port, pending=pending if defers else ()),
        tasks=tuple(tasks),
        rewrite=Rewrite(
            mode="PIPELINE",
            gpu_rows=0,
            stages=pipeline.cuts,
            modes=pipeline.modes,
            schedules=tuple(
                costs[i, 0].schedule if mode == "PIM" else "" for i, mode in enumerate(pipeline.modes)
            ),
        ),
        placed_rows=rows,
        placed_bytes=rows * row_bytes(maker.system) * maker.system.pim_channels,
        filter_bytes=sum(
            weight_bytes(region, maker.system.dtype, 0 if mode == "PIM" else None)
            for region, mode in zip(run.regions, pipeline.modes)
        ),
    )


def _pim_costs(maker: Candidates, run: StagedRun, schedules: Sequence[str]) -> dict[tuple[int, int], PimCost]:
    """The cost of every part on PIM. Parts of a region share a loop order, by default the largest's."""
    costs = {}
    for position, mode in enumerate(run.pipeline.modes):
        if mode == "GPU":
            continue
        region, parts = run.regions[position], run.rows[position]
        schedule = schedules[position]
        if schedule:
            maker.costs.side.require_schedule(schedule, region.layer, region.name)
        else:
            schedule = maker.costs.pim(run.largest(position), region.name).schedule
        for stage in range(len(parts)):
            costs[position, stage] = maker.costs.pim(
                run.products(position, stage), region.name, schedule=schedule
            )
    return costs


def _tasks(maker: Candidates, run: StagedRun, costs: Mapping[tuple[int, int], PimCost]) -> list[Task]:
    """The tasks of all parts, in the order in which the parts are issued.

    A part waits for the part of the previous region of the same stage. Earlier stages have ended by then,
    since one resource does the parts of a region in order.
    """
    tasks: list[Task] = []
    done: dict[tuple[int, int], tuple[int, ...]] = {}
    for position, stage in run.pipeline.steps:
        region, label = run.regions[position], f"{run.regions[position].name}, stage {stage}"
        waits = done[position - 1, stage] if position else ()
        first = len(tasks)
        if (position, stage) in costs:
            part = run.geometry(position, stage)
            parts = maker.tasks.pim(label, costs[position, stage], part.n * part.h * part.w * part.c)
        else:
            kernel = run.kernel(position, stage, maker.system.dtype)
            parts = maker.tasks.gpu_beside_pim(label, label, kernel)
        tasks += [task.waiting_for(waits) for task in parts]
        done[position, stage] = tuple(range(first, len(tasks)))
        results = costs[position, stage].results if (position, stage) in costs else 0
        for lanes in maker.tasks.last(region, WHOLE, results) if results else ():
            tasks.append(lanes.waiting_for(done[position, stage]))
            done[position, stage] = (len(tasks) - 1,)
    return tasks


def placed(maker: Candidates, candidate: Candidate, row_begin: int) -> Iterator[tuple[str, PimProgram]]:
    """PIM programs of a candidate's parts by name (`stage_name`), with weights from row `row_begin` on.

    Each part stores weights of its own, since its products are distributed over the channels differently.
    """
    run = StagedRun.of(maker.graph, pipeline_of(candidate))
    costs = _pim_costs(maker, run, candidate.rewrite.schedules)
    for (position, stage), cost in costs.items():
        name, schedule = run.regions[position].name, Schedule.parse(cost.schedule)
        part = stage_name(name, stage)
        geometry = run.geometry(position, stage)
        yield part, maker.costs.side.program(geometry, schedule, part, row_begin=row_begin)
        row_begin += cost.rows


def pipeline_of(candidate: Candidate) -> Pipeline:
    """The pipeline of a candidate of mode PIPELINE."""
    return Pipeline(regions=candidate.covers, modes=candidate.rewrite.modes, cuts=candidate.rewrite.stages)


def kernels(graph: RegionGraph, choice: Choice, dtype: str) -> dict[str, list[Kernel]]:
    """By region, the GPU kernels of a pipeline choice; none for regions on PIM."""
    pipeline = Pipeline(regions=choice.regions, modes=choice.modes, cuts=choice.stages)
    run = StagedRun.of(graph, pipeline)
    by_region: dict[str, list[Kernel]] = {name: [] for name in pipeline.regions}
    for position, stage in pipeline.steps:
        if pipeline.modes[position] == "GPU":
            by_region[pipeline.regions[position]].append(run.kernel(position, stage, dtype))
    return by_region


def candidates(
    maker: Candidates, wanted: Callable[[tuple[str, ...]], bool] = lambda _: True
) -> dict[str, list[Candidate]]:
    """By first region, the pipelines that are faster than their regions one after another.

    For every run and every assignment of its regions to devices, the best number of stages. Candidates of
    single regions must have been timed (`Candidates.prepare`).

    Parameters
    ----------
    wanted : callable
        A predicate of a run's region names: other runs are left out.
    """
    if "PIPELINE" not in maker.modes or not maker.system.gpu_channels:
        return {}
    bounds = _Bounds(maker)
    every = (run for run in _all_runs(maker) if wanted(run.pipeline.regions))
    worth = [run for run in every if bounds.shares_ns(run) * MARGIN < bounds.one_by_one_ns(run)]
    # Kernels of parts are priced quickly, PIM programs are not: these are timed for few runs only.
    least_ns = maker.costs.together(lambda: bounds.least_ns(worth))
    tried = [run for run, ns in zip(worth, least_ns) if ns < bounds.one_by_one_ns(run)]
    layers = {
        run.largest(position): run.regions[position].name
        for run in tried
        for position, mode in enumerate(run.pipeline.modes)
        if mode == "PIM"
    }
    maker.costs.time_layers([maker.costs.layer(geometry, name) for geometry, name in layers.items()])
    made = maker.costs.together(lambda: [make(maker, run.pipeline) for run in tried])
    best: dict[tuple[tuple[str, ...], ...], tuple[float, Candidate]] = {}
    for run, candidate in zip(tried, made, strict=True):
        latency_ns = maker.tasks.alone_ns(candidate.tasks)
        key = (run.pipeline.regions, run.pipeline.modes)
        if latency_ns < bounds.one_by_one_ns(run) and (key not in best or latency_ns < best[key][0]):
            best[key] = (latency_ns, candidate)
    by_region: dict[str, list[Candidate]] = {}
    for _, candidate in best.values():
        by_region.setdefault(candidate.covers[0], []).append(candidate)
    return by_region


def _all_runs(maker: Candidates) -> tuple[StagedRun, ...]:
    """`runs`, shared by searches of the same network on systems that allow the same runs."""
    system = maker.system
    refused = tuple(bool(maker.refusal(region)) for region in maker.graph.regions)
    key = (maker.graph.digest, refused, system.views, system.pim.result_lanes)
    if key not in maker.costs.staged_runs:
        maker.costs.staged_runs[key] = tuple(runs(maker))
    return maker.costs.staged_runs[key]


def runs(maker: Candidates) -> Iterator[StagedRun]:
    """All runs of `LENGTHS` regions in `STAGES` stages, on both devices."""
    graph = maker.graph
    for begin, length in itertools.product(range(len(graph.regions)), LENGTHS):
        regions = graph.regions[begin : begin + length]
        names = tuple(region.name for region in regions)
        if len(regions) < length or any(unstaged(region) for region in regions):
            continue
        if not all(chained(graph, *pair) for pair in itertools.pairwise(regions)):
            continue
        devices = [("GPU",) if maker.refusal(region) else ("GPU", "PIM") for region in regions]
        rows = regions[-1].layer.oh
        for modes, stages in itertools.product(itertools.product(*devices), STAGES):
            if len(set(modes)) == 2 and stages <= rows:
                cuts = tuple(rows * stage // stages for stage in range(1, stages))
                try:
                    yield _of(maker, Pipeline(regions=names, modes=modes, cuts=cuts))
                except PlanError:
                    continue


class _Bounds:
    """Bounds of the times of staged runs, from their regions' candidates, before stages are timed."""

    def __init__(self, maker: Candidates):
        self.maker = maker
        self._tasks: dict[tuple[str, str], Task] = {}
        self._fastest: dict[str, dict[tuple[bool, bool], float]] = {}
        self._alone: dict[tuple[str, ...], float] = {}

    def one_by_one_ns(self, run: StagedRun) -> float:
        """Time of the regions of `run` one after another, deferred epilogues included.

        A candidate that fuses a deferred epilogue does it in its own kernel; else it is a kernel by itself.
        """
        if run.pipeline.regions not in self._alone:
            best_ns, before = {False: 0.0}, None
            for region in run.regions:
                found: dict[bool, float] = {}
                for pending, until_ns in best_ns.items():
                    for (accepts, leaves), ns in self._of(region).items():
                        if pending:
                            assert before is not None
                            after = self.maker.absorb(before) if accepts else self.maker.settle(before)
                            ns += self.maker.tasks.alone_ns((after.task,)) if after.task else 0.0
                        found[leaves] = min(found.get(leaves, math.inf), until_ns + ns)
                best_ns, before = found, region
            self._alone[run.pipeline.regions] = min(best_ns.values())
        return self._alone[run.pipeline.regions]

    def _of(self, region: Region) -> dict[tuple[bool, bool], float]:
        """Time of the fastest candidate, by whether it fuses a deferred epilogue and whether it defers."""
        if region.name not in self._fastest:
            fastest = self._fastest[region.name] = {}
            for each in self.maker.all(region):
                key = each.input.accepts_pending, bool(each.output.pending)
                fastest[key] = min(fastest.get(key, math.inf), self.maker.tasks.alone_ns(each.tasks))
        return self._fastest[region.name]

    def shares_ns(self, run: StagedRun) -> float:
        """Approximate lower bound: a part takes a launch and its share of the region; no crossbar time."""
        wholes = [self._task(region, mode) for region, mode in zip(run.regions, run.pipeline.modes)]

        def part(step: tuple[int, int]) -> list[tuple[str, float]]:
            """The resource of a part, and its estimated time."""
            position, stage = step
            (begin, end), whole = run.rows[position][stage], wholes[position]
            share = (end - begin) / run.regions[position].layer.oh
            return [(whole.resource, self._charged(whole.launch_ns) + whole.execution_ns * share)]

        return _stages_ns(run, part)

    def least_ns(self, runs: Sequence[StagedRun]) -> list[float]:
        """Lower bounds of runs: the times of their kernels, and the least work of PIM for their products."""
        tasks, side, dtype = self.maker.tasks, self.maker.costs.side, self.maker.system.dtype
        work = [
            {
                (position, stage): run.kernel(position, stage, dtype)
                if run.pipeline.modes[position] == "GPU"
                else run.products(position, stage)
                for position, stage in run.pipeline.steps
            }
            for run in runs
        ]
        distinct = dict.fromkeys(itertools.chain.from_iterable(of_run.values() for of_run in work))
        tasks.time_kernels(each for each in distinct if isinstance(each, Kernel))

        def least(part: Kernel | ConvGeometry) -> list[tuple[str, float]]:
            """The resources of a part, and lower bounds of their times."""
            if isinstance(part, Kernel):
                parts = tasks.gpu_beside_pim("", "", part)
                return [(each.resource, self._charged(each.launch_ns) + each.execution_ns) for each in parts]
            work_ns = least_work_ns(part, side.pim, side.dtype, side.channels)
            return [("pim", self._charged(tasks.submission_ns) + work_ns)]

        known = {part: least(part) for part in distinct}
        return [
            _stages_ns(run, {step: known[part] for step, part in parts.items()}.__getitem__)
            for run, parts in zip(runs, work)
        ]

    def _charged(self, launch_ns: float) -> float:
        """The least that a launch is charged: 0 if launches are issued ahead, as they may be hidden."""
        return 0.0 if self.maker.system.launched_ahead else launch_ns

    def _task(self, region: Region, mode: str) -> Task:
        key = region.name, mode
        if key not in self._tasks:
            resource = mode.lower()
            self._tasks[key] = next(t for t in self.maker.make(region, mode).tasks if t.resource == resource)
        return self._tasks[key]


def _stages_ns(run: StagedRun, part: Callable[[tuple[int, int]], Sequence[tuple[str, float]]]) -> float:
    """Time of `run`, if `part` gives each part's resources and durations, by region and stage.

    A part begins when that of the previous region has ended; see `_tasks`.
    """
    ends: dict[tuple[int, int], float] = {}
    free: dict[str, float] = {}
    for position, stage in run.pipeline.steps:
        begin, last = ends[position - 1, stage] if position else 0.0, 0.0
        for resource, duration_ns in part((position, stage)):
            free[resource] = end = max(free.get(resource, 0.0), begin) + duration_ns
            last = max(last, end)
        ends[position, stage] = last
    return max(ends.values())
