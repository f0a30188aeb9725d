"""The baseline of plans: the whole network on the GPU with all memory channels."""

from __future__ import annotations

from pimflow.core.candidate import Candidate, CostTable
from pimflow.placement.candidates import fused_groups
from pimflow.placement.candidates.candidates import Candidates
from pimflow.placement.solvers.evaluate import Evaluation
from pimflow.placement.solvers.objectives import EvaluatedPlan, Goal
from pimflow.placement.solvers.plan_search import PlanSearch
from pimflow.placement.solvers.solution import LATENCY, Solution


def gpu_alone(maker: Candidates, goal: Goal) -> EvaluatedPlan:
    """The fastest plan of the GPU alone within the memory bound of `goal`, or without it if none is."""
    most = Goal(max_memory_bytes=goal.max_memory_bytes)
    search = PlanSearch(maker.graph, alone_table(maker), maker.system, most)
    return search.minimum(LATENCY) or search.unbounded(LATENCY)


def alone_table(maker: Candidates) -> CostTable:
    """The cost table of the GPU with all memory channels. Nothing is deferred, so it has no transitions."""
    channels = maker.system.gpu.memory_channels
    candidates = maker.costs.together(lambda: fused_groups.every_on_gpu(maker, channels))
    return CostTable(
        candidates=candidates,
        refused={},
        settle={},
        absorb={},
        launched_ahead=maker.system.launched_ahead,
    )


def alone_search(maker: Candidates, goal: Goal) -> PlanSearch:
    """The search of plans of the GPU alone."""
    return PlanSearch(maker.graph, alone_table(maker), maker.system, goal)


def smallest_alone(maker: Candidates, goal: Goal) -> EvaluatedPlan:
    """The plan of minimum memory of the GPU alone within the bounds of `goal`; else the fastest."""
    return alone_search(maker, goal).best() or gpu_alone(maker, goal)


def unsearched(candidates: tuple[Candidate, ...], evaluation: Evaluation) -> Solution:
    """Make a solution of candidates and their evaluation, without a search."""
    latency_ns = evaluation.latency_ns
    return Solution(candidates=candidates, value=latency_ns, bound=latency_ns)
