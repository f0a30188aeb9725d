"""Does a memory budget count what a plan really makes, so that no plan is refused that keeps to it?"""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples, long_but
from problems import covers, problems

from pimflow import frontend
from pimflow.commands.shared import prepare
from pimflow.compiler import build, phases
from pimflow.core.candidate import Footprint, LayerAlternative
from pimflow.core.goal import SOLVERS
from pimflow.core.liveness import Lifetime, Liveness
from pimflow.core.rewrite import OPERATOR_KERNELS
from pimflow.errors import InfeasibleError
from pimflow.hardware import system
from pimflow.pim_backend.runtime import targets
from pimflow.placement import Goal, search
from pimflow.placement.solvers.evaluate import evaluate
from pimflow.placement.solvers.plan_memory import PlanMemory
from pimflow.placement.solvers.plan_search import PlanSearch

SYSTEM = system(dtype="fp32", splits="grid")
ELEMENTS = 4 * 4 * 8  # of every tensor of `problems`


@st.composite
def sized_problems(draw):
    """A problem whose candidates hold weights and workspaces; some of several regions are one kernel."""
    graph, table = draw(problems(max_regions=4))
    sizes = st.sampled_from((0, 100, 300, 1000, 3000))
    new_candidates = {
        name: tuple(
            replace(
                c,
                footprint=Footprint(
                    filter_bytes=draw(sizes), workspace_bytes=draw(sizes) if len(c.covers) == 1 else 0
                ),
                rewrite=OPERATOR_KERNELS if c.rewrite.mode == "SPLIT" else c.rewrite,
                deferred_epilogue=() if c.rewrite.mode == "SPLIT" else c.deferred_epilogue,
            )
            for c in candidates
        )
        for name, candidates in table.candidates.items()
    }
    return graph, replace(table, candidates=new_candidates)


def up(size_bytes):
    return (size_bytes + 63) // 64 * 64


def plan_bytes(graph, cover):
    """Candidate by candidate: what it reads and makes, what later ones need, what it holds by itself."""
    order = {region.name: position for position, region in enumerate(graph.regions)}
    last = {name: max(map(order.get, readers), default=-1) for name, readers in graph.readers.items()}
    last |= dict.fromkeys(graph.outputs, len(order))
    peak_bytes, waiting = 0, set()
    for candidate in cover:
        begin = order[candidate.covers[0]]
        one_kernel = not candidate.uses_pim
        live = {name for name, position in order.items() if position < begin <= last[name]}
        live |= {candidate.covers[-1]} if one_kernel else set(candidate.covers)
        waiting_regions = [graph.region(name) for name in waiting]
        addends = {tensor for region in waiting_regions for tensor in region.inputs[region.operands :]}
        live |= addends
        last_region = graph.region(candidate.covers[-1])
        is_plain = one_kernel and len(candidate.covers) == 1 and candidate.alternative == LayerAlternative()
        late = last_region.inputs[last_region.operands :] if is_plain else ()
        overwritten = [
            name
            for name in late
            if name != "%x"
            and last[name] == begin
            and name not in waiting | addends
            and last_region.inputs.count(name) == 1
        ]
        live -= {last_region.name} if overwritten else set()
        read = {tensor for name in candidate.covers for tensor in graph.region(name).inputs}
        takes = waiting & read
        shared = {name for name in takes if len(graph.consumers[name]) > 1}
        tensors = len(live - {"%x"}) + (len(shared) if candidate.fuses_epilogue else 0)
        peak_bytes = max(peak_bytes, 4 * ELEMENTS * tensors + up(candidate.footprint.workspace_bytes))
        waiting -= takes
        waiting |= {candidate.covers[-1]} if candidate.deferred_epilogue else set()
    return peak_bytes


