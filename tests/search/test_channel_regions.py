"""Has each set of memory channels a region of its own in the pool, and does the search count just that?"""

import random
from dataclasses import replace

import numpy as np
import pytest
from branching import randomly_wired, wide_branches
from drawn_plans import random_plan
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples, long_but
from problems import graph_of
from test_modes import networks, slow_system

from pimflow import frontend, memory
from pimflow.commands.shared import prepare
from pimflow.compiler import build, phases
from pimflow.compiler.verification import verify
from pimflow.core.candidate import Candidate, CostTable, EdgeCost, Footprint, Task
from pimflow.core.channel_sets import channel_sets
from pimflow.core.rewrite import OPERATOR_KERNELS, SplitRewrite
from pimflow.core.tensor_placement import IN_ALL_CHANNELS, IN_GPU_CHANNELS, IN_PIM_CHANNELS
from pimflow.hardware import system
from pimflow.pim_backend.runtime import targets
from pimflow.placement import CandidateGenerator, Goal, profile, search
from pimflow.placement.best_plan import SearchedNetwork, SearchResult, to_search_result
from pimflow.placement.candidates.channel_layouts import from_row
from pimflow.placement.gpu_baseline import gpu_only_plan
from pimflow.placement.solvers import label_search
from pimflow.placement.solvers.exhaustive import all_covers
from pimflow.placement.solvers.label_search import LATENCY, SearchQuery
from pimflow.placement.solvers.plan_memory import PlanMemory
from pimflow.placement.solvers.plan_search import PlanSearch
from pimflow.placement.solvers.problem import PlacementProblem
from pimflow.relay_passes.memory.buffers import buffers

SPLIT = SplitRewrite(gpu_share=1.0)
SYSTEM = system(splits="grid")
NETWORKS = {
    "toy": lambda: frontend.load("toy"),
    "wide branches": lambda: frontend.load(wide_branches()),
    "wired": lambda: frontend.load(randomly_wired(8, 3)),
}


def plans(network, target, draw):
    """Random plans with PIM, as `SearchResult`, and the bytes of each region of their pools as counted."""
    graph = prepare.regions(network, target, fuse=True)
    generator = CandidateGenerator(graph, target)
    table, alone = profile(graph, generator), gpu_only_plan(generator, Goal())
    plan_search = PlanSearch(graph, table, target, Goal())
    while True:
        chosen = draw_pim_plan(generator, table, draw)
        network = SearchedNetwork(
            generator=generator, table=table, gpu_only=alone.evaluation, goal=Goal(), original=None
        )
        search_result = to_search_result(network, chosen)
        yield search_result, plan_search.memory.bytes_by_memory(chosen)


def draw_pim_plan(generator, table, draw):
    """A plan at random, drawn anew if it is of the GPU alone."""
    while True:
        chosen = random_plan(generator, table, draw)
        if any(c.uses_pim for c in chosen):
            return chosen


def lower_plan(network, search_result, target):
    """Lifetimes of what is built, and the plan of its pool."""
    applied = build.apply_search_result(network.module, search_result)
    lowered = buffers(phases.allocate(applied, targets.target_by_name(target), search_result.system))
    return lowered, memory.merge_pools(memory.plan(lowered.liveness().lifetimes))


@pytest.mark.long
@pytest.mark.parametrize("target", ["cuda+pim", "llvm+pim"])
@pytest.mark.parametrize("name", long_but(["toy"], [*NETWORKS]))
def test_every_region_takes_what_is_counted_and_no_buffer_leaves_its_own(name, target):
    network = NETWORKS[name]()
    target_system = replace(SYSTEM, dtype="fp16" if target == "cuda+pim" else "fp32")
    drawn_plans, exact, several = plans(network, target_system, random.Random(1)), 0, 0
    seen = 0
    for _ in range(examples(8)):
        search_result, counted = next(drawn_plans)
        lowered, pool = lower_plan(network, search_result, target)
        ranges = {part.memory: range(part.begin_bytes, part.end_bytes) for part in pool.pools}
        for life in pool.lifetimes:
            offset = pool.offsets_bytes[life.name]
            assert not life.size_bytes or {offset, offset + life.size_bytes - 1} <= {*ranges[life.memory]}
        for span in ranges.values():
            assert all(span is other_span or not {*span} & {*other_span} for other_span in ranges.values())
        built = {part.memory: part.pool_bytes for part in pool.pools}
        assert all(size <= counted[channels] for channels, size in built.items()), search_result.candidates
        exact += built == counted
        several += len(built) > 1
        placements = {c.covers[-1].replace(".", "_"): c.output for c in search_result.candidates}
        for buffer, title in lowered.names.items():
            placement = placements.get(title.partition(":")[2])
            if len(built) > 1 and placement:
                assert buffer.memory == placement.channels
                seen += 1
    assert exact and several and seen


