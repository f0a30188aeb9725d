"""How much of the GPU's memory a plan takes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from pimflow.core.candidate import Candidate, CostTable
from pimflow.core.region import RegionGraph
from pimflow.placement.solvers.ilp import Bound


@dataclass(frozen=True)
class PlanMemory:
    """Of plans of one network: the most that is live at once.

    Weights that the GPU reads, in the form in which it reads them, over the whole inference; tensors between
    regions while they are needed; the workspaces of a candidate while it runs. What PIM reads lies in its own
    channels. Regions count one after the other, in their order, and a tensor inside a fused kernel counts
    although it is not there: the planner needs no less than this only where neither matters.
    """

    graph: RegionGraph
    dtype: str

    @functools.cached_property
    def live_bytes(self) -> list[int]:
        """By region, of tensors while it runs."""
        found = self.graph.liveness(self.dtype)
        return [found.live_bytes(step) for step in range(found.steps)]

    @functools.cached_property
    def _order(self) -> dict[str, int]:
        return {region.name: position for position, region in enumerate(self.graph.regions)}

    def of(self, candidates: Sequence[Candidate]) -> int:
        """In bytes, of a plan of `candidates`."""
        most = max(
            self.live_bytes[self._order[name]] + candidate.workspace_bytes
            for candidate in candidates
            for name in candidate.covers
        )
        return most + sum(candidate.filter_bytes for candidate in candidates)

    def bounds(self, table: CostTable, at_most: float) -> list[Bound]:
        """Rows that hold for the plans that take at most so much, and for no others."""
        working = {
            name
            for candidates in table.candidates.values()
            for candidate in candidates
            if candidate.workspace_bytes
            for name in candidate.covers
        }
        quiet = [r.name for r in self.graph.regions if r.name not in working]
        # Where nothing has a workspace, the moment with most live bytes stands for all.
        fullest = max(quiet, key=lambda name: self.live_bytes[self._order[name]], default=None)
        moments = sorted({*working, *([fullest] if fullest else [])}, key=self._order.__getitem__)

        def held(name: str, candidate: Candidate) -> int:
            return candidate.filter_bytes + (candidate.workspace_bytes if name in candidate.covers else 0)

        return [
            Bound(
                at_most=max(at_most - self.live_bytes[self._order[name]], 1.0),
                of=functools.partial(held, name),
            )
            for name in moments
        ]

    def least(self, table: CostTable) -> int:
        """In bytes, of the plan of single regions that holds the fewest weights, and then workspaces."""

        def held(candidate: Candidate) -> tuple[int, int]:
            return candidate.filter_bytes, candidate.workspace_bytes

        return self.of(
            [min((c for c in found if len(c.covers) == 1), key=held) for found in table.candidates.values()]
        )
