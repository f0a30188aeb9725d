"""Does the search decompose just the layers that it pays for, whatever it pays in?"""

import itertools
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx_models import onnx_model

from pimflow import frontend
from pimflow.commands.shared.prepare import regions
from pimflow.core.region import RegionGraph
from pimflow.decomposition.alternative_search import choose
from pimflow.decomposition.alternatives import DecompositionAlternatives
from pimflow.decomposition.network import decompose
from pimflow.decomposition.request import DecompositionRequest
from pimflow.errors import InfeasibleError
from pimflow.hardware import system
from pimflow.placement import Costs, Goal, Profiling, search
from pimflow.relay_passes.decomposition.decompose import Decompose

# Launches are so short that even these small layers differ by more.
# The choice is exact where channels are partitioned (docs/decomposition.md).
SYSTEM = system(channel_sharing="partitioned").with_launches(gpu_ns=300.0, pim_ns=100.0)


def branches(residual: bool = False) -> onnx.ModelProto:
    """A stem beside a branch, two layers that read their concatenation, and the sum of these.

    With a `residual`, the concatenation is added to what the first makes of it.
    """
    draw, weights, nodes = np.random.default_rng(0), [], []

    def conv(x: str, name: str, oc: int, c: int, k: int) -> str:
        values = (draw.standard_normal((oc, c, k, k)) / np.sqrt(c * k * k)).astype(np.float32)
        weights.append(numpy_helper.from_array(values, f"{name}.w"))
        nodes.append(helper.make_node("Conv", [x, f"{name}.w"], [f"{name}.c"], name=name, pads=[k // 2] * 4))
        nodes.append(helper.make_node("Relu", [f"{name}.c"], [f"{name}.r"], name=f"{name}.relu"))
        return f"{name}.r"

    stem = conv("x", "stem", 64, 16, 3)
    parts = [stem, conv(stem, "right", 64, 64, 3)]
    nodes.append(helper.make_node("Concat", parts, ["both"], name="both", axis=1))
    wide = 128 if residual else 64
    ends = [conv("both", "first", wide, 128, 1), conv("both", "second", wide, 128, 3)]
    if residual:
        nodes.append(helper.make_node("Add", ["first.c", "both"], ["first.s"], name="residual"))
        ends[0] = "first.s"
    nodes.append(helper.make_node("Add", ends, ["y"], name="sum"))
    return onnx_model(nodes, {"x": (1, 16, 28, 28)}, {"y": (1, wide, 28, 28)}, weights, name="branches")


class MixedNetwork:
    """A network, both of its forms, and what each mixture of them costs by itself."""

    def __init__(self, model: object, request: str, fuse: bool = False):
        network, self.fuse = frontend.load(model), fuse
        self.change = decompose(network, DecompositionRequest.parse(request))
        original, decomposed = (regions(source, fuse=fuse) for source in (network, self.change.network))
        self.forms = DecompositionAlternatives(
            original=original, decomposed=(decomposed,), chains=self.change.chains
        )
        self.costs = Costs(SYSTEM, Profiling())

    def mixtures(self):
        layers = list(self.change.chains)
        for count in range(len(layers) + 1):
            yield from itertools.combinations(layers, count)

    def graph(self, layers: tuple[str, ...]) -> RegionGraph:
        """What the mixed module itself consists of."""
        chosen = {
            layer_change.layer: layer_change
            for layer_change in self.change.layers
            if layer_change.layer in layers
        }
        network = self.change.original
        mixed = replace(network, module=Decompose(chosen)(network.module)) if chosen else network
        return regions(mixed, fuse=self.fuse)

    def value(self, layers: tuple[str, ...], goal: Goal) -> float:
        return goal.value(search(self.graph(layers), SYSTEM, self.costs, goal).evaluation)


@pytest.fixture(scope="module")
def toy() -> MixedNetwork:
    return MixedNetwork("toy", "tucker:0.5")


@pytest.fixture(scope="module")
def branched() -> MixedNetwork:
    return MixedNetwork(branches(), "tucker:0.4")


@pytest.fixture(scope="module")
def fusing() -> MixedNetwork:
    return MixedNetwork("toy", "tucker:0.5", fuse=True)


@pytest.fixture(scope="module")
def residual() -> MixedNetwork:
    return MixedNetwork(branches(residual=True), "tucker:0.4")


@pytest.mark.long
def test_a_mixture_is_what_the_mixed_module_consists_of(toy, branched, fusing):
    keeping = branched.forms.original.region("first")
    assert keeping.kernel.extra_output_elements and branched.forms.original.region("second").extra_inputs
    for oracle in (toy, branched, fusing):
        assert oracle.forms.independent_layers == tuple(oracle.change.chains)
        for layers in oracle.mixtures():
            expected, mixture = oracle.graph(layers), oracle.forms.mixture(dict.fromkeys(layers, 0))
            assert (mixture.regions, mixture.outputs) == (expected.regions, expected.outputs)
            assert mixture.fusible == expected.fusible


@pytest.mark.long
def test_layers_that_others_join_have_one_form_together(residual):
    """The sum joins the kernel of an lconv, behind all that reads the concatenation; else it is its own."""
    bound = residual.forms.dependent_layers
    assert set(bound) == {"first", "second"}
    for layers in residual.mixtures():
        if len(set(bound).intersection(layers)) in (0, len(bound)):
            expected, mixture = residual.graph(layers), residual.forms.mixture(dict.fromkeys(layers, 0))
            assert (mixture.regions, mixture.outputs) == (expected.regions, expected.outputs)


@pytest.mark.parametrize(
    ("name", "objective"),
    [
        pytest.param("toy", "edp", marks=pytest.mark.long),
        pytest.param("branched", "latency", marks=pytest.mark.long),
        ("branched", "energy"),
        pytest.param("fusing", "latency", marks=pytest.mark.long),
    ],
)
def test_no_mixture_is_cheaper_than_the_one_chosen(name, objective, request):
    """The oracle searches a plan for every mixture: 32 and 16. Groups of layers mix forms too."""
    oracle = request.getfixturevalue(name)
    goal = Goal(objective=objective, modes="gpu,pim" if oracle.fuse else "gpu,pim,split,pipeline")
    chosen = choose(oracle.forms, SYSTEM, oracle.costs, goal)
    values = {layers: oracle.value(layers, goal) for layers in oracle.mixtures()}
    chosen_layers = tuple(layer for layer in oracle.change.chains if layer in chosen.layers)
    gap = 2e-3 if objective == "edp" else 1e-6
    assert values[chosen_layers] <= min(values.values()) * (1 + gap)
    assert goal.value(chosen.best.evaluation) == pytest.approx(values[chosen_layers], rel=gap)
    assert 0 < len(chosen_layers) < len(oracle.change.chains) and values[chosen_layers] < values[()]


def test_bounds_hold_for_the_mixture(toy):
    modes = "gpu,pim"
    fastest = choose(toy.forms, SYSTEM, toy.costs, Goal(modes=modes)).best.evaluation
    goal = Goal(objective="energy", max_latency_ns=1.01 * fastest.latency_ns, modes=modes)
    within = choose(toy.forms, SYSTEM, toy.costs, goal)
    assert goal.allows(within.best)
    assert within.best.evaluation.energy_pj <= fastest.energy_pj
    with pytest.raises(InfeasibleError, match="latency of"):
        choose(toy.forms, SYSTEM, toy.costs, Goal(max_latency_ns=0.5 * fastest.latency_ns, modes=modes))


def test_what_a_layer_takes_by_itself_in_both_forms(toy):
    alone_ns = choose(toy.forms, SYSTEM, toy.costs, Goal(modes="gpu")).standalone_ns
    for layer, (given_ns, chain_ns) in alone_ns.items():
        for graph, names, ns in (
            (toy.forms.original, (layer,), given_ns),
            (toy.forms.decomposed[0], toy.forms.chains[layer], chain_ns),
        ):
            search_result = search(graph, SYSTEM, toy.costs, Goal(modes="gpu"))
            alone = (search_result.table.candidates[name][0] for name in names)
            assert ns == pytest.approx(sum(c.tasks[0].duration_ns for c in alone))
