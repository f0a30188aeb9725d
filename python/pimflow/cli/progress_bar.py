"""How far a command is, on stderr."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

AFTER_SECONDS = 2.0


@contextlib.contextmanager
def bar(text: str, quiet: bool) -> Iterator[Callable[[float], None]]:
    """A progress bar on stderr, from two seconds on; a plain line where that is no terminal."""
    begin = time.monotonic()
    update: Callable[[float], None] | None = None
    with contextlib.ExitStack() as shown:

        def advance(share: float) -> None:
            nonlocal update
            if update is None and not quiet and time.monotonic() - begin > AFTER_SECONDS:
                update = _shown(text, shown)
            if update is not None:
                update(share)

        yield advance


def _shown(text: str, shown: contextlib.ExitStack) -> Callable[[float], None]:
    if not sys.stderr.isatty():
        print(f"pimflow: {text} …", file=sys.stderr)
        return lambda _: None
    from rich.console import Console
    from rich.progress import Progress

    drawn = shown.enter_context(Progress(console=Console(stderr=True)))
    task = drawn.add_task(text, total=1.0)
    return lambda share: drawn.update(task, completed=share)
