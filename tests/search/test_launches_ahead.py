"""Launches that are issued ahead: are they hidden where they can be, and nowhere else?"""

from dataclasses import replace

import pytest
from answers import best_label, min_value
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from problems import graph_of, launch_ahead_problems, problems, shared_channel_problems

import pimflow
from pimflow.core.candidate import Candidate, CostTable, EdgeCost, Task
from pimflow.core.rewrite import OPERATOR_KERNELS
from pimflow.core.tensor_placement import IN_ALL_CHANNELS, IN_GPU_CHANNELS, ChannelMode
from pimflow.errors import UsageError
from pimflow.hardware import system
from pimflow.placement.solvers.evaluate import execute
from pimflow.placement.solvers.exhaustive import all_covers
from pimflow.placement.solvers.label_search import Criterion


@given(launch_ahead_problems(st.one_of(problems(max_regions=4), shared_channel_problems(max_regions=3))))
@settings(max_examples=examples(40))
def test_a_launch_waits_for_the_task_before_it_on_its_device_to_begin(problem):
    graph, ahead = problem
    in_turn = replace(ahead, overlaps_launches=False)
    for chosen, latency_ns, _ in all_covers(graph, ahead):
        slow, quick = (execute(graph, chosen, table) for table in (in_turn, ahead))
        assert quick.latency_ns == latency_ns
        assert zero_launch_latency_ns(graph, chosen, ahead) <= latency_ns <= slow.latency_ns
        begun: dict[str, int] = {}
        for given_in_turn, event in zip(slow.timeline.events, quick.timeline.events, strict=True):
            launch_ps = given_in_turn.begun_ps - given_in_turn.start_ps
            if launch_ps:
                assert event.begun_ps - begun.get(event.resource, 0) >= launch_ps
                begun[event.resource] = event.begun_ps


def zero_launch_latency_ns(graph, chosen: tuple[Candidate, ...], table: CostTable) -> float:
    """How long a plan takes if no launch takes any time."""

    def none(task: Task) -> Task:
        return replace(task, launch_ns=0.0)

    def edges(costs):
        return {name: replace(edge, task=edge.task and none(edge.task)) for name, edge in costs.items()}

    free = replace(
        table,
        epilogue_cost=edges(table.epilogue_cost),
        fused_epilogue_cost=edges(table.fused_epilogue_cost),
        overlaps_launches=False,
    )
    plain = tuple(replace(member, tasks=tuple(map(none, member.tasks))) for member in chosen)
    return execute(graph, plain, free).latency_ns


def make_candidate(name: str, resource: str, launch_ns: float, execution_ns: float) -> Candidate:
    return Candidate(
        name=resource,
        covers=(name,),
        rewrite=OPERATOR_KERNELS,
        tasks=(Task(label=name, resource=resource, launch_ns=launch_ns, execution_ns=execution_ns),),
    )


def test_a_launch_behind_a_change_of_channels_is_hidden_once():
    """The change takes PIM 1; the launch of 2 goes out at the begin, and ends 1 after it."""
    graph = graph_of([()])
    wide = replace(
        make_candidate("r0", "gpu", 2, 1),
        channel_mode=ChannelMode.PLAIN_MEMORY,
        final_channel_mode=ChannelMode.PLAIN_MEMORY,
    )
    wide = replace(wide, tasks=(replace(wide.tasks[0], also=("pim",)),))
    switch = EdgeCost(task=Task(label="switch", resource="pim", launch_ns=0.0, execution_ns=1.0))
    for ahead in (False, True):
        table = CostTable(candidates={"r0": (wide,)}, switch=switch, overlaps_launches=ahead)
        assert execute(graph, (wide,), table).latency_ns == 3


@pytest.mark.parametrize(
    "tasks, latency_ns",
    [
        # All on one device: 4 + 5, then max(4 - 5, 0) + 3, then (4 - 3) + 2.
        ([("gpu", 4, 5), ("gpu", 4, 3), ("gpu", 4, 2)], 9 + 3 + 3),
        # PIM's queue is empty: its launch of 6 hides behind the 5 that the first executes. That of 9 goes out
        # when the first begins, 5 + 2 of executing before its task can begin.
        ([("gpu", 4, 5), ("pim", 6, 2), ("gpu", 9, 1)], 9 + (6 - 5) + 2 + (9 - 7) + 1),
    ],
)
def test_by_hand(tasks, latency_ns):
    graph = graph_of([(), *((i,) for i in range(len(tasks) - 1))])
    chosen = tuple(make_candidate(f"r{i}", *task) for i, task in enumerate(tasks))
    table = CostTable(candidates={c.covers[0]: (c,) for c in chosen}, overlaps_launches=True)
    assert execute(graph, chosen, table).latency_ns == latency_ns
    assert best_label(graph, table).latency_ns == pytest.approx(latency_ns)


