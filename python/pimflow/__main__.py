"""The command ``pimflow`` as a process; ``python -m pimflow`` is the same."""

from __future__ import annotations

import atexit
import os
import sys

from pimflow.host import garbage_collection, interrupts
from pimflow_signals import INTERRUPTED, leave_when_interrupted

# Threads of OpenBLAS go to sleep 2 ** 4 cycles after a product. By default they spin for 2 ** 26 cycles,
# which takes longer than most products of a verification.
BLAS_ENVIRONMENT = {"OPENBLAS_THREAD_TIMEOUT": "4"}


def run() -> None:
    """Run one command, and leave with its exit code."""
    leave_when_interrupted()
    interrupts.reraise_dropped_interrupts()
    for name, value in BLAS_ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # NumPy reads it when it is imported
    garbage_collection.collect_rarely()
    codes: list[int] = []
    if not atexit._ncallbacks():  # callbacks registered earlier would run after `_leave`, so never
        atexit.register(_leave, codes)  # registered first, so called last
    from pimflow.commands.main import main  # slow, so that it may be interrupted
    from pimflow.host import partial_tvm

    partial_tvm.install()
    code = main()
    interrupts.ignore_signals()
    if code == INTERRUPTED:
        # Python records an interrupt of code that was generated at run time, such as methods of dataclasses,
        # and would end by that signal, although the error was caught.
        sys.stderr.flush()
        os._exit(code)
    codes.append(code)
    sys.exit(code)


def _leave(codes: list[int]) -> None:
    """Exit with the code of a command that ended normally, after all other exit callbacks.

    Python would free its objects one by one, which takes 0.4 s after a compilation.
    """
    if codes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(codes[0])


if __name__ == "__main__":
    run()
