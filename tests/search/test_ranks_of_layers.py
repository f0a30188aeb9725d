"""Does the search choose the best rank of every layer, within bounds on the error too?"""

import functools
import itertools
from dataclasses import replace

import numpy as np
import onnx
import pytest
from drawn_networks import Graph

from pimflow import frontend
from pimflow.commands.shared.prepare import regions
from pimflow.core.region_graph import RegionGraph
from pimflow.decomposition.alternative_search import choose
from pimflow.decomposition.alternatives import DecompositionAlternatives
from pimflow.decomposition.layer_errors import layer_errors
from pimflow.decomposition.network import combine_alternatives, decompose
from pimflow.decomposition.request import DecompositionRequest
from pimflow.errors import InfeasibleError
from pimflow.hardware import system
from pimflow.placement import Costs, Goal, Profiling, search
from pimflow.placement.solvers.plan_memory import PlanMemory

# Launches and waits are so short that even these small layers differ by more.
# The choice is exact where channels are partitioned (docs/decomposition.md).
SYSTEM = system(channel_sharing="partitioned").with_launches(gpu_ns=300.0, pim_ns=100.0)
QUICK = SYSTEM.gpu.efficiency | {"kernel_cycles": 1.0, "step_cycles": 30.0}
SYSTEM = replace(SYSTEM, gpu=replace(SYSTEM.gpu, efficiency=QUICK))
RANKS = "tucker:0.15:0.5,where=pays"


class RankedGraph(Graph):
    """Convolutions whose channels are equal but for noise, so a low rank is a good approximation."""

    def weight(self, oc: int, c: int, k: int, _: int) -> str:
        few = self.values.standard_normal((oc, 4)) @ self.values.standard_normal((4, c * k * k))
        values = (few + 0.4 * self.values.standard_normal((oc, c * k * k))).reshape(oc, c, k, k)
        return self.constant((values / (3 * k * np.sqrt(c))).astype("f4"))

    def layer(self, x: str, name: str, channels: int, kernel: int) -> str:
        return self.conv(x, channels, kernel, bias=False, name=name)

    def sum(self, *operands: str) -> str:
        return self.add("Add", [*operands], self.shapes[operands[0]])


def three_layers(after_first: str) -> onnx.ModelProto:
    """Of which the last is 1x1: one after the other, ``branches`` behind the first, or a ``residual``."""
    net = RankedGraph((1, 48, 14, 14), seed=3)
    first = net.relu(net.layer("x0", "first", 96, 3))
    second = net.layer(first, "second", 96, 3)
    if after_first == "residual":
        second = net.sum(second, first)
    last = net.layer(first if after_first == "branches" else net.relu(second), "last", 96, 1)
    if after_first == "branches":
        net.sum(second, last)
    return net.model()


def branch_network(residual: bool = False) -> onnx.ModelProto:
    """A stem beside a branch, two layers that read their concatenation, and the sum of these.

    With a `residual`, the concatenation is added to what the first makes of it.
    """
    net = RankedGraph((1, 16, 14, 14), seed=3)
    stem = net.relu(net.layer("x0", "stem", 64, 3))
    both = net.concat(stem, net.relu(net.layer(stem, "right", 64, 3)))
    wide = 128 if residual else 64
    first = net.layer(both, "first", wide, 1)
    first = first if residual else net.relu(first)
    second = net.relu(net.layer(both, "second", wide, 3))
    net.sum(net.sum(first, both) if residual else first, second)
    return net.model()


