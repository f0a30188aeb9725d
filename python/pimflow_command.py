"""Entry point of the command ``pimflow``: from its start, Ctrl-C and SIGTERM end it with one line."""

from pimflow_signals import leave_when_interrupted


def run() -> None:
    """Run one command, and leave with its exit code."""
    leave_when_interrupted()
    from pimflow.__main__ import run as run_command  # slow, so that it may be interrupted

    run_command()
