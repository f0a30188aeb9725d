"""The tasks of a candidate in a plan, given the state that earlier candidates leave.

The evaluator and the exhaustive solver use these functions, and what the label search finds is checked by
the evaluator: so they cannot disagree about transitions.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pimflow.core.candidate import Candidate, CostTable, Task, overlap_first_launch
from pimflow.core.region import APPEND
from pimflow.core.region_graph import RegionGraph
from pimflow.core.rewrite import PipelineRewrite
from pimflow.core.tensor_placement import IN_GPU_CHANNELS, ChannelMode, TensorPlacement
from pimflow.placement.solvers import launches
from pimflow.placement.solvers.launches import Running


@dataclass(frozen=True, kw_only=True)
class PlanState:
    """State after a partial plan: all that the tasks of further candidates depend on.

    Attributes
    ----------
    deferred_epilogues : frozenset of str
        Regions whose results have a deferred epilogue.
    open_submission : str
        The last region, if its PIM submission is still open; else empty.
    open_alternative : str
        The alternative of a layer that is begun and not completed (`Candidate.leaves_open`).
    placements : mapping of str to TensorPlacement
        By region whose result does not lie in the GPU channels, where it lies.
    partial_sums : frozenset of str
        Those of `deferred_epilogues` of which both devices left a part (`Candidate.defers_partial_sum`).
    is_plain_memory : bool
        Whether the channels that have PIM are used as plain memory. Every inference begins with them as PIM.
    running : Running or None
        The work that the next launch may overlap; None if launches are not issued ahead.
    free_ns, ready_ns : mapping of str to float
        When each resource that was used becomes free, and when the result of each region is complete.
    """

    deferred_epilogues: frozenset[str] = frozenset()
    open_submission: str = ""
    open_alternative: str = ""
    placements: Mapping[str, TensorPlacement] = field(default_factory=dict)
    partial_sums: frozenset[str] = frozenset()
    is_plain_memory: bool = False
    running: Running | None = None
    free_ns: Mapping[str, float] = field(default_factory=dict)
    ready_ns: Mapping[str, float] = field(default_factory=dict)

    def placement(self, table: CostTable, name: str) -> TensorPlacement:
        """Where a region's result or a graph input lies."""
        return self.placements.get(name) or table.inputs.get(name, IN_GPU_CHANNELS)


def initial_state(table: CostTable) -> PlanState:
    """The state at the begin of an inference."""
    return PlanState(running=Running() if table.overlaps_launches else None)


def check_covers(graph: RegionGraph, table: CostTable) -> None:
    """Raise `ValueError` unless candidates of several regions cover runs that a plan can contain.

    A run is listed at its first region. No region outside reads an inner result, except what an original
    layer keeps beside its result; and only caches inside are outputs of the network. In a pipeline, each
    region reads the previous one as its first input, and no other region does.
    """
    order = {region.name: position for position, region in enumerate(graph.regions)}
    for name, candidates in table.candidates.items():
        for candidate in candidates:
            begin, count = order[name], len(candidate.covers)
            run = graph.regions[begin : begin + count]
            covered = {region.name for region in run}
            original = candidate.alternative.original
            readers = graph.consumers if original else graph.readers
            returned = set(graph.outputs).difference(graph.extra_outputs if original else ())
            returned -= {region.name for region in run if region.operator == APPEND}
            is_closed = all(
                covered.issuperset(readers[region.name]) and region.name not in returned
                for region in run[:-1]
            )
            is_chained = not isinstance(candidate.rewrite, PipelineRewrite) or all(
                consumer.first_result_input == producer.name
                and graph.consumers[producer.name] == (consumer.name,)
                for producer, consumer in itertools.pairwise(run)
            )
            if tuple(region.name for region in run) != candidate.covers or not (is_closed and is_chained):
                raise ValueError(f"candidate '{candidate.name}' of '{name}' covers no run of regions")


def candidate_inputs(graph: RegionGraph, candidate: Candidate) -> tuple[str, ...]:
    """Regions and graph inputs that a candidate reads, the first operand first."""
    if len(candidate.covers) == 1:
        return graph.region(candidate.covers[0]).inputs
    names = [name for region in candidate.covers for name in graph.region(region).inputs]
    return tuple(name for name in names if name not in candidate.covers)


def results_read(graph: RegionGraph, candidate: Candidate) -> tuple[str, ...]:
    """The names in `candidate_inputs` whose results a candidate reads, not the tensors kept beside
    results.
    """
    names = [name for region in candidate.covers for name in graph.region(region).result_inputs]
    return tuple(name for name in names if name not in candidate.covers)


def late_inputs(
    graph: RegionGraph, candidate: Candidate, deferred_epilogues: Collection[str]
) -> frozenset[str]:
    """Operands that the result of `candidate` waits for, but no task of it: its epilogue is deferred.

    None if `candidate` itself does a deferred epilogue of such an operand.
    """
    original = candidate.alternative.original
    if (len(candidate.covers) > 1 and original is None) or not candidate.deferred_epilogue:
        return frozenset()
    region = original or graph.region(candidate.covers[0])
    operands = frozenset(region.late_operands)
    fused_operands = operands.intersection(deferred_epilogues).intersection(results_read(graph, candidate))
    return frozenset() if fused_operands else operands


