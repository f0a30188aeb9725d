"""Splits of a layer between GPU and PIM: a grid of candidates, or the best of all."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from pimflow.core.kernel import STORED_BYTES, ConvGeometry
from pimflow.core.liveness import ALIGNMENT_BYTES
from pimflow.core.loop_order import LoopOrder
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
    splits = [Split("rows", rows) for rows in sorted({round(share * geometry.oh) for share in SHARES})]
    return [split for split in splits if not split.obstacle(geometry)]


def all_splits(geometry: ConvGeometry, pim: PimSpec) -> list[Split]:
    """All splits along rows and along the batch, and the useful ones along channels and the reduction.

    Output channels are cut at multiples of PIM's tile, counted from either end; the reduction where the GPU
    reads aligned vectors of the layer's input.
    """
    line, tile = ALIGNMENT_BYTES // STORED_BYTES, pim.banks
    tiles = {extent for part in range(tile, geometry.oc, tile) for extent in (part, geometry.oc - part)}
    extents = {
        "rows": range(1, geometry.oh),
        "channels": sorted(tiles),
        "reduction": range(line, geometry.c, line),
        "batch": range(1, geometry.n),
    }
    splits = (Split(axis, gpu) for axis in AXES for gpu in extents[axis])
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
        Instead of `splits`: of each group with equal `deferred_epilogue` the best is found, and the best of
        the `grid` if it is nearly as fast (`NEAR`).
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
        splits, grid_splits = set(self.splits), frozenset(grid(self.geometry))
        for split in self.splits:
            timing.cost(split)
        for group in groups.values():
            fastest, *timed = timing.fastest(group)
            splits |= {times.split for times in (fastest, *timed)}
            limit_ns = NEAR * timing.total_ns(fastest)
            near = timing.fastest([times for times in group if times.split in grid_splits], limit_ns)
            splits |= {times.split for times in near[:1]}
        return LayerCosts(
            schedule=timing.schedule,
            splits=tuple(sorted(splits)),
            costs=(*timing.whole_costs, *timing.costs.items()),
            least_ns=tuple(timing.lower_bounds_ns.items()),
        )


class _SplitTiming:
    """Times of the splits of one layer, each computed once."""

    def __init__(self, layer: SplitLayer):
        self.layer, self.target, known = layer, layer.pim_target, layer.known
        if known is None:
            costs = self.target.whole_layer_costs(layer.geometry, layer.name)
            pairs = tuple((WHOLE, cost) for cost in costs)
            known = LayerCosts(schedule=costs[0].schedule, splits=(), costs=pairs)
        self.schedule, self.lower_bounds_ns = known.schedule, dict(known.least_ns)
        self.whole_costs = [(split, cost) for split, cost in known.costs if split == WHOLE]
        self.costs = {split: cost for split, cost in known.costs if split != WHOLE}

    def _order(self, split: Split) -> LoopOrder:
        return self.target.part_schedule(self.layer.geometry, self.layer.name, self.schedule, split)

    def cost(self, split: Split) -> LayerPimCost:
        """The cost of PIM's part."""
        if split not in self.costs:
            layer = self.layer
            self.costs[split] = self.target.cost(layer.geometry, self._order(split), layer.name, split)
        return self.costs[split]

    def _busiest_ns(self, split: Split) -> float:
        """A lower bound of PIM's part: the time of its busiest channel."""
        if split not in self.lower_bounds_ns:
            layer, order = self.layer, self._order(split)
            self.lower_bounds_ns[split] = self.target.busiest_ns(layer.geometry, order, layer.name, split)
        return self.lower_bounds_ns[split]

    def _work_ns(self, split: Split) -> float:
        """A lower bound of PIM's part: its least work over all channels."""
        target, geometry = self.target, self.layer.geometry
        part, begin = split.pim_part(geometry), split.pixel_begin(geometry)
        return min_work_ns(part, target.pim, target.dtype, target.channels, part.pixels - begin)

    def total_ns(self, times: NonPimTimes, step: int = LAST_STEP) -> float:
        """Time of a split; in steps 0 and 1 lower bounds of it, each slower to compute."""
        terms, split = self.layer.terms, times.split
        assert terms is not None, "splits are compared by the charges of their layer"
        if step == LAST_STEP:
            return terms.total_ns(times, self.cost(split))
        return terms.lower_bound_ns(times, self._busiest_ns(split) if step else self._work_ns(split))

    def fastest(self, non_pim_times: Sequence[NonPimTimes], limit_ns: float = math.inf) -> list[NonPimTimes]:
        """The fastest of some splits, and the others that had to be timed to prove it.

        None if all take longer than `limit_ns`. A best-first search by a lower bound of each split, which is
        raised step by step: the work of PIM, the time of its busiest channel, the time itself. The first
        split that comes up with its time is the fastest. Nothing is assumed about how times change from
        split to split.
        """
        timed: list[NonPimTimes] = []
        queue = [(self.total_ns(times, 0), index, 0) for index, times in enumerate(non_pim_times)]
        heapq.heapify(queue)
        while queue and queue[0][0] <= limit_ns:
            _, index, step = heapq.heappop(queue)
            times = non_pim_times[index]
            if step == LAST_STEP:
                return [times, *timed]
            heapq.heappush(queue, (self.total_ns(times, step + 1), index, step + 1))
            if step + 1 == LAST_STEP:
                timed.append(times)
        return []
