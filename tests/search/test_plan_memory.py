"""Does a memory budget count what a plan really makes, so that no plan is refused that keeps to it?"""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples, long_but
from problems import covers, problems

from pimflow import frontend
from pimflow.api import prepare
from pimflow.compiler import build, phases
from pimflow.core.candidate import Cost
from pimflow.core.liveness import Lifetime, Liveness
from pimflow.errors import InfeasibleError
from pimflow.hardware import system
from pimflow.pim_backend.runtime import targets
from pimflow.placement import Goal, search
from pimflow.placement.solvers.objectives import Minimiser
from pimflow.placement.solvers.plan_memory import PlanMemory

SYSTEM = system(dtype="fp32", splits="grid")
ELEMENTS = 4 * 4 * 8  # of every tensor of `problems`


@st.composite
def sized(draw):
    """A problem whose candidates hold weights and workspaces; some of several regions are one kernel."""
    graph, table = draw(problems(max_regions=4))
    sizes = st.sampled_from((0, 100, 300, 1000, 3000))
    found = {
        name: tuple(
            replace(
                c,
                filter_bytes=draw(sizes),
                workspace_bytes=draw(sizes) if len(c.covers) == 1 else 0,
                rewrite=replace(c.rewrite, mode="GPU") if c.rewrite.mode == "SPLIT" else c.rewrite,
            )
            for c in candidates
        )
        for name, candidates in table.candidates.items()
    }
    costs = {(name, c.name): Cost.of(c) for name, each in found.items() for c in each}
    return graph, replace(table, candidates=found, costs=costs)


def plan_bytes(graph, cover):
    """Kernel by kernel: what it reads and writes, and what later ones still read, or the network returns."""
    steps, workspaces = [], []
    for candidate in cover:
        one_kernel = candidate.rewrite.mode == "GPU"
        for names in [candidate.covers] if one_kernel else [(name,) for name in candidate.covers]:
            read = {source for name in names for source in graph.region(name).inputs} - set(names)
            steps.append((read, names[-1]))
            workspaces.append(candidate.workspace_bytes)
    most = 0
    for at, (read, written) in enumerate(steps):
        later = {name for reads, _ in steps[at + 1 :] for name in reads} | set(graph.outputs)
        there = {"%x"} | {name for _, name in steps[:at]}
        live = read | {written} | (there & later)
        most = max(most, 4 * ELEMENTS * len(live) + workspaces[at])
    return most + sum(candidate.filter_bytes for candidate in cover)


@settings(max_examples=examples(40))
@given(sized())
def test_the_least_is_that_of_some_plan_and_no_plan_takes_less(problem):
    graph, table = problem
    memory = PlanMemory(graph, "fp32")
    sizes = [plan_bytes(graph, cover) for cover in covers(graph, table)]
    assert [memory.of(cover) for cover in covers(graph, table)] == sizes
    assert memory.least(table) == min(sizes)


@settings(max_examples=examples(25))
@given(sized(), st.floats(0, 1))
def test_the_fastest_plan_within_a_budget_is_found(problem, share):
    graph, table = problem
    every = covers(graph, table)
    sizes = [plan_bytes(graph, cover) for cover in every]
    budget = min(sizes) + share * (max(sizes) - min(sizes))
    found = Minimiser(graph, table, SYSTEM, Goal(solver="exhaustive", max_memory_bytes=budget)).best()
    assert found and plan_bytes(graph, found.solution.candidates) <= budget
    within = Minimiser(graph, table, SYSTEM, Goal(solver="exhaustive"))
    best_ns = min(
        within._evaluated(replace(found.solution, candidates=cover)).evaluation.latency_ns
        for cover, size in zip(every, sizes, strict=True)
        if size <= budget
    )
    assert found.evaluation.latency_ns == pytest.approx(best_ns, rel=1e-5)


def test_what_is_inside_a_kernel_takes_nothing_unless_others_hold_it():
    def life(name, begin, end, **more):
        return Lifetime(name=name, begin=begin, end=end, size_bytes=100, **more)

    lives = (life("x", 0, 1), life("a", 0, 2), life("b", 1, 3), life("c", 2, 4))
    live = Liveness(steps=4, lifetimes=lives)
    assert live.span_bytes(1, 3) == 300 and live.span_bytes(1, 3, ["b"]) == 200
    assert live.span_bytes(1, 2, ["b"]) == 200, "read behind the kernel"
    returned = Liveness(steps=4, lifetimes=(*lives[:2], life("b", 1, 3, pinned=True), lives[3]))
    assert returned.span_bytes(1, 3, ["b"]) == 300
    joined = live.with_aliases({"b": "c"})
    assert joined.span_bytes(1, 3, ["b"]) == 200, "it lies inside the result"


@pytest.fixture(scope="module")
def toy():
    network = frontend.load("toy")
    return network, prepare.regions(network, SYSTEM, fuse=True)


def built_bytes(network, found):
    """The pool and the weights of what is built for a GPU."""
    plans, target = [], targets.named_target("cuda+pim")
    with target:
        phases.lower(build.planned(network.module, found), target, SYSTEM, plans.append)
    return plans[-1].pool_bytes + sum(candidate.filter_bytes for candidate in found.candidates)


@pytest.mark.parametrize("primitives", [False, True])
@pytest.mark.parametrize("modes", long_but(["gpu,pim"], ["gpu", "gpu,pim"]))
def test_every_budget_from_the_least_on_has_a_plan_that_keeps_to_it_when_built(toy, modes, primitives):
    network, graph = toy
    goal = Goal(modes=modes, primitives=primitives)
    with pytest.raises(InfeasibleError) as refused:
        search(graph, SYSTEM, goal=replace(goal, max_memory_bytes=1000.0))
    least = refused.value.demand
    with pytest.raises(InfeasibleError):
        search(graph, SYSTEM, goal=replace(goal, max_memory_bytes=0.99 * least))
    for factor in (1.0, 1.1, 1.5, 205 * 1024 / least):
        found = search(graph, SYSTEM, goal=replace(goal, max_memory_bytes=factor * least))
        assert built_bytes(network, found) <= factor * least * (1 + 1e-6)


def test_a_fused_network_is_not_refused_for_tensors_that_it_never_makes(toy):
    """It was, at 205 KiB: with weights it takes 114."""
    network, graph = toy
    found = search(graph, SYSTEM, goal=Goal(modes="gpu", max_memory_bytes=120_000.0))
    assert found.tiled() and built_bytes(network, found) <= 120_000
