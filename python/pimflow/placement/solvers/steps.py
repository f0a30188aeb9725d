"""The tasks of a candidate at its place in a plan, given the state that earlier candidates leave.

The evaluator and every solver count with these, so that they cannot disagree about transitions.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from pimflow.core.candidate import AS_MEMORY, Candidate, CostTable, Port, Task, launched_beside
from pimflow.core.region import APPEND, Region, RegionGraph
from pimflow.placement.solvers import launches
from pimflow.placement.solvers.launches import Running

CANONICAL = Port()
Kept = tuple[frozenset[str], frozenset[tuple[str, str]]]  # pending, and layouts: see `State`


@dataclass(frozen=True, kw_only=True)
class State:
    """State of the recurrence: what a plan up to some region leaves to the next regions.

    Attributes
    ----------
    pending : frozenset of str
        Regions whose results have something pending.
    on_pim : str
        The last region, if its PIM submission may go on; else empty.
    open : str
        The form of a layer that is not done to its end (`Candidate.leaves_open`).
    layouts : frozenset of (str, str)
        Regions whose results are still read, and their layout where that is not the canonical one.
    as_memory : bool
        Whether the channels that have PIM are used as plain memory. Every inference begins with them as PIM:
        a plan that never changes that pays nothing, and the change behind one that ends so is charged to it.
    running : Running or None
        What the next launch may hide behind; None if launches are not issued ahead.
    """

    pending: frozenset[str] = frozenset()
    on_pim: str = ""
    open: str = ""
    layouts: frozenset[tuple[str, str]] = frozenset()
    as_memory: bool = False
    running: Running | None = None

    def layout(self, table: CostTable, name: str) -> str:
        """The layout of a result, or of a graph input."""
        known = dict(self.layouts) if self.layouts else {}
        return known.get(name) or table.inputs.get(name, CANONICAL).layout

    @property
    def apart_from_running(self) -> tuple:
        """All of it but what runs."""
        return self.pending, self.on_pim, self.open, self.layouts, self.as_memory

    def beside(self, kept: Kept) -> State:
        """The state with what was `parted` from the one that led to it."""
        pending, layouts = kept
        if not pending and not layouts:
            return self
        return State(
            pending=self.pending | pending,
            on_pim=self.on_pim,
            open=self.open,
            layouts=self.layouts | layouts,
            as_memory=self.as_memory,
            running=self.running,
        )


def begin(table: CostTable) -> State:
    """The state that an inference begins in."""
    return State(running=Running() if table.launched_ahead else None)


def check_covers(graph: RegionGraph, table: CostTable) -> None:
    """Raise `ValueError` unless candidates of several regions are runs that a plan can be made of.

    A run begins at its first region. No region outside reads what is inside, except what a layer in another
    form keeps beside its result; the network gives back no more of it than caches. In a pipeline, each region
    reads the one before through its first input, and no other region does.
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
    """The names in `reads` of regions whose results a candidate reads, not what they keep beside these."""
    names = [name for region in candidate.covers for name in graph.region(region).results_read]
    return tuple(name for name in names if name not in candidate.covers)


def late_operands(region: Region) -> tuple[str, ...]:
    """Operands that only the epilogue of a layer reads: a residual."""
    return region.inputs[1:] if region.geometry and region.epilogue and not region.prologue else ()


def late(graph: RegionGraph, candidate: Candidate, pending: Collection[str]) -> frozenset[str]:
    """Operands that the result of `candidate` waits for, but none of its tasks: another kernel's epilogue.

    Nothing where `candidate` itself takes over what such a result left pending.
    """
    several = len(candidate.covers) > 1 and candidate.original is None
    if several or not candidate.output.pending:
        return frozenset()
    region = candidate.original or graph.region(candidate.covers[0])
    operands = frozenset(late_operands(region)) - {region.inputs[0]}
    taken = operands.intersection(pending).intersection(results_read(graph, candidate))
    return frozenset() if taken else operands


def goes_on(graph: RegionGraph, candidate: Candidate, state: State) -> bool:
    """Whether `candidate` may be part of the PIM submission before it."""
    return bool(state.on_pim) and graph.region(candidate.covers[0]).first_result == state.on_pim