@pytest.mark.long
def test_outputs_are_the_same_bits_with_regions_and_without(monkeypatch):
    network, target = frontend.load("toy"), targets.target_by_name("llvm+pim")
    inputs, draw = network.example_inputs(), random.Random(3)
    several = (pair for pair in plans(network, SYSTEM, draw) if len(pair[1]) == 3)
    search_result, counted = next(several)
    apart = build.build(network, search_result, target)
    assert len(apart.memory.pools) == 3
    assert apart.memory.pool_bytes <= 2 * sum(counted.values())  # the stand-in stores fp32
    verify(network, apart, search_result.system, inputs, network.reference(inputs)).require()
    monkeypatch.setattr(SearchResult, "channel_sets", lambda _: {})
    together = build.build(network, search_result, target)
    assert [pool.memory for pool in together.memory.pools] == ["gpu"]
    for expected, output in zip(apart.infer(inputs), together.infer(inputs), strict=True):
        assert np.array_equal(expected, output)


def test_by_hand():
    """A chain of three tensors of 256 B, the last returned in fp32: 512 B. Each kernel has 64 B besides."""
    graph = graph_of([(), (0,), (1,)])
    counted = PlanMemory(graph, "fp16")

    def lying(*placements, first=SPLIT):
        return [
            Candidate(
                name=placement.channels_text,
                covers=(region.name,),
                rewrite=rewrite,
                tasks=(),
                output=placement,
                footprint=Footprint(workspace_bytes=50),
            )
            for region, placement, rewrite in zip(
                graph.regions, placements, (first, OPERATOR_KERNELS, OPERATOR_KERNELS), strict=True
            )
        ]

    # The last kernel: what it reads, its result and its workspace.
    assert counted.bytes_by_memory(lying(IN_GPU_CHANNELS, IN_GPU_CHANNELS, IN_GPU_CHANNELS)) == {
        "gpu": 256 + 512 + 64
    }
    # Each tensor with the workspace of its own kernel.
    apart = {"left": 256 + 64, "all": 256 + 64, "pim": 512 + 64}
    assert counted.bytes_by_memory(lying(IN_GPU_CHANNELS, IN_ALL_CHANNELS, IN_PIM_CHANNELS)) == apart
    assert counted.pool_bytes(lying(IN_GPU_CHANNELS, IN_ALL_CHANNELS, IN_PIM_CHANNELS)) == sum(apart.values())
    # The first and the last are not live at once. A tensor over all channels from a row on counts to its end.
    assert counted.bytes_by_memory(lying(IN_GPU_CHANNELS, from_row(3), IN_GPU_CHANNELS)) == {
        "left": 512 + 64,
        "all": 256 + 64,
    }
    assert counted.bytes_by_memory(lying(IN_ALL_CHANNELS, IN_ALL_CHANNELS, IN_ALL_CHANNELS)) == {
        "all": 256 + 512 + 64
    }
    # Without PIM nothing takes channels from the GPU: there are no sets.
    assert counted.bytes_by_memory(
        lying(IN_GPU_CHANNELS, IN_ALL_CHANNELS, IN_PIM_CHANNELS, first=OPERATOR_KERNELS)
    ) == {"gpu": 256 + 512 + 64}


@pytest.mark.long
@given(networks(), st.sampled_from([8, 16]), st.floats(0, 1), st.randoms(use_true_random=False))
@settings(max_examples=examples(40))
def test_the_fastest_plan_within_a_budget_counts_regions_apart(graph, channels, share, draw):
    """The oracle tries all covers by a few candidates of each region, and counts their pools."""
    target = replace(slow_system(splits="grid"), channel_sharing="time-shared", pim_channels=channels)
    generator = CandidateGenerator(graph, target)
    table = profile(graph, generator)
    few = {name: some_of(result, draw) for name, result in table.candidates.items()}
    table = replace(table, candidates=few)
    memory_of = PlanSearch(graph, table, target, Goal()).memory
    covers = [(memory_of.pool_bytes(chosen), ns, chosen) for chosen, ns, _ in all_covers(graph, table)]
    sizes = sorted({size for size, _, _ in covers})
    fastest_bytes = min(covers, key=lambda cover: cover[1])[0]
    binding = [size for size in sizes if size < fastest_bytes] or sizes
    budget = binding[round(share * (len(binding) - 1))]
    best_ns = min(ns for size, ns, _ in covers if size <= budget)
    result = PlanSearch(graph, table, target, Goal(max_memory_bytes=budget)).best()
    assert result and result.memory_bytes == memory_of.pool_bytes(result.candidates) <= budget
    assert result.evaluation.latency_ns == pytest.approx(best_ns, rel=1e-9)
    if budget > sizes[0]:
        return
    smallest = PlanSearch(graph, table, target, Goal(objective="memory")).best()
    assert smallest and smallest.memory_bytes == budget
    assert PlanSearch(graph, table, target, Goal(max_memory_bytes=budget - 64)).best() is None


