"""Candidates: the alternatives for computing regions, what they cost, and the timeline of a plan.

Kernels, PIM programs, splits, pipelines, primitives, decompositions and fused groups are all candidates: each
covers regions, reads and writes tensors somewhere, and consists of tasks. `core.rewrite` has their kinds.
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from pimflow.core.liveness import Moment
from pimflow.core.region import Region
from pimflow.core.rewrite import GpuRewrite, Mode, PipelineRewrite, Rewrite, SplitRewrite
from pimflow.core.tensor_placement import (
    GPU_CHANNELS_ALONE,
    IN_GPU_CHANNELS,
    ChannelMode,
    ChannelUse,
    TensorPlacement,
)


class Provenance(enum.Enum):
    """How a figure is known, from best to worst.

    ``SCALED`` is an analytic time, multiplied by simulated over analytic time of similar kernels.
    """

    MEASURED = "measured"
    SIMULATED = "simulated"
    SCALED = "scaled"
    ANALYTIC = "analytic"


# Resources of a system with PIM; where a network runs only on a CPU, its kernels are on "cpu". "pim" stands
# for the channels that have PIM: a PIM program occupies them, and so does a kernel that uses them as memory.
Resource = Literal["gpu", "pim", "crossbar", "cpu"]
RESOURCES: tuple[Resource, ...] = ("gpu", "pim", "crossbar")


@dataclass(frozen=True, kw_only=True)
class Task:
    """Exclusive use of one resource, or of several at once.

    Attributes
    ----------
    also : tuple of Resource
        Further resources that it occupies while it executes, but not during its launch: a kernel over all
        memory channels occupies those that have PIM.
    launch_ns, execution_ns : float
        Both occupy the resource, the launch first.
    launched : bool
        False for work inside a kernel that another task launches.
    readies_channels : bool
        Whether it only changes the mode of PIM's channels, and computes nothing.
    after : tuple of int
        Tasks of the same candidate that must have ended, by position.
    moved_bytes : int
        Bytes over the DRAM channels or the crossbar.
    energies_pj : dict of str to float
        Dynamic energy by consumer, such as ``gpu_dram`` or ``pim_comp``.
    known : Provenance
        How `execution_ns` is known.
    """

    label: str
    resource: Resource
    also: tuple[Resource, ...] = ()
    launch_ns: float = 0.0
    execution_ns: float
    launched: bool = True
    readies_channels: bool = False
    after: tuple[int, ...] = ()
    buffers: tuple[str, ...] = ()
    moved_bytes: int = 0
    energies_pj: dict[str, float] = field(default_factory=dict)
    known: Provenance = Provenance.ANALYTIC

    @property
    def resources(self) -> tuple[Resource, ...]:
        """All resources that it occupies."""
        return (self.resource, *self.also)

    @property
    def energy_pj(self) -> float:
        """Dynamic energy."""
        return sum(self.energies_pj.values())

    @property
    def duration_ns(self) -> float:
        """Launch and execution."""
        return self.launch_ns + self.execution_ns

    def with_dependencies(self, dependencies: tuple[int, ...]) -> Task:
        """The task with other predecessors."""
        return self if dependencies == self.after else with_fields(self, after=dependencies)

    def with_launch_ns(self, launch_ns: float) -> Task:
        """The task with another launch time."""
        return self if launch_ns == self.launch_ns else with_fields(self, launch_ns=launch_ns)


def in_sequence(tasks: Iterable[Task]) -> tuple[Task, ...]:
    """Tasks of which each waits for the one before."""
    return tuple(task.with_dependencies((n - 1,) if n else ()) for n, task in enumerate(tasks))


Record = TypeVar("Record", "Task", "Candidate")


def with_fields(record: Record, **changes: object) -> Record:
    """A copy with other values of some fields.

    Searches make millions of tasks and candidates, and `dataclasses.replace` is several times as slow.
    """
    copy = object.__new__(type(record))
    copy.__dict__.update(record.__dict__, **changes)
    return copy


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Memory that a candidate takes.

    Attributes
    ----------
    bank_rows : int
        Rows of every PIM bank that its weights occupy, or its caches.
    workspace_bytes : int
        Memory that it needs only while it runs.
    filter_bytes : int
        Bytes of its weights in the layout that it reads; they are resident during the whole inference.
    moments : tuple of Moment
        Memory at each moment of its run, if that is more than its inputs, its result and the workspace.
    """

    bank_rows: int = 0
    workspace_bytes: int = 0
    filter_bytes: int = 0
    moments: tuple[Moment, ...] = ()

    @property
    def run_moments(self) -> tuple[Moment, ...]:
        """Memory at each moment of the run, besides the tensors of the graph."""
        return self.moments or (Moment(own_bytes=self.workspace_bytes),)


