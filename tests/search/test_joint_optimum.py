"""Is the plan of a real network the best of all, with every kind of candidate on?"""

import functools
from dataclasses import replace

import pytest

from pimflow import frontend
from pimflow.api import prepare
from pimflow.core.candidate import Cost
from pimflow.core.stages import Pipeline
from pimflow.hardware import system
from pimflow.placement import Candidates, Goal, profile
from pimflow.placement.candidates import pipelines
from pimflow.placement.solvers.evaluate import evaluate
from pimflow.placement.solvers.exhaustive import every_cover
from pimflow.placement.solvers.objectives import EDP_GAP, EvaluatedPlan, Minimiser

SYSTEM = system(dtype="fp32", splits="grid").with_launches(gpu_ns=500.0, pim_ns=200.0)
BLOCK = tuple(f"block.{part}.conv" for part in ("expand", "depthwise", "project"))
KINDS = {
    *(("GPU", False, False), ("GPU", False, True), ("GPU", True, False)),
    *(("PIM", False, False), ("SPLIT", False, False), ("PIPELINE", True, False)),
}
EACH = 2  # candidates of each kind and region: those with the least latency


def kind(candidate):
    return candidate.rewrite.mode, len(candidate.covers) > 1, bool(candidate.rewrite.primitive)


@functools.cache
def toy():
    """Fused groups, primitives, splits, pipelines and PIM for the embedded toy, and all of its covers."""
    graph = prepare.regions(frontend.load("toy"), SYSTEM, fuse=True)
    maker = Candidates(graph, SYSTEM, primitives=True)
    table = profile(graph, maker)
    candidates = {name: list(found) for name, found in table.candidates.items()}
    for modes in (("PIM", "GPU", "PIM"), ("GPU", "GPU", "PIM")):
        candidates[BLOCK[0]].append(pipelines.make(maker, Pipeline(regions=BLOCK, modes=modes, cuts=(4, 10))))
    kept = {}
    for name, found in candidates.items():
        by_kind = {}
        for c in sorted(found, key=lambda c: Cost.of(c).latency_ns):
            by_kind.setdefault((kind(c), c.covers if kind(c)[0] != "PIPELINE" else ()), []).append(c)
        kept[name] = tuple(c for alike in by_kind.values() for c in alike[:EACH])
    assert {kind(c) for found in kept.values() for c in found} == KINDS
    table = replace(table, candidates=kept)
    counted = Minimiser(graph, table, SYSTEM, Goal()).memory
    every = [
        EvaluatedPlan(
            solution=cover, evaluation=evaluate(graph, cover, table, SYSTEM), memory_bytes=counted.of(cover)
        )
        for cover, _, _ in every_cover(graph, table)
    ]
    return graph, table, every


@pytest.mark.long
@pytest.mark.parametrize("share", [None, 0.0, 0.4])
@pytest.mark.parametrize("objective", ["latency", "energy", "edp", "memory"])
def test_the_joint_optimum_is_that_of_every_cover(objective, share):
    graph, table, every = toy()
    assert len(every) > 1000
    sizes = sorted({plan.memory_bytes for plan in every})
    budget = None if share is None else float(sizes[round(share * (len(sizes) - 1))])
    goal = Goal(objective=objective, max_memory_bytes=budget)
    best = min(goal.rank(plan) for plan in every if not budget or plan.memory_bytes <= budget)
    found = Minimiser(graph, table, SYSTEM, goal).best()
    assert goal.rank(found) == pytest.approx(best, rel=EDP_GAP if objective == "edp" else 1e-6)
    assert not budget or found.memory_bytes <= budget
