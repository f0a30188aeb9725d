"""Pauses Python's collector of cyclic garbage during work that makes many objects and no cycles."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


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