@dataclass(frozen=True, kw_only=True)
class LayerAlternative:
    """How what a candidate computes differs from the regions of the graph that it covers.

    Attributes
    ----------
    original : Region, optional
        The layer before its decomposition, where the candidate covers the chain of layers that it was
        decomposed into and computes the layer itself.
    regions : tuple of Region
        The regions that it computes, if they are not the graph's regions that it covers: links of chains with
        other ranks.
    error : float
        The relative error that it adds to the network's outputs. To the first order, errors of candidates
        add up.
    """

    original: Region | None = None
    regions: tuple[Region, ...] = ()
    error: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One alternative for computing one or several regions.

    Attributes
    ----------
    name : str
        Unique among the candidates of its regions.
    covers : tuple of str
        Regions that it computes.
    rewrite : Rewrite
        Its kind, with what the passes write for it.
    input, output : TensorPlacement
        Where what it reads lies, and its result.
    fuses_epilogue : bool
        Whether its kernel applies the deferred epilogue of what it reads itself, without a further launch.
    deferred_epilogue : tuple of str
        Operators (``concat``, ``bias``, an activation) that are not applied to its result yet.
    channel_mode, final_channel_mode : ChannelMode, optional
        Mode in which it needs the channels that have PIM, and mode in which it leaves them. None where it
        does not use them, and where a change of mode takes no time.
    requires_open, leaves_open : str
        Key of what the candidate before has to leave open, and key of what it leaves open itself: a candidate
        that does only the end of a layer must follow the one that did the beginning, in the same alternative.
        Empty at the border of layers.
    """

    name: str
    covers: tuple[str, ...]
    rewrite: Rewrite
    tasks: tuple[Task, ...]
    input: TensorPlacement = IN_GPU_CHANNELS
    output: TensorPlacement = IN_GPU_CHANNELS
    fuses_epilogue: bool = False
    deferred_epilogue: tuple[str, ...] = ()
    channels: ChannelUse = GPU_CHANNELS_ALONE
    channel_mode: ChannelMode | None = None
    final_channel_mode: ChannelMode | None = None
    requires_open: str = ""
    leaves_open: str = ""
    footprint: Footprint = Footprint()
    alternative: LayerAlternative = LayerAlternative()

    @property
    def uses_pim(self) -> bool:
        """Whether PIM computes any part of it."""
        return self.rewrite.mode is not Mode.GPU

    @property
    def primitive(self) -> str:
        """The convolution primitive that computes it; empty if none does."""
        return self.rewrite.primitive if isinstance(self.rewrite, GpuRewrite) else ""

    @property
    def pim_regions(self) -> tuple[str, ...]:
        """The regions that PIM computes, completely or in part."""
        if isinstance(self.rewrite, PipelineRewrite):
            modes = zip(self.covers, self.rewrite.modes, strict=True)
            return tuple(name for name, mode in modes if mode is Mode.PIM)
        return self.covers if self.uses_pim else ()

    @property
    def fuses_regions(self) -> bool:
        """Whether it computes several regions in one kernel: tensors between them are never stored."""
        return len(self.covers) > 1 and (self.alternative.original is not None or not self.uses_pim)

    @property
    def defers_partial_sum(self) -> bool:
        """Whether both devices leave a part of each sum, which the kernel of a consumer adds up."""
        splits_reduction = isinstance(self.rewrite, SplitRewrite) and self.rewrite.axis == "reduction"
        return splits_reduction and bool(self.deferred_epilogue)

    @property
    def begins_on_pim(self) -> bool:
        """Whether it is wholly on PIM from its first task on, so that it may share a submission."""
        first_resources = (task.resource for task in self.tasks if not task.after)
        return self.rewrite.mode is Mode.PIM and "gpu" not in first_resources

    @property
    def keeps_submission_open(self) -> bool:
        """Whether its result is complete without the GPU, so that the same PIM submission may continue."""
        uses_gpu = any(task.resource == "gpu" for task in self.tasks)
        return bool(self.tasks) and not uses_gpu and not self.deferred_epilogue

    def with_shared_submission(self) -> Candidate:
        """The candidate as part of the open PIM submission whose last result it reads: it has no own launch.

        One submission may contain several dependent regions. A candidate that does not begin on PIM is
        unchanged.
        """
        if not self.begins_on_pim:
            return self
        tasks = tuple(
            replace(task, launch_ns=0.0, launched=False) if task.resource == "pim" else task
            for task in self.tasks
        )
        return replace(self, tasks=tasks)

    def with_first_task(self, first_task: Task) -> Candidate:
        """The candidate with `first_task` before its tasks, which wait for it only where they use its
        resource.
        """
        later_tasks = (task.with_dependencies(tuple(i + 1 for i in task.after)) for task in self.tasks)
        return replace(self, tasks=(first_task, *later_tasks))


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Totals of a candidate's tasks, run by themselves.

    `known` says for each resource how its times are known; see `provenance_by_resource`.
    """

    latency_ns: float
    energy_pj: float
    gpu_busy_ns: float
    pim_busy_ns: float
    moved_bytes: int
    workspace_bytes: int
    known: dict[str, Provenance]

    @classmethod
    def from_candidate(cls, candidate: Candidate) -> Cost:
        """The totals of a candidate's tasks."""
        tasks = overlap_first_launch(candidate.tasks)
        busy = {r: sum(t.duration_ns for t in tasks if t.resource == r) for r in RESOURCES}
        return cls(
            latency_ns=makespan_ns(tasks),
            energy_pj=sum(t.energy_pj for t in tasks),
            gpu_busy_ns=busy["gpu"],
            pim_busy_ns=busy["pim"],
            moved_bytes=sum(t.moved_bytes for t in tasks),
            workspace_bytes=candidate.footprint.workspace_bytes,
            known=provenance_by_resource(tasks),
        )