def fits(graph: RegionGraph, table: CostTable | None, candidate: Candidate, state: State) -> bool:
    """Whether `candidate` may be done in `state`.

    It goes on with the form of the layer that is open, and what it reads can be had in its layout.
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
    """Whether `candidate` needs another use of the channels that have PIM than they are in."""
    return bool(candidate.channels_as) and (candidate.channels_as == AS_MEMORY) != state.as_memory


def after(graph: RegionGraph, table: CostTable | None, candidate: Candidate, state: State) -> State:
    """The state that `candidate` leaves, done in `state`; without a table, nothing of what runs then."""
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
        running=_running(graph, table, candidate, state),
    )


def _running(
    graph: RegionGraph, table: CostTable | None, candidate: Candidate, state: State
) -> Running | None:
    """What runs behind `candidate`; a view leaves that as it was, and is read in place of it."""
    if state.running is None or table is None:
        return None
    last, follows = candidate.covers[-1], _follows(graph, candidate, state)
    if not candidate.tasks:
        return replace(state.running, of=last if follows else "")
    made = _unmoved(graph, table, candidate, state)
    return state.running.then(made, last, follows, table.longest_launch_ns)


def _follows(graph: RegionGraph, candidate: Candidate, state: State) -> bool:
    """Whether the tasks of `candidate` wait for all that runs before it."""
    waiting = late(graph, candidate, state.pending)
    read = (name for name in reads(graph, candidate) if name not in waiting)
    return state.running is not None and state.running.of in (launches.BEGIN, *read)


def parted(graph: RegionGraph, covers: Sequence[str], state: State) -> tuple[State, Kept]:
    """What of `state` candidates that do these regions meet: it decides their tasks, and what they leave.

    Beside it, what stays as it is behind them (`State.beside`).
    """
    read = {name for region in covers for name in graph.region(region).inputs}
    pending = state.pending.intersection(read)
    layouts = frozenset(each for each in state.layouts if each[0] in read)
    met = State(
        pending=pending,
        on_pim=state.on_pim if graph.region(covers[0]).first_result == state.on_pim else "",
        open=state.open,
        layouts=layouts,
        as_memory=state.as_memory,
        running=state.running,
    )
    return met, (state.pending - pending, state.layouts - layouts)


def tasks(graph: RegionGraph, table: CostTable, candidate: Candidate, state: State) -> tuple[Task, ...]:
    """The tasks of `candidate` done in `state`: first, one after another, those of the transitions."""
    moved = transforms(graph, table, candidate, state) if table.transforms else {}
    made, before = _unmoved(graph, table, candidate, state), state.running
    if before is not None:
        follows = _follows(graph, candidate, state)
        made = launches.left(made, lambda resource: before.hides_ns(resource, follows), follows)
    return _behind(tuple(moved.values()), made)


def _unmoved(graph: RegionGraph, table: CostTable, candidate: Candidate, state: State) -> tuple[Task, ...]:
    """The same without transforms, with launches in full."""
    read = sorted(state.pending.intersection(results_read(graph, candidate)))
    return joined(table, candidate, read, goes_on(graph, candidate, state), switches(candidate, state))


def transforms(graph: RegionGraph, table: CostTable, candidate: Candidate, state: State) -> dict[str, Task]:
    """By what `candidate` reads in another layout than it is there in, the task that changes that."""
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
    """The tasks of `candidate`, which takes over what `pending` regions left, and perhaps a submission.

    If it is `switched`, one comes before them that changes the use of the channels that have PIM, once its
    operands are there. PIM's launch is on its way meanwhile (`launched_beside`).
    """
    transitions = [table.transition(name, candidate).task for name in pending]
    if on_pim:
        candidate = candidate.continued()
    if switched and table.switch.task:
        candidate = candidate.behind(table.switch.task)
    own = candidate.tasks if table.launched_ahead else launched_beside(candidate.tasks)
    return _behind([task for task in transitions if task], own)


def _behind(before: Sequence[Task], tasks: tuple[Task, ...]) -> tuple[Task, ...]:
    """`tasks` behind others, which are done one after another."""
    if not before:
        return tasks
    first = len(before)
    chained = [task.waiting_for((i - 1,) if i else ()) for i, task in enumerate(before)]
    waits = (first - 1,)
    shifted = [task.waiting_for(tuple(i + first for i in task.after) or waits) for task in tasks]
    return (*chained, *shifted)
