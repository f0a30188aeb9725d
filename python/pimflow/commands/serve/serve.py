"""Serve requests of a language model over simulated time, by the costs of its compiled steps."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pimflow.commands.generate.language import LanguageModel, open_language_model
from pimflow.commands.serve.options import ServeOptions
from pimflow.commands.serve.report import LatencyLimits, Refusal, Serving, StepTableReport, serving_figures
from pimflow.commands.serve.request_traces import requests_from_options
from pimflow.commands.serve.searched_table import MIN_CHUNK, searched_table
from pimflow.commands.serve.step_costs import StepPlans
from pimflow.commands.serve.step_table import StepTable, whole
from pimflow.commands.shared.arguments import public
from pimflow.commands.shared.published_decode import PublishedDecode
from pimflow.commands.shared.search import SearchRequest
from pimflow.commands.shared.search_arguments import SearchArguments
from pimflow.core.goal import GoalOptions
from pimflow.core.kernel import ELEMENT_BYTES
from pimflow.errors import InfeasibleError, UsageError
from pimflow.hardware import System
from pimflow.simulators.serving.checker import check_schedule
from pimflow.simulators.serving.scheduler import RequestTrace, Schedule, ServingLimits, StepTimes, serve
from pimflow.weight_types import plain_type

CONTEXT_MULTIPLE = 256  # tokens: similar traces share their plans
MAX_TABLE = 1 << 24  # entries of a table of steps
_SHOWN_REFUSALS = 4


@public(ServeOptions, SearchArguments, GoalOptions, without=("target", "plan", "options", "select"))
def serve_sim(
    model: str | os.PathLike[str],
    *,
    system: System | None = None,
    progress: Callable[[str], None] = lambda _: None,
    **keywords: Any,
) -> Serving:
    """Serve requests by continuous batching over simulated time, as planned and on the GPU alone.

    Steps cost what plans say that are searched for points of a grid of requests at once and tokens; between
    these they are interpolated (`commands.serve.step_grid`). What a server does is stated in
    `simulators.serving.scheduler`, and every schedule is checked (`simulators.serving.checker`).

    Parameters
    ----------
    model : str or path
        Name of a language model of the zoo, a GGUF file, or a folder of Hugging Face's.
    max_batch, chunk_tokens, page_tokens, cache_tokens : int
        Limits of the server; see `ServingLimits`.
    system, **keywords
        As for `pimflow.search`.

    Raises
    ------
    UnknownNameError, UsageError, ModelError
        If there is no such model, or options mean nothing.
    TraceError
        If the trace cannot be read.
    ProfileError
        If the costs of steps cannot be read, or are of another model, system or server.
    InfeasibleError
        If the model does not fit the PIM channels, or no request can ever be served.
    VerificationError
        If a schedule breaks a rule.
    """
    options = ServeOptions.pop_from(keywords).validate()
    language = open_language_model(model, types=options)
    decoder = language.decoder
    if decoder is None:
        raise UsageError(
            f"'{model}': give a language model of the zoo, a .gguf file or a folder: its sizes count"
        )
    requests = requests_from_options(options)
    request = SearchRequest.from_arguments(system, **keywords).validate()
    request.system.require_network_dtype()
    table = StepTable.from_file(options.steps) if options.steps is not None else None
    context = table.context if table else _context(language, options, requests)
    _require_size(options, context, requests)
    plans = StepPlans(language=language, decoder=decoder, request=request, context=context, progress=progress)
    return _ServeJob(
        options=options, language=language, requests=requests, plans=plans, table=table
    ).serving()


def _context(language: LanguageModel, options: ServeOptions, requests: RequestTrace) -> int:
    """Tokens that one request may have."""
    limit = language.max_context
    if options.context is not None and limit is not None and options.context > limit:
        raise UsageError(
            f"'{language.name}' was made for {limit} tokens, not for --context {options.context}"
        )
    needed = -(-max(requests.max_tokens, 2 * MIN_CHUNK) // CONTEXT_MULTIPLE) * CONTEXT_MULTIPLE
    return options.context or min(needed, limit or needed)


def _require_size(options: ServeOptions, context: int, requests: RequestTrace) -> None:
    """Raise `UsageError` if no request fits the context, or the table of steps is too large."""
    if (requests.prompt_tokens + requests.new_tokens - 1 > context).all():
        raise UsageError(f"no request has at most {context} tokens, its prompt and its new ones")
    if (options.max_batch + 1) * (context + 1) > MAX_TABLE:
        raise UsageError(
            f"--max-batch {options.max_batch} with a context of {context} tokens is a table of more than "
            f"{MAX_TABLE} steps; give a smaller --context or --max-batch"
        )


@dataclass(frozen=True, kw_only=True)
class _ServeJob:
    """A server of one model with its options; `table` is None if steps are to be searched."""

    options: ServeOptions
    language: LanguageModel
    requests: RequestTrace
    plans: StepPlans
    table: StepTable | None

    def serving(self) -> Serving:
        """Price the steps, serve the requests on both systems, and check both schedules."""
        options, plans, system = self.options, self.plans, self.plans.request.system
        table = self._step_table()
        limits = self._limits(table.weight_bytes)
        served, refusals = self._servable(limits)
        plans.progress("serving")
        latency = LatencyLimits(
            ttft_limit_ns=options.ttft_limit_ms * 1e6, tpot_limit_ns=options.tpot_limit_ms * 1e6
        )
        figures = []
        for times in self._step_times(table):
            schedule: Schedule = serve(served, limits, times)
            check_schedule(served, limits, times, schedule)
            figures.append(serving_figures(served, limits, latency, schedule, len(refusals)))
        published = self._published
        arrivals_ps = int(self.requests.arrival_ps[-1])
        return Serving(
            model=self.language.name,
            system=system.name,
            gpu=system.gpu.name,
            pim=system.pim.name,
            dtype=system.dtype,
            weights=self.language.weights,
            requests=len(served),
            prompt_tokens=int(served.prompt_tokens.sum()),
            new_tokens=int(served.new_tokens.sum()),
            refused=len(refusals),
            refusals=tuple(refusals[:_SHOWN_REFUSALS]),
            offered_per_s=len(self.requests) / arrivals_ps * 1e12 if arrivals_ps else None,
            latency_limits=latency,
            step_table=StepTableReport.from_table(table),
            steps=table,
            planned=figures[0],
            gpu_only=figures[1],
            gpu_published=figures[2] if published else None,
            gpu_published_source=None if published is None else published.source,
            **self._memory_figures(limits, table.weight_bytes),
        )

    def _step_table(self) -> StepTable:
        """The given table, or that of searched plans; raises as `StepTable.require` and `_limits`."""
        options, plans, table = self.options, self.plans, self.table
        if table is None:
            self._limits(plans.decode(1, plans.context).weight_bytes)  # before the other searches
            return searched_table(
                plans, options.max_batch, self._chunk_tokens, options.random_points, options.seed
            )
        assert options.steps is not None
        table.require(
            options.steps,
            model_digest=plans.model_digest,
            system_digest=plans.system_digest,
            context=options.context or table.context,
            max_batch=max(options.max_batch, table.max_batch),
            chunk_tokens=self._chunk_tokens,
        )
        return table

    def _step_times(self, table: StepTable) -> list[StepTimes]:
        """Times of steps as planned, on the GPU alone, and on one that decodes as published, if there is."""
        batch, published = self.options.max_batch, self._published
        planned, gpu_only = (table.times(batch, column) for column in (0, 1))
        if published is None:
            return [planned, gpu_only]
        decode_ns = [
            [published.step_ns(tokens, size) if size else 0.0 for tokens in range(table.context + 1)]
            for size in range(batch + 1)
        ]
        return [planned, gpu_only, replace(gpu_only, decode_ps=whole(np.array(decode_ns) * 1000))]

    @functools.cached_property
    def _published(self) -> PublishedDecode | None:
        """The second baseline."""
        return PublishedDecode.from_decoder(self.language.decoder, self.plans.request.system)

    @property
    def _chunk_tokens(self) -> int:
        return min(self.options.chunk_tokens, self.plans.context)

    def _limits(self, weight_bytes: int) -> ServingLimits:
        """The limits of the server; raises `InfeasibleError` if weights and caches do not fit."""
        options, page = self.options, self.options.page_tokens
        context, room_bytes = self.plans.context, self.plans.request.system.pim_bytes
        most = options.max_batch * -(-context // page) * page
        cache_tokens = options.cache_tokens
        if cache_tokens is None:
            free_bytes = room_bytes - weight_bytes
            cache_tokens = most if options.assume_room else min(most, max(free_bytes, 0) // self._kv_bytes)
        held_bytes = weight_bytes + max(cache_tokens, page) * self._kv_bytes
        if held_bytes > room_bytes and not options.assume_room:
            raise InfeasibleError(
                f"weights and a page of the caches of '{self.language.name}' in the PIM channels"
                if options.cache_tokens is None
                else f"weights and caches of '{self.language.name}' in the PIM channels",
                held_bytes,
                room_bytes,
                "B",
                ["--assume-room, which times banks with as many rows as that takes"],
            )
        return ServingLimits(
            max_batch=options.max_batch,
            chunk_tokens=self._chunk_tokens,
            page_tokens=page,
            pages=max(cache_tokens // page, 1),
            context=context,
        )

    @property
    def _kv_bytes(self) -> int:
        """Bytes of a token in the caches, as PIM stores them."""
        system = self.plans.request.system
        decoder = self.plans.decoder
        takes = system.pim.takes(plain_type(decoder.cache_type), system.dtype)
        stored = decoder if takes else replace(decoder, cache_type="")
        return stored.kv_bytes_per_token(ELEMENT_BYTES[system.dtype])

    def _memory_figures(self, limits: ServingLimits, weight_bytes: int) -> dict[str, Any]:
        cache_tokens, room_bytes = limits.pages * limits.page_tokens, self.plans.request.system.pim_bytes
        held_bytes = weight_bytes + cache_tokens * self._kv_bytes
        return {
            "context": limits.context,
            "max_batch": limits.max_batch,
            "chunk_tokens": limits.chunk_tokens,
            "page_tokens": limits.page_tokens,
            "cache_tokens": cache_tokens,
            "kv_bytes_per_token": self._kv_bytes,
            "held_bytes": held_bytes,
            "room_bytes": room_bytes,
            "assumes_room": held_bytes > room_bytes,
        }

    def _servable(self, limits: ServingLimits) -> tuple[RequestTrace, list[Refusal]]:
        """The requests that can be served, and the others; raises `InfeasibleError` if all are others."""
        requests = self.requests
        tokens = requests.prompt_tokens + requests.new_tokens - 1
        room = min(limits.context, limits.pages * limits.page_tokens)
        fits = tokens <= room
        refusals = [
            Refusal(
                request=int(number) + 1,
                reason=f"{requests.prompt_tokens[number]} tokens of its prompt and "
                f"{requests.new_tokens[number]} new ones are {tokens[number]} in a cache of {room}",
            )
            for number in np.flatnonzero(~fits)
        ]
        if not fits.any():
            raise InfeasibleError(
                f"request 1 of {len(requests)}, none of which can ever be served",
                int(tokens[0]),
                room,
                "tokens",
                ["--context", "--cache-tokens"],
            )
        served = RequestTrace(
            arrival_ps=requests.arrival_ps[fits],
            prompt_tokens=requests.prompt_tokens[fits],
            new_tokens=requests.new_tokens[fits],
        )
        return served, refusals
