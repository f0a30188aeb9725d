"""Candidates: ways to compute regions, all of one type, and what they cost.

GPU, PIM, SPLIT, pipelines, primitives, decompositions and fused groups are all candidates: each covers
regions, has ports and is made of tasks.
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from pimflow.core.liveness import Moment
from pimflow.core.region import Region


class Known(enum.Enum):
    """How a figure is known, from best to worst.

    ``SCALED`` is an analytic time, multiplied by simulated over analytic time of similar kernels.
    """

    MEASURED = "measured"
    SIMULATED = "simulated"
    SCALED = "scaled"
    ANALYTIC = "analytic"


# Resources of a system with PIM; kernels of a network that runs on a CPU alone are on "cpu". "pim" are the
# channels that have PIM: a program holds them, and so does a kernel that uses them as plain memory.
RESOURCES = ("gpu", "pim", "crossbar")
# How a tensor lies in memory: in the channels that serve the GPU while PIM works, spread over all, or in
# those that have PIM.
LEFT, OVER_ALL, IN_PIM = "NHWC", "NHWC over all channels", "NHWC in PIM's channels"
# What the channels that have PIM are used as: plain memory for the GPU's kernels, or for PIM programs.
AS_MEMORY, AS_PIM = "memory", "pim"


@dataclass(frozen=True, kw_only=True)
class Port:
    """The form in which a tensor crosses a candidate's border.

    Attributes
    ----------
    layout, dtype : str
    device : str
        Whose memory channels hold it.
    pending : tuple of str
        On an output, operators not yet applied (``concat``, ``bias``, an activation), which the
        consumer's kernel must take in.
    accepts_pending : bool
        On an input, whether it takes them in at no further launch.
    """

    layout: str = LEFT
    dtype: str = "fp16"
    device: str = "gpu"
    pending: tuple[str, ...] = ()
    accepts_pending: bool = False


@dataclass(frozen=True, kw_only=True)
class Task:
    """Exclusive use of one resource, or of several at once.

    Attributes
    ----------
    label : str
    resource : str
        One of `RESOURCES`, or ``cpu``.
    also : tuple of str
        Others that it holds while it executes, not while it is launched: a kernel at all memory channels
        holds those that have PIM.
    launch_ns, execution_ns : float
        Both occupy the resource, the launch first.
    launched : bool
        False for work inside a kernel that another task launches.
    readies_channels : bool
        Whether it makes PIM's channels ready for another use, and computes nothing.
    after : tuple of int
        Tasks of the same candidate that must have ended, by position.
    buffers : tuple of str
        Tensors read or written.
    moved_bytes : int
        Bytes over the DRAM channels or the crossbar.
    energies_pj : dict of str to float
        Dynamic energy by what it goes into, such as ``gpu_dram`` or ``pim_comp``.
    known : Known
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
    known: Known = Known.ANALYTIC

    @property
    def held(self) -> tuple[str, ...]:
        """All resources that it holds."""
        return (self.resource, *self.also)

    @property
    def energy_pj(self) -> float:
        return sum(self.energies_pj.values())

    @property
    def duration_ns(self) -> float:
        return self.launch_ns + self.execution_ns

    def waiting_for(self, after: tuple[int, ...]) -> Task:
        """The same `after` others."""
        return self if after == self.after else self._with(after=after)

    def launched_for(self, launch_ns: float) -> Task:
        """The same with another time to launch."""
        return self if launch_ns == self.launch_ns else self._with(launch_ns=launch_ns)

    def _with(self, **changed: object) -> Task:
        """Searches ask millions of times: `replace` takes several times as long."""
        made = object.__new__(Task)
        made.__dict__.update(self.__dict__, **changed)
        return made


