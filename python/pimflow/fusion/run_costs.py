"""Costs of groups of layers with their best tiling: runs of the layer order, and other sets on request."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pimflow.fusion.accelerator import Accelerator
from pimflow.fusion.channels import SUM_BYTES, ChannelRun, fitting_runs
from pimflow.fusion.group import Group
from pimflow.fusion.growing import MAX_LAYERS, Growing
from pimflow.fusion.layers import LayerGraph
from pimflow.fusion.tiling import GroupTiling
from pimflow.fusion.tiling_candidates import TilingCandidates


@dataclass(frozen=True, kw_only=True)
class Costed:
    """The best group of some layers, and its cost.

    Attributes
    ----------
    positions : tuple of int
        Positions of its layers in the graph, ascending.
    channel_runs : tuple of ChannelRun
        See `Group`.
    objective : float
        Value that the search minimises; see `Objective`.
    bound_elements : int
        Lower bound on the elements that its tiles take on chip.
    """

    positions: tuple[int, ...]
    objective: float
    tiling: GroupTiling = field(default_factory=GroupTiling)
    resident: frozenset[str] = frozenset()
    channel_runs: tuple[ChannelRun, ...] = ()
    bound_elements: int = 0

    def group(self, graph: LayerGraph, reuse: str, begin: int) -> Group:
        """The group in a graph where its layers begin at `begin`."""
        return Group(
            graph=graph,
            begin=begin,
            end=begin + len(self.positions),
            tiling=self.tiling,
            reuse=reuse,
            resident=self.resident,
            channel_runs=self.channel_runs,
        )


class Objective:
    """Objective of the search: ``traffic`` in bytes, overlapped ``time`` in ns, or ``energy`` in pJ."""

    def __init__(self, accelerator: Accelerator, kind: str) -> None:
        self.accelerator, self.kind = accelerator, kind
        self.capacity_elements = accelerator.on_chip_bytes // accelerator.element_bytes

    def of(self, traffic_elements: np.ndarray, operations: np.ndarray) -> np.ndarray:
        """Values of the objective for traffic and operations of groups."""
        traffic_bytes = traffic_elements * self.accelerator.element_bytes
        if self.kind == "energy":
            return self.accelerator.energy_pj(traffic_bytes, operations)
        return traffic_bytes if self.kind == "traffic" else self.time_ns(traffic_elements, operations)

    def time_ns(self, traffic_elements: np.ndarray, operations: np.ndarray) -> np.ndarray:
        """Times of groups whose traffic and arithmetic overlap."""
        moving = self.accelerator.memory_ns(traffic_elements * self.accelerator.element_bytes)
        return np.maximum(moving, self.accelerator.compute_ns(operations))


class RunCosts:
    """The best group of every run of layers, computed when first needed, and of other sets.

    A group is profitable if it is no slower than its single layers.

    Parameters
    ----------
    progress : callable
        Called with the share of the runs that is done.
    """

    def __init__(
        self,
        graph: LayerGraph,
        objective: Objective,
        reuse: str,
        halo: str,
        progress: Callable[[float], None],
    ) -> None:
        self.graph, self.objective, self.reuse, self.progress = graph, objective, reuse, progress
        self.candidates = TilingCandidates.of(graph, halo)
        # by layers, the smallest bound that could not be placed: only smaller ones are tried
        self._refused: dict[tuple[int, ...], int] = {}
        self._refused_untiled: set[tuple[int, ...]] = set()
        alone = [(graph.moved_elements(layer), layer.operations) for layer in graph.layers]
        self.alone = [
            Costed(positions=(position,), objective=float(objective.of(*each)))
            for position, each in enumerate(alone)
        ]
        self._alone_ns = [float(objective.time_ns(*each)) for each in alone]
        self._columns: dict[int, list[Costed | None]] = {}

    def __len__(self) -> int:
        return len(self.graph.layers)

    def ending(self, end: int) -> list[Costed | None]:
        """Runs that end before layer `end`, shortest first; None for unprofitable ones."""
        if end not in self._columns:
            growing, column = self.growing(), []
            while len(column) < min(end, MAX_LAYERS):
                fits, best = self.grown(growing, [end - 1 - len(column)])
                if not fits:
                    break
                column.append(best)
            self._columns[end] = column
            self.progress(len(self._columns) / len(self))
        return self._columns[end]

    def run(self, begin: int, end: int) -> Costed | None:
        """The group of layers ``[begin, end)``; None if it is unprofitable or does not fit."""
        column = self.ending(end)
        return column[end - begin - 1] if end - begin <= len(column) else None

    def growing(self) -> Growing:
        """A group without layers, which can grow."""
        return Growing(self.graph, self.candidates, self.reuse)

    def grown(self, growing: Growing, positions: Iterable[int]) -> tuple[bool, Costed | None]:
        """Grow a group by layers, the last first: whether a tiling fits, and the group if profitable."""
        for position in positions:
            growing.grow(position)
        key = tuple(reversed(growing.positions))
        if len(key) == 1:
            return True, self.alone[key[0]]
        capacity = self.objective.capacity_elements
        resident, streamed = growing.memory()
        bound = np.minimum(resident, streamed)
        possible = growing.allowed & (bound <= capacity)
        if not possible.any():
            return False, None
        possible &= bound < self._refused.get(key, capacity + 1)
        best = self._best(growing, key, np.flatnonzero(possible), resident, streamed)
        return True, self._by_channel(growing, key, best) or best

    def of(self, positions: Sequence[int]) -> Costed | None:
        """The group of any layers, in their order; None if it is unprofitable or does not fit."""
        return self.grown(self.growing(), reversed(positions))[1]

    def refuse(self, groups: Iterable[Costed]) -> None:
        """Exclude these groups: their layers get only tilings that take less memory from now on."""
        for each in groups:
            if each.channel_runs:
                self._refused_untiled.add(each.positions)
            else:
                self._refused[each.positions] = each.bound_elements
            self._columns.pop(each.positions[-1] + 1, None)

    def refuses(self, costed: Costed) -> bool:
        """Whether this tiling, or one that takes less memory, is excluded because it could not be placed."""
        if costed.channel_runs:
            return costed.positions in self._refused_untiled
        return costed.bound_elements >= self._refused.get(costed.positions, math.inf)

    def _by_channel(self, growing: Growing, positions: tuple[int, ...], best: Costed | None) -> Costed | None:
        """The group with untiled maps and channel runs, if it fits and is better than `best`; else None."""
        objective = self.objective
        moved = growing.moved[0] + sum(loaded[0] for loaded in growing.outside.values())
        moved += sum(size for size, _ in growing.weights)
        value = float(objective.of(moved, growing.operations[0]))
        pays = objective.time_ns(moved, growing.operations[0]) <= sum(self._alone_ns[p] for p in positions)
        wanted = growing.untiled and self.reuse != "none" and pays
        if not wanted or (best and best.objective <= value):
            return None
        fitting = fitting_runs(
            [self.graph.layers[position] for position in positions],
            {name: int(tile.elements[0]) for name, tile in growing.tiles.items()},
            lambda name: self.graph.shapes[name][3],
            objective.capacity_elements,
            objective.accelerator.element_bytes >= SUM_BYTES,
        )
        growing.untiled = fitting is not None  # does not change with more layers
        if fitting is None or not fitting[0] or positions in self._refused_untiled:
            return None
        runs, bound = fitting
        return Costed(positions=positions, objective=value, channel_runs=runs, bound_elements=bound)

    def _best(
        self,
        growing: Growing,
        positions: tuple[int, ...],
        at: np.ndarray,
        resident: np.ndarray,
        streamed: np.ndarray,
    ) -> Costed | None:
        """The best of the tilings `at`, which fit, and the layers whose weights stay on chip."""
        objective, alone_ns = self.objective, sum(self._alone_ns[position] for position in positions)
        moved = (growing.moved + sum(growing.outside.values()))[at]
        moved = moved + sum(size for size, _ in growing.weights)
        operations = growing.operations[at]
        left = sum(size for size, _ in growing.weights)
        tiles, room = growing.candidates.tiles[at], objective.capacity_elements - streamed[at]
        whole = (resident[at] <= objective.capacity_elements) | (self.reuse == "none")
        # lower bounds of all tilings, and the values of tilings that load weights once
        values = objective.of(moved, operations)
        values = np.where(objective.time_ns(moved, operations) <= alone_ns, values, np.inf)
        once = values[whole | (tiles == 1) | (room >= left)]
        able = np.isfinite(values) & (values <= once.min(initial=np.inf))
        if not able.any():
            return None
        at, moved, operations, tiles, room, whole = (
            x[able] for x in (at, moved, operations, tiles, room, whole)
        )
        kept = []
        for size, _ in growing.weights:
            if (room >= left).all():  # all remaining weights fit together
                break
            left -= size
            stays = whole | ((size <= room) & (tiles > 1))
            room = room - size * (stays & ~whole)
            moved = moved + size * (tiles - 1) * ~stays
            kept.append(stays)
        values = objective.of(moved, operations)
        values = np.where(objective.time_ns(moved, operations) <= alone_ns, values, np.inf)
        best = np.lexsort((tiles, operations, values))[0]
        if not np.isfinite(values[best]):
            return None
        held = [name for i, (_, name) in enumerate(growing.weights) if i >= len(kept) or kept[i][best]]
        return Costed(
            positions=positions,
            objective=float(values[best]),
            tiling=growing.candidates.tiling(at[best]),
            resident=frozenset(held),
            bound_elements=int(min(resident[at[best]], streamed[at[best]])),
        )
