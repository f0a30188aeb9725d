"""What an integer program chooses among: candidates, each with the pending work that it takes over."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pimflow.core.candidate import Candidate, CostTable, Task, start_ns
from pimflow.core.region import RegionGraph
from pimflow.placement.solvers import launches, steps
from pimflow.placement.solvers.launches import Launching, Queue, Running
from pimflow.placement.solvers.plan_memory import MemoryLimit, nothing
from pimflow.placement.solvers.segments import Segment
from pimflow.placement.solvers.steps import State
from pimflow.placement.solvers.ways import Weights

START, END = "start", "end"
NEVER = float("-inf")
Delays = dict[tuple[str, str], float]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A candidate that takes over certain pending results, as part of a PIM submission or not.

    Attributes
    ----------
    candidate : Candidate
    begin, last : int
        Positions of the first and the last region that it does.
    reads : tuple of str
        What its tasks wait for.
    late : frozenset of str
        What only its result waits for.
    operands : tuple of str
        All that it reads, each once: what it needs in its layout.
    takes : frozenset of str
        Regions whose pending work it does, of those that may have some or not, and no others.
    goes_on : bool or None
        Whether it continues a submission; None if that makes no difference to it.
    switched : bool or None
        Whether the use of the channels that have PIM changes before it; None if that makes no difference.
    delays_ns : dict of (str, str) to float
        From what it waits for (`START`: its inputs; a resource: that this is free) to when it leaves a
        resource, and to its `END`; what is not in it does not depend on one another.
    energy_pj : float
    running_bytes : int
        Memory while it runs; 0 where memory does not matter.
    launching : dict of str to delays
        Where launches are issued ahead, by resource, the delays if nothing of its first launch there is
        hidden; in `delays_ns` all is. They are less by what is hidden.
    follows : bool
        Whether it waits for the region before.
    queues : tuple of Queue
        What it leaves running (`launches.leaves`).
    executing_ns : float
        How long it executes at least.
    """

    candidate: Candidate
    begin: int
    last: int
    reads: tuple[str, ...]
    late: frozenset[str]
    operands: tuple[str, ...]
    takes: frozenset[str]
    goes_on: bool | None
    switched: bool | None
    delays_ns: Delays
    energy_pj: float
    running_bytes: int = 0
    launching: dict[str, Delays] = field(default_factory=dict)
    follows: bool = False
    queues: tuple[Queue, ...] = ()
    executing_ns: float = 0.0

    @property
    def ends_at(self) -> tuple[int, ...]:
        """Positions of the regions whose tensors others can read once it has ended."""
        keeps = self.candidate.original is not None and self.candidate.original.kept_elements
        return (self.begin, self.last) if keeps else (self.last,)

    @property
    def alone_ns(self) -> float:
        """How long it takes when nothing runs beside it."""
        return self.delays_ns.get((START, END), 0.0)

    @property
    def leaves(self) -> str:
        """The state of its last region: with pending work, on PIM, or neither (empty)."""
        if self.candidate.output.pending:
            return "pending"
        return "on pim" if self.candidate.stays_on_pim else ""


def delays_ns(tasks: tuple[Task, ...], resources: tuple[str, ...], idle: bool = False) -> Delays:
    """Delays as in `Variant`: longest paths through the tasks, by the evaluator's recurrence.

    The only resource is never `idle`, but where launches are issued ahead.
    """
    if len(resources) == 1 and not idle:
        return {(START, END): sum(task.duration_ns for task in tasks)}
    delays = {}
    for source in (START, *resources):
        begin = 0.0 if source == START else NEVER
        free = {resource: 0.0 if resource == source else NEVER for resource in resources}
        ends: list[float] = []
        for task in tasks:
            ready = max([begin, start_ns(task, free), *(ends[i] for i in task.after)])
            ends.append(ready + task.duration_ns)
            free |= dict.fromkeys(task.held, ends[-1])
        leaves = {**free, END: max([begin, *ends])}
        delays |= {(source, sink): ns for sink, ns in leaves.items() if ns > NEVER}
    return delays