class RankedNetwork:
    """A network in all forms of its layers, and what each mixture of them costs by itself."""

    def __init__(self, model: object, request: str, fuse: bool = False):
        network, self.fuse = frontend.load(model), fuse
        self.changes = decompose(network, DecompositionRequest.parse(request)).alternatives()
        self.forms = DecompositionAlternatives(
            original=regions(network, fuse=fuse),
            decomposed=tuple(regions(change.network, fuse=fuse) for change in self.changes),
            chains=self.changes[0].chains,
            rules=tuple(rule.text for rule in self.changes[0].request.rules),
            errors=layer_errors(self.changes, None),
        )
        self.costs = Costs(SYSTEM, Profiling())
        self._values: dict[object, float | None] = {}

    def mixtures(self):
        """All that are possible: layers that are not free have one form together."""
        layers = self.forms.independent_layers
        rules_by_layer = [(None, *sorted(set(self.forms.distinct_rules[layer]))) for layer in layers]
        together = [None, *range(len(self.changes))] if self.forms.dependent_layers else [None]
        for rules in itertools.product(*rules_by_layer, together):
            chosen = dict(zip(self.forms.independent_layers, rules)) | dict.fromkeys(
                self.forms.dependent_layers, rules[-1]
            )
            yield {layer: rule for layer, rule in chosen.items() if rule is not None}

    def graph(self, chosen: dict[str, int]) -> RegionGraph:
        """What the mixed module itself consists of."""
        return regions(combine_alternatives(self.changes, chosen).network, fuse=self.fuse)

    def error(self, chosen: dict[str, int]) -> float:
        return sum(self.forms.errors[layer][rule] for layer, rule in chosen.items())

    def value(self, chosen: dict[str, int], goal: Goal) -> float | None:
        """Of the best plan of the mixture; None if none keeps to the bounds."""
        if goal.max_error is not None and self.error(chosen) > goal.max_error:
            return None
        plain = replace(goal, max_error=None)
        key = (tuple(sorted(chosen.items())), plain)
        if key not in self._values:
            try:
                search_result = search(self.graph(chosen), SYSTEM, self.costs, plain)
                self._values[key] = goal.value(search_result.evaluation)
            except InfeasibleError:
                self._values[key] = None
        return self._values[key]

    def best(self, goal: Goal) -> float | None:
        values = [self.value(chosen, goal) for chosen in self.mixtures()]
        return min((value for value in values if value is not None), default=None)


NETWORKS = {
    "chain": (functools.partial(three_layers, "chain"), RANKS),
    "branches": (functools.partial(three_layers, "branches"), RANKS),
    "residual": (functools.partial(three_layers, "residual"), RANKS),
    "fused chain": (functools.partial(three_layers, "chain"), RANKS, True),
    "joined": (branch_network, "tucker:0.4"),
    "joined, residual": (functools.partial(branch_network, residual=True), "tucker:0.4"),
}


@functools.cache
def rank_network(name: str) -> RankedNetwork:
    make, *options = NETWORKS[name]
    return RankedNetwork(make(), *options)


@pytest.fixture(scope="module")
def chain() -> RankedNetwork:
    return rank_network("chain")


@pytest.mark.long
@pytest.mark.parametrize(("name", "free"), [*zip(NETWORKS, (3, 3, 1, 3, 4, 2), strict=True)])
def test_a_mixture_of_ranks_is_what_the_mixed_module_consists_of(name, free):
    """A sum joins the kernel of an lconv, behind all that reads its other operand: layers go together."""
    network = rank_network(name)
    assert len(network.forms.independent_layers) == free
    for chosen in network.mixtures():
        expected, mixture = network.graph(chosen), network.forms.mixture(chosen)
        assert (mixture.regions, mixture.outputs) == (expected.regions, expected.outputs)
        assert mixture.fusible == expected.fusible


MODES = {"gpu": "gpu", "devices": "gpu,pim", "pipelines": "gpu,pim,pipeline"}


