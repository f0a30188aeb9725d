"""The baseline of plans: the whole network on the GPU with all memory channels."""

from __future__ import annotations

from pimflow.core.candidate import CostTable
from pimflow.placement.candidates import fused_groups
from pimflow.placement.candidates.candidates import CandidateGenerator
from pimflow.placement.solvers.criteria import LATENCY
from pimflow.placement.solvers.objectives import EvaluatedPlan, Goal
from pimflow.placement.solvers.plan_search import PlanSearch


def gpu_only_plan(generator: CandidateGenerator, goal: Goal) -> EvaluatedPlan:
    """The fastest plan of the GPU alone within the memory bound of `goal`, or without it if none is."""
    memory_goal = Goal(max_memory_bytes=goal.max_memory_bytes)
    search = PlanSearch(generator.graph, gpu_only_table(generator), generator.system, memory_goal)
    plan = search.minimum(LATENCY) or search.with_goal(Goal()).minimum(LATENCY)
    assert plan  # without bounds, the GPU alone needs no other candidates
    return plan


def gpu_only_table(generator: CandidateGenerator) -> CostTable:
    """The cost table of the GPU with all memory channels. Nothing is deferred, so it has no transitions."""
    channels = generator.system.gpu.memory_channels
    candidates = generator.costs.batch_kernels(lambda: fused_groups.gpu_candidates(generator, channels))
    return CostTable(candidates=candidates, overlaps_launches=generator.system.overlaps_launches)


def gpu_only_search(generator: CandidateGenerator, goal: Goal) -> PlanSearch:
    """The search of plans of the GPU alone."""
    return PlanSearch(generator.graph, gpu_only_table(generator), generator.system, goal)


def smallest_gpu_only_plan(generator: CandidateGenerator, goal: Goal) -> EvaluatedPlan:
    """The plan of minimum memory of the GPU alone within the bounds of `goal`; else the fastest."""
    return gpu_only_search(generator, goal).best() or gpu_only_plan(generator, goal)
