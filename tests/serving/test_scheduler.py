"""Does the server of `simulators.serving` keep its rules, and does the check find every breach of them?"""

import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_by_token import token_by_token

from pimflow.errors import UsageError, VerificationError
from pimflow.simulators.serving.checker import check_schedule
from pimflow.simulators.serving.scheduler import RequestTrace, ServingLimits, StepTimes, serve

CONTEXT, MAX_BATCH = 40, 6


def step_times(context=CONTEXT, max_batch=MAX_BATCH, seed=0):
    rng = np.random.default_rng(seed)
    return StepTimes(
        chunk_ps=rng.integers(1, 60, context + 1),
        chunk_pj=rng.integers(1, 60, context + 1),
        decode_ps=rng.integers(1, 30, (max_batch + 1, context + 1)),
        decode_pj=rng.integers(1, 30, (max_batch + 1, context + 1)),
    )


@st.composite
def cases(draw):
    page = draw(st.integers(1, 5))
    triple = st.tuples(st.integers(0, 90), st.integers(1, 20), st.integers(1, 20))
    tokens = draw(st.lists(triple, min_size=1, max_size=12))
    gaps, prompts, new = (np.array(column) for column in zip(*tokens))
    trace = RequestTrace(arrival_ps=np.cumsum(gaps), prompt_tokens=prompts, new_tokens=new)
    least = -(-trace.max_tokens // page)
    limits = ServingLimits(
        max_batch=draw(st.integers(1, MAX_BATCH)),
        chunk_tokens=draw(st.integers(1, 12)),
        page_tokens=page,
        pages=least + draw(st.integers(0, 12)),
        context=CONTEXT,
    )
    times = step_times(seed=draw(st.integers(0, 3)))
    rows = limits.max_batch + 1
    return (trace, limits, replace(times, decode_ps=times.decode_ps[:rows], decode_pj=times.decode_pj[:rows]))


@given(cases())
def test_it_does_what_a_server_does_token_by_token(case):
    requests, limits, times = case
    schedule = serve(*case)
    check_schedule(*case, schedule)
    clients, steps, most_pages = token_by_token(requests, limits, times)
    assert schedule.first_token_ps.tolist() == [client.got[0] for client in clients]
    assert schedule.finish_ps.tolist() == [client.got[-1] for client in clients]
    assert schedule.preemptions.tolist() == [client.preemptions for client in clients]
    gaps = Counter(int(gap) for client in clients for gap in np.diff(client.got))
    assert dict(schedule.gaps.tolist()) == gaps
    assert schedule.spans["steps"].sum() == len(steps)
    assert schedule.spans["pages"].max() == most_pages
    assert schedule.spans["end_ps"][-1] == steps[-1][1]


def crowded_case():
    """Eight requests whose caches do not fit at once."""
    requests = RequestTrace(
        arrival_ps=np.arange(8) * 40, prompt_tokens=np.full(8, 9), new_tokens=np.arange(4, 20, 2)
    )
    limits = ServingLimits(max_batch=MAX_BATCH, chunk_tokens=4, page_tokens=3, pages=14, context=CONTEXT)
    return requests, limits, step_times()


def test_a_crowded_server_takes_pages_back_and_is_still_right():
    case = crowded_case()
    schedule = serve(*case)
    check_schedule(*case, schedule)
    assert schedule.preemptions.sum() > 0


BREACHES = {
    **{
        name: lambda spans, name=name: spans[name].__setitem__(3, spans[name][3] + 1)
        for name in ("start_ps", "end_ps", "steps", "decoding", "attended", "chunk_end", "pages", "energy_pj")
    },
    "chunk_request": lambda spans: spans["chunk_request"].__setitem__(0, 1),
}


@pytest.mark.parametrize("name", BREACHES)
def test_the_check_finds_every_changed_column(name):
    case = crowded_case()
    schedule = serve(*case)
    spans = {column: values.copy() for column, values in schedule.spans.items()}
    BREACHES[name](spans)
    with pytest.raises(VerificationError, match="breaks a rule"):
        check_schedule(*case, replace(schedule, spans=spans))


@pytest.mark.parametrize("name", ["first_token_ps", "finish_ps", "preemptions", "events", "gaps"])
def test_the_check_finds_every_changed_result(name):
    case = crowded_case()
    schedule = serve(*case)
    for index in range(getattr(schedule, name).size):
        values = getattr(schedule, name).copy()
        values.flat[index] += 1
        with pytest.raises(VerificationError, match="breaks a rule"):
            check_schedule(*case, replace(schedule, **{name: values}))


def test_the_check_finds_less_room_than_was_used_and_a_smaller_batch():
    requests, limits, times = crowded_case()
    schedule = serve(requests, limits, times)
    for name in ("pages", "max_batch"):
        used = {"pages": schedule.spans["pages"], "max_batch": schedule.spans["decoding"]}[name].max()
        with pytest.raises(VerificationError):
            check_schedule(requests, replace(limits, **{name: int(used) - 1}), times, schedule)


def test_the_check_finds_a_request_before_its_arrival():
    requests, limits, times = crowded_case()
    schedule = serve(requests, limits, times)
    late = replace(requests, arrival_ps=requests.arrival_ps + 1)
    with pytest.raises(VerificationError):
        check_schedule(late, limits, times, schedule)


def test_what_can_never_fit_is_refused_by_its_number():
    requests, limits, times = crowded_case()
    with pytest.raises(UsageError, match=r"request 8 can never be served: 9 tokens .* and 18 new ones"):
        serve(requests, replace(limits, pages=8), times)
    with pytest.raises(UsageError, match="the context has 20"):
        serve(requests, replace(limits, context=20), times)


@pytest.mark.long
def test_a_hundred_thousand_requests_take_seconds_and_give_the_same_bytes():
    rng = np.random.default_rng(0)
    count, context = 100_000, 4096
    requests = RequestTrace(
        arrival_ps=np.cumsum(rng.integers(0, 4000, count)),
        prompt_tokens=rng.integers(1, 2000, count),
        new_tokens=rng.integers(1, 400, count),
    )
    limits = ServingLimits(max_batch=64, chunk_tokens=512, page_tokens=16, pages=4096, context=context)
    times = step_times(context, 64)
    begin = time.process_time()
    schedules = [serve(requests, limits, times) for _ in range(2)]
    assert time.process_time() - begin < 20  # for both: 10 s each were asked for, and each takes about one
    check_schedule(requests, limits, times, schedules[0])
    first, second = ([s.first_token_ps, s.finish_ps, s.events, s.gaps, *s.spans.values()] for s in schedules)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(first, second))
