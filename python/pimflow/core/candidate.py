"""Candidates: the alternatives for computing regions, what they cost, and the timeline of a plan.

GPU, PIM, SPLIT, pipelines, primitives, decompositions and fused groups are all candidates: each covers
regions, has ports and consists of tasks.
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from pimflow.core.liveness import Moment
from pimflow.core.region import Region


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
RESOURCES = ("gpu", "pim", "crossbar")
# Layouts of a tensor: in the channels that serve the GPU while PIM works, over all channels, or in the
# channels that have PIM.
IN_GPU_CHANNELS, IN_ALL_CHANNELS, IN_PIM_CHANNELS = "NHWC", "NHWC over all channels", "NHWC in PIM's channels"
# Modes of the channels that have PIM: plain memory for the GPU's kernels, or PIM programs.
PLAIN_MEMORY_MODE, PIM_MODE = "memory", "pim"


@dataclass(frozen=True, kw_only=True)
class Port:
    """Placement of a tensor that a candidate reads or writes.

    Attributes
    ----------
    layout, dtype : str
    device : str
        The device whose memory channels hold it.
    deferred_epilogue : tuple of str
        On an output, the deferred epilogue: operators (``concat``, ``bias``, an activation) that are not
        applied yet.
    fuses_epilogue : bool
        On an input, whether the candidate's kernel applies a deferred epilogue itself, without a further
        launch.
    """

    layout: str = IN_GPU_CHANNELS
    dtype: str = "fp16"
    device: str = "gpu"
    deferred_epilogue: tuple[str, ...] = ()
    fuses_epilogue: bool = False


@dataclass(frozen=True, kw_only=True)
class Task:
    """Exclusive use of one resource, or of several at once.

    Attributes
    ----------
    label : str
    resource : str
        One of `RESOURCES`, or ``cpu``.
    also : tuple of str
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
    buffers : tuple of str
        Tensors read or written.
    moved_bytes : int
        Bytes over the DRAM channels or the crossbar.
    energies_pj : dict of str to float
        Dynamic energy by consumer, such as ``gpu_dram`` or ``pim_comp``.
    known : Provenance
        How `execution_ns` is known.
    """

    label: str
    resource: str
    also: tuple[str, ...] = ()
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
    def resources(self) -> tuple[str, ...]:
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
        return self if dependencies == self.after else self._with_fields(after=dependencies)

    def with_launch_ns(self, launch_ns: float) -> Task:
        """The task with another launch time."""
        return self if launch_ns == self.launch_ns else self._with_fields(launch_ns=launch_ns)

    def _with_fields(self, **changes: object) -> Task:
        """A copy with changes; searches make millions of them, and `replace` is several times as slow."""
        task = object.__new__(Task)
        task.__dict__.update(self.__dict__, **changes)
        return task


@dataclass(frozen=True, kw_only=True)
class Rewrite:
    """What applying a candidate does to the graph.

    Attributes
    ----------
    mode : str
        ``GPU``, ``PIM``, ``SPLIT``, ``PIPELINE`` or ``CPU``.
    gpu_rows : int
        Extent of the GPU's part, the first one, along `axis`: output rows by default; 0 for ``PIPELINE``.
    schedule : str
        Loop order of the PIM program, as `core.loop_order.LoopOrder` prints it; empty for GPU.
    axis : str
        For ``SPLIT``, the axis that is split: one of `core.split.AXES`.
    stages : tuple of int
        For ``PIPELINE``, output rows of the last region at which a stage ends and the next begins.
    modes, schedules : tuple of str
        For ``PIPELINE``, by region: ``GPU`` or ``PIM``, and the loop order, empty for ``GPU``.
    primitive : str
        For ``CPU`` and ``GPU``, the convolution primitive; empty for the operator's own kernel.
    finishes : tuple of str
        For ``PIM``, the device epilogue, which PIM does: the whole epilogue of the region, or nothing.
    joins : bool
        Whether the product itself does the addition in `finishes` (`PimProgram.added_channels`).
    channels : str
        Memory channels that it uses besides the GPU channels of a mixed plan: one of
        `core.plan.CHANNELS_PATTERN`.
    """

    mode: str
    gpu_rows: int
    schedule: str = ""
    axis: str = "rows"
    stages: tuple[int, ...] = ()
    modes: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ()
    primitive: str = ""
    finishes: tuple[str, ...] = ()
    joins: bool = False
    channels: str = ""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One alternative for computing one or several regions.

    Attributes
    ----------
    name : str
        Unique among the candidates of its regions.
    covers : tuple of str
        Regions that it computes.
    gpu_share : float or None
        GPU output rows / all output rows; None for pipelines.
    input, output : Port
        Placement of what it reads, and of its result.
    tasks : tuple of Task
    rewrite : Rewrite
    placed_rows : int
        Rows of every PIM bank that its weights occupy.
    placed_bytes : int
        Bytes of weights that are written to the PIM channels before the first inference.
    workspace_bytes : int
        Memory that it needs only while it runs.
    filter_bytes : int
        Bytes of its weights in the layout that it reads; they are resident during the whole inference.
    moments : tuple of Moment
        Memory that it needs while it runs, if more than its inputs, its result and the workspace.
    original : Region, optional
        The layer before its decomposition, where the candidate covers the chain of layers that it was
        decomposed into and computes the layer itself.
    regions : tuple of Region
        The regions that it computes, if they are not the graph's regions that it covers: links of chains with
        other ranks.
    error : float
        The relative error that it adds to the network's outputs. To the first order, errors of candidates
        add up.
    requires_open, leaves_open : str
        Key of what the candidate before has to leave open, and key of what it leaves open itself: a candidate
        that does only the end of a layer must follow the one that did the beginning, in the same alternative.
        Empty at the border of layers.
    channel_mode, final_channel_mode : str
        Mode in which it needs the channels that have PIM, and mode in which it leaves them:
        `PLAIN_MEMORY_MODE` or `PIM_MODE`. Empty where it does not use them, and where a change of mode takes
        no time.
    """

    name: str
    covers: tuple[str, ...]
    gpu_share: float | None
    input: Port
    output: Port
    tasks: tuple[Task, ...]
    rewrite: Rewrite
    placed_rows: int = 0
    placed_bytes: int = 0
    workspace_bytes: int = 0
    filter_bytes: int = 0
    moments: tuple[Moment, ...] = ()
    original: Region | None = None
    regions: tuple[Region, ...] = ()
    error: float = 0.0
    requires_open: str = ""
    leaves_open: str = ""
    channel_mode: str = ""
    final_channel_mode: str = ""

    @property
    def memory_moments(self) -> tuple[Moment, ...]:
        """Memory that it needs at each moment of its run, besides the tensors of the graph."""
        return self.moments or (Moment(own_bytes=self.workspace_bytes),)

    @property
    def pim_regions(self) -> tuple[str, ...]:
        """The regions that PIM computes, completely or in part."""
        if self.rewrite.modes:
            return tuple(name for name, mode in zip(self.covers, self.rewrite.modes) if mode == "PIM")
        return self.covers if self.rewrite.mode != "GPU" else ()

    @property
    def fuses_regions(self) -> bool:
        """Whether it computes several regions in one kernel: tensors between them are never stored."""
        return len(self.covers) > 1 and (self.original is not None or self.rewrite.mode == "GPU")

    @property
    def keeps_submission_open(self) -> bool:
        """Whether its result is complete without the GPU, so that the same PIM submission may continue."""
        uses_gpu = any(task.resource == "gpu" for task in self.tasks)
        return bool(self.tasks) and not uses_gpu and not self.output.deferred_epilogue

    def with_shared_submission(self) -> Candidate:
        """The candidate as part of the open PIM submission whose last result it reads: it has no own launch.

        One submission may contain several dependent regions. A candidate that does not begin on PIM is
        unchanged.
        """
        first_resources = [task.resource for task in self.tasks if not task.after]
        if self.rewrite.mode != "PIM" or "gpu" in first_resources:
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
            workspace_bytes=candidate.workspace_bytes,
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
    """Cost of converting one port into another: none, or that of a task.

    If it is not `possible`, there is no such conversion.
    """

    task: Task | None = None
    possible: bool = True

    @property
    def latency_ns(self) -> float:
        """Duration of the task; 0 without one."""
        return self.task.duration_ns if self.task else 0.0


