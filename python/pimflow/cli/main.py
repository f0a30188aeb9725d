"""The ``pimflow`` command: thin over the public API.

Exit codes: 0 ok, 1 our bug, 2 usage, 3 bad input or unwritable output, 4 infeasible, 5 verification
mismatch, 130 interrupted. Results go to stdout, progress and errors to stderr.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading

from pimflow.cli import parser, streams
from pimflow.errors import InfeasibleError, PimflowError, one_line


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    if threading.current_thread() is threading.main_thread():  # else it is somebody else's program
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # cleans up like Ctrl-C
    streams.reopen()
    with contextlib.redirect_stderr(streams.Progress(sys.stderr)):
        try:
            with streams.results():
                args = parser.parse(argv)
                args.command(args)
        except PimflowError as error:
            print(f"pimflow: error: {one_line(str(error))}", file=sys.stderr)
            return error.exit_code
        except KeyboardInterrupt:
            print("pimflow: interrupted", file=sys.stderr)
            return 130
        except MemoryError:
            print("pimflow: error: it takes more memory than this machine has", file=sys.stderr)
            return InfeasibleError.exit_code
    return 0
