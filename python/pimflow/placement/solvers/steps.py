"""The tasks of a candidate in a plan, given the state that earlier candidates leave.

The evaluator and the exhaustive solver use these functions, and what the label search finds is checked by
the evaluator: so they cannot disagree about transitions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from pimflow.core.candidate import AS_MEMORY, Candidate, CostTable, Port, Task, launched_beside
from pimflow.core.region import APPEND, Region, RegionGraph
from pimflow.placement.solvers import launches
from pimflow.placement.solvers.launches import Behind, Launching, Running

CANONICAL = Port()


@dataclass(frozen=True, kw_only=True)
class State:
    """State after a partial plan: all that the tasks of further candidates depend on.

    Attributes
    ----------
    pending : frozenset of str
        Regions whose results have a deferred epilogue.
    on_pim : str
        The last region, if its PIM submission is still open; else empty.
    open : str
        The alternative of a layer that is begun and not completed (`Candidate.leaves_open`).
    layouts : frozenset of (str, str)
        Regions whose results are still read in another layout than the canonical one, with that layout.
    as_memory : bool
        Whether the channels that have PIM are used as plain memory. Every inference begins with them as PIM.
    running : Running or None
        The work that the next launch may overlap; None if launches are not issued ahead.
    """

    pending: frozenset[str] = frozenset()
    on_pim: str = ""
    open: str = ""
    layouts: frozenset[tuple[str, str]] = frozenset()
    as_memory: bool = False
    running: Running | None = None

    def layout(self, table: CostTable, name: str) -> str:
        """The layout of a region's result or of a graph input."""
        known = dict(self.layouts) if self.layouts else {}
        return known.get(name) or table.inputs.get(name, CANONICAL).layout


def begin(table: CostTable) -> State:
    """The state at the begin of an inference."""
    return State(running=Running() if table.launched_ahead else None)


def check_covers(graph: RegionGraph, table: CostTable) -> None:
    """Raise `ValueError` unless candidates of several regions cover runs that a plan can contain.

    A run is listed at its first region. No region outside reads an inner result, except what a layer in
    another form keeps beside its result; and only caches inside are outputs of the network. In a pipeline,
    each region reads the previous one as its first input, and no other region does.
    """
    order = {region.name: position for position, region in enumerate(graph.regions)}
    for name, candidates in table.candidates.items():
        for candidate in candidates:
            begin, count = order[name], len(candidate.covers)
            run = graph.regions[begin : begin + count]
            inside = {region.name for region in run}
            reading = graph.consumers if candidate.original else graph.readers
            returned = set(graph.outputs).difference(graph.kept_outputs if candidate.original else ())
            returned -= {region.name for region in run if region.operator == APPEND}
            closed = all(
                inside.issuperset(reading[region.name]) and region.name not in returned for region in run[:-1]
            )
            chained = candidate.rewrite.mode != "PIPELINE" or all(
                after.first_result == before.name and graph.consumers[before.name] == (after.name,)
                for before, after in itertools.pairwise(run)
            )
            if tuple(region.name for region in run) != candidate.covers or not (closed and chained):
                raise ValueError(f"candidate '{candidate.name}' of '{name}' covers no run of regions")


def reads(graph: RegionGraph, candidate: Candidate) -> tuple[str, ...]:
    """Regions and graph inputs that a candidate reads, the first operand first."""
    if len(candidate.covers) == 1:
        return graph.region(candidate.covers[0]).inputs
    names = [name for region in candidate.covers for name in graph.region(region).inputs]
    return tuple(name for name in names if name not in candidate.covers)


def results_read(graph: RegionGraph, candidate: Candidate) -> tuple[str, ...]:
    """The names in `reads` whose results a candidate reads, not the tensors kept beside results."""
    names = [name for region in candidate.covers for name in graph.region(region).results_read]
    return tuple(name for name in names if name not in candidate.covers)


def late_operands(region: Region) -> tuple[str, ...]:
    """Operands that only the epilogue of a layer reads, such as a residual."""
    return region.inputs[1:] if region.geometry and region.epilogue and not region.prologue else ()