def is_feasible(graph: RegionGraph, table: CostTable | None, candidate: Candidate, state: PlanState) -> bool:
    """Whether `candidate` is possible in `state`.

    It must complete the layer that is open, and be able to read its inputs where they lie.
    """
    if candidate.requires_open != state.open_alternative:
        return False
    if table is None or not table.transforms:
        return True
    return all(
        table.transform(name, state.placement(table, name), candidate.input).possible
        for name in candidate_inputs(graph, candidate)
    )


def next_state(graph: RegionGraph, candidate: Candidate, state: PlanState) -> PlanState:
    """The state after `candidate` is done in `state`, without the times of its tasks."""
    last = candidate.covers[-1]
    deferred_epilogues = state.deferred_epilogues.difference(results_read(graph, candidate))
    if candidate.deferred_epilogue:
        deferred_epilogues |= {last}
    partial_sums = state.partial_sums | ({last} if candidate.defers_partial_sum else set())
    is_moved = candidate.output != IN_GPU_CHANNELS
    mode = candidate.final_channel_mode
    return PlanState(
        deferred_epilogues=deferred_epilogues,
        open_submission=last if candidate.keeps_submission_open else "",
        open_alternative=candidate.leaves_open,
        placements={**state.placements, last: candidate.output} if is_moved else state.placements,
        partial_sums=partial_sums & deferred_epilogues,
        is_plain_memory=state.is_plain_memory if mode is None else mode is ChannelMode.PLAIN_MEMORY,
    )


def states(graph: RegionGraph, candidates: Iterable[Candidate]) -> Iterator[PlanState]:
    """The states before each of the candidates of a plan, and after the last, without times."""
    return itertools.accumulate(
        candidates, lambda state, candidate: next_state(graph, candidate, state), initial=PlanState()
    )


def layout_transforms(
    graph: RegionGraph, table: CostTable, candidate: Candidate, state: PlanState
) -> dict[str, Task]:
    """By input of `candidate` that lies elsewhere, the task that transforms it, if any."""
    if not table.transforms:
        return {}
    edges = {
        name: table.transform(name, state.placement(table, name), candidate.input)
        for name in dict.fromkeys(candidate_inputs(graph, candidate))
    }
    return {name: edge.task for name, edge in edges.items() if edge.task}


def tasks_in_context(
    graph: RegionGraph, table: CostTable, candidate: Candidate, state: PlanState
) -> tuple[Task, ...]:
    """The tasks of `candidate` in `state`, with deferred epilogues and whole launches, but for transforms.

    If the channels that have PIM must be switched, its first task does so once its operands are there; a PIM
    launch overlaps that (`overlap_first_launch`).
    """
    fused_regions = sorted(state.deferred_epilogues.intersection(results_read(graph, candidate)))
    transitions = [table.transition(name, candidate).task for name in fused_regions]
    first_input = graph.region(candidate.covers[0]).first_result_input
    if state.open_submission and first_input == state.open_submission:
        candidate = candidate.with_shared_submission()
    mode = candidate.channel_mode
    needs_switch = mode is not None and (mode is ChannelMode.PLAIN_MEMORY) != state.is_plain_memory
    if needs_switch and table.switch.task:
        candidate = candidate.with_first_task(table.switch.task)
    own_tasks = candidate.tasks if table.overlaps_launches else overlap_first_launch(candidate.tasks)
    return _prepend_tasks([task for task in transitions if task], own_tasks)


def _prepend_tasks(preceding: Sequence[Task], tasks: tuple[Task, ...]) -> tuple[Task, ...]:
    """`tasks` after the tasks `preceding`, which run in sequence."""
    if not preceding:
        return tasks
    offset = len(preceding)
    chained = [task.with_dependencies((i - 1,) if i else ()) for i, task in enumerate(preceding)]
    last_preceding = (offset - 1,)
    shifted = [
        task.with_dependencies(tuple(i + offset for i in task.after) or last_preceding) for task in tasks
    ]
    return (*chained, *shifted)


def charged_tasks(
    graph: RegionGraph, table: CostTable, candidate: Candidate, state: PlanState
) -> tuple[tuple[Task, ...], Running | None]:
    """The tasks of `candidate` in `state`, transitions included, and the work in progress after them."""
    tasks, running = tasks_in_context(graph, table, candidate, state), state.running
    if running is not None:
        late_names = late_inputs(graph, candidate, state.deferred_epilogues)
        early_names = (name for name in candidate_inputs(graph, candidate) if name not in late_names)
        follows = running.awaited_region in (launches.BEGIN, *early_names)
        awaited_tasks, hidden_ns = tasks if candidate.tasks else (), running.hidden_ns
        tasks = launches.charged_tasks(tasks, follows, lambda resource: hidden_ns(resource, follows))
        running = running.advance(awaited_tasks, candidate.covers[-1], follows)
    transform_tasks = tuple(layout_transforms(graph, table, candidate, state).values())
    return _prepend_tasks(transform_tasks, tasks), running
