"""Does a log that skips intervals like others find the same races as one that looks at each access?"""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples

from pimflow.compiler.kernel_checks.access_log import Accesses, AccessLog
from pimflow.compiler.kernel_checks.memo import CAPACITY, PATIENCE, Memo

ELEMENTS = 3


def accesses(elements):
    """An access by three threads of a block, to one element each."""
    threads = np.arange(3)
    zeros = threads * 0
    return Accesses(elements=np.array(elements), threads=threads, warps=zeros, blocks=zeros, lanes=threads)


PATTERNS = [accesses(elements) for elements in ([0, 1, 2], [1, 2, 0], [0, 0, 0], [2, 1, 0])]
STEPS = st.lists(st.one_of(st.none(), st.tuples(st.sampled_from(PATTERNS), st.booleans())), max_size=40)


def has_race(interval):
    """Whether two threads access an element, and one of them writes it."""
    return any(
        pattern.elements[i] == other.elements[j] and i != j and (is_write or also_writes)
        for pattern, is_write in interval
        for other, also_writes in interval
        for i in range(3)
        for j in range(3)
    )


@settings(max_examples=examples(200))
@given(STEPS)
def test_intervals_that_are_alike_are_judged_alike(steps):
    found = []
    log = AccessLog("shared", ELEMENTS, True, lambda *_: found.append(epoch))
    epoch, interval, expected, epochs = 0, [], False, np.zeros(3, np.int64)
    for step in [*steps, None]:
        if step is None:  # a barrier
            expected |= has_race(interval)
            epoch, interval = epoch + 1, []
            continue
        interval.append(step)
        pattern, is_write = step
        (log.write if is_write else log.read)(pattern, epoch, epochs)
    assert bool(found) == expected


def test_a_memo_forgets_what_is_not_asked_for_again():
    memo, calls, argument = Memo(), [], object()
    assert [memo.result((argument,), lambda: calls.append(1) or len(calls)) for _ in range(3)] == [1, 1, 1]
    arguments = [object() for _ in range(PATIENCE + CAPACITY)]
    for later in arguments:
        memo.result((later,), lambda: calls.append(1))
    count = len(calls)
    memo.result((arguments[-1],), lambda: calls.append(1))
    assert len(calls) == count + 1