@dataclass(frozen=True, kw_only=True)
class SegmentProblem:
    """The choice of candidates for a part of a network, and of the state that it begins in.

    `begins` has by state how much more it takes to reach it than the best of them, by the objective. Where
    launches are issued ahead the same region runs before all of them, and where memory is limited there is
    one.
    """

    graph: RegionGraph
    table: CostTable
    weights: Weights
    segment: Segment
    begins: Mapping[State, float]
    bounded: bool = False  # by rows over the whole plan, to which figures beside the time matter
    limit: MemoryLimit | None = None

    @functools.cached_property
    def order(self) -> dict[str, int]:
        return {region.name: position for position, region in enumerate(self.graph.regions)}

    @functools.cached_property
    def may_pend(self) -> frozenset[str]:
        """Regions whose results have something pending or not, as is chosen."""
        inside = {
            c.covers[-1]
            for region in self.graph.regions[slice(*self.segment)]
            for c in self.table.candidates[region.name]
            if c.output.pending
        }
        return inside.union(*(state.pending for state in self.begins)) - self.pending_before

    @functools.cached_property
    def pending_before(self) -> frozenset[str]:
        """Regions before the segment whose results have something pending in whichever state it begins."""
        return frozenset.intersection(*(state.pending for state in self.begins))

    @property
    def running(self) -> Mapping[State, Running]:
        """What runs when the segment begins, by the state that it begins in, if launches are issued ahead."""
        return {state: state.running for state in self.begins if state.running}

    @property
    def resources(self) -> tuple[str, ...]:
        return self.table.resources

    def first_reader(self, name: str) -> int:
        """Position of the region that takes over what `name` left pending."""
        return self.order[self.graph.consumers[name][0]]

    @functools.cached_property
    def variants(self) -> list[Variant]:
        """The variants that may be chosen, without those that another is at least as good as."""
        begin, end = self.segment
        every = [
            variant
            for position in range(begin, end)
            for candidate in self.table.candidates[self.graph.regions[position].name]
            if position + len(candidate.covers) <= end and (position > begin or self._may_begin(candidate))
            for variant in self._variants(position, candidate)
        ]
        alike: dict[tuple, list[Variant]] = {}
        for variant in every:
            v, c = variant, variant.candidate
            key = (v.begin, v.last, v.late, v.takes, v.goes_on, v.leaves, c.goes_on_with, c.leaves_open)
            key = (*key, c.input.layout, c.output.layout, v.switched, c.channels_as, c.leaves_channels_as)
            key = (*key, v.follows, tuple(queue.resource for queue in v.queues))
            key = (*key, c.holds) if self.limit and self.limit.apart else key
            alike.setdefault(key, []).append(variant)
        by_energy = self.bounded or self.weights.per_pj > 0
        by_error = self.bounded or self.weights.per_error > 0
        by_rows = self.bounded
        resident = self.limit.resident if self.limit else nothing
        longest_ns = max(self.table.longest_launch_ns.values(), default=0.0) if self.running else 0.0
        no_worse = functools.partial(
            _no_worse,
            by_energy=by_energy,
            by_error=by_error,
            by_rows=by_rows,
            resident=resident,
            longest_ns=longest_ns,
        )
        kept = {id(v) for group in alike.values() for v in _undominated(group, no_worse)}
        return [variant for variant in every if id(variant) in kept]

    def _may_begin(self, candidate: Candidate) -> bool:
        return any(steps.fits(self.graph, self.table, candidate, state) for state in self.begins)

    def _variants(self, position: int, candidate: Candidate) -> list[Variant]:
        reads, results = steps.reads(self.graph, candidate), steps.results_read(self.graph, candidate)
        last = position + len(candidate.covers) - 1
        read_first = [
            n for n in dict.fromkeys(results) if n in self.order and position <= self.first_reader(n) <= last
        ]
        left = [name for name in read_first if name in self.pending_before]
        waiting = [name for name in self.pending_before if self.first_reader(name) > last]
        maybe = [name for name in read_first if name in self.may_pend]
        variants = []
        for count in range(len(maybe) + 1):
            for takes in itertools.combinations(maybe, count):
                for goes_on, switched in self._ways_to_begin(position, candidate):
                    pending = sorted([*left, *takes])
                    running_bytes = 0
                    if self.limit and self.limit.memory:
                        behind = (*pending, *waiting)
                        running_bytes = self.limit.memory.running_bytes(candidate, behind)
                        if running_bytes > self.limit.at_most:
                            continue
                    late = steps.late(self.graph, candidate, pending)
                    tasks = steps.joined(
                        self.table, candidate, pending, bool(goes_on), switched=bool(switched)
                    )
                    figures = self._ahead(position, candidate, reads, late, tasks)
                    variants.append(
                        Variant(
                            candidate=candidate,
                            begin=position,
                            last=last,
                            reads=tuple(name for name in reads if name not in late),
                            late=late,
                            operands=tuple(dict.fromkeys(reads)),
                            takes=frozenset(takes),
                            goes_on=goes_on,
                            switched=switched,
                            energy_pj=sum(task.energy_pj for task in tasks),
                            running_bytes=running_bytes,
                            **figures,
                        )
                    )
        return variants

    def _ahead(
        self,
        position: int,
        candidate: Candidate,
        reads: Sequence[str],
        late: Collection[str],
        tasks: tuple[Task, ...],
    ) -> dict[str, Any]:
        """Fields of a variant that launches issued ahead decide, of those that are not just its delays."""
        resources = self.resources
        if not self.running:
            return {"delays_ns": delays_ns(tasks, resources)}
        begun = next(iter(self.running.values())).of
        before = begun if position == self.segment[0] else self.graph.regions[position - 1].name
        follows = before == launches.BEGIN or (before in reads and before not in late)

        launching = Launching.of(tasks, follows)

        def delays(hides_ns: Callable[[str], float]) -> Delays:
            return delays_ns(launching.left(hides_ns), resources, idle=True)

        hidden = launching.left(lambda _: math.inf)
        visible = launching.left(lambda _: 0.0)
        shown = {all_.resource for none, all_ in zip(hidden, visible) if none != all_}
        return {
            "delays_ns": delays(lambda _: math.inf),
            "launching": {
                each: delays(lambda other, each=each: 0.0 if other == each else math.inf)
                for each in sorted(shown)
            },
            "follows": follows,
            "queues": launches.leaves(tasks) if candidate.tasks else (),
            "executing_ns": launches.executing_ns(tasks) if candidate.tasks else 0.0,
        }

    def _ways_to_begin(
        self, position: int, candidate: Candidate
    ) -> Iterator[tuple[bool | None, bool | None]]:
        """Going on with a submission or not, and with another use of PIM's channels than before or not."""
        switching: Collection[bool | None] = (None,)
        if candidate.channels_as and self.table.switch.task:
            at_start = position == self.segment[0]
            begun = {steps.switches(candidate, state) for state in self.begins}
            switching = sorted(begun) if at_start else (False, True)
        return itertools.product(self._ways_to_go_on(position, candidate), switching)

    def _ways_to_go_on(self, position: int, candidate: Candidate) -> Collection[bool | None]:
        before = self.graph.regions[position - 1].name if position else ""
        if self.graph.regions[position].first_result != before or candidate.continued() is candidate:
            return (None,)
        if position == self.segment[0]:
            return sorted({state.on_pim == before for state in self.begins})
        return (False, True)