@pytest.mark.parametrize(
    ("name", "objective", "modes"),
    [
        ("chain", "latency", "devices"),
        ("joined", "energy", "devices"),
        ("chain", "latency", "pipelines"),
        pytest.param("branches", "energy", "devices", marks=pytest.mark.long),
        pytest.param("residual", "energy", "devices", marks=pytest.mark.long),
        pytest.param("branches", "edp", "devices", marks=pytest.mark.long),
        pytest.param("fused chain", "latency", "devices", marks=pytest.mark.long),
        pytest.param("fused chain", "latency", "gpu", marks=pytest.mark.long),
    ],
)
def test_no_mixture_of_ranks_is_cheaper_than_the_one_chosen(name, objective, modes):
    """The oracle searches a plan for each mixture, under bounds on the error from none to all."""
    oracle = rank_network(name)
    gap = 2e-3 if objective == "edp" else 1e-6
    errors = sorted({oracle.error(chosen) for chosen in oracle.mixtures()})
    before, seen = float("inf"), set()
    for bound in (*errors[:: len(errors) // 5], None):
        goal = Goal(objective=objective, modes=MODES[modes], max_error=bound)
        chosen = choose(oracle.forms, SYSTEM, oracle.costs, goal)
        value, best = oracle.value(chosen.layers, goal), oracle.best(goal)
        assert best is not None and value is not None, chosen.layers
        assert value <= best * (1 + gap)
        assert goal.value(chosen.best.evaluation) == pytest.approx(value, rel=gap)
        assert chosen.best.error == pytest.approx(oracle.error(chosen.layers))
        assert value <= before * (1 + gap), "a looser bound makes no plan worse"
        before = value
        seen.add(tuple(sorted(chosen.layers.items())))
    assert len(seen) > 1


@pytest.mark.long
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_memory_is_that_of_the_ranks_chosen(chain, share):
    """Tensors between links are as large as their ranks."""
    free = Goal(modes="gpu")
    max_bytes, min_bytes = 10_000_000, None
    with pytest.raises(InfeasibleError) as refused:
        choose(chain.forms, SYSTEM, chain.costs, replace(free, max_memory_bytes=1))
    min_bytes = refused.value.demand
    goal = replace(free, max_memory_bytes=min_bytes + share * (max_bytes - min_bytes) / 100)
    chosen = choose(chain.forms, SYSTEM, chain.costs, goal)
    assert chain.value(chosen.layers, goal) == pytest.approx(chain.best(goal), rel=1e-6)


@pytest.mark.long
def test_the_smallest_plan_is_that_of_all_mixtures(chain):
    """And of equally small ones the fastest."""
    goal = Goal(objective="memory", modes="gpu,pim")
    chosen = choose(chain.forms, SYSTEM, chain.costs, goal)
    plans = []
    for mixture in chain.mixtures():
        search_result = search(chain.graph(mixture), SYSTEM, chain.costs, goal)
        memory_bytes = PlanMemory(search_result.graph, SYSTEM.dtype).pool_bytes(search_result.candidates)
        plans.append((memory_bytes, search_result.evaluation.latency_ns))
    assert goal.rank(chosen.best) == pytest.approx(min(plans))


def test_an_error_bound_that_no_plan_meets_beside_others_is_refused(chain):
    fastest = choose(chain.forms, SYSTEM, chain.costs, Goal(modes="gpu"))
    bound = 1.001 * fastest.best.evaluation.latency_ns
    goal = Goal(modes="gpu", max_latency_ns=bound, max_error=0.0)
    with pytest.raises(InfeasibleError, match=r"latency of .* within the other bounds: needs") as refused:
        choose(chain.forms, SYSTEM, chain.costs, goal)
    longer = replace(goal, max_latency_ns=refused.value.demand)
    assert choose(chain.forms, SYSTEM, chain.costs, longer).best.error <= 1e-6
    (lever,) = (lever for lever in refused.value.levers if lever.startswith("--max-error"))
    wider = replace(goal, max_error=float(lever.split()[1]))
    assert choose(chain.forms, SYSTEM, chain.costs, wider).best.evaluation.latency_ns <= bound * (1 + 1e-6)


def test_what_a_layer_takes_by_itself_in_all_forms(chain):
    standalone_ns = choose(chain.forms, SYSTEM, chain.costs, Goal(modes="gpu")).standalone_ns
    original = search(chain.forms.original, SYSTEM, chain.costs, Goal(modes="gpu"))
    for layer, (given_ns, *_) in standalone_ns.items():
        assert given_ns == pytest.approx(original.table.candidates[layer][0].tasks[0].duration_ns)
