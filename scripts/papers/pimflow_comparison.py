"""Searches of the configurations that PIMFlow's paper compares, under every convention.

Sources: the slides "Execution Time", "Energy Consumption" and "Model Size Sensitivity Study" of PIMFlow
(CGO 2023), and the figures of MobileNetV2 that its artifact comes with.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pimflow import placement
from pimflow.commands.profile.profile import region_graph
from pimflow.commands.shared.options import NetworkOptions
from pimflow.core.region import Region
from pimflow.core.region_graph import RegionGraph
from pimflow.core.rewrite import MODES, Mode
from pimflow.hardware import System, system
from pimflow.placement import Costs, Evaluation, Goal, Profiling, SearchResult
from pimflow.placement.solvers.evaluate import savings_pj

NETWORKS = ("efficientnet-b0", "mobilenet-v2", "mnasnet-1.0", "resnet-50", "vgg-16")
SIZES = (
    *(f"efficientnet-b{size}" for size in range(7)),
    *("mobilenet-v2", "mobilenet-v2-1.4", "mobilenet-v2-2.0"),
    *("mnasnet-1.0", "mnasnet-1.3", "mnasnet-2.0"),
)
ACCOUNTINGS = ("paper", "full")
TIMINGS = ("ramulator-pimflow", "strict")
CONVENTIONS = tuple((accounting, timing) for accounting in ACCOUNTINGS for timing in TIMINGS)
CONVOLUTIONS = ("conv2d", "depthwise", "grouped")
WHOLE_LAYERS = (Mode.GPU, Mode.PIM)

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A compiler of the comparison: what it may do with a layer, and on which system.

    Attributes
    ----------
    scheduling, splits : str
        Of the system: loop orders of PIM programs, and which splits are tried.
    modes : tuple of str
        What may be done with a layer.
    channel_sharing : str
        Of the system: what the paper compares is partitioned.
    """

    name: str
    scheduling: str
    splits: str = "grid"
    modes: tuple[str, ...] = MODES
    channel_sharing: str = "partitioned"

    def system(self, accounting: str, timing: str) -> System:
        """The paper's devices under a convention."""
        return system(
            accounting=accounting,
            timing=timing,
            scheduling=self.scheduling,
            splits=self.splits,
            channel_sharing=self.channel_sharing,
        )


# The paper's five, in its order and on its terms (MD-DP and pipelines build on Newton++, splits are tenths of
# the rows); then whole layers by all loop orders, and all that this project does.
NEWTON_PLUS = Configuration(name="Newton+", scheduling="newton+", modes=WHOLE_LAYERS)
NEWTON_PLUS_PLUS = Configuration(name="Newton++", scheduling="newton++", modes=WHOLE_LAYERS)
PIMFLOW = Configuration(name="PIMFlow", scheduling="newton++")
ALL_ORDERS = Configuration(name="all loop orders", scheduling="pimflow", modes=WHOLE_LAYERS)
OURS = Configuration(name="pimflow", scheduling="pimflow", splits="exact", channel_sharing="time-shared")
CONFIGURATIONS = (
    NEWTON_PLUS,
    NEWTON_PLUS_PLUS,
    Configuration(name="Pipeline", scheduling="newton++", modes=(*WHOLE_LAYERS, Mode.PIPELINE)),
    Configuration(name="MD-DP", scheduling="newton++", modes=(*WHOLE_LAYERS, Mode.SPLIT)),
    PIMFLOW,
    ALL_ORDERS,
    OURS,
)


class Searches:
    """Searches that share costs of layers and kernels; systems may differ in convention, launches and prices.

    Parameters
    ----------
    profiling : Profiling
        How times are found.
    progress : callable
        Told what is being searched.
    """

    def __init__(self, profiling: Profiling, progress: Callable[[str], None] = lambda _: None):
        self.profiling, self.progress = profiling, progress
        self._costs: dict[tuple[object, ...], Costs] = {}
        self._graphs: dict[str, RegionGraph] = {}

    def graph(self, model: str) -> RegionGraph:
        """The regions of a network."""
        if model not in self._graphs:
            self._graphs[model] = region_graph(model, NetworkOptions(), self.profiling.cache)
        return self._graphs[model]

    def costs(self, target: System, profiling: Profiling) -> Costs:
        """Costs on a system; systems that differ in accounting, launches or splits share them."""
        key = (target.timing, target.scheduling, target.channel_sharing, profiling.gpu)
        if key not in self._costs:
            self._costs[key] = Costs(target, profiling)
        return self._costs[key]

    def search(
        self, model: str, target: System, goal: Goal, profiling: Profiling | None = None
    ) -> SearchResult:
        """The best plan of a network."""
        self.progress(
            f"{model}, {target.accounting}, {target.timing}, {target.scheduling}, {','.join(goal.modes)}"
        )
        profiling = profiling or self.profiling
        return placement.search(self.graph(model), target, self.costs(target, profiling), goal)


def is_convolution(region: Region) -> bool:
    """Whether `region` is a convolution; a fully connected layer is not."""
    return region.operator in CONVOLUTIONS


