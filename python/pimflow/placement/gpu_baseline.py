"""The baseline of plans: the whole network on the GPU with all memory channels."""

from __future__ import annotations

from pimflow.core.candidate import CostTable
from pimflow.placement.candidates import fused_groups
from pimflow.placement.candidates.candidates import CandidateGenerator
from pimflow.placement.solvers.label_search import LATENCY
from pimflow.placement.solvers.objectives import EvaluatedPlan, Goal
from pimflow.placement.solvers.plan_search import PlanSearch


def gpu_only_search(generator: CandidateGenerator, goal: Goal) -> PlanSearch:
    """The search of plans of the GPU alone. Nothing is deferred, so that its table has no transitions."""
    graph, system = generator.graph, generator.system
    channels = system.gpu.memory_channels
    candidates = generator.costs.batch_kernels(lambda: fused_groups.gpu_candidates(generator, channels))
    table = CostTable(candidates=candidates, overlaps_launches=system.overlaps_launches)
    return PlanSearch(graph, table, system, goal)


def gpu_only_plan(generator: CandidateGenerator, goal: Goal) -> EvaluatedPlan:
    """The fastest plan of the GPU alone within the memory bound of `goal`, or without it if none is."""
    search = gpu_only_search(generator, Goal(max_memory_bytes=goal.max_memory_bytes))
    plan = search.minimum(LATENCY) or search.with_goal(Goal()).minimum(LATENCY)
    assert plan  # without bounds, the GPU alone needs no other candidates
    return plan
