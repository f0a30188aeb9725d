"""Is the memory that a plan is said to take what its build takes?"""

import random

import pytest
from branching import randomly_wired, wide_branches
from drawn_plans import random_plan
from length import long_but
from papers.temco_variants import with_fused_runs

from pimflow import frontend, memory
from pimflow.commands.shared import prepare
from pimflow.commands.shared.options import NetworkOptions
from pimflow.compiler import build, phases, plan_pools
from pimflow.compiler.plan_pools import PlanPools
from pimflow.compiler.smaller_pool import PoolPlanning
from pimflow.core.rewrite import Mode
from pimflow.core.stages import Pipeline
from pimflow.fusion.kernels import tile_groups
from pimflow.hardware import system
from pimflow.pim_backend.runtime import targets
from pimflow.placement import CandidateGenerator, Costs, Goal, Profiling, profile
from pimflow.placement.best_plan import SearchedNetwork, to_search_result
from pimflow.placement.candidates import pipelines
from pimflow.placement.gpu_baseline import gpu_only_plan
from pimflow.placement.solvers.plan_search import PlanSearch
from pimflow.relay_passes.memory.buffers import buffers
from pimflow.relay_passes.memory.pool_bound import stored_bytes
from pimflow.relay_passes.schedules import schedule_cpu

BLOCK = Pipeline(
    regions=tuple(f"block.{part}.conv" for part in ("expand", "depthwise", "project")),
    modes=(Mode.PIM, Mode.GPU, Mode.PIM),
    cuts=(4, 10),
)


def pool_bytes(network, search_result, target):
    """Of what is built, by the planner: it shares nothing with the row. No bound is above it."""
    tvm_target = targets.target_by_name(target)
    applied = build.apply_search_result(network.module, search_result)
    lowered = buffers(phases.allocate(applied, tvm_target, search_result.system))
    plan = memory.merge_pools(memory.plan(lowered.liveness().lifetimes))
    assert search_result.channel_sets() or {pool.memory for pool in plan.pools} == {"gpu"}
    pools = PlanPools(network=network, target=tvm_target, system=search_result.system)
    assert 0 < pools.bound_bytes(applied) <= plan.pool_bytes
    return plan.pool_bytes


NETWORKS = {
    "toy": lambda: frontend.load("toy"),
    "toy, two at once": lambda: frontend.load("toy", batch=2),
    "wide branches": lambda: frontend.load(wide_branches()),
    "wired": lambda: frontend.load(randomly_wired(8, 3)),
}
# The target, what it stores, and whether regions are fused.
BUILDS = [("cuda+pim", "fp16", True), ("cuda+pim", "fp32", True), ("llvm+pim", "fp32", False)]
CASES = [(name, b) for name in NETWORKS for b in BUILDS[: 1 if name == "toy, two at once" else None]]
QUICK = [("wide branches", BUILDS[2])]


@pytest.mark.long
def test_kernels_that_are_kept_allocate_what_new_ones_do(monkeypatch):
    planning, target = PoolPlanning(), targets.target_by_name("llvm+pim")
    options = NetworkOptions(decompose="tucker:0.25", fuse_activations=True)
    network = prepare.prepare(frontend.load("toy"), options, system()).network
    modules = network.module, with_fused_runs(network).module
    made = [buffers(phases.allocate(module, target, system())).liveness() for module in modules]
    assert made[0] != made[1]
    assert [buffers(planning.lower(module, target, system())).liveness() for module in modules] == made
    monkeypatch.setattr(schedule_cpu, "_schedule", None)  # from now on no kernel is made
    monkeypatch.setattr(tile_groups, "generate", None)
    assert [buffers(planning.lower(module, target, system())).liveness() for module in modules] == made


@pytest.mark.long
def test_a_plan_is_lowered_only_if_its_pool_may_be_the_smallest(monkeypatch):
    options = NetworkOptions(decompose="tucker:0.25", fuse_activations=True)
    ready = prepare.prepare(frontend.load("toy"), options, system())
    graph = prepare.regions(ready.network, fuse_activations=True)

    def frugal(bound) -> tuple[object, int, int]:
        """The plan, its pool, and how many pools were planned, by a bound."""
        monkeypatch.setattr(plan_pools, "stored_bytes", bound)
        pools = PlanPools(network=ready.network, target=targets.target_by_name("llvm+pim"), system=system())
        plan = plan_pools.frugal_plan(graph, system(), Costs(system(), Profiling()), pools)
        return plan.plan.choices, pools.pool_bytes(plan), len(pools._cached_bytes)

    bounded, unbounded = frugal(stored_bytes), frugal(lambda *_, **__: 0)
    assert bounded[:2] == unbounded[:2]
    assert frugal(lambda *_, **__: 1 << 40)[2] == 1 < unbounded[2]


@pytest.mark.parametrize("case", long_but(QUICK, CASES))
def test_what_is_built_keeps_to_the_row_and_comes_near_it(case):
    """For any plan: the row is above the pool by one tensor at most, which a kernel writes over another."""
    name, (target, dtype, fuse) = case
    network, target_system = NETWORKS[name](), system(dtype=dtype)
    graph = prepare.regions(network, target_system, fuse=fuse)
    generator = CandidateGenerator(graph, target_system)
    table = profile(graph, generator)
    if name == "toy":
        staged = pipelines.make(generator, BLOCK)
        table.candidates[BLOCK.regions[0]] += (staged,)
    plans = PlanSearch(
        graph, table, target_system, Goal(kernel_device="gpu" if target == "cuda+pim" else "cpu")
    )
    gpu_only, draw = gpu_only_plan(generator, Goal()), random.Random(0)
    inputs = SearchedNetwork(
        generator=generator, table=table, gpu_only=gpu_only.evaluation, goal=Goal(), original=None
    )
    largest = max(graph.tensor_bytes(dtype).values())
    exact = 0
    for _ in range(4):
        chosen = random_plan(generator, table, draw)
        search_result = to_search_result(inputs, chosen)
        row, pool = plans.memory.pool_bytes(chosen), pool_bytes(network, search_result, target)
        spread = max(len(set(search_result.channel_sets().values())), 1)
        assert pool <= row <= pool + spread * largest, [c.name for c in chosen]
        exact += pool == row
    assert exact
