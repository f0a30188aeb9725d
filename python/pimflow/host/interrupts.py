"""Ctrl-C and SIGTERM: in commands at any moment, and during C++ code that calls Python functions.

Libraries turn the `KeyboardInterrupt` of a signal into another error, or lose it: an extension module that is
being imported makes it an ImportError, and Python prints and drops it in a destructor. So a command remembers
that it was interrupted (`command`).

tvm-ffi converts the arguments of a callback one by one. If a signal handler raises meanwhile, it releases a
string twice (0.1.14: `TVMFFIPyCallbackArgSetterObject_` releases what the unfinished string owns already),
and the process crashes, then or later.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import ParamSpec, TypeVar

from pimflow.host import stderr
from pimflow_command import SIGNALS, leave

P = ParamSpec("P")
T = TypeVar("T")

_AGAIN_SECONDS = 0.05


class Command:
    """What is interrupted by a signal; see `command`.

    Attributes
    ----------
    interrupted : bool
        Whether a signal came.
    """

    def __init__(self) -> None:
        self.interrupted = False

    def take(self, _number: int, _frame: FrameType | None) -> None:
        """The signal handler. From now on stderr is nowhere: TVM's C++ code warns of what is cut short."""
        self.interrupted = True
        with contextlib.suppress(OSError):
            stderr.hide(lasting=True)
        raise KeyboardInterrupt

    def restore(self) -> None:
        """Give stderr back, with its cursor, which progress may have hidden."""
        sys.stderr.flush()
        if stderr.show() and os.isatty(2):
            os.write(2, b"\r\x1b[K\x1b[?25h")


@contextlib.contextmanager
def command() -> Iterator[Command]:
    """For the work of one command: signals raise `KeyboardInterrupt`, and are remembered.

    Signals that are ignored or that others handle stay so, but SIGTERM, which would end the process without
    cleaning up. Outside of the main thread it is somebody else's program: nothing changes.
    """
    running = Command()
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        if handler in (signal.default_int_handler, leave) or number == signal.SIGTERM:
            signal.signal(number, running.take)
    try:
        yield running
    finally:
        running.restore()
        for number, handler in before.items():
            signal.signal(number, handler)


def raise_again_what_is_lost() -> None:
    """For the process of a command: an interrupt that Python drops, as in a destructor, comes again."""
    sys.unraisablehook = _raise_again


def _raise_again(lost: sys.UnraisableHookArgs) -> None:
    """Other errors are printed as always."""
    if isinstance(lost.exc_value, KeyboardInterrupt):
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGTERM))  # which is never ignored
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)  # at once would be in here
    else:
        sys.__unraisablehook__(lost)


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
    kept = {}
    if threading.current_thread() is threading.main_thread():
        kept = {number: handler for number in SIGNALS if _raises(handler := signal.getsignal(number))}
    for number in kept:
        signal.signal(number, hold.take)
    try:
        yield hold
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
        if hold.waiting:
            signal.raise_signal(next(iter(kept)))
            raise KeyboardInterrupt


def _raises(handler: object) -> bool:
    """Whether a signal handler raises `KeyboardInterrupt`."""
    return handler is signal.default_int_handler or isinstance(getattr(handler, "__self__", None), Command)


def ignore() -> None:
    """After the work is done: a signal during Python's shutdown would turn success into a failure code."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
