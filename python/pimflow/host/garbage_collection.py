"""Python's collector of cyclic garbage, and memory that was freed."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import resource
from collections.abc import Iterator

SELDOM = 50_000  # objects that are made, and not freed, between two walks; 700 by default
WORTH_BYTES = 32 << 20  # a walk over all objects takes longer than a small network's steps do
_left_bytes = 0.0  # what the process held when it last gave back


def seldom() -> None:
    """For the process of a command: young objects are walked less often. Few of them are in cycles."""
    _, *older = gc.get_threshold()
    gc.set_threshold(SELDOM, *older)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """The collector is off inside the block, and as before afterwards.

    It walks all objects whenever their number has grown by a quarter. A search, or the code generation of a
    network, makes hundreds of thousands that live until the end: the walks were a sixth of its time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def give_back() -> None:
    """Collect garbage, and give freed memory back to the system, if the process has come to hold much more.

    glibc keeps what was freed between parts that are in use: a network's weights leave half a gigabyte.
    """
    global _left_bytes
    held_bytes = _resident_bytes()
    if held_bytes < _left_bytes + WORTH_BYTES:
        _left_bytes = min(_left_bytes, held_bytes)
        return
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    _left_bytes = _resident_bytes()


def _resident_bytes() -> float:
    """What the process holds in memory; infinite where the system does not say."""
    try:
        with open("/proc/self/statm") as sizes:
            return int(sizes.read().split()[1]) * resource.getpagesize()
    except OSError:
        return math.inf
