"""Entry point of the command ``pimflow``: from its start, Ctrl-C and SIGTERM end it with one line.

It is outside the package, whose import takes about 20 ms, and imports only modules that Python has already
loaded. Before `run`, in Python's own start, Python handles Ctrl-C.
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


def run() -> None:
    """Run one command, and leave with its exit code."""
    leave_when_interrupted()
    from pimflow.__main__ import run as run_command

    run_command()
