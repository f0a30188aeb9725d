"""Splits of a layer between GPU and PIM: a grid of candidates, or the best of all."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pimflow.core.liveness import ALIGNMENT_BYTES
from pimflow.core.loop_order import LoopOrder
from pimflow.core.region import STORED_BYTES, ConvGeometry
from pimflow.core.split import AXES, WHOLE, Split
from pimflow.hardware import PimSpec
from pimflow.placement.costs.pim_runs import LayerPimCost, PimCost, PimTarget
from pimflow.simulators.pim.bound import min_work_ns

SHARES = tuple(tenth / 10 for tenth in range(1, 10))
# Beside the fastest split of a layer, the fastest of the grid is a candidate too, if it takes at most this
# many times as long: neighbouring layers decide. More splits of the grid gave no network a faster plan.
NEAR = 1.1
LAST_STEP = 2  # of the time of a split, by ever better lower bounds


def grid(geometry: ConvGeometry) -> list[Split]:
    """Splits along rows in steps of a tenth (PIMFlow, "Execution Mode and Task Size Search")."""
    gpu_rows = sorted({round(share * geometry.oh) for share in SHARES})
    return _possible_splits(geometry, [Split("rows", rows) for rows in gpu_rows])


def all_splits(geometry: ConvGeometry, pim: PimSpec) -> list[Split]:
    """All splits along rows and along the batch, and the useful ones along channels and the reduction.

    Output channels are cut at multiples of PIM's tile, counted from either end; the reduction where the GPU
    reads aligned vectors of the layer's input.
    """
    return list(_all_splits(geometry, pim.banks))


# Cached: every search of a network asks for the same layers.
@functools.lru_cache(maxsize=1 << 12)
def _all_splits(geometry: ConvGeometry, tile: int) -> tuple[Split, ...]:
    line = ALIGNMENT_BYTES // STORED_BYTES
    tiles = {extent for part in range(tile, geometry.oc, tile) for extent in (part, geometry.oc - part)}
    extents = {
        "rows": range(1, geometry.oh),
        "channels": sorted(tiles),
        "reduction": range(line, geometry.c, line),
        "batch": range(1, geometry.n),
    }
    return tuple(_possible_splits(geometry, [Split(axis, gpu) for axis in AXES for gpu in extents[axis]]))


def _possible_splits(geometry: ConvGeometry, splits: Sequence[Split]) -> list[Split]:
    return [split for split in splits if not split.obstacle(geometry)]


@dataclass(frozen=True, kw_only=True)
class NonPimTimes:
    """The times of all parts of a split but PIM's.

    Attributes
    ----------
    gpu_ns : float
        The GPU's part, which runs at the same time as PIM's.
    crossbar_ns : float
        The GPU's traffic over the crossbar, which PIM uses too.
    after_ns : float
        What follows both parts and depends on the split.
    deferred_epilogue : tuple of str
        The deferred epilogue (`Split.deferred_epilogue`).
    """

    split: Split
    gpu_ns: float
    crossbar_ns: float
    after_ns: float
    deferred_epilogue: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SplitCharges:
    """The charges of a PIM program besides its own time.

    Attributes
    ----------
    burst_ns : float
        Time of a column-sized burst over the crossbar; 0 if that is not charged.
    """

    launch_ns: float
    burst_ns: float

    def total_ns(self, times: NonPimTimes, pim_cost: PimCost) -> float:
        """Time of a split: both parts and the crossbar in parallel, then what follows."""
        crossbar_ns = pim_cost.traffic_bursts * self.burst_ns + times.crossbar_ns
        pim_ns = max(self.launch_ns, pim_cost.ahead_ns) + pim_cost.time_ns
        return max(times.gpu_ns, pim_ns, crossbar_ns) + times.after_ns

    def lower_bound_ns(self, times: NonPimTimes, pim_ns: float) -> float:
        """A lower bound of `total_ns`, if `pim_ns` is one of PIM's part."""
        return max(times.gpu_ns, self.launch_ns + pim_ns, times.crossbar_ns) + times.after_ns


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """The costs of a layer on PIM.

    Attributes
    ----------
    schedule : LoopOrder
        The fastest loop order for the whole layer.
    splits : tuple of Split
        Those that are candidates.
    costs : tuple of (Split, LayerPimCost)
        A split may occur several times, with different loop orders.
    least_ns : tuple of (Split, float)
        Lower bounds of the time of PIM's part.
    """

    schedule: LoopOrder
    splits: tuple[Split, ...]
    costs: tuple[tuple[Split, LayerPimCost], ...]
    least_ns: tuple[tuple[Split, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class SplitLayer:
    """A layer to be timed on PIM.

    Attributes
    ----------
    name : str
        A region that is this layer.
    splits : tuple of Split
        The splits to time.
    besides : tuple of NonPimTimes
        Instead of `splits`: of each group of splits with equal `deferred_epilogue` the best is found, and
        the best of the `grid` if it is nearly as fast (`NEAR`).
    terms : SplitCharges, optional
        The charges by which splits are compared.
    known : LayerCosts, optional
        Earlier results for the same layer with other splits or terms.
    """

    pim_target: PimTarget
    geometry: ConvGeometry
    name: str
    splits: tuple[Split, ...] = ()
    besides: tuple[NonPimTimes, ...] = ()
    terms: SplitCharges | None = None
    known: LayerCosts | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """The cache key of its costs."""
        return ("layer", self.pim_target.identity, self.geometry, self.splits, self.besides, self.terms)

    def costs(self) -> LayerCosts:
        """Time the whole layer and its splits."""
        timing = _SplitTiming(self)
        groups: dict[tuple[str, ...], list[NonPimTimes]] = {}
        for times in self.besides:
            groups.setdefault(times.deferred_epilogue, []).append(times)
        costs = {split: timing.cost(split) for split in self.splits}
        grid_splits = frozenset(grid(self.geometry))
        for group in groups.values():
            group_costs = timing.best(group)
            costs |= group_costs | timing.near_fastest(group, group_costs, grid_splits)
        return LayerCosts(
            schedule=timing.schedule,
            splits=tuple(sorted(costs)),
            costs=(
                *timing.whole_costs,
                *((split, cost) for split, cost in timing.costs.items() if split != WHOLE),
            ),
            least_ns=tuple(timing.lower_bounds_ns.items()),
        )


class _SplitTiming:
    """Times of the splits of one layer, each computed once."""

    def __init__(self, layer: SplitLayer):
        self.layer, previous = layer, layer.known
        if previous:
            self.whole_costs = [(split, cost) for split, cost in previous.costs if split == WHOLE]
        else:
            self.whole_costs = [
                (WHOLE, cost) for cost in layer.pim_target.whole_layer_costs(layer.geometry, layer.name)
            ]
        self.schedule = previous.schedule if previous else self.whole_costs[0][1].schedule
        self.costs = {split: cost for split, cost in previous.costs if split != WHOLE} if previous else {}
        self.lower_bounds_ns = dict(previous.least_ns) if previous else {}
        self._orders: dict[Split, LoopOrder] = {}

    def _order(self, split: Split) -> LoopOrder:
        if split not in self._orders:
            target, geometry, name = self.layer.pim_target, self.layer.geometry, self.layer.name
            self._orders[split] = target.part_schedule(geometry, name, self.schedule, split)
        return self._orders[split]

    def cost(self, split: Split) -> LayerPimCost:
        """The cost of PIM's part."""
        if split not in self.costs:
            layer, order = self.layer, self._order(split)
            self.costs[split] = layer.pim_target.cost(layer.geometry, order, layer.name, split)
        return self.costs[split]

    def _busiest_ns(self, split: Split) -> float:
        """A lower bound of PIM's part: the time of its busiest channel."""
        if split not in self.lower_bounds_ns:
            layer, order = self.layer, self._order(split)
            self.lower_bounds_ns[split] = layer.pim_target.busiest_ns(
                layer.geometry, order, layer.name, split
            )
        return self.lower_bounds_ns[split]

    def _work_ns(self, split: Split) -> float:
        """A lower bound of PIM's part: its least work over all channels."""
        pim_target, geometry = self.layer.pim_target, self.layer.geometry
        part, begin = split.pim_part(geometry), split.pixel_begin(geometry)
        return min_work_ns(part, pim_target.pim, pim_target.dtype, pim_target.channels, part.pixels - begin)

    def _total_ns(self, times: NonPimTimes, step: int) -> float:
        """Time of a split in step 2; in steps 0 and 1 lower bounds of it, each slower to compute."""
        terms, split = self.layer.terms, times.split
        assert terms is not None, "splits are compared by the charges of their layer"
        if step == LAST_STEP:
            return terms.total_ns(times, self.cost(split))
        return terms.lower_bound_ns(times, self._busiest_ns(split) if step else self._work_ns(split))

    def near_fastest(
        self,
        non_pim_times: Sequence[NonPimTimes],
        group_costs: Collection[Split],
        grid_splits: Collection[Split],
    ) -> dict[Split, LayerPimCost]:
        """The fastest of `non_pim_times` that is in `grid_splits`, if it takes at most `NEAR` times
        the best of `group_costs`.
        """
        fastest_ns = min(
            self._total_ns(times, LAST_STEP) for times in non_pim_times if times.split in group_costs
        )
        limit_ns, fastest = NEAR * fastest_ns, dict[Split, LayerPimCost]()
        for times in non_pim_times:
            if times.split not in grid_splits or any(self._total_ns(times, n) > limit_ns for n in (0, 1)):
                continue
            if (total_ns := self._total_ns(times, LAST_STEP)) <= limit_ns:
                limit_ns, fastest = total_ns, {times.split: self.cost(times.split)}
        return fastest

    def best(self, non_pim_times: Sequence[NonPimTimes]) -> dict[Split, LayerPimCost]:
        """The fastest of `non_pim_times`, and the others that had to be timed to prove it.

        A best-first search by a lower bound of each split, which is raised step by step: the work of PIM, the
        time of its busiest channel, the time itself. The first split that comes up with its time is the
        fastest. Nothing is assumed about how times change from split to split.
        """
        costs: dict[Split, LayerPimCost] = {}
        queue = [(self._total_ns(times, 0), index, 0) for index, times in enumerate(non_pim_times)]
        heapq.heapify(queue)
        while queue:
            _, index, step = heapq.heappop(queue)
            if step == LAST_STEP:
                return costs
            times = non_pim_times[index]
            heapq.heappush(queue, (self._total_ns(times, step + 1), index, step + 1))
            if step + 1 == LAST_STEP:
                costs[times.split] = self.cost(times.split)
        return costs
