"""Hide stderr temporarily: TVM's C++ code prints warnings there that no log level stops.

A signal handler may hide stderr at any moment, also while it is hidden. Therefore the code saves the original
descriptor before it replaces it, and forgets it only after it is restored.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

_saved_descriptor = -1  # descriptor of the original stderr while it is hidden, else -1
_is_lasting = False  # whether it stays hidden until `show`, also after a block of `hidden`


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Drop what is written to stderr in the block, also by C++ code."""
    sys.stderr.flush()
    first = _saved_descriptor < 0
    try:
        hide()
        yield
    finally:
        if first and not _is_lasting:
            show()


def hide(*, lasting: bool = False) -> None:
    """Redirect stderr to the null device.

    Parameters
    ----------
    lasting : bool
        Whether it stays hidden until `show`, also if a block of `hidden` ends before.
    """
    global _saved_descriptor, _is_lasting
    if _saved_descriptor < 0:
        _saved_descriptor = os.dup(2)
    _is_lasting = _is_lasting or lasting
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)


def show() -> bool:
    """Restore stderr; returns whether it was hidden."""
    global _saved_descriptor, _is_lasting
    if _saved_descriptor < 0:
        return False
    os.dup2(_saved_descriptor, 2)
    descriptor, _saved_descriptor = _saved_descriptor, -1
    _is_lasting = False
    os.close(descriptor)
    return True
