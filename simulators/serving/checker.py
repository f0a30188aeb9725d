"""A check of a server's schedule against its rules, which shares no code with what makes schedules.

It derives what every span must be from the events alone: who had pages when, what each step cost, which
tokens came of it, and compares this with what the schedule says of itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pimflow.errors import VerificationError
from pimflow.simulators.serving.scheduler import (
    ADMIT,
    FINISH,
    RequestTrace,
    Schedule,
    ServingLimits,
    StepTimes,
)


@dataclass(frozen=True, kw_only=True)
class _Stays:
    """Times that requests have pages, from an admission on; a request has several if it gave them up.

    Attributes
    ----------
    request, first, last : ndarray, [stays]
        Whose it is, its first span, and its last one, included.
    finishes : ndarray, [stays], bool
        Whether it ends because the request has all its tokens.
    target : ndarray, [stays]
        Tokens that its prefill puts into the cache: the prompt, and what the request got in earlier stays.
    decode : ndarray, [stays]
        The span after its prefill; ``last + 1`` if that is not done.
    tokens : ndarray, [stays]
        Tokens that the request gets.
    """

    request: np.ndarray
    first: np.ndarray
    last: np.ndarray
    finishes: np.ndarray
    target: np.ndarray
    decode: np.ndarray
    tokens: np.ndarray


def check_schedule(
    requests: RequestTrace, limits: ServingLimits, times: StepTimes, schedule: Schedule
) -> None:
    """Raise `VerificationError` unless a schedule keeps the rules of `simulators.serving.scheduler`.

    Checked are: steps one after the other, none while nobody is served, and no idle time while someone waits;
    no request before its arrival, and none overtaken; every prefill in chunks, whole and in order; all tokens
    of all requests, and no more; pages as the tokens need them, within the caches; batches within the limit;
    times and energies of all spans as the steps take; times of first and last tokens, and the gaps between.
    """
    spans = schedule.spans
    steps_before = np.concatenate([[0], np.cumsum(spans["steps"])])
    stays = _stays(requests, schedule, steps_before)
    _check_order(requests, schedule, stays)
    _check_prefills(limits, spans, stays)
    _check_batches(limits, spans, stays, steps_before)
    _check_pages(limits, spans, stays, steps_before)
    _check_costs(limits, times, spans)
    _check_tokens(requests, schedule, stays)


def _require(holds: np.ndarray | bool, rule: str) -> None:
    if not np.all(holds):
        where = "" if np.ndim(holds) == 0 else f", first at {int(np.argmin(holds))}"
        raise VerificationError(f"the schedule of the server breaks a rule: {rule}{where}")


def _stays(requests: RequestTrace, schedule: Schedule, steps_before: np.ndarray) -> _Stays:
    span, request, kind = schedule.events.T
    order = np.argsort(request, kind="stable")  # of each request, its events as they came
    span, request, kind = span[order], request[order], kind[order]
    _require(len(kind) % 2 == 0, "every admission has an end")
    first, last = span[0::2], np.where(kind[1::2] == FINISH, span[1::2], span[1::2] - 1)
    finishes, owner = kind[1::2] == FINISH, request[0::2]
    _require((kind[0::2] == ADMIT) & (kind[1::2] != ADMIT), "an admission, then its end")
    _require((owner == request[1::2]) & (first <= last), "a request ends what it began")
    _require((span >= 0) & (span < len(steps_before) - 1), "events happen at spans")
    ends = np.append(owner[1:] != owner[:-1], True)
    _require(finishes == ends, "a request ends once, with its last token")
    _require(np.array_equal(owner[ends], np.arange(len(requests))), "every request is served")
    last_chunk = _last_chunks(schedule.spans, owner, first, last)
    target, tokens, decode = (np.zeros(len(owner), np.int64) for _ in range(3))
    earlier = 0  # tokens that a request got in its earlier stays
    for stay in range(len(owner)):
        earlier = earlier if stay and owner[stay] == owner[stay - 1] else 0
        target[stay] = requests.prompt_tokens[owner[stay]] + earlier
        is_whole = schedule.spans["chunk_end"][last_chunk[stay]] == target[stay]
        decode[stay] = last_chunk[stay] + 1 if is_whole else last[stay] + 1
        if is_whole:
            tokens[stay] = 1 + steps_before[last[stay] + 1] - steps_before[decode[stay]]
        earlier += tokens[stay]
    return _Stays(
        request=owner, first=first, last=last, finishes=finishes, target=target, decode=decode, tokens=tokens
    )


def _last_chunks(
    spans: dict[str, np.ndarray], owner: np.ndarray, first: np.ndarray, last: np.ndarray
) -> np.ndarray:
    """The span of the last chunk of each stay, [stays]; `owner`, `first`, `last` are those of stays."""
    count = len(spans["steps"])
    chunk_spans = np.flatnonzero(spans["chunk_request"] >= 0)
    request = spans["chunk_request"][chunk_spans]
    # The stay of each chunk is the last one of its request that begins no later.
    chunk_stay = np.searchsorted(owner * count + first, request * count + chunk_spans, side="right") - 1
    is_inside = (owner[chunk_stay] == request) & (chunk_spans <= last[chunk_stay])
    _require(is_inside & (chunk_stay >= 0), "a chunk is of a request that has pages")
    last_chunk = np.full(len(owner), -1)
    np.maximum.at(last_chunk, chunk_stay, chunk_spans)
    _require(last_chunk >= 0, "an admission begins a prefill")
    return last_chunk


def _check_order(requests: RequestTrace, schedule: Schedule, stays: _Stays) -> None:
    start_ps, end_ps = schedule.spans["start_ps"], schedule.spans["end_ps"]
    _require((schedule.spans["steps"] >= 1) & (start_ps < end_ps), "a span has steps, which take time")
    _require(start_ps[1:] >= end_ps[:-1], "steps follow one another")
    arrivals = requests.arrival_ps[stays.request]
    _require(start_ps[stays.first] >= arrivals, "no request is served before it arrives")
    is_first = np.append(True, stays.request[1:] != stays.request[:-1])
    _require(np.diff(stays.first[is_first]) > 0, "requests are admitted one by one, in the order of arrival")
    served = np.cumsum(_changes(len(start_ps), stays.first, stays.last + 1))
    _require(served >= 1, "a step serves somebody")
    idle = np.flatnonzero(np.append(start_ps[0] > 0, start_ps[1:] > end_ps[:-1]))
    begins = np.zeros(len(start_ps), bool)
    begins[stays.first[is_first]] = True
    _require(begins[idle], "idle time ends with an admission")
    by_span = np.full(len(start_ps), -1)
    by_span[stays.first[is_first]] = np.arange(len(requests))
    _require(start_ps[idle] == requests.arrival_ps[by_span[idle]], "nobody waits while the server is idle")
    _require(served[idle] == 1, "nobody has pages while the server is idle")


def _changes(spans: int, begins: np.ndarray, ends: np.ndarray, weights: np.ndarray | int = 1) -> np.ndarray:
    """What to sum over spans for the total of `weights` of all that lasts from a begin up to an end."""
    changes = np.zeros(spans + 1, np.int64)
    np.add.at(changes, begins, weights)
    np.subtract.at(changes, ends, weights)
    return changes[:-1]


def _check_prefills(limits: ServingLimits, spans: dict[str, np.ndarray], stays: _Stays) -> None:
    chunk_spans = np.flatnonzero(spans["chunk_request"] >= 0)
    _require(spans["steps"][chunk_spans] == 1, "a chunk is one step")
    expected_request = np.full(len(spans["steps"]), -1)
    expected_end = np.zeros(len(spans["steps"]), np.int64)
    lengths = stays.decode - stays.first
    positions = np.repeat(stays.first, lengths) + _counts(lengths)
    _require(np.bincount(positions) <= 1, "one prefill at a time")
    expected_request[positions] = np.repeat(stays.request, lengths)
    ends = (1 + _counts(lengths)) * limits.chunk_tokens
    expected_end[positions] = np.minimum(ends, np.repeat(stays.target, lengths))
    _require(spans["chunk_request"] == expected_request, "a prefill goes on from its admission to its end")
    _require(spans["chunk_end"] == expected_end, "a prefill has its tokens, in order")


def _counts(lengths: np.ndarray) -> np.ndarray:
    """0, 1, … for each of `lengths`, one after the other."""
    starts: np.ndarray = np.repeat(np.cumsum(lengths) - lengths, lengths)
    counts: np.ndarray = np.arange(len(starts)) - starts
    return counts


def _check_batches(
    limits: ServingLimits, spans: dict[str, np.ndarray], stays: _Stays, steps_before: np.ndarray
) -> None:
    count = len(spans["steps"])
    served = np.cumsum(_changes(count, stays.first, stays.last + 1))
    _require(served <= limits.max_batch, "no more requests at once than the limit")
    decoding = np.cumsum(_changes(count, stays.decode, stays.last + 1))
    _require(spans["decoding"] == decoding, "every request whose prefill is done gets a token in every step")
    offsets = stays.target + 1 - steps_before[stays.decode]
    attended = (
        np.cumsum(_changes(count, stays.decode, stays.last + 1, offsets)) + decoding * steps_before[:-1]
    )
    _require(spans["attended"] == attended, "a token attends to all before it")


def _check_pages(
    limits: ServingLimits, spans: dict[str, np.ndarray], stays: _Stays, steps_before: np.ndarray
) -> None:
    count, size = len(spans["steps"]), limits.page_tokens
    prompt_pages = -(-stays.target // size)
    changes = _changes(count, stays.first, stays.last + 1, prompt_pages)
    steps = steps_before[stays.last + 1] - steps_before[stays.decode]
    more = -(-(stays.target + steps) // size) - prompt_pages
    # The token that needs a further page, counted from the prefill's end on, and the span of its step.
    token = np.repeat(prompt_pages * size - stays.target, more) + _counts(more) * size
    spans_of_pages = (
        np.searchsorted(steps_before, np.repeat(steps_before[stays.decode], more) + token, side="right") - 1
    )
    changes += _changes(count, spans_of_pages, np.repeat(stays.last + 1, more))
    pages = np.cumsum(changes)
    _require(spans["pages"] == pages, "a request has the pages that its tokens need")
    _require(pages <= limits.pages, "the pages in use are no more than there are")


def _check_costs(limits: ServingLimits, times: StepTimes, spans: dict[str, np.ndarray]) -> None:
    decoding, chunk_end = spans["decoding"], spans["chunk_end"]
    mean = np.where(decoding > 0, spans["attended"] // np.maximum(decoding, 1), 0)
    _require(mean + spans["steps"] - 1 <= limits.context, "no step attends to more than the context")
    for chunk, decode, costs in (
        (times.chunk_ps, times.decode_ps, spans["end_ps"] - spans["start_ps"]),
        (times.chunk_pj, times.decode_pj, spans["energy_pj"]),
    ):
        sums = np.zeros((decode.shape[0], decode.shape[1] + 1), np.int64)
        np.cumsum(decode, axis=1, out=sums[:, 1:])
        steps = sums[decoding, mean + spans["steps"]] - sums[decoding, mean]
        expected = np.where(chunk_end > 0, chunk[chunk_end], 0) + np.where(decoding > 0, steps, 0)
        _require(costs == expected, "a step takes the time and the energy of its batch")


def _check_tokens(requests: RequestTrace, schedule: Schedule, stays: _Stays) -> None:
    count, end_ps = len(requests), schedule.spans["end_ps"]
    tokens = np.zeros(count, np.int64)
    np.add.at(tokens, stays.request, stays.tokens)
    _require(tokens == requests.new_tokens, "every request gets its tokens, and no more")
    preemptions = np.bincount(stays.request[~stays.finishes], minlength=count)
    _require(schedule.preemptions == preemptions, "pages are given up as often as it says")
    has_tokens = stays.tokens > 0
    first_token_ps = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(first_token_ps, stays.request[has_tokens], end_ps[stays.decode[has_tokens] - 1])
    _require(schedule.first_token_ps == first_token_ps, "a prefill's end gives the first token")
    _require(schedule.finish_ps == end_ps[stays.last[stays.finishes]], "the last token ends a request")
    gap_ps, counts = schedule.gaps.T
    _require(counts.sum() == (tokens - 1).sum(), "a gap before every token but the first")
    total_ps = int((schedule.finish_ps - schedule.first_token_ps).sum())
    _require(int((gap_ps * counts).sum()) == total_ps, "gaps lead from first to last tokens")
