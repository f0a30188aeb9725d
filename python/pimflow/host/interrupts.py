"""Ctrl-C while C++ code runs that calls Python back.

tvm-ffi hands a callback its arguments one by one. A signal handler that raises meanwhile makes it release a
string twice (0.1.14: `TVMFFIPyCallbackArgSetterObject_` lets go of what the half-made string owns already),
and the process dies of it, then or later.
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
    """Keeps `KeyboardInterrupt` back until it can be raised; see `held`."""

    def __init__(self) -> None:
        self.waiting = False
        self._released = False

    def take(self, _number: int, _frame: FrameType | None) -> None:
        """The signal handler."""
        self.waiting = True
        if self._released:
            raise KeyboardInterrupt

    def releasing(self, callback: Callable[P, T]) -> Callable[P, T]:
        """`callback`, in whose body interrupts are raised as usual, one that waits at once."""

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
    """Around a call of C++ code that calls Python back: `KeyboardInterrupt` is raised when it is over.

    Callbacks made with `Hold.releasing` end the call sooner. Concerns the signals that raise
    `KeyboardInterrupt`, and only the main thread, which alone gets them.
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
    """When all is done: Python's own end would die of a signal, and not say that the work is there."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
