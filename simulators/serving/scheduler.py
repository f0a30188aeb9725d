"""Continuous batching over simulated time: the schedule of a server that decodes many requests at once.

A *step* of the server is one chunk of the prefill of at most one request, and then one token of every request
that decodes. Requests are admitted in the order of arrival, one prefill at a time; none overtakes another.
Caches are paged: a request is admitted when the pages of its prompt are free, and gets a page whenever its
tokens fill those that it has. If no page is free then, the request that was admitted last gives up its pages
and waits before all others; later its prompt and its tokens so far are computed again, and the next token
follows from that (recomputation, as in vLLM: arXiv 2309.06180, section 4.5). Chunks of prefills beside
decoding are those of Sarathi-Serve (arXiv 2403.02310).

The loop runs in C++ (``src/serving.cc``). Times are whole picoseconds and energies whole picojoules, so that
a schedule is the same on every machine. `check_schedule` judges it, and shares no code with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pimflow.errors import UsageError
from pimflow.host import native

_serve = native.get("pimflow.simulators.serve")
_REQUEST = native.Record("pimflow.simulators.served_request")
_LIMITS = native.Record("pimflow.simulators.serving_limits")
_SPAN = native.Record("pimflow.simulators.serving_span")
_EVENT = native.Record("pimflow.simulators.serving_event")
_GAP = native.Record("pimflow.simulators.token_gap")
ADMIT, PREEMPT, FINISH = range(3)
_REQUEST_FIELDS = ("arrival_ps", "prompt_tokens", "new_tokens", "first_token_ps", "finish_ps", "preemptions")
_SPAN_FIELDS = (
    *("start_ps", "end_ps", "steps", "decoding", "attended"),
    *("chunk_request", "chunk_end", "pages", "energy_pj"),
)


@dataclass(frozen=True, kw_only=True)
class RequestTrace:
    """Requests in the order of arrival.

    Attributes
    ----------
    arrival_ps, prompt_tokens, new_tokens : ndarray, [requests], int64
        When each arrives, and how many tokens it brings and gets.
    """

    arrival_ps: np.ndarray
    prompt_tokens: np.ndarray
    new_tokens: np.ndarray

    def __len__(self) -> int:
        return len(self.arrival_ps)

    @property
    def max_tokens(self) -> int:
        """The most tokens that a request has in the caches: all but the last that it gets."""
        return int((self.prompt_tokens + self.new_tokens).max()) - 1


@dataclass(frozen=True, kw_only=True)
class ServingLimits:
    """What a server may do at once.

    Attributes
    ----------
    max_batch : int
        Requests that have pages.
    """

    max_batch: int
    chunk_tokens: int
    page_tokens: int
    pages: int
    context: int


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Times and energies of a server's steps.

    Attributes
    ----------
    chunk_ps, chunk_pj : ndarray, [context + 1], int64
        A chunk of a prefill, by the tokens in the cache after it; it begins at a multiple of
        the size of chunks.
    decode_ps, decode_pj : ndarray, [max_batch + 1, context + 1], int64
        A token of each of so many requests, by the mean, rounded down, of the tokens that they attend to.
    """

    chunk_ps: np.ndarray
    chunk_pj: np.ndarray
    decode_ps: np.ndarray
    decode_pj: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What a server did, when.

    Attributes
    ----------
    first_token_ps, finish_ps, preemptions : ndarray, [requests], int64
        When each request got its first token and its last one, and how often it gave up its pages.
    spans : mapping of str to ndarray, [spans], int64
        Steps one after the other that decode the same requests: ``start_ps``, ``end_ps``, ``steps``; of the
        first of them the requests that get a token (``decoding``) and the tokens that they attend to in all
        (``attended``); ``chunk_request``, -1 without, with the tokens in its cache afterwards
        (``chunk_end``); ``pages`` in use during the last of them, and ``energy_pj``.
    events : ndarray, [events, 3], int64
        Span, request, and what happened: ADMIT and PREEMPT before the span, FINISH at its end.
    gaps : ndarray, [gaps, 2], int64
        Times between two tokens of a request in ps, rising, and how often each was.
    """

    first_token_ps: np.ndarray
    finish_ps: np.ndarray
    preemptions: np.ndarray
    spans: dict[str, np.ndarray] = field(repr=False)
    events: np.ndarray = field(repr=False)
    gaps: np.ndarray = field(repr=False)


def require_servable(requests: RequestTrace, limits: ServingLimits) -> None:
    """Raise `UsageError` for the first request that never fits context or caches."""
    tokens = requests.prompt_tokens + requests.new_tokens - 1
    room = min(limits.context, limits.pages * limits.page_tokens)
    if (tokens <= room).all():
        return
    number = int(np.argmax(tokens > room))
    kind = "the context has" if room == limits.context else "the caches have"
    raise UsageError(
        f"request {number + 1} can never be served: {requests.prompt_tokens[number]} tokens of its prompt "
        f"and {requests.new_tokens[number]} new ones need a cache of {tokens[number]}, and {kind} {room}"
    )


def serve(requests: RequestTrace, limits: ServingLimits, times: StepTimes) -> Schedule:
    """The schedule of a server for these requests; raises as `require_servable`."""
    require_servable(requests, limits)
    zeros = np.zeros(len(requests), np.int64)
    columns = (requests.arrival_ps, requests.prompt_tokens, requests.new_tokens, zeros, zeros, zeros)
    rows = _REQUEST.zeros(_REQUEST_FIELDS, len(requests))
    rows[:] = np.stack(columns, axis=1)
    limit_row = _LIMITS.row(**vars(limits))
    tables = (times.chunk_ps, times.chunk_pj, times.decode_ps, times.decode_pj)
    spans, events, gaps = _serve(rows, limit_row, *(np.ascontiguousarray(table) for table in tables))
    _SPAN.zeros(_SPAN_FIELDS, 0)  # checks the order of the fields
    _EVENT.zeros(("span", "request", "kind"), 0)
    _GAP.zeros(("gap_ps", "count"), 0)
    span_rows = np.frombuffer(spans, np.int64).reshape(-1, len(_SPAN_FIELDS))
    return Schedule(
        first_token_ps=rows[:, 3].copy(),
        finish_ps=rows[:, 4].copy(),
        preemptions=rows[:, 5].copy(),
        spans={name: span_rows[:, column] for column, name in enumerate(_SPAN_FIELDS)},
        events=np.frombuffer(events, np.int64).reshape(-1, 3),
        gaps=np.frombuffer(gaps, np.int64).reshape(-1, 2),
    )
