"""Python's collector of cyclic garbage, out of the way of work that makes many objects and no cycles."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """No collection meanwhile; as before afterwards.

    Whenever the objects there have grown by a quarter, the collector goes through all of them. A search, or
    the code of a network, makes hundreds of thousands that live until the end: a sixth of its time was that.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
