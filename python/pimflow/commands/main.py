"""The ``pimflow`` command, a thin layer over the public API.

Exit codes: 0 ok, 1 our bug, 2 usage, 3 bad input or unwritable output, 4 infeasible, 5 verification
mismatch, 130 interrupted. Results go to stdout, progress and errors to stderr.
"""

from __future__ import annotations

import contextlib
import sys

from pimflow.commands import parser
from pimflow.commands.command_line import streams
from pimflow.errors import InfeasibleError, PimflowError, one_line
from pimflow.host import interrupts
from pimflow_signals import INTERRUPTED, MESSAGE


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    streams.reopen()
    with (
        contextlib.redirect_stderr(streams.LossyStream(sys.stderr)),
        interrupts.command_interrupts() as running,
    ):
        cause = ""  # text that the interrupted code adds to the message
        try:
            code, message = _run(argv)
        except Exception:  # a bug, or an error that a library raised because of an interrupt
            if not running.interrupted:
                raise
        except KeyboardInterrupt as interrupt:
            running.interrupted = True
            cause = f": {one_line(str(interrupt))}" if str(interrupt) else ""
        interrupts.ignore_signals()
        running.restore()
        if running.interrupted:
            code, message = INTERRUPTED, MESSAGE + cause
        if message:
            print(message, file=sys.stderr)
    return code


def _run(argv: list[str] | None) -> tuple[int, str]:
    """Run a command; returns its exit code, and the last message for stderr."""
    try:
        with streams.buffer_results():
            args = parser.parse(argv)
            if not args.json:
                streams.wrap_results()
            args.command(args)
    except PimflowError as error:
        return error.exit_code, f"pimflow: error: {one_line(str(error))}"
    except MemoryError:
        return InfeasibleError.exit_code, "pimflow: error: it takes more memory than this machine has"
    return 0, ""
