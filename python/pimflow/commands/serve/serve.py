"""Serve requests of a language model over simulated time, by the costs of its compiled steps."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pimflow.commands.generate.language import LanguageModel, open_language_model
from pimflow.commands.serve.options import ServeOptions
from pimflow.commands.serve.report import LatencyLimits, Refusal, Serving, StepTableReport, serving_figures
from pimflow.commands.serve.request_traces import requests_from_options
from pimflow.commands.serve.step_costs import PlacedStep, StepPlans
from pimflow.commands.serve.step_grid import StepGrid
from pimflow.commands.shared.arguments import public
from pimflow.commands.shared.search import SearchRequest
from pimflow.commands.shared.search_arguments import SearchArguments
from pimflow.core.goal import GoalOptions
from pimflow.core.options import field_names
from pimflow.core.region import ELEMENT_BYTES
from pimflow.errors import InfeasibleError, UsageError
from pimflow.hardware import System
from pimflow.simulators.serving.checker import check_schedule
from pimflow.simulators.serving.scheduler import RequestTrace, Schedule, ServingLimits, StepTimes, serve

CONTEXT_MULTIPLE = 256  # tokens: similar traces share their plans
MAX_TABLE = 1 << 24  # entries of a table of steps
MIN_CHUNK = 16  # tokens: a shorter chunk costs as much
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
    trace : path, optional
        Requests as the Azure traces of language models have them (`commands.serve.request_traces`).
    rate, requests, lengths, seed
        Arrivals a second, number of requests, and mean tokens of prompts and answers of drawn requests.
    context : int, optional
        Most tokens of a request.
    max_batch, chunk_tokens, page_tokens, cache_tokens : int
        Limits of the server; see `ServingLimits`.
    ttft_limit_ms, tpot_limit_ms : float
        Limits of goodput.
    assume_room : bool
        Whether a model that does not fit the PIM channels is timed as if it did.
    system, **keywords
        As for `pimflow.search`.

    Raises
    ------
    UnknownNameError, UsageError, ModelError
        If there is no such model, or options mean nothing.
    TraceError
        If the trace cannot be read.
    InfeasibleError
        If the model does not fit the PIM channels, or no request can ever be served.
    VerificationError
        If a schedule breaks a rule.
    """
    names = field_names(ServeOptions)
    options = ServeOptions(**{name: keywords.pop(name) for name in names if name in keywords}).validate()
    language = open_language_model(model)
    if language.decoder is None:
        raise UsageError(
            f"'{model}': give a language model of the zoo, a .gguf file or a folder: its sizes count"
        )
    requests = requests_from_options(options)
    request = SearchRequest.from_arguments(system, **keywords).validate()
    request.system.require_network_dtype()
    context = _context(language, options, requests)
    plans = StepPlans(
        language=language, decoder=language.decoder, request=request, context=context, progress=progress
    )
    return _Server(options=options, language=language, requests=requests, plans=plans).serving()