def provenance_by_resource(tasks: Iterable[Task]) -> dict[str, Provenance]:
    """By resource, the worst `Provenance` of its tasks; resources without tasks are left out.

    Tasks that change the mode of channels count as a resource ``channels``. One value for all resources
    would be ``analytic`` for every layer on PIM, because times over the crossbar are always analytic.
    """
    order = list(Provenance)
    worst: dict[str, Provenance] = {}
    for task in tasks:
        part = "channels" if task.readies_channels else task.resource
        worst[part] = max(worst.get(part, order[0]), task.known, key=order.index)
    return worst


def overlap_first_launch(tasks: tuple[Task, ...]) -> tuple[Task, ...]:
    """`tasks` with the first launch on PIM shortened by the mode changes that it overlaps.

    A launch begins when the candidate's inputs are there. The tasks before it on PIM, which change the mode
    of the channels (`Task.readies_channels`), run during the launch. (A kernel over all channels overlaps
    them too: see `Task.also`.) A launch that waits for any other task is unchanged.
    """
    readying_tasks = tuple(itertools.takewhile(lambda task: task.readies_channels, tasks))
    launch_index = next(
        (i for i, task in enumerate(tasks) if task.resource == "pim" and task.launch_ns), None
    )
    if launch_index is None or any(i >= len(readying_tasks) for i in tasks[launch_index].after):
        return tasks
    remaining_ns = max(tasks[launch_index].launch_ns - sum(task.execution_ns for task in readying_tasks), 0.0)
    return (
        *tasks[:launch_index],
        replace(tasks[launch_index], launch_ns=remaining_ns),
        *tasks[launch_index + 1 :],
    )


def makespan_ns(tasks: tuple[Task, ...]) -> float:
    """End of the last task when each starts as soon as its predecessors and its resources allow."""
    ends: list[float] = []
    free: dict[str, float] = {}
    for task in tasks:
        start = max([0.0, start_ns(task, free), *(ends[i] for i in task.after)])
        ends.append(start + task.duration_ns)
        free |= dict.fromkeys(task.resources, ends[-1])
    return max(ends, default=0.0)


def start_ns(task: Task, free_ns: Mapping[str, float]) -> float:
    """Earliest start of a task: its resource is free then, and those of `also` after its launch."""
    earliest_ns = free_ns.get(task.resource, 0.0)
    for resource in task.also:
        earliest_ns = max(earliest_ns, free_ns.get(resource, 0.0) - task.launch_ns)
    return earliest_ns


@dataclass(frozen=True, kw_only=True)
class EdgeCost:
    """Cost of reading a tensor from another placement: none, or that of a task.

    If it is not `possible`, there is no such conversion.
    """

    task: Task | None = None
    possible: bool = True

    @property
    def latency_ns(self) -> float:
        """Duration of the task; 0 without one."""
        return self.task.duration_ns if self.task else 0.0