NO_COST = EdgeCost()


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
    transforms : dict of (str, str, str) to EdgeCost
        By tensor (a region's result or a graph input), layout in which it lies and layout in which it is
        read: cost of the conversion. Pairs that are not listed cost nothing: the bytes stay where they are.
    inputs : dict of str to Port
        Placement of the graph's inputs.
    switch : EdgeCost
        Cost of changing the mode of the channels that have PIM (`Candidate.channel_mode`).
    overlaps_launches : bool
        Whether launches are issued while the task before runs.
    digest : str
        Hash of model, system and cost-model version.
    """

    candidates: dict[str, tuple[Candidate, ...]]
    unsupported_reasons: dict[str, str]
    epilogue_cost: dict[str, EdgeCost]
    fused_epilogue_cost: dict[str, EdgeCost]
    transforms: dict[tuple[str, str, str], EdgeCost] = field(default_factory=dict)
    inputs: dict[str, Port] = field(default_factory=dict)
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
        edges = self.fused_epilogue_cost if consumer.input.fuses_epilogue else self.epilogue_cost
        return edges.get(f"{region} {consumer.requires_open}") or edges[region]

    def transform(self, tensor: str, result_layout: str, input_layout: str) -> EdgeCost:
        """Cost of converting `tensor` from the layout `result_layout`, in which it lies, to the layout
        `input_layout`.
        """
        return self.transforms.get((tensor, result_layout, input_layout), NO_COST)


@dataclass(frozen=True, kw_only=True)
class Event:
    """Occupation of a resource by a task, in picoseconds from the start of the inference.

    `launched` is False for work inside a kernel that another task launches; `regions` are those of the
    task's candidate; `also` are further resources that it occupies while it executes, from `begun_ps` on,
    which is the end of its launch (`Task.also`).
    """

    start_ps: int
    end_ps: int
    resource: str
    label: str
    launched: bool = True
    regions: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    begun_ps: int = 0


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What runs when, on both devices and the crossbar."""

    events: tuple[Event, ...] = field(default=())

    @property
    def end_ps(self) -> int:
        """End of the last event; 0 without events."""
        return max((e.end_ps for e in self.events), default=0)

    def busy_ps(self, resource: str) -> int:
        """Time in which `resource` is busy."""
        return sum(e.end_ps - e.start_ps for e in self.events if e.resource == resource)
