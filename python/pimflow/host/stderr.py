"""Stderr pointed nowhere for a while: TVM's C++ code warns there, which no log level stops.

A signal handler may hide stderr at any step of the code here, also while it is hidden: what it was is kept
before it is lost, and forgotten after it is back.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

_kept = -1  # number of the file that stderr was, while it is hidden
_lasting = False  # hidden until `show`, whatever `hidden` ends


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Drop what is written to stderr in the block, also by C++ code."""
    sys.stderr.flush()
    first = _kept < 0
    try:
        hide()
        yield
    finally:
        if first and not _lasting:
            show()


def hide(*, lasting: bool = False) -> None:
    """Point stderr nowhere.

    Parameters
    ----------
    lasting : bool
        Until `show`, also where a block of `hidden` ends meanwhile.
    """
    global _kept, _lasting
    if _kept < 0:
        _kept = os.dup(2)
    _lasting = _lasting or lasting
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)


def show() -> bool:
    """Give stderr back; whether it was hidden."""
    global _kept, _lasting
    if _kept < 0:
        return False
    os.dup2(_kept, 2)
    kept, _kept = _kept, -1
    _lasting = False
    os.close(kept)
    return True
