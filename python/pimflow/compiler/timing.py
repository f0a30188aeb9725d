"""How long calls take: kernels by TVM's timer on their device, anything else by this process's clock."""

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
    """Times of a function of `module`, which TVM calls once more before it measures.

    Parameters
    ----------
    **options
        See ``time_evaluator``; ``number`` calls, one by default, are averaged in a measurement.
    """
    timed = module.time_evaluator(name, device, repeat=repeats, **({"number": 1} | options))
    return [seconds * 1e9 for seconds in timed(*arguments).results]


def calls_ns(call: Callable[[], object], calls: int) -> list[int]:
    """Time of each of `calls` calls, one after the other; what they return is freed in between."""
    times = []
    for _ in range(calls):
        begin = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - begin)
    return times
