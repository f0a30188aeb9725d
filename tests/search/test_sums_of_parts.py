"""Layers split along the reduction: what adding both parts takes, in time and in memory."""

import itertools
from dataclasses import replace

import pytest

from pimflow import frontend
from pimflow.commands.shared import prepare
from pimflow.core.kernel import EMPTY_KERNEL, ConvGeometry, Kernel
from pimflow.core.rewrite import SplitRewrite
from pimflow.core.split import Split
from pimflow.hardware import system
from pimflow.placement import CandidateGenerator, search
from pimflow.placement.best_plan import with_candidates
from pimflow.placement.solvers.objectives import Goal
from pimflow.placement.solvers.plan_memory import PlanMemory
from pimflow.placement.solvers.plan_search import PlanSearch
from pimflow.placement.solvers.plan_state import PlanState
from pimflow.placement.solvers.problem import PlacementProblem
from pimflow.placement.solvers.tables import Tables
from pimflow.simulators.gpu.model import kernel_cost

SYSTEM = system()


@pytest.fixture(scope="module")
def searched():
    return search(prepare.regions(frontend.load("mobilenet-v2")), SYSTEM)


def adding(search_result, name):
    """The candidate of a region that leaves both parts to be added, if there is one."""
    candidates = search_result.table.candidates[name]
    return next((c for c in candidates if c.defers_partial_sum), None)


@pytest.mark.long
def test_a_plan_has_such_layers_and_no_kernel_for_their_sums(searched):
    chosen = [c for c in searched.candidates if getattr(c.rewrite, "axis", "") == "reduction"]
    assert chosen
    for candidate in chosen:
        launched = [task for task in candidate.tasks if task.launched and task.resource == "gpu"]
        assert len(launched) == 1  # the GPU's part


@pytest.mark.parametrize(("taps", "outputs"), [(1, 96), (3, 64), (3, 256)])
def test_a_consumer_reads_the_sum_for_each_tap_and_tile_of_columns(searched, taps, outputs):
    g = ConvGeometry(n=1, h=14, w=14, c=64, oc=outputs, kh=taps, kw=taps, padding=(taps // 2,) * 4)
    region = replace(next(r for r in searched.graph.regions if r.operator == "conv2d"), geometry=g)
    tasks = searched.generator.task_builder
    elements = 14 * 14 * outputs
    region = replace(region, output_shape=(1, 14, 14, outputs), input_shapes=((1, 14, 14, 64),))
    kernel = Kernel(
        kind="gemm", m=196, n=outputs, k=64 * taps**2, window=taps**2, macs=196 * 64 * taps**2 * outputs,
        input_bytes=2 * 196 * 64, weight_bytes=128 * taps**2 * outputs, output_bytes=2 * elements, geometry=g,
    )  # fmt: skip
    _, columns, _ = kernel_cost(kernel, SYSTEM.gpu, dtype="fp16", channels=16).tile
    assert tasks.l2_rereads(region) == taps**2 * -(-outputs // columns) - 1


def test_reading_inside_a_kernel_takes_no_launch_and_less_than_alone(searched):
    tasks = searched.generator.task_builder
    alone = tasks.gpu_task("", Kernel(kind="stream", input_bytes=200_000, output_bytes=0))
    inside = tasks._incremental_task("", 200_000, 0, 0.0)
    assert not inside.launched and not inside.launch_ns
    empty = tasks.gpu_task("", EMPTY_KERNEL)
    assert inside.execution_ns + empty.execution_ns == pytest.approx(alone.execution_ns)
    assert tasks._incremental_task("", 0, 0, 0.0).execution_ns == 0
    assert tasks._incremental_task("", 200_000, 0, 3.0).execution_ns > inside.execution_ns


def test_both_parts_are_live_until_they_are_added(searched):
    """Of two plans that differ in one layer, where more is live behind it than at any other place."""
    graph = searched.graph
    memory = PlanMemory(graph, SYSTEM.dtype)
    alone = [searched.table.candidates[region.name][0] for region in graph.regions]
    peak_bytes = memory.pool_bytes(alone)
    count = 0
    for position, region in enumerate(graph.regions):
        split = adding(searched, region.name)
        if split is None:
            continue
        plan = [*alone[:position], split, *alone[position + 1 :]]
        behind = alone[position + 1]
        size = memory.size_bytes[region.name]
        reads = region.name in graph.region(behind.covers[0]).inputs
        state = PlanState(deferred_epilogues=frozenset([region.name]))
        behind_bytes = memory.peak_bytes(behind, state) + size * reads
        assert memory.pool_bytes(plan) >= max(peak_bytes, behind_bytes)
        count += reads
    assert count > 10


def test_two_parts_are_another_state_than_a_deferred_epilogue(searched):
    """Both leave work to a consumer, but two parts take twice the memory until they are added."""
    memory = PlanMemory(searched.graph, SYSTEM.dtype)
    problem = PlacementProblem(searched.graph, searched.table, memory, row_size_bytes=1.0)
    pairs = [
        [problem._group_row(Tables(), index, option) for option in (candidate, other)]
        for index, region in enumerate(searched.graph.regions)
        for candidate, other in itertools.combinations(searched.table.candidates[region.name], 2)
        if candidate.covers == other.covers and candidate.defers_partial_sum != other.defers_partial_sum
    ]
    assert pairs
    assert all(row != other for row, other in pairs)


@pytest.mark.long
def test_within_little_memory_a_plan_is_as_fast_as_those_without_sums(searched):
    graph, table = searched.graph, searched.table
    free = PlanSearch(graph, table, SYSTEM, Goal()).best()
    assert any(getattr(c.rewrite, "axis", "") == "reduction" for c in free.candidates)
    candidates = {n: tuple(c for c in row if not c.defers_partial_sum) for n, row in table.candidates.items()}
    without = replace(table, candidates=candidates)
    for share in (0.9, 0.99):
        goal = Goal(max_memory_bytes=share * free.memory_bytes)
        plan, without_sums = (PlanSearch(graph, item, SYSTEM, goal).best() for item in (table, without))
        assert plan.memory_bytes <= goal.max_memory_bytes
        assert plan.memory_bytes == PlanMemory(graph, SYSTEM.dtype, table).pool_bytes(plan.candidates)
        assert plan.evaluation.latency_ns <= without_sums.evaluation.latency_ns * (1 + 1e-9)


def test_where_nothing_follows_the_sum_is_a_kernel_of_its_own():
    graph = prepare.regions(frontend.load("toy"))
    generator = CandidateGenerator(graph, SYSTEM)
    last = graph.regions[-1]
    assert last.operator == "fc" and last.name in graph.outputs
    candidate = generator.make(last, SplitRewrite.from_split(Split("reduction", 16), last.geometry))
    assert not candidate.deferred_epilogue
    launched = [task for task in candidate.tasks if task.launched and task.resource == "gpu"]
    assert len(launched) == 2
    assert Split("reduction", 16).deferred_epilogue(last.geometry) == ("add",)
    plan = search(graph, SYSTEM)
    chosen = [c for c in plan.candidates if last.name not in c.covers]
    assert with_candidates(plan, (*chosen, candidate)).evaluation.latency_ns > 0
