"""Costs of PIM programs and GPU kernels: from profilers, each asked once, and from the result cache."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pimflow.core.attention import Attention
from pimflow.core.candidate import Known
from pimflow.core.json_form import json_form
from pimflow.core.keywords import keywords_checked
from pimflow.core.region import ConvGeometry, Kernel
from pimflow.core.split import WHOLE, Split
from pimflow.core.typed_values import read_fields
from pimflow.fusion import GroupTiling
from pimflow.hardware import GpuSpec, System
from pimflow.host.executors import Executor, Serial
from pimflow.host.result_cache import ResultCache
from pimflow.pim_backend.programs.cache_schedule import ProductSchedule
from pimflow.pim_backend.programs.schedule import Schedule
from pimflow.placement.costs.attention_runs import KEYS, VALUES, CacheWork, ProductCost
from pimflow.placement.costs.pim_runs import PimCost, PimSide
from pimflow.placement.costs.splits import Beside, LayerCosts, SplitLayer
from pimflow.placement.costs.staged_runs import StagedRun
from pimflow.simulators.gpu.model import KernelCost, KernelRequest, kernel_costs
from pimflow.simulators.profiler import Analytic, BuiltIn, GpuProfiler, PimProfiler

Made = TypeVar("Made")

NOTHING = KernelCost(
    **dict.fromkeys(("launch_ns", "execution_ns", "compute_ns", "l2_ns", "dram_ns"), 0.0),
    dram_bytes=0.0,
    l2_bytes=0.0,
    tile=None,
    blocks=0,
)


@keywords_checked
@dataclass(frozen=True, kw_only=True)
class Profiling:
    """The profilers, and the cache and workers for their results.

    Attributes
    ----------
    gpu : GpuProfiler
    pim : PimProfiler, optional
        The engines, with the system's timing, by default.
    cache : ResultCache, optional
        Where results are stored.
    executor : Executor
        Runs the timing of PIM programs.
    progress : callable
        Called with how many layers are timed, and how many there are.
    """

    gpu: GpuProfiler = field(default_factory=Analytic)
    pim: PimProfiler | None = None
    cache: ResultCache | None = None
    executor: Executor = field(default_factory=Serial)
    progress: Callable[[int, int], None] = lambda _done, _all: None

    def __reduce__(self) -> tuple[Callable[[], Profiling], tuple[()]]:
        """Leave out executor and progress: a worker has neither."""
        return functools.partial(Profiling, gpu=self.gpu, pim=self.pim, cache=self.cache), ()

    def of_pim(self, system: System) -> PimProfiler:
        """The profiler of PIM programs of `system`."""
        return self.pim or BuiltIn(system.timing, system.gwrite_hiding)

    def require(self, system: System, modes: Sequence[str]) -> None:
        """Raise an error if `modes` has PIM and the profiler cannot time programs of the system's device."""
        if system.pim_channels and set(modes) - {"GPU"}:
            self.of_pim(system).require_device(system.pim)


@dataclass
class Tally:
    """How many results were computed, and how many came from the cache."""

    computed: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)


# By launch time, memory channels and run of regions: the fastest tiling, or None if none is faster.
FoundTilings = dict[tuple[object, ...], GroupTiling | None]


@dataclass(frozen=True, kw_only=True)
class CacheCosts:
    """Costs of both products of attention over a cache by schedule, the fastest first."""

    keys: tuple[ProductCost, ...]
    values: tuple[ProductCost, ...]