def late(graph: RegionGraph, candidate: Candidate, pending: Collection[str]) -> frozenset[str]:
    """Operands that the result of `candidate` waits for, but no task of it: its epilogue is deferred.

    None if `candidate` itself does a deferred epilogue of such an operand.
    """
    several = len(candidate.covers) > 1 and candidate.original is None
    if several or not candidate.output.pending:
        return frozenset()
    region = candidate.original or graph.region(candidate.covers[0])
    operands = frozenset(late_operands(region)) - {region.inputs[0]}
    taken = operands.intersection(pending).intersection(results_read(graph, candidate))
    return frozenset() if taken else operands


def goes_on(graph: RegionGraph, candidate: Candidate, state: State) -> bool:
    """Whether `candidate` may continue the open PIM submission."""
    return bool(state.on_pim) and graph.region(candidate.covers[0]).first_result == state.on_pim


def fits(graph: RegionGraph, table: CostTable | None, candidate: Candidate, state: State) -> bool:
    """Whether `candidate` is possible in `state`.

    It must complete the layer that is open, and be able to read its inputs in their layouts.
    """
    if candidate.goes_on_with != state.open:
        return False
    if table is None or not table.transforms:
        return True
    taken = candidate.input.layout
    return all(
        table.transform(name, state.layout(table, name), taken).possible for name in reads(graph, candidate)
    )


def switches(candidate: Candidate, state: State) -> bool:
    """Whether the channels that have PIM must be switched before `candidate`."""
    return bool(candidate.channels_as) and (candidate.channels_as == AS_MEMORY) != state.as_memory


def after(graph: RegionGraph, candidate: Candidate, state: State) -> State:
    """The state after `candidate` is done in `state`; `State.running` is left out."""
    last = candidate.covers[-1]
    pending = state.pending.difference(results_read(graph, candidate))
    if candidate.output.pending:
        pending |= {last}
    layouts = state.layouts
    if layouts:
        done = {name for name, _ in layouts if graph.last_readers[name] in candidate.covers}
        layouts = frozenset(each for each in layouts if each[0] not in done)
    if candidate.output.layout != CANONICAL.layout and graph.readers[last]:
        layouts |= {(last, candidate.output.layout)}
    use = candidate.leaves_channels_as
    return State(
        pending=pending,
        on_pim=last if candidate.stays_on_pim else "",
        open=candidate.leaves_open,
        layouts=layouts,
        as_memory=use == AS_MEMORY if use else state.as_memory,
    )


def transforms(graph: RegionGraph, table: CostTable, candidate: Candidate, state: State) -> dict[str, Task]:
    """By input of `candidate` that lies in another layout, the task that transforms it, if any."""
    if not table.transforms:
        return {}
    taken = candidate.input.layout
    given = ((name, state.layout(table, name)) for name in dict.fromkeys(reads(graph, candidate)))
    edges = {name: table.transform(name, layout, taken) for name, layout in given if layout != taken}
    return {name: edge.task for name, edge in edges.items() if edge.task}


def joined(
    table: CostTable,
    candidate: Candidate,
    pending: Sequence[str],
    on_pim: bool,
    switched: bool = False,
) -> tuple[Task, ...]:
    """The tasks of `candidate` with the deferred epilogues of `pending` regions, but for transforms.

    If `on_pim`, it continues a PIM submission. If `switched`, its first task switches the channels that have
    PIM, once its operands are there; a PIM launch overlaps that (`launched_beside`).
    """
    transitions = [table.transition(name, candidate).task for name in pending]
    if on_pim:
        candidate = candidate.continued()
    if switched and table.switch.task:
        candidate = candidate.behind(table.switch.task)
    own = candidate.tasks if table.launched_ahead else launched_beside(candidate.tasks)
    return _chained([task for task in transitions if task], own)


def _chained(before: Sequence[Task], tasks: tuple[Task, ...]) -> tuple[Task, ...]:
    """`tasks` after the tasks `before`, which run in sequence."""
    if not before:
        return tasks
    first = len(before)
    chained = [task.waiting_for((i - 1,) if i else ()) for i, task in enumerate(before)]
    waits = (first - 1,)
    shifted = [task.waiting_for(tuple(i + first for i in task.after) or waits) for task in tasks]
    return (*chained, *shifted)


