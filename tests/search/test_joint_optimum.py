"""Is the plan of a real network the best of all, with every kind of candidate on?"""

import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest

from pimflow import frontend
from pimflow.commands.shared import prepare
from pimflow.core.candidate import Cost
from pimflow.core.rewrite import Mode
from pimflow.core.stages import Pipeline
from pimflow.decomposition.alternative_search import AlternativeCandidates
from pimflow.decomposition.alternatives import DecompositionAlternatives
from pimflow.decomposition.layer_errors import layer_errors
from pimflow.decomposition.network import decompose
from pimflow.decomposition.request import DecompositionRequest
from pimflow.hardware import system
from pimflow.placement import CandidateGenerator, Costs, Goal, Profiling, profile
from pimflow.placement.candidates import pipelines
from pimflow.placement.solvers.exhaustive import all_covers
from pimflow.placement.solvers.label_search import LATENCY
from pimflow.placement.solvers.objectives import EvaluatedPlan
from pimflow.placement.solvers.plan_search import PlanSearch

SYSTEM = system(dtype="fp32", splits="grid", channel_sharing="partitioned").with_launches(
    gpu_ns=500.0, pim_ns=200.0
)
BLOCK = tuple(f"block.{part}.conv" for part in ("expand", "depthwise", "project"))
KINDS = {
    *(("GPU", False, False), ("GPU", False, True), ("GPU", True, False)),
    *(("PIM", False, False), ("SPLIT", False, False), ("PIPELINE", True, False)),
}


def kind(candidate):
    return candidate.rewrite.mode, len(candidate.covers) > 1, bool(candidate.primitive)


@functools.cache
def toy():
    """Of the embedded toy the fastest candidate of each kind and run of regions, and all covers by these."""
    graph = prepare.regions(frontend.load("toy"), SYSTEM, fuse=True)
    generator = CandidateGenerator(graph, SYSTEM, primitives=True)
    table = profile(graph, generator)
    candidates = {name: list(options) for name, options in table.candidates.items()}
    for modes in ((Mode.PIM, Mode.GPU, Mode.PIM), (Mode.GPU, Mode.GPU, Mode.PIM)):
        candidates[BLOCK[0]].append(
            pipelines.make(generator, Pipeline(regions=BLOCK, modes=modes, cuts=(4, 10)))
        )
    fastest = {}
    for name, options in candidates.items():
        by_kind = {}
        for c in sorted(options, key=lambda c: Cost.from_candidate(c).latency_ns):
            by_kind.setdefault((kind(c), c.covers), c)
        fastest[name] = tuple(by_kind.values())
    assert {kind(c) for options in fastest.values() for c in options} == KINDS
    table = replace(table, candidates=fastest)
    plans = PlanSearch(graph, table, SYSTEM, Goal())
    all_plans = [
        EvaluatedPlan(
            candidates=cover,
            evaluation=SimpleNamespace(
                latency_ns=latency_ns, energy_pj=energy_pj + plans.energy.per_ns * latency_ns
            ),
            memory_bytes=plans.memory.pool_bytes(cover),
        )
        for cover, latency_ns, energy_pj in all_covers(graph, table)
    ]
    return graph, table, all_plans


@functools.cache
def toy_in_forms():
    """The toy with two layers as they came or as chains of one of two ranks, and the others as they came."""
    change = decompose(frontend.load("toy"), DecompositionRequest.parse("tucker:0.25:0.5,where=pays"))
    changes = change.alternatives()
    forms = DecompositionAlternatives(
        original=prepare.regions(change.original, SYSTEM, fuse=True),
        decomposed=tuple(prepare.regions(variant.network, SYSTEM, fuse=True) for variant in changes),
        chains=change.chains,
        rules=("0.25", "0.5"),
        errors=layer_errors(changes, None),
    )
    goal = Goal(primitives=True)
    alternatives = AlternativeCandidates(
        forms, dict.fromkeys(forms.independent_layers, 0), SYSTEM, Costs(SYSTEM, Profiling()), goal
    )
    fastest = {}
    for name, options in alternatives.table.candidates.items():
        by_kind = {}
        for c in sorted(options, key=lambda c: Cost.from_candidate(c).latency_ns):
            done = alternatives.rules_by_candidate[name, c.name]
            if all(rule is None or layer in FREE for layer, rule in done.items()):
                by_kind.setdefault((kind(c), c.covers, tuple(done.items())), c)
        fastest[name] = tuple(
            c for c in by_kind.values() if not c.primitive and few(alternatives.rules_by_candidate, c)
        )
    table = replace(alternatives.table, candidates=fastest)
    counted = PlanSearch(alternatives.graph, table, SYSTEM, goal).memory
    covers = [
        (cover, latency_ns, energy_pj, sum(c.alternative.error for c in cover), counted.pool_bytes(cover))
        for cover, latency_ns, energy_pj in all_covers(alternatives.graph, table)
    ]
    return alternatives.graph, table, covers


FREE = ("widen.conv", "down.conv")


def few(done, candidate):
    """Candidates of chains, and as many of other layers as leave something to enumerate."""
    forms = done[candidate.covers[0], candidate.name]
    if candidate.name.startswith("FUSED"):
        return len(forms) < 3 and FREE[0] in forms
    return candidate.rewrite.mode != "SPLIT" or forms.get(FREE[0]) is not None


@pytest.mark.long
@pytest.mark.parametrize("budgets", [(None, None), (0.5, None), (None, 0.3), (0.6, 0.6)])
def test_with_layers_in_several_forms_it_is_that_of_every_cover_too(budgets):
    """Of all ranks, links on either device, and groups over several forms; within error and memory."""
    graph, table, covers = toy_in_forms()
    assert len(covers) > 10000
    assert (
        len(
            {
                tuple(c.name for c in cover if c.alternative.error or c.alternative.original)
                for cover, *_ in covers
            }
        )
        > 8
    )
    values = [sorted({cover[place] for cover in covers}) for place in (3, 4)]
    limits = [share and sizes[int(share * len(sizes))] for sizes, share in zip(values, budgets)]
    for objective in ("latency", "energy"):
        goal = Goal(objective=objective, max_error=limits[0], max_memory_bytes=limits[1], primitives=True)
        plans = PlanSearch(graph, table, SYSTEM, goal)
        criterion = LATENCY if objective == "latency" else plans.energy
        best = min(
            criterion.value(latency_ns, energy_pj, cover)
            for cover, latency_ns, energy_pj, error, memory_bytes in covers
            if (limits[0] is None or error <= limits[0]) and (limits[1] is None or memory_bytes <= limits[1])
        )
        result = plans.best()
        evaluation = result.evaluation
        value = evaluation.latency_ns if objective == "latency" else evaluation.energy_pj
        assert value == pytest.approx(best, rel=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("share", [None, 0.0, 0.4])
@pytest.mark.parametrize("objective", ["latency", "energy", "edp", "memory"])
def test_the_joint_optimum_is_that_of_every_cover(objective, share):
    graph, table, all_plans = toy()
    assert len(all_plans) > 1000
    sizes = sorted({plan.memory_bytes for plan in all_plans})
    budget = None if share is None else float(sizes[round(share * (len(sizes) - 1))])
    goal = Goal(objective=objective, max_memory_bytes=budget)
    best = min(goal.rank(plan) for plan in all_plans if not budget or plan.memory_bytes <= budget)
    result = PlanSearch(graph, table, SYSTEM, goal).best()
    assert goal.rank(result) == pytest.approx(best, rel=1e-9)
    assert not budget or result.memory_bytes <= budget