class Costs:
    """Costs on one system; systems that differ only in launch times may share them.

    Attributes
    ----------
    side : PimSide
    profiling : Profiling
    tally : Tally
        Counts of ``pim`` layers and ``gpu`` kernels.
    tilings : dict
        `FoundTilings` of all networks that these costs price.
    staged_runs : dict
        Runs of regions in stages of these networks; they contain no costs.
    besides : dict
        By system and layer, the times of the layer's splits without PIM's part.
    """

    def __init__(self, system: System, profiling: Profiling):
        self.profiling = profiling
        self.side = PimSide(
            pim=system.pim,
            channels=system.pim_channels,
            dtype=system.dtype,
            profiler=profiling.of_pim(system),
            level=system.scheduling,
        )
        self.tally = Tally()
        self.tilings: FoundTilings = {}
        self.staged_runs: dict[tuple[object, ...], tuple[StagedRun, ...]] = {}
        self.besides: dict[tuple[object, ...], tuple[Beside, ...]] = {}
        self._gpu, self._dtype = system.gpu, system.dtype
        self._layers: dict[ConvGeometry, LayerCosts] = {}
        self._answers: dict[tuple, tuple[Split, ...]] = {}
        self._schedules: dict[tuple[ConvGeometry, Split], str] = {}
        self._pim: dict[tuple[ConvGeometry, Split, str, str, str], PimCost] = {}
        self._caches: dict[tuple, tuple[ProductCost, ...]] = {}
        self._kernels: dict[KernelRequest, KernelCost] = {}
        self._modelled: dict[tuple[KernelRequest, float], KernelCost] = {}
        self._asked: dict[KernelRequest, None] | None = None
        self._computed: dict[object, Any] | None = None

    def on_system(self, system: System, profiling: Profiling | None = None) -> Costs:
        """Costs on another system, which share the results for a device that both systems have."""
        costs = Costs(system, profiling or self.profiling)
        if costs._kernel_place == self._kernel_place:
            costs._kernels, costs._modelled = self._kernels, self._modelled
            costs.tilings, costs.besides = self.tilings, self.besides
        costs.staged_runs = self.staged_runs
        if costs.side.identity == self.side.identity:
            costs._layers, costs._answers, costs._schedules = self._layers, self._answers, self._schedules
            costs._pim, costs._caches = self._pim, self._caches
        return costs

    @property
    def profilers(self) -> str:
        """Names of the profilers that the costs are from."""
        return f"gpu={self.profiling.gpu.name} pim={self.side.profiler.identity}"

    def layer(self, geometry: ConvGeometry, name: str, **asked: object) -> SplitLayer:
        """A `SplitLayer` to be timed on this PIM device."""
        return SplitLayer(side=self.side, geometry=geometry, name=name, **asked)

    def splits(self, layer: SplitLayer) -> tuple[Split, ...]:
        """The splits of a layer that are candidates."""
        if layer.key not in self._answers:
            self.time_layers([layer])
        return self._answers[layer.key]

    def time_layers(self, wanted: Sequence[SplitLayer]) -> None:
        """Time the layers that were not timed yet, the largest first."""
        layers = {layer.key: layer for layer in wanted if layer.key not in self._answers}
        ordered = sorted(layers.values(), key=lambda layer: -layer.geometry.macs)
        kept = self._kept((layer.key for layer in ordered), _stored_layer)
        for layer in ordered:
            if layer.key in kept:
                self._know(layer, kept[layer.key])
        missing = [layer for layer in ordered if layer.key not in kept]
        self.tally.kept["pim"] += len(ordered) - len(missing)
        self.profiling.progress(len(ordered) - len(missing), len(ordered))
        work = [dataclasses.replace(layer, known=self._layers.get(layer.geometry)) for layer in missing]
        for done, (position, costs) in enumerate(
            self.profiling.executor.map(SplitLayer.costs, work), start=1
        ):
            layer = missing[position]
            self._know(layer, costs)
            self._keep({layer.key: dataclasses.asdict(costs)})
            self.tally.computed["pim"] += 1
            self.profiling.progress(len(ordered) - len(missing) + done, len(ordered))

    def _know(self, layer: SplitLayer, costs: LayerCosts) -> None:
        self._layers[layer.geometry] = costs
        self._answers[layer.key] = costs.splits
        for split, cost in costs.costs:
            if split != WHOLE:
                self._schedules[layer.geometry, split] = cost.schedule
            self._pim[layer.geometry, split, cost.schedule, "", ""] = cost

    def _kept(self, keys: Iterable[object], read: Callable[[Any], Any]) -> dict:
        return self.profiling.cache.get(keys, read=read) if self.profiling.cache else {}

    def _keep(self, results: dict) -> None:
        if self.profiling.cache:
            self.profiling.cache.put(results)

    def pim(
        self,
        geometry: ConvGeometry,
        name: str,
        split: Split = WHOLE,
        schedule: str = "",
        initial: str = "",
        activation: str = "",
    ) -> PimCost:
        """The cost of PIM's part of a layer, by the loop order `schedule`, or the fastest if that is empty.

        Latches start from `initial` (`PimProgram.initial`). With an `activation` (`PimProgram.activation`)
        another order may be the fastest, since results then need row changes.
        """
        if not schedule and activation:
            orders = map(str, self.side.schedules(split.pim_part(geometry)))
            costs = [self.pim(geometry, name, split, order, initial, activation) for order in orders]
            return min(costs, key=lambda cost: cost.time_ns)
        if not schedule:
            if geometry not in self._layers:
                self.time_layers([self.layer(geometry, name)])
            schedule = self._schedules.get((geometry, split)) or str(
                self.side.order(geometry, name, self._layers[geometry].schedule, split)
            )
            self._schedules[geometry, split] = schedule
        known = (geometry, split, schedule, initial, activation)
        if known not in self._pim:
            key = ("pim", self.side.identity, *known)
            kept = self._kept([key], functools.partial(read_fields, PimCost))
            if key in kept:
                self._pim[known] = kept[key]
            else:
                order = Schedule.parse(schedule)
                self._pim[known] = self.side.cost(geometry, order, name, split, initial, activation)
                self._keep({key: dataclasses.asdict(self._pim[known])})
        return self._pim[known]

    def caches(self, wanted: Sequence[tuple[Attention, int]]) -> list[CacheCosts]:
        """Costs of attention over caches in PIM, by (attention, tokens in its cache; 0 for a full cache).

        Raises
        ------
        UnsupportedOpError, InfeasibleError
            Where a cache cannot lie in PIM; see `CacheLayout.fits`.
        """
        work = [
            tuple(CacheWork.like(self.side, attention, each, tokens) for each in (KEYS, VALUES))
            for attention, tokens in wanted
        ]
        missing = {each.key: each for pair in work for each in pair if each.key not in self._caches}
        kept = self._kept(missing, _stored_products)
        self._caches |= kept
        asked = [each for key, each in missing.items() if key not in kept]
        for position, costs in self.profiling.executor.map(CacheWork.costs, asked):
            self._caches[asked[position].key] = costs
            self._keep({asked[position].key: [dataclasses.asdict(each) for each in costs]})
        self.tally.kept["pim"] += len(kept)
        self.tally.computed["pim"] += len(asked)
        return [CacheCosts(keys=self._caches[k.key], values=self._caches[v.key]) for k, v in work]

    def product(self, work: CacheWork, schedule: ProductSchedule) -> ProductCost:
        """The cost of one product of attention by one schedule; raises as `caches`."""
        known = next((each for each in self._caches.get(work.key, ()) if each.schedule == schedule), None)
        if known is not None:
            return known
        key = (*work.key, schedule)
        if key not in self._caches:
            kept = self._kept([key], _stored_products)
            found = kept.get(key) or (work.cost(schedule),)
            self._caches[key] = found
            if not kept:
                self._keep({key: [dataclasses.asdict(each) for each in found]})
        return self._caches[key][0]

    def kernel(self, kernel: Kernel, channels: int) -> KernelCost:
        """The cost of a GPU kernel while `channels` memory channels serve the GPU."""
        request = KernelRequest(kernel, channels)
        if request not in self._kernels:
            self.time_kernels([request])
        return self._kernels.get(request, NOTHING)

    def time_kernels(self, requests: Iterable[KernelRequest]) -> None:
        """Time the kernels that were not timed yet in one batch; inside `together` only request them."""
        missing = dict.fromkeys(request for request in requests if request not in self._kernels)
        if self._asked is not None:
            self._asked |= missing
        elif missing:
            self._time_kernels(list(missing))

    def modelled(self, kernel: Kernel, channels: int, gpu: GpuSpec) -> KernelCost:
        """The cost of a kernel on `gpu` by the analytic model, whatever the profiler."""
        request = KernelRequest(kernel, channels)
        if (request, gpu.launch_ns) not in self._modelled:
            (cost,) = kernel_costs([request], gpu, self._dtype)
            self._modelled[request, gpu.launch_ns] = cost
        return self._modelled[request, gpu.launch_ns]

    def launch_ns(self, cost: KernelCost, gpu: GpuSpec) -> float:
        """The launch time of such a kernel on `gpu`: the profiler's, which may be measured.

        If `gpu` has another launch time than the system of these costs, that of `gpu`.
        """
        return cost.launch_ns if gpu.launch_ns == self._gpu.launch_ns else gpu.launch_ns

    def together(self, make: Callable[[], Made]) -> Made:
        """The result of `make`; the costs of all kernels that it requests are stored in one batch.

        If the profiler measures, they are also timed in one batch: `make` is then called twice.
        """
        if self.profiling.gpu.computes:
            self._computed = {}
            try:
                return make()
            finally:
                self._keep(self._computed)
                self._computed = None
        self._asked = {}
        try:
            made, asked = make(), list(self._asked)
        finally:
            self._asked = None
        if not asked:
            return made
        self._time_kernels(asked)
        return make()

    def _time_kernels(self, requests: Sequence[KernelRequest]) -> None:
        profiler = self.profiling.gpu
        keys = {request: (*self._kernel_place, request) for request in requests}
        kept = self._kept(keys.values(), functools.partial(read_fields, KernelCost))
        missing = [request for request in requests if keys[request] not in kept]
        for request in requests:
            if keys[request] in kept:
                self._kernels[request] = kept[keys[request]]
        timed = dict(zip(missing, profiler.costs(missing, self._gpu, self._dtype))) if missing else {}
        self._kernels |= timed
        results = {keys[request]: json_form(cost) for request, cost in timed.items()}
        if self._computed is None:
            self._keep(results)
        else:
            self._computed |= results
        self.tally.kept["gpu"] += len(kept)
        self.tally.computed["gpu"] += len(missing)

    @functools.cached_property
    def _kernel_place(self) -> tuple[str, ...]:
        """The beginning of the cache keys of all kernels."""
        return (
            "kernel",
            self.profiling.gpu.name,
            repr(dataclasses.replace(self._gpu, sources={})),
            self._dtype,
        )

    def known_kernels(self) -> dict[str, int]:
        """How many kernel times are measured, simulated and so on (`Known`), the most reliable first."""
        counts = Counter(cost.known for cost in self._kernels.values())
        return {way.value: counts[way] for way in Known if counts[way]}


def _stored_layer(plain: Any) -> LayerCosts:
    """Costs of a layer, from their cached form; raises an error if that is malformed."""
    costs = read_fields(LayerCosts, plain)
    for order in (costs.schedule, *(cost.schedule for _, cost in costs.costs)):
        Schedule.parse(order)
    if WHOLE not in {split for split, _ in costs.costs}:
        raise ValueError("no cost of the whole layer")
    return costs


def _stored_products(plain: Any) -> tuple[ProductCost, ...]:
    """Costs of a product of attention, from their cached form; raises an error if that is malformed."""
    costs = tuple(read_fields(ProductCost, cost) for cost in plain)
    if not costs:
        raise ValueError("no costs")
    return costs
