"""Print results on stdout, progress and warnings on stderr."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pimflow.commands.command_line.steps import StepClock
from pimflow.errors import escape_controls

BAR_DELAY_SECONDS = 2.0  # delay of a progress bar


def print_json(value: Any) -> None:
    """Print a result as JSON; NumPy scalars become numbers, and sets sorted lists."""
    print(json.dumps(value, indent=1, default=_json_value))


def _json_value(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value)
    return value.item() if hasattr(value, "item") else str(value)


def show(result: Any, as_json: bool) -> None:
    """Print a result that has `to_json` and `text`."""
    if as_json:
        print_json(result.to_json())
    else:
        print(result.text())


def print_page(path: Path, as_json: bool) -> None:
    """Print the path and the size of a page that was written."""
    size_bytes = path.stat().st_size
    if as_json:
        print_json({"wrote": str(path), "bytes": size_bytes})
    else:
        print(f"wrote     {path} ({size_bytes / 1e6:.2f} MB)")


def say(text: str, quiet: bool) -> None:
    """Print a line on stderr, unless `quiet`."""
    if not quiet:
        print(f"pimflow: {escape_controls(text)}", file=sys.stderr)


def warn(text: str, quiet: bool = False) -> None:
    """Print a warning on stderr, unless `quiet`."""
    say(f"warning: {text}", quiet)


@contextlib.contextmanager
def status(args: argparse.Namespace) -> Iterator[Callable[[str], None]]:
    """Show the steps of a command on stderr, with the time that is left; nothing if it is ``--quiet``.

    On a terminal there is one line. If stderr is none, or with ``--verbose``, there is a line for each step;
    with ``--verbose`` also the time that it took.
    """
    if args.quiet:
        yield lambda _: None
        return

    def finish(text: str, seconds: float) -> None:
        """Print the time of a step."""
        if args.verbose:
            say(f"{text}: {seconds:.2f} s", quiet=False)

    clock = StepClock(args, finish)
    with contextlib.ExitStack() as stack:
        is_line = sys.stderr.isatty() and not args.verbose
        if is_line:
            from rich.console import Console

            stack.enter_context(Console(stderr=True).status(clock))

        def progress(text: str) -> None:
            """Begin a step."""
            clock.end()
            if not is_line:
                say(f"{text} …", quiet=False)
            clock.begin(text)

        yield progress
        clock.end()


@contextlib.contextmanager
def bar(text: str, args: argparse.Namespace) -> Iterator[Callable[[float], None]]:
    """Show a progress bar on stderr after two seconds; a plain line if that is no terminal.

    It disappears when all is done, so that results may be printed, and appears again if there is more to do.
    """
    begin = time.monotonic()
    update: Callable[[float], None] | None = None
    with contextlib.ExitStack() as stack:

        def advance(share: float) -> None:
            """Show the share that is done, in [0, 1]."""
            nonlocal update
            if (
                update is None
                and share < 1
                and not args.quiet
                and time.monotonic() - begin > BAR_DELAY_SECONDS
            ):
                update = _start_bar(text, stack)
            if update is not None:
                update(share)
            if share >= 1 and sys.stderr.isatty():
                stack.close()
                update = None

        yield advance


def _markup(text: str) -> str:
    """Escape brackets in `text`, which rich would take for markup."""
    from rich.markup import escape

    return escape(escape_controls(text))


def _start_bar(text: str, stack: contextlib.ExitStack) -> Callable[[float], None]:
    if not sys.stderr.isatty():
        say(f"{text} …", quiet=False)
        return lambda _: None
    from rich.console import Console
    from rich.progress import Progress

    progress = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
    task = progress.add_task(_markup(text), total=1.0)
    return lambda share: progress.update(task, completed=share)
