"""The command ``pimflow`` as a process; ``python -m pimflow`` is the same."""

from __future__ import annotations

import sys

from pimflow.host import interrupts, without_torch


def run() -> None:
    """Run one command, and leave with its exit code."""
    without_torch.install()
    try:
        from pimflow.cli.main import main  # takes long enough to be interrupted
    except KeyboardInterrupt:
        print("pimflow: interrupted", file=sys.stderr)
        sys.exit(130)
    code = main()
    interrupts.ignore()
    sys.exit(code)


if __name__ == "__main__":
    run()
