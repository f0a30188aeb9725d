"""GPU memory that a plan takes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

from pimflow.core.candidate import Candidate, CostTable
from pimflow.core.liveness import Liveness
from pimflow.core.region import RegionGraph
from pimflow.placement.solvers.ilp import Bound

Span = tuple[int, int]


@dataclass(frozen=True)
class PlanMemory:
    """The peak memory of plans of one network: the most bytes that are live at once.

    Weights that the GPU reads, in the form in which it reads them, over the whole inference; tensors between
    regions while they are needed; the workspaces of a candidate while it runs. What PIM reads lies in its own
    channels. Regions count one after the other, in their order. Those that are one kernel count as one: what
    they read and their result are live at once, and what they pass to one another is never made.
    """

    graph: RegionGraph
    dtype: str
    _known: dict[Span, int] = field(default_factory=dict, repr=False, compare=False)

    @functools.cached_property
    def _liveness(self) -> Liveness:
        return self.graph.liveness(self.dtype)

    @functools.cached_property
    def _order(self) -> dict[str, int]:
        return {region.name: position for position, region in enumerate(self.graph.regions)}

    def _span_bytes(self, begin: int, count: int) -> int:
        """Bytes of live tensors while `count` regions run as one kernel."""
        if (begin, count) not in self._known:
            inside = [region.name for region in self.graph.regions[begin : begin + count - 1]]
            self._known[begin, count] = self._liveness.span_bytes(begin, begin + count, inside)
        return self._known[begin, count]

    def running_bytes(self, name: str, candidate: Candidate) -> int:
        """Bytes of live tensors and workspaces while `candidate` does region `name`."""
        if candidate.fuses_regions:
            return self._span_bytes(self._order[candidate.covers[0]], len(candidate.covers))
        return self._span_bytes(self._order[name], 1) + candidate.workspace_bytes

    def of(self, candidates: Sequence[Candidate]) -> int:
        """Peak memory of a plan of `candidates` in bytes."""
        most = max(
            self.running_bytes(name, candidate) for candidate in candidates for name in candidate.covers
        )
        return most + sum(candidate.filter_bytes for candidate in candidates)

    def bounds(self, table: CostTable, at_most: float) -> list[Bound]:
        """Rows that hold for the plans that take at most so much, and for no others: one a region."""
        running: dict[str, list[int]] = {region.name: [] for region in self.graph.regions}
        for candidates in table.candidates.values():
            for candidate in candidates:
                for name in candidate.covers:
                    running[name].append(self.running_bytes(name, candidate))
        # Whatever is chosen takes so much in the fullest of them: its row stands for those that never do.
        fullest = max(running, key=lambda name: min(running[name]))
        floor = min(running[fullest])

        def held(name: str, candidate: Candidate) -> int:
            runs = self.running_bytes(name, candidate) if name in candidate.covers else 0
            return candidate.filter_bytes + runs

        return [
            Bound(at_most=at_most, of=functools.partial(held, name))
            for name, demands in running.items()
            if name == fullest or max(demands) > floor
        ]

    def least(self, table: CostTable) -> int:
        """In bytes, of the plan that takes the fewest: no plan of these candidates takes less.

        By the most that may be live while a region runs, the fewest weights of a cover that keeps to it.
        """
        order, count = self._order, len(self.graph.regions)
        begins: list[dict[tuple[int, int, str, str], int]] = [{} for _ in range(count)]
        for name, candidates in table.candidates.items():
            for candidate in candidates:
                runs = max(self.running_bytes(each, candidate) for each in candidate.covers)
                behind = order[name] + len(candidate.covers)
                key = (behind, runs, candidate.goes_on_with, candidate.leaves_open)
                known = begins[order[name]].get(key, candidate.filter_bytes)
                begins[order[name]][key] = min(known, candidate.filter_bytes)
        best = float("inf")
        for most in sorted({runs for ends in begins for _, runs, *_ in ends}):
            if most >= best:
                break
            weights: list[dict[str, float]] = [{"": 0.0}, *({} for _ in range(count))]  # by what is open
            for begin, ends in enumerate(begins):
                for (end, runs, taken, left), filter_bytes in ends.items():
                    if runs <= most and taken in weights[begin]:
                        so_far = weights[begin][taken] + filter_bytes
                        weights[end][left] = min(weights[end].get(left, so_far), so_far)
            best = min(best, most + weights[-1].get("", float("inf")))
        return int(best)
