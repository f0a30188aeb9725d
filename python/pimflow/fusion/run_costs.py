"""Costs of groups of layers with their best tiling: runs of the layer order, and other sets on request."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pimflow.fusion.accelerator import Accelerator
from pimflow.fusion.channels import SUM_BYTES, ChannelRun, fitting_runs
from pimflow.fusion.group import Group, Reuse
from pimflow.fusion.growing import MAX_LAYERS, GrowingGroup
from pimflow.fusion.layers import LayerGraph
from pimflow.fusion.tiling import GroupTiling
from pimflow.fusion.tiling_candidates import Halo, TilingCandidates


@dataclass(frozen=True, kw_only=True)
class CostedGroup:
    """The best group of some layers, and its cost.

    Attributes
    ----------
    positions : tuple of int
        Positions of its layers in the graph, ascending.
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

    def group(self, graph: LayerGraph, reuse: Reuse, begin: int) -> Group:
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

    def values(self, traffic_elements: np.ndarray, operations: np.ndarray) -> np.ndarray:
        """Values of the objective for traffic and operations of groups."""
        traffic_bytes = traffic_elements * self.accelerator.element_bytes
        if self.kind == "energy":
            return self.accelerator.energy_pj(traffic_bytes, operations)
        return traffic_bytes if self.kind == "traffic" else self.time_ns(traffic_elements, operations)

    def values_within(
        self, limit_ns: float, traffic_elements: np.ndarray, operations: np.ndarray
    ) -> np.ndarray:
        """`values`, infinite for groups that take longer than `limit_ns`."""
        values = self.values(traffic_elements, operations)
        return np.where(self.time_ns(traffic_elements, operations) <= limit_ns, values, np.inf)

    def time_ns(self, traffic_elements: np.ndarray, operations: np.ndarray) -> np.ndarray:
        """Times of groups whose traffic and arithmetic overlap."""
        moving = self.accelerator.memory_ns(traffic_elements * self.accelerator.element_bytes)
        return np.maximum(moving, self.accelerator.compute_ns(operations))


