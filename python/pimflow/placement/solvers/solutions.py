"""What solvers find, kept with the profiles: to solve may take longer than to time layers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

from pimflow.core.candidate import CostTable
from pimflow.core.region import RegionGraph
from pimflow.host.result_cache import ResultCache
from pimflow.placement.solvers.plan_memory import MemoryLimit
from pimflow.placement.solvers.ways import Solution, Weights


class Solutions:
    """A cache of solutions for a network and its cost table.

    Parameters
    ----------
    graph, table
        A solution is reused only for the same candidates with the same tasks.
    cache : ResultCache, optional
        Without one nothing is kept.
    """

    def __init__(self, graph: RegionGraph, table: CostTable, cache: ResultCache | None = None):
        self.graph, self.table, self.cache = graph, table, cache

    @cached_property
    def _contents(self) -> str:
        """Digest of all that a solver reads."""
        table = (self.table.candidates, self.table.settle, self.table.absorb)
        if self.table.transforms or self.table.switch.task:
            table = (*table, self.table.transforms, self.table.switch)
        if self.table.launched_ahead:
            table = (*table, "launched ahead")
        return hashlib.sha256(repr((self.graph, table)).encode()).hexdigest()

    def solved(
        self,
        solver: str,
        weights: Weights,
        solve: Callable[[], Solution | None],
        limit: MemoryLimit | None = None,
    ) -> Solution | None:
        """The solver's cached solution for `weights` under a limit, else what `solve` gives, then cached."""
        if self.cache is None:
            return solve()
        within = limit and (limit.at_most, limit.memory.dtype)
        key = ("solution", solver, self._contents, weights, within)
        kept = self.cache.get([key], read=self._stored_solution).get(key)
        if kept is not None:
            return kept
        solution = solve()
        if solution is None:
            return None
        chosen = [(candidate.covers[0], candidate.name) for candidate in solution.candidates]
        figures = {"latency_ns": solution.latency_ns, "value": solution.value, "bound": solution.bound}
        self.cache.put({key: {"chosen": chosen, **figures}})
        return solution

    def _stored_solution(self, plain: Any) -> Solution:
        """The solution that was kept; raises an error if it is none of this table."""
        candidates = tuple(
            next(c for c in self.table.candidates[region] if c.name == name)
            for region, name in plain["chosen"]
        )
        covered = [region for candidate in candidates for region in candidate.covers]
        if sorted(covered) != sorted(region.name for region in self.graph.regions):
            raise ValueError("not a cover of the regions")
        figures = {name: plain[name] for name in ("latency_ns", "value", "bound")}
        if not all(type(figure) in (int, float) for figure in figures.values()):
            raise TypeError("figures that are no numbers")
        if not 0 <= figures["latency_ns"] < math.inf or not math.isfinite(figures["value"]):
            raise ValueError("figures that cannot be")
        return Solution(candidates=candidates, **figures)
