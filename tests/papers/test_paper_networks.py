"""Does the Relay snippet compile a network of the paper, and do the pages say what it found?

`scripts/verify_modes.py` compiles all of them, in every mode. Of the figures on the pages, those of one
network are computed anew, from the search of the snippet and a few that share its costs; the others are
compared with one another.
"""

import re
from collections import Counter
from dataclasses import dataclass, replace

import pimflow  # isort: skip  first: it gives TVM the Relay that the others import

import compare_networks
import numpy as np
import onnx
import onnxruntime
import pytest
import tvm
from page_tables import BY_CONVENTION, README, RESULTS, block, row
from papers.pimflow_comparison import CONVENTIONS, OURS, PIMFLOW, Searches, plan_figures
from tvm import relay
from tvm.contrib import graph_executor

from pimflow import zoo
from pimflow.hardware import system
from pimflow.placement import Goal, SearchResult, search

pytestmark = pytest.mark.long

NETWORK = "mobilenet-v2"


@dataclass(frozen=True, kw_only=True)
class NetworkRun:
    """What the snippet gave, and what it found on the way."""

    model: str
    y: np.ndarray
    reference: np.ndarray
    search_result: SearchResult


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    model, search_results = zoo.load(NETWORK), []
    path = tmp_path_factory.mktemp("networks") / "net.onnx"
    onnx.save(model, path)
    x = zoo.example_inputs(model)["input"]
    reference = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"input": x})
    search = pimflow.search_network

    def record_search(network, *args, **options):
        prepared, search_result = search(network, *args, **options)
        search_results.append(search_result)
        return prepared, search_result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pimflow.commands.shared.search.search_network", record_search)
        y = snippet(path, x)
    (search_result,) = search_results
    return NetworkRun(model=NETWORK, y=y, reference=reference[0], search_result=search_result)


def snippet(path, x) -> np.ndarray:
    model = onnx.load(path)
    shape_dict = {"input": (1, 3, 224, 224)}
    mod, params = relay.frontend.from_onnx(model, shape_dict)
    with tvm.transform.PassContext(opt_level=3):
        lib = relay.build(mod, target="llvm+pim", params=params)
    dev = tvm.cpu()
    m = graph_executor.GraphModule(lib["default"](dev))
    m.set_input("input", x)
    m.run()
    assert m.get_num_outputs() == 1
    return m.get_output(0).numpy()


def test_the_classic_snippet(ran):
    assert ran.y.shape == ran.reference.shape
    assert np.abs(ran.y - ran.reference).max() <= 2e-3 * np.abs(ran.reference).max()


# --- the figures on the pages ---


def pair(figures: dict) -> str:
    return f"{figures['convolutions_speedup']:.3f} / {figures['speedup']:.3f}"


def test_what_is_claimed_is_what_is_found(ran):
    """In full, under `strict`: one figure of a price that moves moves these."""
    figures = plan_figures(ran.search_result)
    convention = {"accounting": "full", "timing": "strict", "splits": "exact"}
    shown = row(BY_CONVENTION, "networks", network=ran.model, **convention)
    assert tuple(shown.values()) == compare_networks.row(ran.model, ran.search_result)
    assumed = row(BY_CONVENTION, "launches", PIM_launch=f"{system().pim_launch_ns:g} ns (assumed)")
    assert assumed[ran.model] == f"{figures['speedup']:.3f}x"
    shown = row(RESULTS, "pimflow speed-up full strict", network=ran.model)
    assert shown["GPU alone, ms"] == f"{figures['latency_gpu_only_ns'] / 1e6:.4f}"
    assert shown["pimflow"] == pair(figures)
    shown = row(RESULTS, "pimflow energy", network=ran.model, **{"accounting, timing": "full, strict"})
    alone_pj = figures["energy_gpu_only_pj"]
    assert shown["GPU alone, mJ"] == f"{alone_pj / 1e9:.2f}"
    assert shown["pimflow"] == f"{figures['energy_change']:+.1%}"
    assert shown["its COMPs"] == f"{figures['energies_pj']['pim_comp'] / alone_pj:.1%}"


def test_the_first_example_is_what_is_found(ran):
    """Layer by layer, and as the paper accounts."""
    search_result = ran.search_result
    shown = block(BY_CONVENTION, "layers")
    figures = re.findall(r"^(\S+) +(GPU|PIM|SPLIT|PIPELINE) .* (\S+) →\s+(\S+) us$", shown, flags=re.M)
    assert len(figures) > 40
    for name, mode, before_us, after_us in figures:
        assert search_result.plan.choice(name).mode == mode
        assert before_us == f"{search_result.gpu_only.region_times[name].latency_ns / 1e3:.2f}"
        assert after_us == f"{search_result.evaluation.region_times[name].latency_ns / 1e3:.2f}"
    before, after = search_result.gpu_only, search_result.evaluation
    speedup = before.latency_ns / after.latency_ns
    total = f"{before.latency_ns / 1e6:.4f} → {after.latency_ns / 1e6:.4f} ms ({speedup:.3f}x) "
    energy = f"energy {before.energy_pj / 1e9:.2f} → {after.energy_pj / 1e9:.2f} mJ"
    for page, name in ((BY_CONVENTION, "layers"), (README, "compile")):
        assert total in block(page, name) and energy in block(page, name)
    modes = Counter(search_result.plan.choice(region.name).mode for region in search_result.graph.regions)
    for mode, count in modes.items():
        assert re.search(rf"^{mode} +{count} ", block(README, "compile"), flags=re.M)


def test_other_conventions_are_what_is_found(ran):
    """Other launches, and the published accounting, timing, loop orders and splits."""
    result, costs = ran.search_result, ran.search_result.costs
    for launch_ns, kind in compare_networks.launches_ns().items():
        launch = f"{launch_ns:g} ns" + (f" ({kind})" if kind else "")
        shown = row(BY_CONVENTION, "launches", PIM_launch=launch)
        if not launch_ns:
            rerun = search(result.graph, replace(result.system, pim_launch_ns=launch_ns), costs, Goal())
            speedup = rerun.gpu_only.latency_ns / rerun.evaluation.latency_ns
            assert shown[ran.model] == f"{speedup:.3f}x"
    convention = CONVENTIONS[0]
    searches = Searches(costs.profiling)
    shown = row(RESULTS, f"pimflow speed-up {' '.join(convention)}", network=ran.model)
    for configuration in (PIMFLOW, OURS):
        rerun = searches.search(ran.model, configuration.system(*convention), Goal(modes=configuration.modes))
        assert shown[configuration.name] == pair(plan_figures(rerun))
    accounting, timing = convention
    listed = {"network": ran.model, "accounting": accounting, "timing": timing, "splits": "exact"}
    assert tuple(row(BY_CONVENTION, "networks", **listed).values()) == compare_networks.row(ran.model, rerun)
