"""Splits of a layer between GPU and PIM: a grid of candidates, or the best of all."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pimflow.core.liveness import ALIGNMENT_BYTES
from pimflow.core.region import STORED_BYTES, ConvGeometry
from pimflow.core.split import AXES, WHOLE, Split
from pimflow.hardware import PimSpec
from pimflow.pim_backend.programs.schedule import Schedule
from pimflow.placement.costs.pim_runs import PimCost, PimSide
from pimflow.simulators.pim.bound import least_work_ns

SHARES = tuple(tenth / 10 for tenth in range(1, 10))
# Beside the fastest split of a layer, the fastest of the grid is a candidate too, if it takes at most this
# many times as long: neighbouring layers decide. More splits of the grid gave no network a faster plan.
NEAR = 1.1


def grid(geometry: ConvGeometry) -> list[Split]:
    """Splits along rows in steps of a tenth (PIMFlow, "Execution Mode and Task Size Search")."""
    tried = sorted({round(share * geometry.oh) for share in SHARES})
    return _possible(geometry, [Split("rows", rows) for rows in tried])


def every(geometry: ConvGeometry, pim: PimSpec) -> list[Split]:
    """All splits along rows and along the batch, and the useful ones along channels and the reduction.

    Output channels are cut at multiples of PIM's tile, counted from either end; the reduction where the GPU
    reads aligned vectors of the layer's input.
    """
    return list(_every(geometry, pim.banks))


# Cached: every search of a network asks for the same layers.
@functools.lru_cache(maxsize=1 << 12)
def _every(geometry: ConvGeometry, tile: int) -> tuple[Split, ...]:
    line = ALIGNMENT_BYTES // STORED_BYTES
    tiles = {extent for part in range(tile, geometry.oc, tile) for extent in (part, geometry.oc - part)}
    extents = {
        "rows": range(1, geometry.oh),
        "channels": sorted(tiles),
        "reduction": range(line, geometry.c, line),
        "batch": range(1, geometry.n),
    }
    return tuple(_possible(geometry, [Split(axis, gpu) for axis in AXES for gpu in extents[axis]]))


def _possible(geometry: ConvGeometry, splits: Sequence[Split]) -> list[Split]:
    return [split for split in splits if not split.obstacle(geometry)]


@dataclass(frozen=True, kw_only=True)
class Beside:
    """The times of all parts of a split but PIM's.

    Attributes
    ----------
    split : Split
    gpu_ns : float
        The GPU's part, which runs at the same time as PIM's.
    crossbar_ns : float
        The GPU's traffic over the crossbar, which PIM uses too.
    after_ns : float
        What follows both parts and depends on the split.
    pending : tuple of str
        The deferred epilogue (`Split.pending`).
    """

    split: Split
    gpu_ns: float
    crossbar_ns: float
    after_ns: float
    pending: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The charges of a PIM program besides its own time.

    Attributes
    ----------
    launch_ns : float
    burst_ns : float
        Time of a column-sized burst over the crossbar; 0 if that is not charged.
    """

    launch_ns: float
    burst_ns: float

    def total_ns(self, beside: Beside, run: PimCost) -> float:
        """Time of a split: both parts and the crossbar in parallel, then what follows."""
        crossbar_ns = run.traffic_bursts * self.burst_ns + beside.crossbar_ns
        pim_ns = max(self.launch_ns, run.ahead_ns) + run.time_ns
        return max(beside.gpu_ns, pim_ns, crossbar_ns) + beside.after_ns

    def least_ns(self, beside: Beside, pim_ns: float) -> float:
        """A lower bound of `total_ns`, if `pim_ns` is one of PIM's part."""
        return max(beside.gpu_ns, self.launch_ns + pim_ns, beside.crossbar_ns) + beside.after_ns


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """The costs of a layer on PIM.

    Attributes
    ----------
    schedule : str
        The fastest loop order for the whole layer.
    splits : tuple of Split
        Those that are candidates.
    costs : tuple of (Split, PimCost)
        A split may occur several times, with different loop orders.
    least_ns : tuple of (Split, float)
        Lower bounds of the time of PIM's part.
    """

    schedule: str
    splits: tuple[Split, ...]
    costs: tuple[tuple[Split, PimCost], ...]
    least_ns: tuple[tuple[Split, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class SplitLayer:
    """A layer to be timed on PIM.

    Attributes
    ----------
    side : PimSide
    geometry : ConvGeometry
    name : str
        A region that is this layer.
    splits : tuple of Split
        The splits to time.
    besides : tuple of Beside
        Instead of `splits`: of each group of splits with equal `pending` the best is found, and the best of
        the `grid` if it is nearly as fast (`NEAR`).
    terms : Terms, optional
        The charges by which splits are compared.
    known : LayerCosts, optional
        Earlier results for the same layer with other splits or terms.
    """

    side: PimSide
    geometry: ConvGeometry
    name: str
    splits: tuple[Split, ...] = ()
    besides: tuple[Beside, ...] = ()
    terms: Terms | None = None
    known: LayerCosts | None = None

    @property
    def key(self) -> tuple:
        """The cache key of its costs."""
        return ("layer", self.side.identity, self.geometry, self.splits, self.besides, self.terms)

    def costs(self) -> LayerCosts:
        """Time the whole layer and its splits."""
        timing = _Timing(self)
        groups: dict[tuple[str, ...], list[Beside]] = {}
        for beside in self.besides:
            groups.setdefault(beside.pending, []).append(beside)
        costs = {split: timing.cost(split) for split in self.splits}
        steps = frozenset(grid(self.geometry))
        for alike in groups.values():
            timed = timing.best(alike)
            costs |= timed | timing.near(alike, timed, steps)
        return LayerCosts(
            schedule=timing.schedule,
            splits=tuple(sorted(costs)),
            costs=(*timing.whole, *((split, cost) for split, cost in timing.costs.items() if split != WHOLE)),
            least_ns=tuple(timing.least_ns.items()),
        )


class _Timing:
    """Times of the splits of one layer, each computed once."""

    def __init__(self, layer: SplitLayer):
        self.layer, known = layer, layer.known
        if known:
            self.whole = [(split, cost) for split, cost in known.costs if split == WHOLE]
        else:
            self.whole = [(WHOLE, cost) for cost in layer.side.whole(layer.geometry, layer.name)]
        self.schedule = known.schedule if known else self.whole[0][1].schedule
        self.costs = {split: cost for split, cost in known.costs if split != WHOLE} if known else {}
        self.least_ns = dict(known.least_ns) if known else {}

    def _order(self, split: Split) -> Schedule:
        layer = self.layer
        return layer.side.order(layer.geometry, layer.name, self.schedule, split)

    def cost(self, split: Split) -> PimCost:
        """The cost of PIM's part."""
        if split not in self.costs:
            layer, order = self.layer, self._order(split)
            self.costs[split] = layer.side.cost(layer.geometry, order, layer.name, split)
        return self.costs[split]

    def busiest_ns(self, split: Split) -> float:
        """A lower bound of PIM's part: the time of its busiest channel."""
        if split not in self.least_ns:
            layer, order = self.layer, self._order(split)
            self.least_ns[split] = layer.side.busiest_ns(layer.geometry, order, layer.name, split)
        return self.least_ns[split]

    def _work_ns(self, split: Split) -> float:
        """A lower bound of PIM's part: its least work over all channels."""
        side, geometry = self.layer.side, self.layer.geometry
        part, begin = split.pim_part(geometry), split.pixel_begin(geometry)
        return least_work_ns(part, side.pim, side.dtype, side.channels, part.pixels - begin)

    def near(
        self, besides: Sequence[Beside], timed: Mapping[Split, PimCost], among: Collection[Split]
    ) -> dict[Split, PimCost]:
        """The fastest of `besides` that is in `among`, if it takes at most `NEAR` times the best `timed`."""
        terms = self.layer.terms
        fastest_ns = min(terms.total_ns(each, timed[each.split]) for each in besides if each.split in timed)
        limit_ns, near = NEAR * fastest_ns, {}
        for beside in besides:
            split = beside.split
            if split not in among or terms.least_ns(beside, self._work_ns(split)) > limit_ns:
                continue
            if terms.least_ns(beside, self.busiest_ns(split)) > limit_ns:
                continue
            cost = self.cost(split)
            if (total_ns := terms.total_ns(beside, cost)) <= limit_ns:
                limit_ns, near = total_ns, {split: cost}
        return near

    def best(self, besides: Sequence[Beside]) -> dict[Split, PimCost]:
        """The fastest of `besides`, and the others that had to be timed to prove it.

        A best-first search by a lower bound of each split, which is raised step by step: the work of PIM, the
        time of its busiest channel, the time itself. The first split that comes up with its time is the
        fastest. Nothing is assumed about how times change from split to split.
        """
        terms = self.layer.terms
        queue, timed = [], {}
        for index, beside in enumerate(besides):
            queue.append((terms.least_ns(beside, self._work_ns(beside.split)), index, "work"))
        heapq.heapify(queue)
        while queue:
            _, index, known_by = heapq.heappop(queue)
            beside = besides[index]
            if known_by == "time":
                return timed
            if known_by == "work":
                bound_ns = terms.least_ns(beside, self.busiest_ns(beside.split))
                heapq.heappush(queue, (bound_ns, index, "channel"))
            else:
                timed[beside.split] = self.cost(beside.split)
                heapq.heappush(queue, (terms.total_ns(beside, timed[beside.split]), index, "time"))
        return timed
