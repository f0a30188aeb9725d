"""The steps of a command on a terminal: how long each has taken, and how long it took the last time."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pimflow.errors import escape_controls

if TYPE_CHECKING:
    from rich.text import Text

LEAST_SECONDS = 2.0  # of a step whose time is stored, and shown


class StepClock:
    """The running step of a command, with its remaining time if the cache has that of an earlier run.

    Parameters
    ----------
    args : Namespace
        Of the command: steps of the same command on the same network take as long again. Their times are in
        the cache of results, unless ``--cache none`` is given.
    finish : callable
        Called with the text and the seconds of each step when it ends.
    """

    def __init__(self, args: argparse.Namespace, finish: Callable[[str, float], None]) -> None:
        subject = next((getattr(args, name) for name in ("model", "directory", "source") if name in args), "")
        self._subject = (args.parser.prog, str(subject))
        self._cache_path = getattr(args, "cache", None)
        self._finish = finish
        self._text, self._begin, self._expected_seconds = "", 0.0, 0.0

    def begin(self, text: str) -> None:
        """End the running step, and begin the next."""
        self.end()
        self._text, self._begin = escape_controls(text), time.monotonic()
        self._expected_seconds = self._stored_seconds()

    def end(self) -> None:
        """End the running step, and store its time."""
        if not self._text:
            return
        seconds = time.monotonic() - self._begin
        self._finish(self._text, seconds)
        if seconds >= LEAST_SECONDS:
            self._with_cache(lambda cache: cache.put({self._key(): seconds}, _ANY_CODE))
        self._text = ""

    def line(self) -> str:
        """The step as text: ``searching … 3 s, about 5 s left``."""
        seconds = time.monotonic() - self._begin
        parts = [f"{seconds:.0f} s"] if seconds >= LEAST_SECONDS else []
        if self._expected_seconds > seconds:
            parts.append(f"about {self._expected_seconds - seconds:.0f} s left")
        return f"{self._text} … {', '.join(parts)}"

    def __rich__(self) -> Text:
        """The step for a terminal, which asks for it several times a second."""
        from rich.text import Text

        return Text(self.line())

    def _key(self) -> tuple[object, ...]:
        return ("seconds of a step", *self._subject, self._text)

    def _stored_seconds(self) -> float:
        key = self._key()
        stored = self._with_cache(lambda cache: cache.get([key], _ANY_CODE, read=float))
        return float((stored or {}).get(key, 0.0))

    def _with_cache(self, use: Callable[[Any], Any]) -> Any:
        from pimflow.host.result_cache import ResultCache, default_path

        if self._cache_path == "none":
            return None
        cache = ResultCache(self._cache_path or default_path())
        try:
            return use(cache)
        finally:
            cache.close()


_ANY_CODE = "any"  # times of steps are no results: other code may read them
