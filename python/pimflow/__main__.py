"""The command ``pimflow`` as a process; ``python -m pimflow`` is the same."""

from __future__ import annotations

import atexit
import os
import sys

from pimflow.host import garbage_collection, interrupts
from pimflow_command import INTERRUPTED, leave_when_interrupted

# Threads of NumPy's products wait asleep, after 2 ** 4 cycles. By default they keep a core busy for 2 ** 26
# after each product: for most products of a verification, that is more than the product takes.
SLEEP = {"OPENBLAS_THREAD_TIMEOUT": "4"}


def run() -> None:
    """Run one command, and leave with its exit code."""
    leave_when_interrupted()
    interrupts.raise_again_what_is_lost()
    for name, value in SLEEP.items():
        os.environ.setdefault(name, value)  # NumPy reads it when it is imported
    garbage_collection.seldom()
    codes: list[int] = []
    atexit.register(_leave, codes)  # the first that is registered is called last
    from pimflow.cli.main import main  # takes long enough to be interrupted
    from pimflow.host import without_torch

    without_torch.install()
    code = main()
    interrupts.ignore()
    if code == INTERRUPTED:
        # Python remembers an interrupt of code that was made at run time, as data classes are, and would end
        # by that signal, whoever caught it.
        sys.stderr.flush()
        os._exit(code)
    codes.append(code)
    sys.exit(code)


def _leave(codes: list[int]) -> None:
    """End with the code of a command that ended by itself, once all else that ends with Python has ended.

    Python would free its objects one by one, which takes 0.4 s after a compilation.
    """
    if codes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(codes[0])


if __name__ == "__main__":
    run()