def plans_within(graph, table, budget):
    problem = PlacementProblem(graph, table, PlanMemory(graph, SYSTEM.dtype, table), row_size_bytes=1.0)
    question = SearchQuery(criteria=(LATENCY,), counts_memory=True, max_memory_bytes=budget)
    return label_search.search(problem, question).plans


@pytest.mark.long
@pytest.mark.parametrize("name", NETWORKS)
def test_the_search_says_of_any_plan_what_its_pool_takes(name):
    """A problem whose only plan it is has a solution within that many bytes, and none within fewer."""
    graph = prepare.regions(NETWORKS[name](), SYSTEM)
    generator, draw, several = CandidateGenerator(graph, SYSTEM), random.Random(2), 0
    table = profile(graph, generator)
    memory_of = PlanMemory(graph, SYSTEM.dtype, table)
    for _ in range(examples(40)):
        chosen = draw_pim_plan(generator, table, draw)
        alone = {region.name: () for region in graph.regions} | {c.covers[0]: (c,) for c in chosen}
        only, pool_bytes = replace(table, candidates=alone), memory_of.pool_bytes(chosen)
        for budget in (pool_bytes, pool_bytes - 64):
            assert len(plans_within(graph, only, budget)) == (budget == pool_bytes)
        several += len(memory_of.bytes_by_memory(chosen)) > 1
    assert several > examples(40) / 2


@pytest.mark.parametrize("budget", [832, 895, 896])
def test_a_budget_under_which_no_candidates_of_one_set_go_together(budget):
    """What the last of three reads is made in one set of channels, and its own result in another."""
    graph = graph_of([(), (0,), (1,)])

    def candidate(region, read, written):
        return Candidate(
            name=f"{region} {read} {written}",
            covers=(region,),
            rewrite=SplitRewrite(gpu_share=1.0) if region == "r0" else OPERATOR_KERNELS,
            tasks=(Task(label=region, resource="gpu", execution_ns=1.0),),
            input=read,
            output=written,
            footprint=Footprint(workspace_bytes=50),
        )

    candidates = {
        "r0": (candidate("r0", IN_GPU_CHANNELS, IN_GPU_CHANNELS),),
        "r1": (
            candidate("r1", IN_GPU_CHANNELS, IN_GPU_CHANNELS),
            candidate("r1", IN_GPU_CHANNELS, from_row(3)),
        ),
        "r2": (candidate("r2", from_row(3), IN_GPU_CHANNELS),),
    }
    never = {("r1", IN_GPU_CHANNELS, from_row(3)): EdgeCost(possible=False)}
    table = CostTable(candidates=candidates, transforms=never)
    best = PlanSearch(graph, table, SYSTEM, Goal(max_memory_bytes=budget)).best()
    assert (best is not None) == (budget == 896) and (best is None or best.memory_bytes == 896)


def some_of(candidates, draw):
    """Those that use the channels left, and some that use others; as fast as it happens."""
    plain = [c for c in candidates if not str(c.channels)]
    others = [c for c in candidates if str(c.channels)]
    chosen = (*draw.sample(plain, min(2, len(plain))), *draw.sample(others, min(5, len(others))))
    if not any(not c.uses_pim and not str(c.channels) for c in chosen):
        chosen = (plain[0], *chosen)

    def with_time(candidate):
        factor = draw.choice((0.2, 1.0, 2.0))
        tasks = (replace(task, execution_ns=task.execution_ns * factor) for task in candidate.tasks)
        return replace(candidate, tasks=tuple(tasks))

    return tuple(map(with_time, {c.name: c for c in chosen}.values()))


@pytest.mark.long
def test_one_set_of_channels_is_one_region():
    """Partitioned channels, and the GPU alone: as if there were no sets."""
    network = frontend.load("toy")
    for target, goal in (
        (replace(SYSTEM, channel_sharing="partitioned"), Goal()),
        (SYSTEM, Goal(modes="gpu")),
    ):
        search_result = search(prepare.regions(network, target), target, goal=goal)
        assert channel_sets(search_result.candidates) == {}
        _, pool = lower_plan(network, search_result, "llvm+pim")
        assert [(part.memory, part.begin_bytes) for part in pool.pools] == [("gpu", 0)]