def _undominated(group: list[Variant], no_worse: Callable[[Variant, Variant], bool]) -> list[Variant]:
    kept: list[Variant] = []
    for variant in group:
        if not any(no_worse(other, variant) for other in kept):
            kept = [other for other in kept if not no_worse(variant, other)] + [variant]
    return kept


def _no_worse(
    one: Variant,
    other: Variant,
    *,
    by_energy: bool,
    by_error: bool,
    by_rows: bool,
    resident: Callable[[Candidate], float],
    longest_ns: float,
) -> bool:
    """Whether `one` may take the place of `other`, which goes on the same; no launch takes longer."""
    return (
        (not by_energy or one.energy_pj <= other.energy_pj)
        and (not by_error or one.candidate.error <= other.candidate.error)
        and (not by_rows or one.candidate.placed_rows <= other.candidate.placed_rows)
        and one.running_bytes <= other.running_bytes
        and resident(one.candidate) <= resident(other.candidate)
        and _no_later(one.delays_ns, other.delays_ns)
        and (not longest_ns or _launched_no_later(one, other, longest_ns))
    )


def _launched_no_later(one: Variant, other: Variant, longest_ns: float) -> bool:
    launching = (
        _no_later(delays, other.launching.get(name, other.delays_ns))
        for name, delays in one.launching.items()
    )
    hiding = zip(_hiding(one), _hiding(other), strict=True)
    return all(launching) and all(mine >= min(its, longest_ns) for mine, its in hiding)


def _no_later(one: Delays, other: Delays) -> bool:
    return all(ns <= other.get(path, NEVER) for path, ns in one.items())


def _hiding(variant: Variant) -> list[float]:
    """How much later launches may hide behind it."""
    queues = [ns for queue in variant.queues for ns in (queue.own_ns, queue.behind_ns)]
    return [variant.executing_ns, *queues]
