"""What a signal does to the command ``pimflow`` while its package is imported: it ends with one line.

This module is outside the package, whose import takes about 20 ms, and imports only modules that Python has
already loaded. Before it, in Python's own start, Python handles Ctrl-C.
"""

from __future__ import annotations

import _signal  # the import of `signal` takes as long as all others: it creates enumerations
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

INTERRUPTED = 130  # exit code
MESSAGE = "pimflow: interrupted"
SIGNALS = (_signal.SIGINT, _signal.SIGTERM)


def leave(_number: int, _frame: FrameType | None) -> None:
    """A signal handler: end the process, which has nothing to clean up yet, or any more."""
    try:
        os.write(2, f"{MESSAGE}\n".encode())
    finally:
        os._exit(INTERRUPTED)


def leave_when_interrupted() -> None:
    """Handle signals by `leave` before the command runs; ignored signals stay ignored."""
    for number in SIGNALS:
        if _signal.getsignal(number) is not _signal.SIG_IGN:
            _signal.signal(number, leave)