@dataclass(frozen=True, kw_only=True)
class Joint:
    """The part of a state that decides the tasks of a candidate, but for transforms.

    Attributes
    ----------
    pending : tuple of str
        Regions whose deferred epilogues it fuses, or has done before it.
    on_pim, switched : bool
        Whether it may continue a PIM submission, and whether PIM's channels must be switched.
    follows : bool or None
        Whether its tasks wait for all work in progress; None if launches are not issued ahead.
    """

    pending: tuple[str, ...]
    on_pim: bool
    switched: bool
    follows: bool | None

    @classmethod
    def of(cls, graph: RegionGraph, candidate: Candidate, state: State) -> Joint:
        """The predecessor state of `candidate` in `state`."""
        follows = None
        if state.running is not None:
            waiting = late(graph, candidate, state.pending)
            read = (name for name in reads(graph, candidate) if name not in waiting)
            follows = state.running.of in (launches.BEGIN, *read)
        return cls(
            pending=tuple(sorted(state.pending.intersection(results_read(graph, candidate)))),
            on_pim=goes_on(graph, candidate, state),
            switched=switches(candidate, state),
            follows=follows,
        )


@dataclass(frozen=True, kw_only=True)
class Made:
    """The tasks of a candidate after a predecessor state, but for transforms.

    Attributes
    ----------
    launching : Launching
    behind : Behind or None
        The work that they leave in progress; None if launches are not issued ahead.
    longest_ns : mapping
        By resource, the longest launch.
    """

    launching: Launching
    behind: Behind | None
    longest_ns: Mapping[str, float]

    @classmethod
    def of(cls, table: CostTable, candidate: Candidate, joint: Joint) -> Made:
        """The tasks of `candidate` after the predecessor state `joint`."""
        made = joined(table, candidate, joint.pending, joint.on_pim, joint.switched)
        launching, behind, longest_ns = Launching(tasks=made), None, table.longest_launch_ns
        if joint.follows is not None:
            launching = Launching.of(made, joint.follows)
            own = made if candidate.tasks else ()
            behind = Behind.made(own, candidate.covers[-1], joint.follows, longest_ns)
        return cls(launching=launching, behind=behind, longest_ns=longest_ns)

    def hides_ns(self, running: Running | None) -> Callable[[str], float]:
        """By resource, how much of its first launch overlaps the work of `running`."""
        if running is None or self.behind is None:
            return lambda resource: 0.0
        follows = self.behind.follows
        return lambda resource: running.hides_ns(resource, follows)

    def then(self, running: Running | None) -> Running | None:
        """The work in progress after it."""
        return running and self.behind and running.then(self.behind, self.longest_ns)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A candidate done in a state: its `tasks`, transitions included, and the state `after` it."""

    tasks: tuple[Task, ...]
    after: State

    @classmethod
    def of(cls, graph: RegionGraph, table: CostTable, candidate: Candidate, state: State) -> Step:
        """The step of `candidate` from `state`."""
        made = Made.of(table, candidate, Joint.of(graph, candidate, state))
        moved = tuple(transforms(graph, table, candidate, state).values())
        tasks = made.launching.left(made.hides_ns(state.running))
        left = replace(after(graph, candidate, state), running=made.then(state.running))
        return cls(tasks=_chained(moved, tasks), after=left)


def alike(candidate: Candidate) -> Hashable:
    """A key that is equal for candidates of the same regions if they behave alike in every state.

    They are possible in the same states, have the same transforms and transitions, and leave the same state,
    but for `State.running`.
    """
    given, result = candidate.input, candidate.output
    taken = (candidate.goes_on_with, given.layout, given.accepts_pending, candidate.channels_as)
    kept = (bool(result.pending), result.layout, candidate.stays_on_pim)
    return taken, kept, candidate.leaves_open, candidate.leaves_channels_as, candidate.original
