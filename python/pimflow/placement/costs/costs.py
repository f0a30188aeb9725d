"""Costs of PIM programs and GPU kernels: from profilers, each asked once, and from the result cache."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pimflow.core.attention import Attention
from pimflow.core.candidate import Provenance
from pimflow.core.json_form import json_form
from pimflow.core.kernel import ConvGeometry, Kernel
from pimflow.core.keywords import check_keywords
from pimflow.core.loop_order import LoopOrder
from pimflow.core.region import Region
from pimflow.core.rewrite import Mode
from pimflow.core.split import WHOLE, Split
from pimflow.core.typed_values import read_fields
from pimflow.fusion.tilings import TilingCache
from pimflow.hardware import GpuSpec, System
from pimflow.hardware.spec_text import fields_text
from pimflow.host.executors import Executor, Serial
from pimflow.host.result_cache import ResultCache
from pimflow.pim_backend.programs.cache_schedule import KEYS, VALUES, ProductSchedule
from pimflow.placement.costs.attention_runs import CacheWork, ProductCost
from pimflow.placement.costs.pim_runs import ONLY_SUMS, LatchUse, LayerPimCost, PimTarget
from pimflow.placement.costs.splits import LayerCosts, NonPimTimes, SplitLayer
from pimflow.placement.costs.staged_runs import StagedRun
from pimflow.simulators.gpu.model import KernelCost, KernelRequest, kernel_costs
from pimflow.simulators.profiler import Analytic, BuiltIn, GpuProfiler, PimProfiler

Made = TypeVar("Made")


@check_keywords
@dataclass(frozen=True, kw_only=True)
class Profiling:
    """The profilers, and the cache and workers for their results.

    Attributes
    ----------
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
    progress: Callable[[int, int], None] = lambda _done, _total: None

    def __reduce__(self) -> tuple[Callable[[], Profiling], tuple[()]]:
        """Leave out executor and progress: a worker has neither."""
        return functools.partial(Profiling, gpu=self.gpu, pim=self.pim, cache=self.cache), ()

    def pim_profiler(self, system: System) -> PimProfiler:
        """The profiler of PIM programs of `system`."""
        return self.pim or BuiltIn(system.timing, system.hides_gwrites)

    def require(self, system: System, modes: Sequence[str]) -> None:
        """Raise an error if `modes` has PIM and the profiler cannot time programs of the system's device."""
        if system.pim_channels and set(modes) - {Mode.GPU}:
            self.pim_profiler(system).require_device(system.pim)


@dataclass
class Tally:
    """How many results were computed, and how many came from the cache."""

    computed: Counter[str] = field(default_factory=Counter)
    cached: Counter[str] = field(default_factory=Counter)


