"""Control of Python's garbage collector, and release of freed memory to the system."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import resource
from collections.abc import Iterator

COLLECTION_THRESHOLD = 200_000  # new objects, less freed ones, between two collections; 700 by default
MIN_RELEASE_BYTES = 32 << 20  # a full collection takes longer than the steps of a small network
_last_resident_bytes = 0.0  # resident memory after the last release


def collect_rarely() -> None:
    """For the process of a command: collect young objects less often. Few of them are in cycles."""
    _, *older = gc.get_threshold()
    gc.set_threshold(COLLECTION_THRESHOLD, *older)


@contextlib.contextmanager
def pause() -> Iterator[None]:
    """Disable the collector in the block.

    It walks all objects whenever their number has grown by a quarter. A search, or the code generation of a
    network, creates hundreds of thousands that live until its end: collections took a sixth of its time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def release_memory() -> None:
    """Collect garbage and return freed memory to the system, if resident memory has grown by
    `MIN_RELEASE_BYTES`.

    glibc keeps freed memory between blocks in use: the weights of a network leave half a gigabyte.
    """
    global _last_resident_bytes
    resident_bytes = _resident_bytes()
    if resident_bytes < _last_resident_bytes + MIN_RELEASE_BYTES:
        _last_resident_bytes = min(_last_resident_bytes, resident_bytes)
        return
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    _last_resident_bytes = _resident_bytes()


def _resident_bytes() -> float:
    """Resident memory of the process; infinite if the system does not say."""
    try:
        with open("/proc/self/statm") as sizes:
            return int(sizes.read().split()[1]) * resource.getpagesize()
    except OSError:
        return math.inf
