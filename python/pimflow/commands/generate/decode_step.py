"""The step of one token: compiled once for all lengths, and charged by the tokens that it attends to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import onnx

from pimflow import zoo
from pimflow.commands.generate.decoding import (
    OWN_NAMES,
    CompiledStep,
    Lengths,
    StepGraph,
    StepInterface,
    StepRequest,
    compile_step,
)
from pimflow.commands.shared.search import SearchRequest
from pimflow.core.graph_by_length import GraphByLength
from pimflow.core.region_graph import RegionGraph
from pimflow.frontend import Network
from pimflow.host.garbage_collection import release_memory
from pimflow.placement import SearchResult
from pimflow.placement.plan_application import Charges, graph_charges

MIN_TOKENS = 2  # tokens of a graph: one of the cache, and the step's own


class DecodeStep:
    """A step of one token over a cache.

    It is searched, compiled and verified over all places of the cache. Its cost follows from the tokens that
    are in the cache. What is only searched draws no weights, on whose sizes alone a search depends.

    Parameters
    ----------
    graph : callable
        Gives the network of a step that attends to so many tokens.
    grows : bool
        Whether there are graphs for fewer tokens than the context. If not, a step always attends to all.
    """

    def __init__(
        self,
        graph: Callable[[int], StepGraph],
        search_request: SearchRequest,
        context: int,
        batch: int,
        interface: StepInterface = OWN_NAMES,
        *,
        grows: bool = True,
    ) -> None:  # seven: what is compiled, for which lengths, and how it is called and charged
        self.context, self.batch = context, batch
        self._grows = grows and context > MIN_TOKENS
        self._graph, self._search_request = graph, search_request
        self._interface = interface
        self._charges: dict[int, Charges] = {}

    def lengths(self, tokens: int) -> Lengths:
        """The lengths of a step that attends to so many tokens."""
        places = self.context if self.context > 1 else 0
        return Lengths(attended=self.effective_tokens(tokens), batch=self.batch, places=places)

    def request(self, tokens: int) -> StepRequest:
        """The request for a step that attends to so many tokens."""
        return StepRequest(self._graph(tokens), self._search_request, self.lengths(tokens))

    @functools.cached_property
    def search_result(self) -> SearchResult:
        """The search result of the step over all places."""
        search_result = self._blank_request(self.context).place()[2]
        release_memory()
        return search_result

    def compile(
        self, inputs: Callable[[Network], Mapping[str, np.ndarray]], progress: Callable[[str], None]
    ) -> CompiledStep:
        """Search the step unless that is done, build and verify it; raises as `compile_step`."""
        step = compile_step(
            self.request(self.context),
            inputs,
            progress,
            vars(self).get("search_result"),
            interface=self._interface,
        )
        self.search_result = step.search_result
        return step

    def effective_tokens(self, tokens: int) -> int:
        """The number of tokens that a step over `tokens` is charged for."""
        return tokens if self._grows else self.context

    def charges(self, tokens: int) -> Charges:
        """The cost of a step over so many tokens."""
        tokens = self.effective_tokens(tokens)
        if tokens not in self._charges:
            self._charges[tokens] = graph_charges(self.search_result, self.regions(tokens))
        return self._charges[tokens]

    def regions(self, tokens: int) -> RegionGraph:
        """The regions of a step over so many tokens."""
        if tokens == self.context:
            return self.search_result.graph
        try:
            return self._graph_by_length.graph_of_length(tokens)
        except ValueError:  # a file whose sizes are not linear in the tokens
            return self._load_regions(max(tokens, MIN_TOKENS))

    @functools.cached_property
    def _graph_by_length(self) -> GraphByLength:
        shorter_length = max(self.context // 2, MIN_TOKENS)
        longer = (self.context, self.search_result.graph)
        return GraphByLength(
            places=self.context, longer=longer, shorter=(shorter_length, self._load_regions(shorter_length))
        )

    def _load_regions(self, tokens: int) -> RegionGraph:
        regions = self._blank_request(tokens).regions()
        release_memory()
        return regions

    def _blank_request(self, tokens: int) -> StepRequest:
        """The request whose matrices are not drawn."""
        request = self.request(tokens)
        if not isinstance(request.graph, onnx.ModelProto):
            return request
        return replace(request, graph=zoo.blank_matrices(request.graph))