class Costs:
    """Costs on one system; systems that differ only in launch times may share them.

    Attributes
    ----------
    pim_target : PimTarget
    tally : Tally
        Counts of ``pim`` layers and ``gpu`` kernels.
    tiling_cache : dict
        `TilingCache` of all networks that these costs price.
    staged_runs : dict
        Runs of regions in stages of these networks; they contain no costs.
    non_pim_times : dict
        By system and layer, the times of the layer's splits without PIM's part.
    """

    def __init__(self, system: System, profiling: Profiling):
        self.profiling = profiling
        self.pim_target = PimTarget(
            pim=system.pim,
            channels=system.pim_channels,
            dtype=system.dtype,
            profiler=profiling.pim_profiler(system),
            level=system.scheduling,
        )
        self.tally = Tally()
        self.tiling_cache: TilingCache = {}
        self.staged_runs: dict[tuple[object, ...], tuple[StagedRun, ...]] = {}
        self.non_pim_times: dict[tuple[object, ...], tuple[NonPimTimes, ...]] = {}
        self._shared: dict[int, tuple[weakref.ref[Region], dict[Hashable, Any]]] = {}
        self._gpu, self._dtype = system.gpu, system.dtype
        self._layers: dict[ConvGeometry, LayerCosts] = {}
        self._splits: dict[tuple[object, ...], tuple[Split, ...]] = {}
        # By loop order too, or None for the fastest.
        self._pim: dict[tuple[ConvGeometry, Split, LoopOrder | None, LatchUse], LayerPimCost] = {}
        self._caches: dict[tuple[object, ...], tuple[ProductCost, ...]] = {}
        self._kernels: dict[KernelRequest, KernelCost] = {}
        self._analytic_costs: dict[KernelRequest, KernelCost] = {}
        self._requests: dict[KernelRequest, None] | None = None
        self._computed: dict[object, Any] | None = None

    def with_system(self, system: System, profiling: Profiling | None = None) -> Costs:
        """Costs on another system, which share the results for a device that both systems have."""
        costs = Costs(system, profiling or self.profiling)
        if costs._kernel_key_prefix == self._kernel_key_prefix:
            costs._kernels, costs._analytic_costs = self._kernels, self._analytic_costs
            costs.tiling_cache, costs.non_pim_times = self.tiling_cache, self.non_pim_times
        costs.staged_runs = self.staged_runs
        if costs.pim_target.identity == self.pim_target.identity:
            costs._layers, costs._splits = self._layers, self._splits
            costs._pim, costs._caches = self._pim, self._caches
        return costs

    def region_result(self, region: Region, key: Hashable, make: Callable[[], Made]) -> Made:
        """The result of `make`, made once while the region exists; anew while kernels are only requested."""
        if self._requests is not None:
            return make()
        number, shared = id(region), self._shared
        if number not in shared:
            shared[number] = weakref.ref(region, lambda _: shared.pop(number)), {}
        results: dict[Hashable, Made] = shared[number][1]
        if key not in results:
            results[key] = make()
        return results[key]

    @property
    def profilers(self) -> str:
        """Names of the profilers that the costs are from."""
        return f"gpu={self.profiling.gpu.name} pim={self.pim_target.profiler.identity}"

    def layer(self, geometry: ConvGeometry, name: str, **options: Any) -> SplitLayer:
        """A `SplitLayer` to be timed on this PIM device."""
        return SplitLayer(pim_target=self.pim_target, geometry=geometry, name=name, **options)

    def splits(self, layer: SplitLayer) -> tuple[Split, ...]:
        """The splits of a layer that are candidates."""
        if layer.key not in self._splits:
            self.time_layers([layer])
        return self._splits[layer.key]

    def time_layers(self, requested_layers: Sequence[SplitLayer]) -> None:
        """Time the layers that were not timed yet, the largest first."""
        layers = {layer.key: layer for layer in requested_layers if layer.key not in self._splits}
        ordered = sorted(layers.values(), key=lambda layer: -layer.geometry.macs)
        work = {
            layer.key: dataclasses.replace(layer, known=self._layers.get(layer.geometry)) for layer in ordered
        }
        results = self._results(work, _parse_layer_costs, SplitLayer.costs)
        for number, (layer, costs) in enumerate(results, start=1):
            self._layers[layer.geometry], self._splits[layer.key] = costs, costs.splits
            for split, cost in costs.costs:
                self._pim[layer.geometry, split, cost.schedule, ONLY_SUMS] = cost
                if split != WHOLE:
                    self._pim[layer.geometry, split, None, ONLY_SUMS] = cost
            self.profiling.progress(number, len(ordered))

    def _results(
        self,
        work: Mapping[Any, Any],
        parse: Callable[[Any], Any],
        compute: Callable[[Any], Any],
    ) -> Iterator[tuple[Any, Any]]:
        """Each work on PIM with its result: from the cache, by its key, or else computed and stored there."""
        cached_results = self._read_cache(work, parse)
        self.tally.cached["pim"] += len(cached_results)
        yield from ((work[key], cached_results[key]) for key in work if key in cached_results)
        missing = [key for key in work if key not in cached_results]
        for position, result in self.profiling.executor.map(compute, [work[key] for key in missing]):
            self._write_cache({missing[position]: result})
            self.tally.computed["pim"] += 1
            yield work[missing[position]], result

    def _read_cache(self, keys: Iterable[object], parse: Callable[[Any], Any]) -> dict[Any, Any]:
        return self.profiling.cache.get(keys, read=parse) if self.profiling.cache else {}

    def _write_cache(self, results: Mapping[Any, Any]) -> None:
        if self.profiling.cache:
            self.profiling.cache.put(results)

    def pim_cost(
        self,
        geometry: ConvGeometry,
        name: str,
        split: Split = WHOLE,
        schedule: LoopOrder | None = None,
        latch_use: LatchUse = ONLY_SUMS,
    ) -> LayerPimCost:
        """The cost of PIM's part of a layer, by the loop order `schedule`, or the fastest by default.

        With an activation another order may be the fastest, since results then need row changes.
        """
        cost_key = (geometry, split, schedule, latch_use)
        if not schedule and geometry not in self._layers:
            self.time_layers([self.layer(geometry, name)])
        if cost_key in self._pim:
            return self._pim[cost_key]
        if schedule:
            key = ("pim", self.pim_target.identity, *cost_key)
            cost = self._read_cache([key], functools.partial(read_fields, LayerPimCost)).get(key)
            if cost is None:
                cost = self.pim_target.cost(geometry, schedule, name, split, latch_use)
                self._write_cache({key: cost})
        elif latch_use.activation:
            orders = self.pim_target.schedules(split.pim_part(geometry))
            costs = [self.pim_cost(geometry, name, split, order, latch_use) for order in orders]
            cost = min(costs, key=lambda cost: cost.time_ns)
        else:
            default = self._pim.get((geometry, split, None, ONLY_SUMS))
            order = (
                default.schedule
                if default
                else self.pim_target.part_schedule(geometry, name, self._layers[geometry].schedule, split)
            )
            cost = self.pim_cost(geometry, name, split, order, latch_use)
        self._pim[cost_key] = cost
        return cost

    def attention_costs(self, attention: Attention, tokens: int = 0) -> dict[str, tuple[ProductCost, ...]]:
        """By product of attention over `tokens` tokens of a cache in PIM (0: all), its costs, fastest first.

        Raises
        ------
        UnsupportedOpError, InfeasibleError
            Where a cache cannot lie in PIM; see `CacheLayout.check_fit`.
        """
        products = {
            name: CacheWork.from_attention(self.pim_target, attention, name, tokens)
            for name in (KEYS, VALUES)
        }
        missing = {work.key: work for work in products.values() if work.key not in self._caches}
        for work, costs in self._results(missing, _parse_product_costs, CacheWork.costs):
            self._caches[work.key] = costs
        return {name: self._caches[work.key] for name, work in products.items()}

    def product_cost(self, work: CacheWork, schedule: ProductSchedule) -> ProductCost:
        """The cost of one product of attention by one schedule; raises as `attention_costs`."""
        for cost in self._caches.get(work.key, ()):
            if cost.schedule == schedule:
                return cost
        key = (*work.key, schedule)
        if key not in self._caches:
            cached_costs = self._read_cache([key], _parse_product_costs)
            self._caches[key] = cached_costs.get(key) or (work.cost(schedule),)
            if not cached_costs:
                self._write_cache({key: self._caches[key]})
        return self._caches[key][0]

    def kernel_cost(self, kernel: Kernel, channels: int) -> KernelCost:
        """The cost of a GPU kernel while `channels` memory channels serve the GPU."""
        request = KernelRequest(kernel, channels)
        if request not in self._kernels:
            self.time_kernels([request])
        return self._kernels.get(request) or self._analytic_cost(request)

    def time_kernels(self, requests: Iterable[KernelRequest]) -> None:
        """Time the kernels that were not timed yet in one batch; inside `batch_kernels` only request them."""
        missing = dict.fromkeys(request for request in requests if request not in self._kernels)
        if self._requests is not None:
            self._requests |= missing
        elif missing:
            self._time_kernels(list(missing))

    def analytic_tile(self, kernel: Kernel, channels: int) -> tuple[int, int, int] | None:
        """The tile of a kernel by the analytic model, whatever the profiler."""
        return self._analytic_cost(KernelRequest(kernel, channels)).tile

    def _analytic_cost(self, request: KernelRequest) -> KernelCost:
        if request not in self._analytic_costs:
            (self._analytic_costs[request],) = kernel_costs([request], self._gpu, self._dtype)
        return self._analytic_costs[request]

    def launch_ns(self, cost: KernelCost, gpu: GpuSpec) -> float:
        """The launch time of such a kernel on `gpu`: the profiler's, which may be measured.

        If `gpu` has another launch time than the system of these costs, that of `gpu`.
        """
        return cost.launch_ns if gpu.launch_ns == self._gpu.launch_ns else gpu.launch_ns

    def batch_kernels(self, generate: Callable[[], Made]) -> Made:
        """The result of `generate`; the costs of all kernels that it requests are stored in one batch.

        If the profiler measures, they are also timed in one batch: `generate` is then called twice.
        """
        if self.profiling.gpu.computes:
            self._computed = {}
            try:
                return generate()
            finally:
                self._write_cache(self._computed)
                self._computed = None
        self._requests = {}
        try:
            result, requests = generate(), list(self._requests)
        finally:
            self._requests = None
        if not requests:
            return result
        self._time_kernels(requests)
        return generate()

    def _time_kernels(self, requests: Sequence[KernelRequest]) -> None:
        profiler = self.profiling.gpu
        keys = {request: (*self._kernel_key_prefix, request) for request in requests}
        cached_costs = self._read_cache(keys.values(), functools.partial(read_fields, KernelCost))
        missing = [request for request in requests if keys[request] not in cached_costs]
        for request in requests:
            if keys[request] in cached_costs:
                self._kernels[request] = cached_costs[keys[request]]
        new_costs = dict(zip(missing, profiler.costs(missing, self._gpu, self._dtype))) if missing else {}
        self._kernels |= new_costs
        results: dict[object, Any] = {keys[request]: json_form(cost) for request, cost in new_costs.items()}
        if self._computed is None:
            self._write_cache(results)
        else:
            self._computed |= results
        self.tally.cached["gpu"] += len(cached_costs)
        self.tally.computed["gpu"] += len(missing)

    @functools.cached_property
    def _kernel_key_prefix(self) -> tuple[str, ...]:
        """The beginning of the cache keys of all kernels."""
        return (
            "kernel",
            self.profiling.gpu.name,
            fields_text(dataclasses.replace(self._gpu, sources={})),
            self._dtype,
        )

    def kernel_counts(self) -> dict[str, int]:
        """How many kernel times are measured, simulated and so on (`Provenance`), the most reliable first."""
        counts = Counter(cost.provenance for cost in self._kernels.values())
        return {source.value: counts[source] for source in Provenance if counts[source]}


def _parse_layer_costs(plain: Any) -> LayerCosts:
    """Costs of a layer, from their cached form; raises an error if that is malformed."""
    costs = read_fields(LayerCosts, plain)
    if WHOLE not in {split for split, _ in costs.costs}:
        raise ValueError("no cost of the whole layer")
    return costs


def _parse_product_costs(plain: Any) -> tuple[ProductCost, ...]:
    """Costs of a product of attention, from their cached form; raises an error if that is malformed."""
    costs = tuple(read_fields(ProductCost, cost) for cost in plain)
    if not costs:
        raise ValueError("no costs")
    return costs
