"""The step of one token: compiled once for all lengths, and charged by the tokens that it attends to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import numpy as np
import onnx

from pimflow.api.decoding import Lengths, Step, compiled_step, placed_step, regions_of
from pimflow.api.search import Question
from pimflow.core.graph_by_length import GraphByLength
from pimflow.core.region import RegionGraph
from pimflow.frontend import Network
from pimflow.host.garbage_collection import give_back
from pimflow.placement import Searched
from pimflow.placement.given_plan import Charges, charged

LEAST = 2  # tokens of a graph: one of the cache, and the step's own


class DecodeStep:
    """A step of one token over a cache.

    It is searched, compiled and verified over all places of the cache. Its cost follows from the tokens that
    are in the cache.

    Parameters
    ----------
    graph : callable
        Gives the ONNX graph of a step that attends to so many tokens.
    context, batch : int
        Places of the caches, and number of sequences.
    grows : bool
        Whether there are graphs for fewer tokens than the context. If not, a step always attends to all.
    """

    def __init__(
        self,
        graph: Callable[[int], onnx.ModelProto],
        question: Question,
        context: int,
        batch: int,
        *,
        grows: bool = True,
    ) -> None:
        self.context, self.batch = context, batch
        self._grows = grows and context > LEAST
        self._graph, self._question = graph, question
        self._charges: dict[int, Charges] = {}

    def lengths(self, tokens: int) -> Lengths:
        """The lengths of a step that attends to so many tokens."""
        places = self.context if self.context > 1 else 0
        return Lengths(attended=self.charged_tokens(tokens), batch=self.batch, places=places)

    @functools.cached_property
    def searched(self) -> Searched:
        """The search result of the step over all places."""
        found = placed_step(self._graph(self.context), self._question, self.lengths(self.context))[2]
        give_back()  # the weights that the graph was loaded with
        return found

    def compiled(
        self, inputs: Callable[[Network], Mapping[str, np.ndarray]], progress: Callable[[str], None]
    ) -> Step:
        """Build the step and verify it on `inputs`; raises as `compiled_step`."""
        graph, lengths, known = self._graph(self.context), self.lengths(self.context), self.searched
        return compiled_step(graph, self._question, lengths, inputs, progress, known)

    def charged_tokens(self, tokens: int) -> int:
        """The number of tokens that a step over `tokens` is charged for."""
        return tokens if self._grows else self.context

    def charges(self, tokens: int) -> Charges:
        """The cost of a step over so many tokens."""
        tokens = self.charged_tokens(tokens)
        if tokens not in self._charges:
            self._charges[tokens] = charged(self.searched, self.regions(tokens))
        return self._charges[tokens]

    def regions(self, tokens: int) -> RegionGraph:
        """The regions of a step over so many tokens."""
        if tokens == self.context:
            return self.searched.graph
        try:
            return self._by_length.at(tokens)
        except ValueError:  # a file whose sizes are not linear in the tokens
            return self._loaded(max(tokens, LEAST))

    @functools.cached_property
    def _by_length(self) -> GraphByLength:
        fewer = max(self.context // 2, LEAST)
        longer = (self.context, self.searched.graph)
        return GraphByLength(places=self.context, longer=longer, shorter=(fewer, self._loaded(fewer)))

    def _loaded(self, tokens: int) -> RegionGraph:
        graph = regions_of(self._graph(tokens), self._question, self.lengths(tokens))
        give_back()
        return graph
