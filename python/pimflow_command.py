"""The command ``pimflow`` from its first moment: Ctrl-C and SIGTERM end it with one line and its exit code.

It stands beside the package, which takes some 20 ms to import, and it imports nothing that Python has not
loaded: what comes before `run` is Python's own start, in which Ctrl-C is Python's.
"""

from __future__ import annotations

import _signal  # `signal` takes as long as all else here: it makes enumerations
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

INTERRUPTED = 130  # exit code
MESSAGE = "pimflow: interrupted"
SIGNALS = (_signal.SIGINT, _signal.SIGTERM)


def leave(_number: int, _frame: FrameType | None) -> None:
    """A signal handler: end the process, which has nothing yet, or any more, to clean up."""
    try:
        os.write(2, f"{MESSAGE}\n".encode())
    finally:
        os._exit(INTERRUPTED)


def leave_when_interrupted() -> None:
    """For a process before its command runs: `leave` takes signals; those that are ignored stay so."""
    for number in SIGNALS:
        if _signal.getsignal(number) is not _signal.SIG_IGN:
            _signal.signal(number, leave)


def run() -> None:
    """Run one command, and leave with its exit code."""
    leave_when_interrupted()
    from pimflow.__main__ import run as run_command

    run_command()
