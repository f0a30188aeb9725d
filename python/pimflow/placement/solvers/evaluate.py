"""One evaluator for every plan: a timeline of both devices, and the energy under it."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from pimflow.core.candidate import (
    RESOURCES,
    Candidate,
    CostTable,
    Event,
    Task,
    Timeline,
    makespan_ns,
    start_ns,
)
from pimflow.core.region_graph import RegionGraph
from pimflow.hardware import System
from pimflow.placement.solvers import plan_state
from pimflow.placement.solvers.plan_state import PlanState
from pimflow.simulators.pim.energy import background_pj

StartedTasks = tuple[tuple[Task, float], ...]  # each with its start in ns


@dataclass(frozen=True, kw_only=True)
class RegionTimes:
    """The times of a region in a plan; those of a candidate of several regions are listed at the first one.

    Candidates are issued in order, so that each one prolongs the plan by an interval, which may be empty:
    these intervals follow one another without gaps.

    Attributes
    ----------
    latency_ns : float
        Its interval: how much later the plan ends than without it and all after it. Over all regions these
        add up to the latency of the plan.
    busy_ns : dict of str to float
        By resource, the time of its own tasks, launches included, wherever in the plan they are.
    idle_ns : dict of str to float
        By resource, the time of its interval in which the resource does no task of any region. Over all
        regions, the busy and the idle times of a resource together add up to the latency of the plan.
    """

    latency_ns: float = 0.0
    busy_ns: dict[str, float]
    idle_ns: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The timeline of a plan, with its latency and energy.

    Attributes
    ----------
    latency_ns : float
        End of the last task.
    energies_pj : dict of str to float
        By consumer: the energies of the tasks (`Task.energies_pj`), and the constant power of both devices
        over the latency (`STATIC`).
    started_tasks : dict of tuple of str to tuple of (Task, float)
        By the regions of a candidate, in order, its tasks with their starts in ns.
    """

    latency_ns: float
    energies_pj: dict[str, float]
    started_tasks: dict[tuple[str, ...], StartedTasks] = field(repr=False)

    @property
    def energy_pj(self) -> float:
        return sum(self.energies_pj.values())

    @functools.cached_property
    def timeline(self) -> Timeline:
        """What runs when, to the picosecond."""
        return Timeline(
            events=tuple(
                _event(task, start, regions)
                for regions, tasks in self.started_tasks.items()
                for task, start in tasks
            )
        )

    @functools.cached_property
    def region_pj(self) -> dict[str, float]:
        """By region, the energy of its tasks, without constant power.

        The energy of a candidate of several regions is listed at the first one.
        """
        energies_pj: dict[str, float] = {}
        for regions, tasks in self.started_tasks.items():
            energies_pj |= dict.fromkeys(regions, 0.0)
            energies_pj[regions[0]] = sum(task.energy_pj for task, _ in tasks)
        return energies_pj

    @property
    def overlap_ns(self) -> dict[str, float]:
        """By region, how much of its candidate's time overlaps others; zeros are left out.

        The sum of these and the latency is the time of all candidates in sequence.
        """
        added_ps, saved_ns = _latency_increase_ps(self.timeline.events), {}
        for (name, *_), tasks in self.started_tasks.items():
            saved_ps = makespan_ns(tuple(task for task, _ in tasks)) * 1000 - added_ps.get(name, 0)
            if round(saved_ps) > 1:  # events are rounded to a picosecond
                saved_ns[name] = saved_ps / 1000
        return saved_ns

    @functools.cached_property
    def region_times(self) -> dict[str, RegionTimes]:
        """By region, its times; to the picosecond, as events are."""
        events = self.timeline.events
        latencies_ps = _latency_increase_ps(events)
        resources = tuple(dict.fromkeys((*RESOURCES, *(event.resource for event in events))))
        busy_ps = {name: dict.fromkeys(resources, 0) for name in self.region_pj}
        for event in events:
            busy_ps[event.regions[0]][event.resource] += event.end_ps - event.start_ps
        idle_ps = {name: dict.fromkeys(resources, 0) for name in self.region_pj}
        ends_ps = np.cumsum([0, *latencies_ps.values()])
        for resource in resources:
            idle_parts = np.diff(ends_ps) - np.diff(_busy_before_ps(events, resource, ends_ps))
            for name, idle in zip(latencies_ps, idle_parts.tolist()):
                idle_ps[name][resource] = idle
        return {
            name: RegionTimes(
                latency_ns=latencies_ps.get(name, 0) / 1000,
                busy_ns={resource: ps / 1000 for resource, ps in busy_ps[name].items()},
                idle_ns={resource: ps / 1000 for resource, ps in idle_ps[name].items()},
            )
            for name in self.region_pj
        }


# The GPU's constant power, and the background of the PIM channels.
STATIC = ("gpu_static", "pim_static")


def savings_pj(plan: Evaluation, gpu_only: Evaluation) -> dict[str, float]:
    """How much less energy `plan` takes than `gpu_only`, by cause; negative if it takes more.

    Returns
    -------
    dict
        ``shorter_runtime``, constant power over the time saved; ``cheaper_work``, all that the tasks take:
        arithmetic, L2, DRAM, crossbar and PIM commands; ``total``, their sum.
    """

    def difference_pj(parts: Iterable[str]) -> float:
        return sum(gpu_only.energies_pj.get(part, 0.0) - plan.energies_pj.get(part, 0.0) for part in parts)

    work = sorted((plan.energies_pj.keys() | gpu_only.energies_pj.keys()) - set(STATIC))
    shorter_runtime, cheaper_work = difference_pj(STATIC), difference_pj(work)
    return {
        "shorter_runtime": shorter_runtime,
        "cheaper_work": cheaper_work,
        "total": shorter_runtime + cheaper_work,
    }


