"""Python's collector of cyclic garbage, and memory that was freed."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator

SELDOM = 50_000  # objects that are made, and not freed, between two walks; 700 by default


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
    """Collect garbage, and give freed memory back to the system.

    glibc keeps what was freed between parts that are in use: a network's weights leave half a gigabyte.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