@dataclass(frozen=True, kw_only=True)
class Rewrite:
    """What applying a candidate does to the graph.

    Attributes
    ----------
    mode : str
        ``GPU``, ``PIM``, ``SPLIT``, ``PIPELINE`` or ``CPU``.
    gpu_rows : int
        How much of `axis` the GPU computes, the first part: output rows unless it says otherwise; 0 for
        ``PIPELINE``.
    schedule : str
        Loop order of the PIM program, as `pim_backend.programs.schedule.Schedule` prints it; empty for GPU.
    axis : str
        For ``SPLIT``, along what: one of `core.split.AXES`.
    stages : tuple of int
        For ``PIPELINE``, output rows of the last region at which a stage ends and the next begins.
    modes, schedules : tuple of str
        For ``PIPELINE``, by region: ``GPU`` or ``PIM``, and the loop order, empty for ``GPU``.
    primitive : str
        For ``CPU`` and ``GPU``, by which convolution primitive; empty for the operator.
    finishes : tuple of str
        For ``PIM``, what PIM does of the region's epilogue: all of it, or nothing.
    joins : bool
        Whether the product itself does an addition of `finishes` (`PimProgram.added_channels`).
    channels : str
        Which memory channels it uses beside those that a mixed plan leaves it: one of `core.plan.CHANNELS`.
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
    """One way to compute some regions.

    Attributes
    ----------
    name : str
        Unique among the candidates of its regions.
    covers : tuple of str
        Regions it replaces.
    gpu_share : float or None
        GPU output rows / all output rows; None where rows do not tell (pipelines).
    input, output : Port
    tasks : tuple of Task
    rewrite : Rewrite
    placed_rows : int
        Rows of every PIM bank that its weights take.
    placed_bytes : int
        Bytes of weights written to the PIM channels before the first inference.
    workspace_bytes : int
        Held while it runs.
    filter_bytes : int
        Bytes of its weights in the layout in which it reads them; they are held over the whole inference.
    moments : tuple of Moment
        What it holds while it runs, where that is more than what it reads, its result and the workspace.
    original : Region, optional
        The layer before its decomposition, where the candidate covers the chain of layers that it was
        decomposed into and computes the layer itself.
    regions : tuple of Region
        What it does, where these differ from the graph's regions that it covers: links of chains that have
        other ranks.
    error : float
        The relative error that it adds to the network's outputs: to the first order, errors of candidates
        add up.
    goes_on_with, leaves_open : str
        What the candidate before has to leave open, and what it leaves open itself: the form of a layer of
        which it does the end, or the beginning. Empty at the border of layers.
    channels_as, leaves_channels_as : str
        What it needs the channels that have PIM as, and what it leaves them as: `AS_MEMORY` or `AS_PIM`.
        Empty where it does not use them, and where they need no time to change.
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
    goes_on_with: str = ""
    leaves_open: str = ""
    channels_as: str = ""
    leaves_channels_as: str = ""

    @property
    def holds(self) -> tuple[Moment, ...]:
        """What it holds while it runs, beside the tensors of the graph."""
        return self.moments or (Moment(own_bytes=self.workspace_bytes),)

    @property
    def pim_regions(self) -> tuple[str, ...]:
        """The regions that PIM computes, wholly or partly."""
        if self.rewrite.modes:
            return tuple(name for name, mode in zip(self.covers, self.rewrite.modes) if mode == "PIM")
        return self.covers if self.rewrite.mode != "GPU" else ()

    @property
    def fuses_regions(self) -> bool:
        """Whether it computes several regions at once: what these pass to one another is never stored."""
        return len(self.covers) > 1 and (self.original is not None or self.rewrite.mode == "GPU")

    def passes_on(self, region: str) -> bool:
        """Whether it never stores the result of that region, which it computes with others."""
        return self.fuses_regions and region in self.covers[:-1]

    @property
    def stays_on_pim(self) -> bool:
        """Whether its result is finished without the GPU, so that a submission may go on with it."""
        on_gpu = any(task.resource == "gpu" for task in self.tasks)
        return bool(self.tasks) and not on_gpu and not self.output.pending

    def continued(self) -> Candidate:
        """The candidate without a launch of its own: part of the PIM submission whose last result it reads.

        One submission carries several dependent regions. A candidate that does not begin on PIM is unchanged.
        """
        first = [task.resource for task in self.tasks if not task.after]
        if self.rewrite.mode != "PIM" or "gpu" in first:
            return self
        tasks = tuple(
            replace(task, launch_ns=0.0, launched=False) if task.resource == "pim" else task
            for task in self.tasks
        )
        return replace(self, tasks=tasks)

    def behind(self, first: Task) -> Candidate:
        """The candidate with a task before its own, which wait for it on its resource alone."""
        own = (task.waiting_for(tuple(i + 1 for i in task.after)) for task in self.tasks)
        return replace(self, tasks=(first, *own))


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Totals of a candidate's tasks, run by themselves.

    `known` says by resource how its times are known, as `known_by_resource` does.
    """

    latency_ns: float
    energy_pj: float
    gpu_busy_ns: float
    pim_busy_ns: float
    moved_bytes: int
    workspace_bytes: int
    known: dict[str, Known]

    @classmethod
    def of(cls, candidate: Candidate) -> Cost:
        tasks = launched_beside(candidate.tasks)
        busy = {r: sum(t.duration_ns for t in tasks if t.resource == r) for r in RESOURCES}
        return cls(
            latency_ns=makespan_ns(tasks),
            energy_pj=sum(t.energy_pj for t in tasks),
            gpu_busy_ns=busy["gpu"],
            pim_busy_ns=busy["pim"],
            moved_bytes=sum(t.moved_bytes for t in tasks),
            workspace_bytes=candidate.workspace_bytes,
            known=known_by_resource(tasks),
        )


def known_by_resource(tasks: Iterable[Task]) -> dict[str, Known]:
    """How the tasks on each resource are known: as the worst of them is.

    A resource without tasks is left out. Those that ready channels stand apart, as ``channels``. One figure
    for all resources would say ``analytic`` of every layer on PIM, for its transfers over the crossbar are
    always computed.
    """
    order = list(Known)
    worst: dict[str, Known] = {}
    for task in tasks:
        part = "channels" if task.readies_channels else task.resource
        worst[part] = max(worst.get(part, order[0]), task.known, key=order.index)
    return worst


def launched_beside(tasks: tuple[Task, ...]) -> tuple[Task, ...]:
    """`tasks` with what is left of the first launch on PIM when its channels are ready.

    A launch begins when what its candidate reads is there, and the channels are made ready meanwhile, by the
    tasks before it on PIM (`Task.readies_channels`). (A kernel at all channels is launched beside these too:
    see `Task.also`.) A launch that waits for anything else is left as it is.
    """
    before = tuple(itertools.takewhile(lambda task: task.readies_channels, tasks))
    first = next((i for i, task in enumerate(tasks) if task.resource == "pim" and task.launch_ns), None)
    if first is None or any(i >= len(before) for i in tasks[first].after):
        return tasks
    left_ns = max(tasks[first].launch_ns - sum(task.execution_ns for task in before), 0.0)
    return (*tasks[:first], replace(tasks[first], launch_ns=left_ns), *tasks[first + 1 :])


def makespan_ns(tasks: tuple[Task, ...]) -> float:
    """End of the last task when each starts as soon as its predecessors and its resources allow."""
    ends: list[float] = []
    free: dict[str, float] = {}
    for task in tasks:
        start = max([0.0, start_ns(task, free), *(ends[i] for i in task.after)])
        ends.append(start + task.duration_ns)
        free |= dict.fromkeys(task.held, ends[-1])
    return max(ends, default=0.0)


def start_ns(task: Task, free_ns: Mapping[str, float]) -> float:
    """When a task may start for all that it holds: its resource is free, and the others behind its launch."""
    starts_ns = free_ns.get(task.resource, 0.0)
    for resource in task.also:
        starts_ns = max(starts_ns, free_ns.get(resource, 0.0) - task.launch_ns)
    return starts_ns


@dataclass(frozen=True, kw_only=True)
class EdgeCost:
    """The price between two ports: nothing, or a task that makes the one into the other.

    If it is not `possible`, the one cannot be made into the other.
    """

    task: Task | None = None
    possible: bool = True

    @property
    def latency_ns(self) -> float:
        return self.task.duration_ns if self.task else 0.0


FREE = EdgeCost()


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Candidates of every region, and what they were computed for.

    Attributes
    ----------
    candidates : dict of str to tuple of Candidate
        By region; a candidate of several regions stands at its first one.
    refused : dict of str to str
        Why a region has no PIM candidate.
    settle, absorb : dict of str to EdgeCost
        By region: the price of applying what its PIM output leaves pending, by a kernel of its own,
        and inside the kernel of the first consumer. By region and form, with a space between, where the
        consumer goes on with a form in which that differs.
    transforms : dict of (str, str, str) to EdgeCost
        By tensor (a region's result or a graph input) and two layouts: the price of making the first the
        second. What is not there costs nothing: the bytes stay where they are.
    inputs : dict of str to Port
        The form in which the graph's inputs come.
    switch : EdgeCost
        The price of another use of the channels that have PIM (`Candidate.channels_as`).
    launched_ahead : bool
        Whether launches are issued while the task before runs.
    digest : str
        Hash of model, system and cost-model version.
    """

    candidates: dict[str, tuple[Candidate, ...]]
    refused: dict[str, str]
    settle: dict[str, EdgeCost]
    absorb: dict[str, EdgeCost]
    transforms: dict[tuple[str, str, str], EdgeCost] = field(default_factory=dict)
    inputs: dict[str, Port] = field(default_factory=dict)
    switch: EdgeCost = EdgeCost()
    launched_ahead: bool = False
    digest: str = ""

    @functools.cached_property
    def resources(self) -> tuple[str, ...]:
        """What tasks run on, those of `RESOURCES` first."""
        edges = (*self.settle.values(), *self.absorb.values(), *self.transforms.values(), self.switch)
        used = {each for edge in edges if edge.task for each in edge.task.held}
        for candidates in self.candidates.values():
            used |= {each for candidate in candidates for task in candidate.tasks for each in task.held}
        return tuple(sorted(used, key=lambda each: (each not in RESOURCES, each))) or RESOURCES[:1]

    @functools.cached_property
    def longest_launch_ns(self) -> dict[str, float]:
        """By resource, the longest launch on it."""
        edges = (*self.settle.values(), *self.absorb.values(), *self.transforms.values(), self.switch)
        found: dict[str, float] = {}
        every = (c.tasks for candidates in self.candidates.values() for c in candidates)
        for task in (*(edge.task for edge in edges if edge.task), *itertools.chain.from_iterable(every)):
            found[task.resource] = max(found.get(task.resource, 0.0), task.launch_ns)
        return {resource: ns for resource, ns in found.items() if ns}

    @functools.cached_property
    def several(self) -> dict[str, list[Candidate]]:
        """By region, the candidates that do it together with others."""
        found: dict[str, list[Candidate]] = {}
        for candidate in itertools.chain.from_iterable(self.candidates.values()):
            for name in candidate.covers if len(candidate.covers) > 1 else ():
                found.setdefault(name, []).append(candidate)
        return found

    def transition(self, region: str, consumer: Candidate) -> EdgeCost:
        """The price of handing what `region` left pending to `consumer`."""
        edges = self.absorb if consumer.input.accepts_pending else self.settle
        return edges.get(f"{region} {consumer.goes_on_with}") or edges[region]

    def transform(self, tensor: str, given: str, taken: str) -> EdgeCost:
        """The price of `tensor`, which is there in the layout `given`, in the layout `taken`."""
        return self.transforms.get((tensor, given, taken), FREE)


@dataclass(frozen=True, kw_only=True)
class Event:
    """Occupation of a resource, in picoseconds from the start of the inference.

    `launched` tells a submission of its own from work inside another kernel; `regions` are those that the
    candidate of the task does; `also` are other resources that it occupies while it executes, from
    `begun_ps` on, behind its launch (`Task.also`).
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
        return max((e.end_ps for e in self.events), default=0)

    def busy_ps(self, resource: str) -> int:
        return sum(e.end_ps - e.start_ps for e in self.events if e.resource == resource)