def test_a_launch_overlaps_the_switch_of_channels():
    """PIM's launch of 2 hides behind the kernel that executes 1 there, and then the change, which takes 2."""
    graph = graph_of([(), ()])
    wide = replace(make_candidate("r0", "gpu", 1, 1), final_channel_mode=ChannelMode.PLAIN_MEMORY)
    wide = replace(wide, tasks=(replace(wide.tasks[0], also=("pim",)),))
    on_pim = replace(make_candidate("r1", "pim", 2, 1), channel_mode=ChannelMode.PIM)
    change = Task(label="change", resource="pim", execution_ns=2.0, readies_channels=True)
    for ahead in (False, True):
        table = CostTable(
            candidates={"r0": (wide,), "r1": (on_pim,)}, switch=EdgeCost(task=change), overlaps_launches=ahead
        )
        assert execute(graph, (wide, on_pim), table).latency_ns == 1 + 1 + 2 + 1


CHAIN = ((), (0,), (1,), (2,))
BRANCHES = ((), (0,), (0,), (2,), (1, 3), (4,))


@pytest.mark.parametrize(
    "edges, ways",
    [
        (CHAIN, ("pim 0 5", "gpu 100 10, gpu 100 60", "gpu 100 10", "pim 1000 10")),
        (BRANCHES, ("gpu 0 5", "gpu 0 5", "pim 0 5", "gpu 0 2, gpu 0 150", "gpu 100 1", "pim 100 1")),
    ],
)
def test_what_hides_less_is_paid_on_every_device(edges, ways):
    """A longer execution hides more of the next launch on the GPU, and of the next on PIM."""
    graph, candidates = graph_of(edges), {}
    for region, texts in zip(graph.regions, ways, strict=True):
        tasks = [(resource, *map(float, ns)) for resource, *ns in map(str.split, texts.split(","))]
        candidates[region.name] = tuple(
            replace(make_candidate(region.name, *task), name=str(number)) for number, task in enumerate(tasks)
        )
    table = CostTable(candidates=candidates, overlaps_launches=True)
    assert best_label(graph, table).latency_ns == pytest.approx(min_value(graph, table))


def test_a_launch_hidden_by_a_switch_of_channels_and_a_copy_back():
    graph = graph_of(CHAIN[:3])
    plain = replace(make_candidate("r0", "gpu", 0, 5), name="plain")
    task = replace(plain.tasks[0], also=("pim",), launch_ns=30.0)
    use = {"channel_mode": ChannelMode.PLAIN_MEMORY, "final_channel_mode": ChannelMode.PLAIN_MEMORY}
    wide = replace(plain, name="wide", tasks=(task,), output=IN_ALL_CHANNELS, **use)
    on_pim = {"channel_mode": ChannelMode.PIM, "final_channel_mode": ChannelMode.PIM}
    transfer = Task(label="transfer", resource="crossbar", execution_ns=21.0)
    first = make_candidate("r1", "pim", 2, 4)
    last = replace(make_candidate("r2", "pim", 25, 10), requires_open="form")
    first = replace(first, tasks=(*first.tasks, transfer), leaves_open="form")
    back = EdgeCost(task=Task(label="back", resource="gpu", execution_ns=2.0))
    table = CostTable(
        candidates={"r0": (plain, wide), "r1": (replace(first, **on_pim),), "r2": (replace(last, **on_pim),)},
        transforms={("r0", IN_ALL_CHANNELS, IN_GPU_CHANNELS): back},
        switch=EdgeCost(task=Task(label="switch", resource="pim", execution_ns=26.0)),
        overlaps_launches=True,
    )
    criterion = Criterion(per_ns=3.0, per_pj=2.0)
    assert best_label(graph, table, criterion).values[0] == min_value(graph, table, criterion)


@pytest.mark.long
def test_both_sides_of_a_network_are_launched_ahead():
    in_turn, ahead = (pimflow.search("toy", system(launches=item)) for item in ("in-turn", "ahead"))
    none = pimflow.search("toy", system().with_launches(gpu_ns=0.0, pim_ns=0.0))
    for side in ("baseline", "evaluation"):
        times = [getattr(item, side).latency_ns for item in (none, ahead, in_turn)]
        assert times == sorted(times) and len(set(times)) == 3
    assert ahead.speedup >= 1
    assert in_turn.plan.system != ahead.plan.system


def test_an_unknown_convention_is_refused():
    with pytest.raises(UsageError, match="launches 'later' is none of in-turn, ahead"):
        system(launches="later")
