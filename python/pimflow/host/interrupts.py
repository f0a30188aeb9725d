"""Handling of Ctrl-C and SIGTERM in commands, and in C++ code that calls Python functions.

Libraries convert the `KeyboardInterrupt` of a signal to another error, or lose it: the import of an extension
module raises ImportError instead, and Python prints and drops it in a destructor. Therefore a command records
that it was interrupted (`command_interrupts`).

tvm-ffi converts the arguments of a callback one by one. If a signal handler raises during that, it releases a
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
from pimflow_signals import SIGNALS, leave

P = ParamSpec("P")
T = TypeVar("T")

_RAISE_DELAY_SECONDS = 0.05


class CommandInterrupts:
    """Interrupts of one command; see `command_interrupts`."""

    def __init__(self) -> None:
        self.interrupted = False

    def handle_signal(self, _number: int, _frame: FrameType | None) -> None:
        """The signal handler. It hides stderr: TVM's C++ code prints warnings about interrupted work."""
        self.interrupted = True
        with contextlib.suppress(OSError):
            stderr.hide(lasting=True)
        raise KeyboardInterrupt

    def restore(self) -> None:
        """Restore stderr, and the cursor, which the progress display may have hidden."""
        sys.stderr.flush()
        if stderr.show() and os.isatty(2):
            os.write(2, b"\r\x1b[K\x1b[?25h")


@contextlib.contextmanager
def command_interrupts() -> Iterator[CommandInterrupts]:
    """For the work of one command: signals raise `KeyboardInterrupt`, and are recorded.

    Signals that are ignored, or have handlers of others, stay so; except SIGTERM, which would end the process
    without cleaning up. Outside the main thread nothing changes: it is the program of a user.
    """
    interrupts = CommandInterrupts()
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in handlers.items():
        if handler in (signal.default_int_handler, leave) or number == signal.SIGTERM:
            signal.signal(number, interrupts.handle_signal)
    try:
        yield interrupts
    finally:
        interrupts.restore()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def reraise_dropped_interrupts() -> None:
    """For the process of a command: raise again an interrupt that Python drops, as in a destructor."""
    sys.unraisablehook = _reraise_interrupt


def _reraise_interrupt(unraisable: sys.UnraisableHookArgs) -> None:
    """The hook for unraisable errors: schedules an interrupt again, prints other errors as usual."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGTERM))  # which is never ignored
        signal.setitimer(signal.ITIMER_REAL, _RAISE_DELAY_SECONDS)  # later: in this hook it would be lost too
    else:
        sys.__unraisablehook__(unraisable)


class InterruptDeferral:
    """Defers `KeyboardInterrupt` until it can be raised; see `defer_interrupts`."""

    def __init__(self) -> None:
        self.is_interrupted = False
        self._allows_interrupts = False

    def handle_signal(self, _number: int, _frame: FrameType | None) -> None:
        """The signal handler."""
        self.is_interrupted = True
        if self._allows_interrupts:
            raise KeyboardInterrupt

    def allow_interrupts(self, callback: Callable[P, T]) -> Callable[P, T]:
        """`callback`, whose body may be interrupted; a deferred interrupt is raised before it."""

        def call_interruptibly(*args: P.args, **kwargs: P.kwargs) -> T:
            """Call `callback` with interrupts allowed."""
            self._allows_interrupts = True
            try:
                if self.is_interrupted:
                    raise KeyboardInterrupt
                return callback(*args, **kwargs)
            finally:
                self._allows_interrupts = False

        return call_interruptibly


@contextlib.contextmanager
def defer_interrupts() -> Iterator[InterruptDeferral]:
    """Defer `KeyboardInterrupt` to the end of a call of C++ code that calls Python functions.

    Callbacks from `InterruptDeferral.allow_interrupts` raise it earlier. Only signals whose handler raises
    `KeyboardInterrupt` are deferred, and only in the main thread: Python delivers signals to no other.
    """
    deferral = InterruptDeferral()
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {
            number: handler for number in SIGNALS if _raises_interrupt(handler := signal.getsignal(number))
        }
    for number in handlers:
        signal.signal(number, deferral.handle_signal)
    try:
        yield deferral
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if deferral.is_interrupted:
            signal.raise_signal(next(iter(handlers)))
            raise KeyboardInterrupt


def _raises_interrupt(handler: object) -> bool:
    """Whether a signal handler raises `KeyboardInterrupt`."""
    return handler is signal.default_int_handler or isinstance(
        getattr(handler, "__self__", None), CommandInterrupts
    )


def ignore_signals() -> None:
    """Ignore signals after the work: during Python's shutdown one would change the exit code."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