def advance(
    graph: RegionGraph, table: CostTable, candidate: Candidate, state: PlanState
) -> tuple[PlanState, StartedTasks]:
    """Issue `candidate`: the state after it, and its tasks with their starts in ns."""
    inputs = plan_state.candidate_inputs(graph, candidate)
    late_inputs = plan_state.late_inputs(graph, candidate, state.deferred_epilogues)
    ready_ns = state.ready_ns
    begin_ns = max((ready_ns.get(name, 0.0) for name in inputs if name not in late_inputs), default=0.0)
    free_ns, ends = dict(state.free_ns), list[float]()
    started_tasks: list[tuple[Task, float]] = []
    tasks, running = plan_state.charged_tasks(graph, table, candidate, state)
    for task in tasks:
        starts_ns = max([begin_ns, start_ns(task, free_ns), *(ends[i] for i in task.after)])
        ends.append(starts_ns + task.duration_ns)
        free_ns |= dict.fromkeys(task.resources, ends[-1])
        started_tasks.append((task, starts_ns))
    end_ns = max([begin_ns, *ends, *(ready_ns.get(name, 0.0) for name in late_inputs)])
    next_state = replace(
        plan_state.next_state(graph, candidate, state),
        running=running,
        free_ns=free_ns,
        ready_ns={**ready_ns, **dict.fromkeys(candidate.covers, end_ns)},
    )
    return next_state, tuple(started_tasks)


def execute(graph: RegionGraph, candidates: tuple[Candidate, ...], table: CostTable) -> Evaluation:
    """Schedule the tasks of `candidates` in order, each as early as its inputs and resources allow.

    Constant power is not counted (`evaluate`).
    A resource does one task at a time, in order. The tasks of a candidate wait for what they read, its result
    for all that it reads. The order is that of the regions: in it the executable launches kernels and submits
    PIM programs. An inference begins with PIM's channels in the mode of PIM; a switch back to it after the
    last candidate is not charged.
    """
    state, energies_pj = plan_state.initial_state(table), dict[str, float]()
    started_tasks: dict[tuple[str, ...], StartedTasks] = {}
    for candidate in candidates:
        state, started_tasks[candidate.covers] = advance(graph, table, candidate, state)
        for task, _ in started_tasks[candidate.covers]:
            for part, pj in task.energies_pj.items():
                energies_pj[part] = energies_pj.get(part, 0.0) + pj
    return Evaluation(
        latency_ns=max(state.ready_ns.values()), energies_pj=energies_pj, started_tasks=started_tasks
    )


def evaluate(
    graph: RegionGraph, candidates: tuple[Candidate, ...], table: CostTable, system: System
) -> Evaluation:
    """Timeline, latency and energy of `candidates`; see `execute`."""
    run = execute(graph, candidates, table)
    return replace(run, energies_pj=run.energies_pj | _static_pj(system, run.latency_ns))


def _static_pj(system: System, latency_ns: float) -> dict[str, float]:
    """The energy of the constant power of both devices over a time."""
    gpu_pj = system.gpu.energy["static_w"] * latency_ns * 1000
    return dict(zip(STATIC, (gpu_pj, background_pj(system.pim, system.pim_channels, latency_ns))))


def _latency_increase_ps(events: Iterable[Event]) -> dict[str, int]:
    """By the first region of a candidate, in order, by how much it ends after all before it."""
    ends_ps: dict[str, int] = {}
    for event in events:
        ends_ps[event.regions[0]] = max(ends_ps.get(event.regions[0], 0), event.end_ps)
    added_ps, reached_ps = {}, 0
    for name, end_ps in ends_ps.items():
        added_ps[name] = max(end_ps - reached_ps, 0)
        reached_ps += added_ps[name]
    return added_ps


def _busy_before_ps(events: Iterable[Event], resource: str, moments_ps: np.ndarray) -> np.ndarray:
    """How long `resource` was busy before each of `moments_ps`, which does one task at a time, in order."""
    spans_ps = [(0, 0), *((event.start_ps, event.end_ps) for event in events if event.resource == resource)]
    borders_ps = np.array(spans_ps).ravel()
    added_ps = np.diff(borders_ps, prepend=0)
    added_ps[::2] = 0  # idle until a task begins
    busy_ps: np.ndarray = np.interp(moments_ps, borders_ps, np.cumsum(added_ps))
    return busy_ps


def static_pj_per_ns(system: System) -> float:
    """Constant power of both devices, in pJ per ns."""
    return sum(_static_pj(system, 1.0).values())


def _event(task: Task, starts_ns: float, regions: tuple[str, ...]) -> Event:
    return Event(
        start_ps=round(starts_ns * 1000),
        end_ps=round((starts_ns + task.duration_ns) * 1000),
        resource=task.resource,
        label=task.label,
        launched=task.launched,
        regions=regions,
        also=task.also,
        begun_ps=round((starts_ns + task.launch_ns) * 1000),
    )