class RunCosts:
    """The best group of every run of layers, computed when first needed, and of other sets.

    A group is profitable if it is no slower than its single layers.
    """

    def __init__(
        self,
        graph: LayerGraph,
        objective: Objective,
        reuse: Reuse,
        halo: Halo,
        progress: Callable[[float], None],
    ) -> None:
        self.graph, self.objective, self.reuse, self.progress = graph, objective, reuse, progress
        self.candidates = TilingCandidates.from_graph(graph, halo)
        # by layers, the smallest bound that could not be placed: only smaller ones are tried
        self._infeasible_bounds: dict[tuple[int, ...], int] = {}
        self._infeasible_untiled: set[tuple[int, ...]] = set()
        layer_costs = [(graph.traffic_elements(layer), layer.operations) for layer in graph.layers]
        self.single_layers = [
            CostedGroup(positions=(position,), objective=float(objective.values(*map(np.asarray, cost))))
            for position, cost in enumerate(layer_costs)
        ]
        self._layer_ns = [float(objective.time_ns(*map(np.asarray, cost))) for cost in layer_costs]
        self._columns: dict[int, list[CostedGroup | None]] = {}

    def __len__(self) -> int:
        return len(self.graph.layers)

    def runs_ending_at(self, end: int) -> list[CostedGroup | None]:
        """Runs that end before layer `end`, shortest first; None for unprofitable ones."""
        if end not in self._columns:
            growing = self.empty_group()
            column: list[CostedGroup | None] = []
            while len(column) < min(end, MAX_LAYERS):
                fits, best = self.grow(growing, [end - 1 - len(column)])
                if not fits:
                    break
                column.append(best)
            self._columns[end] = column
            self.progress(len(self._columns) / len(self))
        return self._columns[end]

    def run(self, begin: int, end: int) -> CostedGroup | None:
        """The group of layers ``[begin, end)``; None if it is unprofitable or does not fit."""
        column = self.runs_ending_at(end)
        return column[end - begin - 1] if end - begin <= len(column) else None

    def empty_group(self) -> GrowingGroup:
        """A group without layers, which can grow."""
        return GrowingGroup(self.graph, self.candidates, self.reuse)

    def grow(self, growing: GrowingGroup, positions: Iterable[int]) -> tuple[bool, CostedGroup | None]:
        """Grow a group by layers, the last first: whether a tiling fits, and the group if profitable."""
        for position in positions:
            growing.grow(position)
        key = tuple(reversed(growing.positions))
        if len(key) == 1:
            return True, self.single_layers[key[0]]
        capacity = self.objective.capacity_elements
        resident, streamed = growing.memory()
        bound = np.minimum(resident, streamed)
        possible = growing.allowed & (bound <= capacity)
        if not possible.any():
            return False, None
        possible &= bound < self._infeasible_bounds.get(key, capacity + 1)
        best = self._best_tiling(growing, key, np.flatnonzero(possible), resident, streamed)
        return True, self._channel_run_group(growing, key, best) or best

    def best_group(self, positions: Sequence[int]) -> CostedGroup | None:
        """The group of any layers, in their order; None if it is unprofitable or does not fit."""
        return self.grow(self.empty_group(), reversed(positions))[1]

    def exclude(self, groups: Iterable[CostedGroup]) -> None:
        """Exclude these groups: their layers get only tilings that take less memory from now on."""
        for group in groups:
            if group.channel_runs:
                self._infeasible_untiled.add(group.positions)
            else:
                self._infeasible_bounds[group.positions] = group.bound_elements
            self._columns.pop(group.positions[-1] + 1, None)

    def is_excluded(self, group: CostedGroup) -> bool:
        """Whether this tiling, or one that takes less memory, is excluded because it could not be placed."""
        if group.channel_runs:
            return group.positions in self._infeasible_untiled
        return group.bound_elements >= self._infeasible_bounds.get(group.positions, math.inf)

    def _channel_run_group(
        self, growing: GrowingGroup, positions: tuple[int, ...], best: CostedGroup | None
    ) -> CostedGroup | None:
        """The group with untiled maps and channel runs, if it fits and is better than `best`; else None."""
        objective = self.objective
        moved_elements = growing.store_elements[0] + sum(
            loaded[0] for loaded in growing.load_elements.values()
        )
        moved_elements += sum(size for size, _ in growing.weights)
        value = float(objective.values(moved_elements, growing.operations[0]))
        pays = objective.time_ns(moved_elements, growing.operations[0]) <= sum(
            self._layer_ns[p] for p in positions
        )
        is_tried = growing.may_fit_untiled and self.reuse != "none" and pays
        if not is_tried or (best and best.objective <= value):
            return None
        fitting = fitting_runs(
            [self.graph.layers[position] for position in positions],
            {name: int(tile.elements[0]) for name, tile in growing.tiles.items()},
            lambda name: self.graph.shapes[name][3],
            objective.capacity_elements,
            objective.accelerator.element_bytes >= SUM_BYTES,
        )
        growing.may_fit_untiled = fitting is not None  # does not change with more layers
        if fitting is None or not fitting[0] or positions in self._infeasible_untiled:
            return None
        runs, bound = fitting
        return CostedGroup(positions=positions, objective=value, channel_runs=runs, bound_elements=bound)

    def _best_tiling(
        self,
        growing: GrowingGroup,
        positions: tuple[int, ...],
        indices: np.ndarray,
        resident: np.ndarray,
        streamed: np.ndarray,
    ) -> CostedGroup | None:
        """The best of the tilings `indices`, which fit, and the layers whose weights stay on chip."""
        objective, layers_ns = self.objective, sum(self._layer_ns[position] for position in positions)
        moved_elements = (growing.store_elements + sum(growing.load_elements.values()))[indices]
        remaining_weights = sum(size for size, _ in growing.weights)
        moved_elements, operations = moved_elements + remaining_weights, growing.operations[indices]
        tiles = growing.candidates.tiles[indices]
        free_elements = objective.capacity_elements - streamed[indices]
        fits_all_weights = (resident[indices] <= objective.capacity_elements) | (self.reuse == "none")
        # lower bounds of all tilings, and the values of tilings that load weights once
        values = objective.values_within(layers_ns, moved_elements, operations)
        once = values[fits_all_weights | (tiles == 1) | (free_elements >= remaining_weights)]
        feasible = np.isfinite(values) & (values <= once.min(initial=np.inf))
        if not feasible.any():
            return None
        indices, moved_elements, operations, tiles, free_elements, fits_all_weights = (
            x[feasible] for x in (indices, moved_elements, operations, tiles, free_elements, fits_all_weights)
        )
        resident_masks = []
        for size, _ in growing.weights:
            if (free_elements >= remaining_weights).all():  # all remaining weights fit together
                break
            remaining_weights -= size
            stays = fits_all_weights | ((size <= free_elements) & (tiles > 1))
            free_elements = free_elements - size * (stays & ~fits_all_weights)
            moved_elements = moved_elements + size * (tiles - 1) * ~stays
            resident_masks.append(stays)
        values = objective.values_within(layers_ns, moved_elements, operations)
        best = np.lexsort((tiles, operations, values))[0]
        if not np.isfinite(values[best]):
            return None
        resident_names = [
            name
            for i, (_, name) in enumerate(growing.weights)
            if i >= len(resident_masks) or resident_masks[i][best]
        ]
        return CostedGroup(
            positions=positions,
            objective=float(values[best]),
            tiling=growing.candidates.tiling(indices[best]),
            resident=frozenset(resident_names),
            bound_elements=int(min(resident[indices[best]], streamed[indices[best]])),
        )