def _context(language: LanguageModel, options: ServeOptions, requests: RequestTrace) -> int:
    """Tokens that one request may have."""
    limit = language.max_context
    if options.context is not None and limit is not None and options.context > limit:
        raise UsageError(
            f"'{language.name}' was made for {limit} tokens, not for --context {options.context}"
        )
    needed = -(-max(requests.max_tokens, 2 * MIN_CHUNK) // CONTEXT_MULTIPLE) * CONTEXT_MULTIPLE
    context = options.context or min(needed, limit or needed)
    if (requests.prompt_tokens + requests.new_tokens - 1 > context).all():
        raise UsageError(f"no request has at most {context} tokens, its prompt and its new ones")
    if (options.max_batch + 1) * (context + 1) > MAX_TABLE:
        raise UsageError(
            f"--max-batch {options.max_batch} with a context of {context} tokens is a table of more than "
            f"{MAX_TABLE} steps; give a smaller --context or --max-batch"
        )
    return context


@dataclass(frozen=True, kw_only=True)
class _Server:
    """A server of one model with its options."""

    options: ServeOptions
    language: LanguageModel
    requests: RequestTrace
    plans: StepPlans

    def serving(self) -> Serving:
        """Price the steps, serve the requests on both systems, and check both schedules."""
        options, plans = self.options, self.plans
        self._limits(plans.decode(1, plans.context).weight_bytes)  # before the other searches
        for grid in (self.decode_grid, self.chunk_grid):
            grid.refine()
        limits = self._limits(self._weight_bytes)
        served, refusals = self._servable(limits)
        plans.progress("serving")
        latency = LatencyLimits(
            ttft_limit_ns=options.ttft_limit_ms * 1e6, tpot_limit_ns=options.tpot_limit_ms * 1e6
        )
        figures = []
        for column in (0, 1):  # as planned, on the GPU alone
            times = self._step_times(column)
            schedule: Schedule = serve(served, limits, times)
            check_schedule(served, limits, times, schedule)
            figures.append(serving_figures(served, limits, latency, schedule, len(refusals)))
        arrivals_ps = int(self.requests.arrival_ps[-1])
        grids = (self.decode_grid, self.chunk_grid)
        return Serving(
            model=self.language.name,
            system=plans.request.system.name,
            gpu=plans.request.system.gpu.name,
            pim=plans.request.system.pim.name,
            dtype=plans.request.system.dtype,
            requests=len(served),
            prompt_tokens=int(served.prompt_tokens.sum()),
            new_tokens=int(served.new_tokens.sum()),
            refused=len(refusals),
            refusals=tuple(refusals[:_SHOWN_REFUSALS]),
            offered_per_s=len(self.requests) / arrivals_ps * 1e12 if arrivals_ps else None,
            latency_limits=latency,
            step_table=StepTableReport(
                decode_batches=grids[0].sizes,
                decode_tokens=grids[0].lengths,
                chunk_tokens=grids[1].sizes,
                chunk_numbers=grids[1].lengths,
                held_out_points=sum(len(grid.held_out) for grid in grids),
                max_relative_error=max(grid.max_error for grid in grids),
            ),
            planned=figures[0],
            gpu_only=figures[1],
            **self._memory_figures(limits),
        )

    @functools.cached_property
    def decode_grid(self) -> StepGrid:
        """Costs of decode steps over requests and attended tokens."""
        batch, context = self.options.max_batch, self.plans.context
        sizes = sorted({batch, *(2**power for power in range(batch.bit_length()))})
        return StepGrid(
            cost=lambda size, tokens: self.plans.decode(size, tokens).figures,
            sizes=sizes,
            lengths=sorted({2, context // 4, context // 2, context}),
        )

    @functools.cached_property
    def chunk_grid(self) -> StepGrid:
        """Costs of chunks of a prompt over their tokens and the number of whole chunks before them."""
        chunk = self._chunk_tokens
        last = self.plans.context // chunk - 1  # the last whole chunk
        smallest = min(MIN_CHUNK, chunk)
        return StepGrid(
            cost=lambda size, number: self.plans.chunk(size, number * chunk).figures,
            sizes=sorted({smallest, max(chunk // 4, smallest), max(chunk // 2, smallest), chunk}),
            lengths=sorted({0, min(1, last), last}),
        )

    @property
    def _chunk_tokens(self) -> int:
        return min(self.options.chunk_tokens, self.plans.context)

    def _step_times(self, column: int) -> StepTimes:
        """Times and energies of all steps, as planned (0) or on the GPU alone (1)."""
        context, batch, chunk = self.plans.context, self.options.max_batch, self._chunk_tokens
        sizes, tokens = np.meshgrid(np.arange(1, batch + 1), np.arange(context + 1), indexing="ij")
        decode = self.decode_grid.values(sizes.ravel(), tokens.ravel()).reshape(batch, context + 1, -1)
        ends = np.arange(1, context + 1)
        number = (ends - 1) // chunk
        chunks = self.chunk_grid.values(ends - number * chunk, number)
        return StepTimes(
            decode_ps=_whole(np.pad(decode[:, :, column], ((1, 0), (0, 0))) * 1000),
            decode_pj=_whole(np.pad(decode[:, :, 2 + column], ((1, 0), (0, 0)))),
            chunk_ps=_whole(np.pad(chunks[:, column], (1, 0)) * 1000),
            chunk_pj=_whole(np.pad(chunks[:, 2 + column], (1, 0))),
        )

    def _limits(self, weight_bytes: int) -> ServingLimits:
        """The limits of the server; raises `InfeasibleError` if weights and caches do not fit."""
        options, page = self.options, self.options.page_tokens
        context = self.plans.context
        most = options.max_batch * -(-context // page) * page
        cache_tokens = options.cache_tokens
        if cache_tokens is None:
            free_bytes = self._room_bytes - weight_bytes
            cache_tokens = most if options.assume_room else min(most, max(free_bytes, 0) // self._kv_bytes)
        held_bytes = weight_bytes + max(cache_tokens, page) * self._kv_bytes
        if held_bytes > self._room_bytes and not options.assume_room:
            raise InfeasibleError(
                f"weights and a page of the caches of '{self.language.name}' in the PIM channels"
                if options.cache_tokens is None
                else f"weights and caches of '{self.language.name}' in the PIM channels",
                held_bytes,
                self._room_bytes,
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
        return int(self.language.kv_elements * ELEMENT_BYTES[self.plans.request.system.dtype])

    @property
    def _room_bytes(self) -> int:
        system = self.plans.request.system
        return system.pim.bytes_per_channel * system.pim_channels

    @functools.cached_property
    def _weight_bytes(self) -> int:
        """Rows of weights of the decode plan that takes the most."""
        context = self.plans.context
        steps: list[PlacedStep] = [self.plans.decode(size, context) for size in self.decode_grid.sizes]
        return max(step.weight_bytes for step in steps)

    def _memory_figures(self, limits: ServingLimits) -> dict[str, Any]:
        cache_tokens = limits.pages * limits.page_tokens
        held_bytes = self._weight_bytes + cache_tokens * self._kv_bytes
        return {
            "context": limits.context,
            "max_batch": limits.max_batch,
            "chunk_tokens": limits.chunk_tokens,
            "page_tokens": limits.page_tokens,
            "cache_tokens": cache_tokens,
            "kv_bytes_per_token": self._kv_bytes,
            "held_bytes": held_bytes,
            "room_bytes": self._room_bytes,
            "assumes_room": held_bytes > self._room_bytes,
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


def _whole(numbers: np.ndarray) -> np.ndarray:
    whole: np.ndarray = np.rint(numbers).astype(np.int64)
    return whole
