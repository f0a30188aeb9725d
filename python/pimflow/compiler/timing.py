"""Times of calls: of kernels by TVM's timer on their device, of functions by the clock of this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import tvm


def kernel_times_ns(
    module: tvm.runtime.Module,
    name: str,
    device: tvm.runtime.Device,
    arguments: Sequence[object],
    repeats: int,
    **options: int | str,
) -> list[float]:
    """Times of a function of `module`; TVM calls it once before it measures.

    Parameters
    ----------
    **options
        See ``time_evaluator``. A measurement is the mean of ``number`` calls, one by default.
    """
    evaluator = module.time_evaluator(name, device, repeat=repeats, **({"number": 1} | options))
    return [seconds * 1e9 for seconds in evaluator(*arguments).results]


def call_times_ns(call: Callable[[], object], calls: int) -> list[int]:
    """Times of `calls` calls, one after the other; each result is freed before the next call."""
    times = []
    for _ in range(calls):
        begin = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - begin)
    return times
