"""The command ``pimflow`` as a process; ``python -m pimflow`` is the same."""

from __future__ import annotations

import os
import sys

from pimflow.host import interrupts
from pimflow_command import INTERRUPTED, leave_when_interrupted


def run() -> None:
    """Run one command, and leave with its exit code."""
    leave_when_interrupted()
    interrupts.raise_again_what_is_lost()
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
    sys.exit(code)


if __name__ == "__main__":
    run()