@settings(max_examples=examples(40))
@given(sized_problems())
def test_the_least_is_that_of_some_plan_and_no_plan_takes_less(problem):
    graph, table = problem
    memory = PlanMemory(graph, "fp32")
    sizes = [plan_bytes(graph, cover) for cover in covers(graph, table)]
    assert [memory.pool_bytes(cover) for cover in covers(graph, table)] == sizes
    assert PlanSearch(graph, table, SYSTEM, Goal()).smallest().memory_bytes == min(sizes)


@settings(max_examples=examples(25))
@given(sized_problems(), st.floats(0, 1))
def test_the_fastest_plan_within_a_budget_is_found(problem, share):
    graph, table = problem
    every_cover = covers(graph, table)
    sizes = [plan_bytes(graph, cover) for cover in every_cover]
    budget = min(sizes) + share * (max(sizes) - min(sizes))
    possible = [cover for cover, size in zip(every_cover, sizes, strict=True) if size <= budget]
    best_ns = min(evaluate(graph, cover, table, SYSTEM).latency_ns for cover in possible)
    for solver in SOLVERS:
        result = PlanSearch(graph, table, SYSTEM, Goal(solver=solver, max_memory_bytes=budget)).best()
        assert result and plan_bytes(graph, result.candidates) <= budget
        assert result.evaluation.latency_ns == pytest.approx(best_ns, rel=1e-9)


def test_what_is_inside_a_kernel_takes_nothing_unless_others_hold_it():
    def life(name, begin, end, **options):
        return Lifetime(name=name, begin=begin, end=end, size_bytes=100, **options)

    lives = (life("x", 0, 1), life("a", 0, 2), life("b", 1, 3), life("c", 2, 4))
    live = Liveness(steps=4, lifetimes=lives)

    def bytes_of(live, *span):
        return live.live_range_bytes(*span).total_bytes

    assert bytes_of(live, 1, 3) == 300 and bytes_of(live, 1, 3, ["b"]) == 200
    assert bytes_of(live, 1, 2, ["b"]) == 200, "read behind the kernel"
    returned = Liveness(steps=4, lifetimes=(*lives[:2], life("b", 1, 3, pinned=True), lives[3]))
    assert bytes_of(returned, 1, 3, ["b"]) == 300
    joined = live.with_aliases({"b": "c"})
    assert bytes_of(joined, 1, 3, ["b"]) == 200, "it lies inside the result"


@pytest.fixture(scope="module")
def toy():
    network = frontend.load("toy")
    return network, prepare.regions(network, SYSTEM, fuse=True)


def pool_bytes(network, search_result):
    """The pool of what is built for a GPU."""
    plans, target = [], targets.target_by_name("cuda+pim")
    with target:
        phases.lower(build.apply_search_result(network.module, search_result), target, SYSTEM, plans.append)
    return plans[-1].pool_bytes


@pytest.mark.parametrize("primitives", long_but([True], [False, True]))
@pytest.mark.parametrize("modes", long_but(["gpu,pim"], ["gpu", "gpu,pim"]))
def test_every_budget_from_the_minimum_on_has_a_plan_that_fits_when_built(toy, modes, primitives):
    network, graph = toy
    goal = Goal(modes=modes, primitives=primitives)
    with pytest.raises(InfeasibleError) as refused:
        search(graph, SYSTEM, goal=replace(goal, max_memory_bytes=1000.0))
    min_bytes = refused.value.demand
    with pytest.raises(InfeasibleError):
        search(graph, SYSTEM, goal=replace(goal, max_memory_bytes=0.99 * min_bytes))
    for factor in (1.0, 1.1, 1.5, 4.0):
        search_result = search(graph, SYSTEM, goal=replace(goal, max_memory_bytes=factor * min_bytes))
        assert pool_bytes(network, search_result) <= factor * min_bytes


def test_a_fused_network_is_not_refused_for_tensors_that_it_never_makes(toy):
    """It was, at 205 KiB, weights among them: the pool takes 24."""
    network, graph = toy
    search_result = search(graph, SYSTEM, goal=Goal(modes="gpu", max_memory_bytes=32_768.0))
    assert search_result.group_tilings() and pool_bytes(network, search_result) <= 32_768