NO_COST = EdgeCost()
Transforms = dict[tuple[str, TensorPlacement, TensorPlacement], EdgeCost]


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Candidates of every region, and costs of the transitions between them.

    Attributes
    ----------
    candidates : dict of str to tuple of Candidate
        By region; a candidate of several regions is listed at its first one.
    unsupported_reasons : dict of str to str
        By region without a PIM candidate, the reason.
    epilogue_cost, fused_epilogue_cost : dict of str to EdgeCost
        Cost of the deferred epilogue of a region's PIM output: in a kernel of its own, and fused into the
        kernel of the first consumer. Keys are regions; where the cost differs for a consumer that continues
        an open alternative, the key is the region, a space and `Candidate.requires_open`.
    transforms : dict of (str, TensorPlacement, TensorPlacement) to EdgeCost
        By tensor (a region's result or a graph input), where it lies and where a candidate reads it: cost of
        the conversion. Pairs that are not listed cost nothing: the bytes stay where they are.
    inputs : dict of str to TensorPlacement
        Where the graph's inputs lie, if not in the GPU channels.
    switch : EdgeCost
        Cost of changing the mode of the channels that have PIM (`Candidate.channel_mode`).
    overlaps_launches : bool
        Whether launches are issued while the task before runs.
    digest : str
        Hash of model, system and cost-model version.
    """

    candidates: dict[str, tuple[Candidate, ...]]
    unsupported_reasons: dict[str, str] = field(default_factory=dict)
    epilogue_cost: dict[str, EdgeCost] = field(default_factory=dict)
    fused_epilogue_cost: dict[str, EdgeCost] = field(default_factory=dict)
    transforms: Transforms = field(default_factory=dict)
    inputs: dict[str, TensorPlacement] = field(default_factory=dict)
    switch: EdgeCost = EdgeCost()
    overlaps_launches: bool = False
    digest: str = ""

    @functools.cached_property
    def resources(self) -> tuple[str, ...]:
        """The resources that tasks use, those of `RESOURCES` first."""
        edges = (
            *self.epilogue_cost.values(),
            *self.fused_epilogue_cost.values(),
            *self.transforms.values(),
            self.switch,
        )
        used = {resource for edge in edges if edge.task for resource in edge.task.resources}
        for candidates in self.candidates.values():
            used |= {
                resource
                for candidate in candidates
                for task in candidate.tasks
                for resource in task.resources
            }
        return (
            tuple(sorted(used, key=lambda resource: (resource not in RESOURCES, resource))) or RESOURCES[:1]
        )

    @functools.cached_property
    def longest_launch_ns(self) -> dict[str, float]:
        """By resource, the longest launch on it."""
        edges = (
            *self.epilogue_cost.values(),
            *self.fused_epilogue_cost.values(),
            *self.transforms.values(),
            self.switch,
        )
        launches_ns: dict[str, float] = {}
        task_lists = (c.tasks for candidates in self.candidates.values() for c in candidates)
        for task in (*(edge.task for edge in edges if edge.task), *itertools.chain.from_iterable(task_lists)):
            launches_ns[task.resource] = max(launches_ns.get(task.resource, 0.0), task.launch_ns)
        return {resource: ns for resource, ns in launches_ns.items() if ns}

    @functools.cached_property
    def multi_region_candidates(self) -> dict[str, list[Candidate]]:
        """By region, the candidates that compute it together with other regions."""
        candidates_by_region: dict[str, list[Candidate]] = {}
        for candidate in itertools.chain.from_iterable(self.candidates.values()):
            for name in candidate.covers if len(candidate.covers) > 1 else ():
                candidates_by_region.setdefault(name, []).append(candidate)
        return candidates_by_region

    def transition(self, region: str, consumer: Candidate) -> EdgeCost:
        """Cost of the deferred epilogue of `region`, if `consumer` is the first that reads it."""
        edges = self.fused_epilogue_cost if consumer.fuses_epilogue else self.epilogue_cost
        return edges.get(f"{region} {consumer.requires_open}") or edges[region]

    def transform(self, tensor: str, result: TensorPlacement, read: TensorPlacement) -> EdgeCost:
        """Cost for a candidate that reads placement `read` of reading `tensor` where it lies, `result`."""
        return self.transforms.get((tensor, result, read), NO_COST)


@dataclass(frozen=True, kw_only=True)
class Event:
    """Occupation of a resource by a task, in picoseconds from the start of the inference.

    `launched` is False for work inside a kernel that another task launches; `regions` are those of the
    task's candidate; `also` are further resources that it occupies while it executes, from `begun_ps` on,
    which is the end of its launch (`Task.also`).
    """

    start_ps: int
    end_ps: int
    resource: Resource
    label: str
    launched: bool = True
    regions: tuple[str, ...] = ()
    also: tuple[Resource, ...] = ()
    begun_ps: int = 0


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What runs when, on both devices and the crossbar."""

    events: tuple[Event, ...] = field(default=())

    @property
    def end_ps(self) -> int:
        """End of the last event; 0 without events."""
        return max((e.end_ps for e in self.events), default=0)

    def busy_ps(self, resource: Resource) -> int:
        """Time in which `resource` is busy."""
        return sum(e.end_ps - e.start_ps for e in self.events if e.resource == resource)
