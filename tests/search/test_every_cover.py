"""Is the exhaustive search, which the label search is compared with, right, and what covers are charged?"""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from problems import (
    covers,
    criteria,
    graph_of,
    layout_problems,
    longest_path_ns,
    problems,
    shared_channel_problems,
)

from pimflow.core.candidate import Candidate, CostTable, Task
from pimflow.core.rewrite import OPERATOR_KERNELS
from pimflow.core.tensor_placement import IN_ALL_CHANNELS, IN_GPU_CHANNELS
from pimflow.errors import UsageError
from pimflow.placement.solvers.evaluate import execute
from pimflow.placement.solvers.exhaustive import TIMED_COVERS, affordable_covers, all_covers


def value(graph, table, chosen, criterion) -> float:
    """By the oracle: transitions that are due are those that a longest path has tasks of."""
    energy_pj = sum(pj for c in chosen for t in c.tasks for pj in t.energies_pj.values())
    done, waiting = {}, set()
    for c in chosen:
        names = [n for covered in c.covers for n in graph.region(covered).inputs if n not in c.covers]
        for name in waiting & set(names):
            edge = table.fused_epilogue_cost[name] if c.fuses_epilogue else table.epilogue_cost[name]
            done[name] = edge.task.energy_pj if edge.task else 0.0
        waiting = (waiting - set(names)) | ({c.covers[-1]} if c.deferred_epilogue else set())
    latency_ns = longest_path_ns(graph, table, chosen)
    timed = criterion.per_ns * latency_ns + criterion.per_pj * (energy_pj + sum(done.values()))
    return timed + criterion.per_error * sum(c.alternative.error for c in chosen)


@given(problems(max_regions=4), criteria)
@settings(max_examples=examples(60))
def test_the_exhaustive_search_is_right(problem, criterion):
    graph, table = problem
    all_plans = covers(graph, table)
    assert sorted(repr(chosen) for chosen, *_ in all_covers(graph, table)) == sorted(map(repr, all_plans))
    for chosen, latency_ns, energy_pj in all_covers(graph, table):
        run = execute(graph, chosen, table)
        assert (latency_ns, sum(run.energies_pj.values())) == (run.latency_ns, pytest.approx(energy_pj))
    values = [value(graph, table, chosen, criterion) for chosen in all_plans]
    best, *_ = min(all_covers(graph, table), key=lambda cover: criterion.value(*cover[1:], cover[0]))
    assert value(graph, table, best, criterion) == pytest.approx(min(values), rel=1e-12)


def test_a_search_that_takes_too_long_is_refused_at_its_begin():
    """Of 2187 covers, 51 are evaluated at most."""
    graph = graph_of([(), *((region,) for region in range(6))])
    candidates = {
        region.name: tuple(
            Candidate(
                name=f"GPU {ns}",
                covers=(region.name,),
                rewrite=OPERATOR_KERNELS,
                tasks=(Task(label=region.name, resource="gpu", execution_ns=ns, energies_pj={}),),
            )
            for ns in (1.0, 2.0, 3.0)
        )
        for region in graph.regions
    }
    table, taken, said = CostTable(candidates=candidates), [], []
    covers_taken = list(affordable_covers(graph, table, 1e6, said.append))
    assert len(covers_taken) == len({tuple(c.name for c in cover) for cover in covers_taken}) == 3**7
    assert len(said) == 1 and f"up to {3**7} plans" in said[0]
    with pytest.raises(UsageError, match=r"more than --search-seconds 1e-09; give --search-seconds \d+, or"):
        taken.extend(affordable_covers(graph, table, 1e-9, said.append))
    assert len(taken) == TIMED_COVERS and len(said) == 1


JOINED = [(), (0,), (0,), (1, 2)]


def transform_costs(graph, table, chosen) -> tuple[float, float]:
    """Time and energy of all transforms of a plan, looked up reader by reader."""
    doing = {name: c for c in chosen for name in c.covers}
    time_ns = energy_pj = 0.0
    for c in chosen:
        read = dict.fromkeys(n for name in c.covers for n in graph.region(name).inputs if n not in c.covers)
        for tensor in read:
            placement = doing[tensor].output if tensor in doing else IN_GPU_CHANNELS
            edge = table.transforms.get((tensor, placement, c.input))
            time_ns += edge.task.duration_ns if edge else 0.0
            energy_pj += edge.task.energy_pj if edge else 0.0
    return time_ns, energy_pj


@given(st.one_of(shared_channel_problems(max_regions=4), shared_channel_problems(inputs=JOINED, fused=False)))
@settings(max_examples=examples(60))
def test_what_lies_over_all_channels_is_read_by_nobody_else(problem):
    graph, table = problem
    for chosen, *_ in all_covers(graph, table):
        doing = {name: c for c in chosen for name in c.covers}
        reading = [(c, n) for c in chosen for name in c.covers for n in graph.region(name).inputs]
        for c, name in reading:
            if name in doing and doing[name].output != IN_GPU_CHANNELS:
                assert c is doing[name] or c.input == IN_ALL_CHANNELS


@given(shared_channel_problems(max_regions=4, spread=False))
@settings(max_examples=examples(40))
def test_each_change_of_use_is_charged_and_no_wide_kernel_runs_beside_pim(problem):
    graph, table = problem
    for chosen, latency_ns, _ in all_covers(graph, table):
        assert latency_ns == pytest.approx(longest_path_ns(graph, table, chosen), rel=1e-12)
        events = execute(graph, chosen, table).timeline.events
        busy = [(e.start_ps, e.end_ps) for e in events if e.resource == "pim"]
        busy = sorted([*busy, *((e.begun_ps, e.end_ps) for e in events if "pim" in e.also)])
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(busy))


laid_out = st.one_of(
    layout_problems(max_regions=4),
    layout_problems(("gpu",), max_regions=4),
    layout_problems(("cpu",), max_regions=4),
)


@given(laid_out)
@settings(max_examples=examples(60))
def test_every_transform_of_a_layout_is_charged(problem):
    graph, table = problem
    plain = replace(table, transforms={})
    for chosen, latency_ns, energy_pj in all_covers(graph, table):
        added_ns, added_pj = transform_costs(graph, table, chosen)
        without = execute(graph, chosen, plain)
        assert energy_pj == pytest.approx(sum(without.energies_pj.values()) + added_pj)
        assert without.latency_ns <= latency_ns
        if table.transforms and len({task.resource for c in chosen for task in c.tasks} | {"gpu"}) == 1:
            assert latency_ns == pytest.approx(without.latency_ns + added_ns), "one after the other"
