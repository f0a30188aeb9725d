"""Are plans as good as the optima that dynamic and integer programs proved, before the label search?

``proved_optima.json`` has what commit 8b3841e5 found for mixed plans of ten networks, by convention: least
latency, least energy, and a product of both that was proved to 0.1 %.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pimflow.commands.shared import prepare
from pimflow.hardware import system
from pimflow.placement import CandidateGenerator, Costs, Goal, Profiling, profile
from pimflow.placement.solvers.plan_search import PlanSearch

OPTIMA = json.loads((Path(__file__).parent / "proved_optima.json").read_text())
BASE = system()
GPU_NS = BASE.gpu.launch_ns
CONVENTIONS = {
    "plan": BASE,
    "PIM launch 0": BASE.with_launches(gpu_ns=GPU_NS, pim_ns=0.0),
    "PIM launch 500 ns": BASE.with_launches(gpu_ns=GPU_NS, pim_ns=500.0),
    "PIM launch as the GPU's": BASE.with_launches(gpu_ns=GPU_NS, pim_ns=GPU_NS),
    "accounting paper, timing ramulator-pimflow": replace(
        BASE, accounting="paper", timing="ramulator-pimflow"
    ),
    "copies made": replace(BASE, copies="made"),
    "launches ahead": replace(BASE, launches="ahead"),
    "no launches": BASE.with_launches(gpu_ns=0.0, pim_ns=0.0),
}


@pytest.fixture(scope="module")
def costs():
    """Times are found once for all conventions that share them."""
    stored_costs: dict[object, Costs] = {}

    def costs_of(target):
        key = (target.accounting, target.timing, target.gpu.launch_ns)
        return stored_costs.setdefault(key, Costs(target, Profiling()))

    return costs_of


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("network", ["toy", pytest.param("mobilenet-v2", marks=pytest.mark.long)])
def test_no_optimum_is_lost(costs, network, convention):
    target, proved = CONVENTIONS[convention], OPTIMA[network][convention]
    options = prepare.NetworkOptions()
    graph = prepare.regions(prepare.load(network, options), target)
    generator = CandidateGenerator(graph, target, costs(target))
    search = PlanSearch(graph, profile(graph, generator), target, Goal())
    goals = [Goal(objective=objective) for objective in ("latency", "energy", "edp")]
    latency, energy, product = (search.with_goal(goal).best().evaluation for goal in goals)
    assert latency.latency_ns == pytest.approx(proved["latency_ns"], rel=1e-9)
    assert energy.energy_pj == pytest.approx(proved["energy_pj"], rel=1e-9)
    assert product.latency_ns * product.energy_pj <= proved["edp"] * (1 + 1e-9)
    assert product.latency_ns * product.energy_pj >= proved["edp"] * (1 - 1e-3)
