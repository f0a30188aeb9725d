"""The command ``pimflow`` as a process; ``python -m pimflow`` is the same."""

from __future__ import annotations

import sys

from pimflow import interrupts
from pimflow.cli import main


def run() -> None:
    """Run one command, and leave with its exit code."""
    code = main()
    interrupts.ignore()
    sys.exit(code)


if __name__ == "__main__":
    run()
