"""Costs of a server's steps, from plans: a token for each of several requests, and chunks of a prompt."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

import numpy as np

from pimflow import zoo
from pimflow.commands.generate.decode_step import MIN_TOKENS, DecodeStep
from pimflow.commands.generate.decoding import Lengths, StepGraph, StepRequest, shared_regions
from pimflow.commands.generate.generation import StepCosts
from pimflow.commands.generate.language import LanguageModel
from pimflow.commands.shared.search import SearchRequest
from pimflow.core.json_form import fields_form
from pimflow.core.typed_values import read_fields
from pimflow.host import native
from pimflow.host.garbage_collection import release_memory
from pimflow.host.result_cache import CODE_PACKAGES, sources_digest
from pimflow.placement import SearchResult
from pimflow.placement.plan_application import Charges
from pimflow.placement.solvers.capacity import loaded_weight_bytes, weight_row_bytes
from pimflow.zoo.language import graph as decoder_graph
from pimflow.zoo.language.decoder import Decoder

STEP_MODULES = (
    *CODE_PACKAGES,
    *("frontend", "fusion", "relay_passes", "zoo", "commands.shared", "commands.generate.decode_step"),
    *("commands.generate.decoding", "commands.generate.generation", "commands.serve.step_costs"),
)


@dataclass(frozen=True, kw_only=True)
class PlacedStep(StepCosts):
    """Costs of a step, and bytes of PIM's rows that its plan takes for weights and caches of all blocks."""

    weight_bytes: int
    cache_bytes: int

    @property
    def figures(self) -> np.ndarray:
        """The costs, [4], in the order of the fields."""
        return np.array([self.ns, self.ns_gpu_only, self.pj, self.pj_gpu_only])


@dataclass
class StepPlans:
    """Searches steps of a language model as `pimflow.generate` does, each once.

    Of a model without weights one block is searched, and counts for all, and the output layer by itself; of
    others the whole step. A decode step is planned for caches of the whole context, and charged by the tokens
    that it attends to; a chunk of a prompt is planned for the tokens before it.
    """

    language: LanguageModel
    decoder: Decoder
    request: SearchRequest
    context: int
    progress: Callable[[str], None]
    searches: int = 0
    _steps: dict[int, DecodeStep] = field(default_factory=dict)
    _heads: dict[int, SearchResult] = field(default_factory=dict)
    _placed: dict[tuple[str, int, int], PlacedStep] = field(default_factory=dict)

    def decode(self, batch: int, tokens: int) -> PlacedStep:
        """A token of each of `batch` requests, which attend to so many tokens, their own included."""
        return self._stored("decode", batch, max(tokens, MIN_TOKENS), self._place_decode)

    def chunk(self, tokens: int, past: int) -> PlacedStep:
        """A chunk of so many tokens of one prompt, after `past` tokens of it."""
        return self._stored("chunk", tokens, past, self._place_chunk)

    def _stored(
        self, kind: str, size: int, length: int, place: Callable[[int, int], PlacedStep]
    ) -> PlacedStep:
        key = (kind, size, length)
        if key in self._placed:
            return self._placed[key]
        cache = self.request.profiling.cache
        context = self.context if kind == "decode" else 0
        cache_key = ("server step", key, context, self.model_digest, self.system_digest)
        stored = (
            cache.get([cache_key], _code_digest(), read=functools.partial(read_fields, PlacedStep))
            if cache
            else {}
        )
        placed = stored[cache_key] if cache_key in stored else place(size, length)
        if cache and cache_key not in stored:
            cache.put({cache_key: fields_form(placed)}, _code_digest())
        self._placed[key] = placed
        return placed

    @functools.cached_property
    def model_digest(self) -> str:
        """Hash of the sizes of the model, and of whether its weights are known."""
        unnamed = replace(self.decoder, name="", file="", source="", text="")
        # Of fields with their default nothing is said, so that a further one leaves stored tables valid. The
        # order of a set is another one in each process.
        sizes = {
            entry.name: sorted(value) if isinstance(value, frozenset) else value
            for entry in fields(unnamed)
            if (value := getattr(unnamed, entry.name)) != entry.default and value != {}
        }
        return hashlib.sha256(repr((sizes, self.decoder.has_weights)).encode()).hexdigest()

    @functools.cached_property
    def system_digest(self) -> str:
        """Hash of the system, the goal and the sources of times."""
        system = self.request.system.without_sources()
        key = (system.identity, self.request.goal, self.request.costs.profilers)
        return hashlib.sha256(repr(key).encode()).hexdigest()

    def _place_decode(self, batch: int, tokens: int) -> PlacedStep:
        if batch not in self._steps:
            self.progress(f"searching a step of {batch} at once")
            self.searches += 1
            self._steps[batch] = DecodeStep(
                lambda attended: self._graph(attended, 1, batch), self.request, self.context, batch
            )
        step = self._steps[batch]
        return self._whole_step(step.charges(tokens), step.search_result, batch)

    def _place_chunk(self, tokens: int, past: int) -> PlacedStep:
        self.progress(f"searching {tokens} tokens of a prompt after {past}")
        self.searches += 1
        lengths = Lengths(attended=past + tokens, tokens=tokens)
        step = StepRequest(self._graph(past + tokens, tokens, 1), self.request, lengths)
        search_result = step.place()[2]
        release_memory()
        return self._whole_step(search_result, search_result, 1)

    def _graph(self, attended: int, tokens: int, batch: int) -> StepGraph:
        if self.decoder.has_weights:
            return self.language.step(attended, tokens, batch)
        return zoo.blank_matrices(
            decoder_graph.block_graph(self.decoder, attended, tokens=tokens, batch=batch)
        )

    def _whole_step(
        self, charges: Charges | SearchResult, search_result: SearchResult, batch: int
    ) -> PlacedStep:
        """The whole model's step; `batch` is that of the output layer, which computes a token of each."""
        blocks = 1 if self.decoder.has_weights else self.decoder.layers
        once = () if self.decoder.has_weights else shared_regions(charges.graph)
        costs = StepCosts.from_search(charges, blocks, once)
        rows = _row_bytes(search_result, blocks)
        if not self.decoder.has_weights:
            head = self._head(batch)
            costs, rows = costs + StepCosts.from_search(head), (rows[0] + _row_bytes(head, 1)[0], rows[1])
        return PlacedStep(**vars(costs), weight_bytes=rows[0], cache_bytes=rows[1])

    def _head(self, batch: int) -> SearchResult:
        if batch not in self._heads:
            lengths = Lengths(attended=1, batch=batch)
            graph = zoo.blank_matrices(decoder_graph.head_graph(self.decoder, batch=batch))
            self._heads[batch] = StepRequest(graph, self.request, lengths).place()[2]
        return self._heads[batch]


def _row_bytes(search_result: SearchResult, blocks: int) -> tuple[int, int]:
    """Bytes of rows of weights, and of caches, of so many blocks."""
    system, candidates = search_result.system, search_result.candidates
    weights = loaded_weight_bytes(system, candidates)
    return blocks * weights, blocks * (weight_row_bytes(system, candidates) - weights)


def _code_digest() -> str:
    """Hash of the code that places steps."""
    return hashlib.sha256(sources_digest(STEP_MODULES).encode() + native.LIBRARY.read_bytes()).hexdigest()
