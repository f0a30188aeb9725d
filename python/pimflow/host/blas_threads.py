"""Threads of NumPy's matrix products: they wait for one another longer than a small product takes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

MIN_THREADED_MACS = 1 << 28  # some 25 ms on one core


@contextlib.contextmanager
def limit_threads(macs: int) -> Iterator[None]:
    """Within the block, compute products of `macs` multiplications on one thread if they are small."""
    if macs >= MIN_THREADED_MACS:
        yield
        return
    with _controller().limit(limits=1):
        yield


@functools.cache
def _controller() -> ThreadpoolController:
    """The libraries of matrix products in this process: the first call looks for them."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")
