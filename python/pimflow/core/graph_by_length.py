"""The region graph of a decode step as a function of the number of tokens that it attends to."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

from pimflow.core.attention import Attention
from pimflow.core.region_graph import RegionGraph


@dataclass(frozen=True, kw_only=True)
class GraphByLength:
    """The regions of a decode step for any number of tokens, interpolated from two lengths.

    All sizes of a step are linear in the number of tokens that it attends to. Names and operators of regions
    do not depend on it.

    Attributes
    ----------
    longer, shorter : (int, RegionGraph)
        Number of tokens that a step attends to, and its regions.
    """

    places: int
    longer: tuple[int, RegionGraph]
    shorter: tuple[int, RegionGraph]

    def graph_of_length(self, tokens: int) -> RegionGraph:
        """The regions of a step over `tokens` tokens.

        Raises
        ------
        ValueError
            If sizes are not linear in the tokens.
        """
        for length, graph in (self.longer, self.shorter):
            if length == tokens:
                return graph
        if self.longer[0] == self.shorter[0]:
            raise ValueError("a graph of one length says nothing of others")
        interpolated = self._interpolate(self.longer[1], self.shorter[1], tokens)
        assert isinstance(interpolated, RegionGraph)
        return interpolated

    def _interpolate(self, longer: Any, shorter: Any, tokens: int) -> Any:
        if type(longer) is not type(shorter):
            raise ValueError(f"a size is {longer} over more tokens, {shorter} over fewer")
        if isinstance(longer, Attention):
            full_cache = self._interpolate_fields(longer.with_full_cache(), shorter.with_full_cache(), tokens)
            return (
                replace(full_cache, read=tokens % self.places) if longer.keys == shorter.keys else full_cache
            )
        if dataclasses.is_dataclass(longer):
            return self._interpolate_fields(longer, shorter, tokens)
        if isinstance(longer, tuple) and len(longer) == len(shorter):
            return tuple(self._interpolate(a, b, tokens) for a, b in zip(longer, shorter))
        if longer == shorter:
            return longer
        if type(longer) is int:
            rise, run = longer - shorter, self.longer[0] - self.shorter[0]
            step, remainder = divmod(rise * (tokens - self.shorter[0]), run)
            if not remainder:
                return shorter + step
        raise ValueError(f"a size is {longer} over more tokens, {shorter} over fewer: that is no line")

    def _interpolate_fields(self, longer: Any, shorter: Any, tokens: int) -> Any:
        values = {
            field.name: self._interpolate(getattr(longer, field.name), getattr(shorter, field.name), tokens)
            for field in dataclasses.fields(longer)
            if field.init
        }
        return replace(longer, **values)
