"""Ctrl-C during C++ code that calls Python functions.

tvm-ffi converts the arguments of a callback one by one. If a signal handler raises meanwhile, it releases a
string twice (0.1.14: `TVMFFIPyCallbackArgSetterObject_` releases what the unfinished string owns already),
and the process crashes, then or later.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Hold:
    """Defers `KeyboardInterrupt` until it can be raised; see `held`."""

    def __init__(self) -> None:
        self.waiting = False
        self._released = False

    def take(self, _number: int, _frame: FrameType | None) -> None:
        """The signal handler."""
        self.waiting = True
        if self._released:
            raise KeyboardInterrupt

    def releasing(self, callback: Callable[P, T]) -> Callable[P, T]:
        """`callback`, in whose body interrupts are raised at once, a deferred one first."""

        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            self._released = True
            try:
                if self.waiting:
                    raise KeyboardInterrupt
                return callback(*args, **kwargs)
            finally:
                self._released = False

        return call


@contextlib.contextmanager
def held() -> Iterator[Hold]:
    """For a call of C++ code that calls Python functions: `KeyboardInterrupt` is raised after the call.

    Callbacks made with `Hold.releasing` end the call sooner. Only signals whose handler raises
    `KeyboardInterrupt` are deferred, and only in the main thread: Python delivers signals to no other.
    """
    hold = Hold()
    here = threading.current_thread() is threading.main_thread()
    kept = [s for s in _SIGNALS if here and signal.getsignal(s) is signal.default_int_handler]
    for number in kept:
        signal.signal(number, hold.take)
    try:
        yield hold
    finally:
        for number in kept:
            signal.signal(number, signal.default_int_handler)
        if hold.waiting:
            raise KeyboardInterrupt


def ignore() -> None:
    """After the work is done: a signal during Python's shutdown would turn success into a failure code."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
