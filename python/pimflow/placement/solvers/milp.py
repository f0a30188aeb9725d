"""Integer programs solved by HiGHS, without the lines that it prints to stdout."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from typing import Any

from scipy import optimize


def solve(*arguments: Any, **options: Any) -> optimize.OptimizeResult:
    """`scipy.optimize.milp` of the same arguments."""
    with _without_remarks():
        return optimize.milp(*arguments, **options)


@contextlib.contextmanager
def _without_remarks() -> Iterator[None]:
    """Drop what C code prints: HiGHS writes lines of its own to stdout, whatever its options say."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        ctypes.CDLL(None).fflush(None)  # C keeps lines for a pipe back until the process ends
        os.dup2(kept, 1)
        os.close(kept)