def kind(region: Region) -> str:
    """Kind of layer by which shares of the GPU's time are grouped."""
    if not is_convolution(region):
        return "FC" if region.operator == "fc" else "other"
    g = region.geometry
    if region.operator != "conv2d":
        return "depthwise"
    assert g is not None
    return "1x1" if (g.kh, g.kw) == (1, 1) else "k x k"


def convolutions_ns(search_result: SearchResult, evaluation: Evaluation) -> float:
    """Time that convolutions add to the latency of a network, in ns."""
    regions = {region.name: region for region in search_result.graph.regions}
    times = evaluation.region_times.items()
    return sum(region_times.latency_ns for name, region_times in times if is_convolution(regions[name]))


def plan_figures(search_result: SearchResult) -> Row:
    """Figures of one plan beside those of the GPU alone, on all its channels."""
    plan, gpu_only = search_result.evaluation, search_result.baseline
    before_ns, after_ns = convolutions_ns(search_result, gpu_only), convolutions_ns(search_result, plan)
    modes = Counter(choice.mode for choice in search_result.plan.choices for _ in choice.regions)
    return {
        "latency_gpu_only_ns": gpu_only.latency_ns,
        "latency_ns": plan.latency_ns,
        "speedup": gpu_only.latency_ns / plan.latency_ns,
        "convolutions_gpu_only_ns": before_ns,
        "convolutions_ns": after_ns,
        "convolutions_speedup": before_ns / after_ns,
        "energy_gpu_only_pj": gpu_only.energy_pj,
        "energy_pj": plan.energy_pj,
        "energy_change": plan.energy_pj / gpu_only.energy_pj - 1,
        "energies_gpu_only_pj": dict(gpu_only.energies_pj),
        "energies_pj": dict(plan.energies_pj),
        "savings_pj": savings_pj(plan, gpu_only),
        "regions": {mode: modes[mode] for mode in MODES if modes[mode]},
    }


def compare(
    searches: Searches,
    models: Sequence[str] = NETWORKS,
    configurations: Sequence[Configuration] = CONFIGURATIONS,
    conventions: Sequence[tuple[str, str]] = CONVENTIONS,
) -> list[Row]:
    """A row with the figures of `plan_figures` for every network, convention and configuration."""
    rows = []
    for model in models:
        for accounting, timing in conventions:
            for configuration in configurations:
                search_result = searches.search(
                    model, configuration.system(accounting, timing), Goal(modes=configuration.modes)
                )
                names = {"model": model, "accounting": accounting, "timing": timing}
                rows.append({**names, "configuration": configuration.name, **plan_figures(search_result)})
    return rows


def read_once(base: System) -> System:
    """The system with the energy of a COMP that reads the global buffer once.

    The authors' fork prices one read for every bank.
    """
    per_bank_pj = base.pim.energy["buffer_read_pj"] / base.pim.banks
    return replace(base, pim=replace(base.pim, energy=base.pim.energy | {"buffer_read_pj": per_bank_pj}))


def energies(searches: Searches, models: Sequence[str] = NETWORKS) -> list[Row]:
    """Rows as those of `compare`: the plan of least energy, and PIMFlow's at the price of `read_once`."""
    rows = []
    for model in models:
        for accounting, timing in CONVENTIONS:
            names = {"model": model, "accounting": accounting, "timing": timing}
            target = OURS.system(accounting, timing)
            search_result = searches.search(model, target, Goal(objective="energy"))
            rows.append({**names, "configuration": "least energy", **plan_figures(search_result)})
            target = read_once(PIMFLOW.system(accounting, timing))
            search_result = searches.search(model, target, Goal(modes=PIMFLOW.modes))
            rows.append({**names, "configuration": "read once", **plan_figures(search_result)})
    return rows


def shares(searches: Searches, models: Sequence[str] = NETWORKS) -> list[Row]:
    """Share of each `kind` of layer in the latency of the GPU alone, a row a network."""
    rows = []
    for model in models:
        gpu_only = searches.search(model, system(), Goal(modes=(Mode.GPU,))).baseline
        total: dict[str, float] = {}
        for region in searches.graph(model).regions:
            name = kind(region)
            total[name] = total.get(name, 0.0) + gpu_only.region_times[region.name].latency_ns
        rows.append({"model": model, **{name: ns / gpu_only.latency_ns for name, ns in total.items()}})
    return rows


def sizes(searches: Searches, models: Sequence[str] = SIZES) -> list[Row]:
    """Rows of networks of growing size, by PIMFlow and by all of this project, under two conventions."""
    return compare(searches, models, (PIMFLOW, OURS), (CONVENTIONS[0], CONVENTIONS[-1]))


def mean_speedup(rows: Iterable[Mapping[str, Any]], key: str = "speedup") -> float:
    """Geometric mean of a column of speed-ups."""
    return statistics.geometric_mean(row[key] for row in rows)


def select(rows: Iterable[Row], **values: str) -> list[Row]:
    """The rows whose fields have the given values."""
    return [row for row in rows if all(row[name] == value for name, value in values.items())]
