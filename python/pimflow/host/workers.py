"""Worker processes of this machine: they end with the process that started them, however that ends.

A worker and its owner share one socket. When the owner ends, also by SIGKILL, the kernel closes its side, and
the worker leaves. Nothing else is shared: no named socket, folder, semaphore or further process can be left
behind, as `multiprocessing` leaves them. Ctrl-C, which a terminal sends to workers too, is the owner's.
Workers that have done their items wait for the next ones: to start one takes longer than most items.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import ForkingPickler
from typing import TypeVar

from pimflow.errors import ProfilerError
from pimflow.host import without_torch

Item = TypeVar("Item")
Result = TypeVar("Result")

ATTEMPTS = 3  # workers that die at one item before that is an error
PRELOAD = ("pimflow.placement.costs.pim_runs",)  # imported once, in the worker that the others fork from
_LOOK_MS = 200  # a watch looks so often whether it is still wanted


def map_items(
    function: Callable[[Item], Result], items: Sequence[Item], jobs: int
) -> Iterator[tuple[int, Result]]:
    """(Position of an item, its result), in the order in which results are ready.

    Parameters
    ----------
    function, items
        Pickled by reference and by value. What is defined in a program's main module is not found by workers.
    jobs : int
        Number of workers, at least 1.

    Raises
    ------
    ProfilerError
        If `ATTEMPTS` workers die at one item.
    Exception
        What `function` raises.
    """
    waiting = deque(range(len(items)))
    deaths: Counter[int] = Counter()
    with contextlib.ExitStack() as crew:
        busy: dict[Connection, int] = {}

        def give(worker: Connection) -> None:
            busy[worker] = position = waiting.popleft()
            with contextlib.suppress(ConnectionError):  # it is dead, which reading from it says
                worker.send((function, items[position]))

        for worker in crew.enter_context(_hired(min(jobs, len(items)))):
            give(worker)
        while busy:
            ready = wait(list(busy))
            for worker in [each for each in busy if each in ready]:
                position = busy.pop(worker)
                try:
                    succeeded, result = worker.recv()
                except (EOFError, ConnectionError):
                    deaths[position] += 1
                    if deaths[position] == ATTEMPTS:
                        left = len(waiting) + len(busy) + 1
                        raise ProfilerError(
                            f"{ATTEMPTS} times a worker process died with {left} of {len(items)} items "
                            "left; memory may be short: use fewer (--jobs)"
                        ) from None
                    waiting.append(position)
                    (worker,) = crew.enter_context(_hired(1))
                    give(worker)
                    continue
                if not succeeded:
                    error, told = result
                    raise error from _InWorker(told)
                if waiting:
                    give(worker)
                yield position, result


class _InWorker(Exception):
    """The traceback of an error in a worker, as its cause."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


# Workers that wait, by the paths that they import from.
_waiting: defaultdict[tuple[str, ...], list[Connection]] = defaultdict(list)


@contextlib.contextmanager
def _hired(count: int) -> Iterator[list[Connection]]:
    """Our ends of the sockets of `count` workers, who wait for others once they have done their items.

    After an error they leave, since some may still be busy, and so do those whose sockets are closed.
    """
    waiting = _waiting[tuple(sys.path)]
    hired = [waiting.pop() for _ in range(min(count, len(waiting)))]
    try:
        if len(hired) < count:
            hired += _started(count - len(hired))
        yield hired
    except BaseException:
        for worker in hired:
            worker.close()
        raise
    # One that is dead has an end to tell.
    waiting += [worker for worker in hired if not (worker.closed or worker.poll())]


def _started(count: int) -> list[Connection]:
    """Our ends of the sockets of `count` new workers, which leave when these are closed."""
    pairs = [Pipe() for _ in range(count)]
    numbers = [theirs.fileno() for _, theirs in pairs]
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from pimflow.host.workers import serve; serve({numbers!r})"
    )
    # Blocked signals are inherited: no moment of a worker is interrupted by Ctrl-C.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=numbers,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    finally:
        for _, theirs in pairs:
            theirs.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    atexit.register(_ended, process)
    return [ours for ours, _ in pairs]


def _ended(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def serve(numbers: Sequence[int]) -> None:
    """A worker's life, and that of the workers that fork from it: one for each socket of `numbers`."""
    without_torch.install()
    with _watch(numbers[0]):
        for module in PRELOAD:
            importlib.import_module(module)
    mine = numbers[0]  # of the others, each child has one
    for number in numbers[1:]:
        if not os.fork():
            mine = number
            break
    for number in set(numbers) - {mine}:
        os.close(number)
    with _watch(mine), Connection(mine) as owner, contextlib.suppress(EOFError, ConnectionError):
        while True:
            owner.send_bytes(_answer(owner.recv_bytes()))
    os._exit(0)


def _answer(request: bytes) -> memoryview:
    """What a worker sends back: (True, result), or (False, (error, its traceback))."""
    try:
        function, item = ForkingPickler.loads(request)
        return ForkingPickler.dumps((True, function(item)))
    except Exception as error:
        told = traceback.format_exc()
        try:
            answer = ForkingPickler.dumps((False, (error, told)))
            ForkingPickler.loads(answer)
        except Exception:  # an error that cannot be pickled
            answer = ForkingPickler.dumps((False, (RuntimeError(f"{type(error).__name__}: {error}"), told)))
        return answer


@contextlib.contextmanager
def _watch(number: int) -> Iterator[None]:
    """End this process as soon as the other side of socket `number` is closed, whatever is running here."""
    poll = select.poll()
    poll.register(number, 0)  # hanging up is always told
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            if poll.poll(_LOOK_MS):
                os._exit(1)

    watch = threading.Thread(target=look, daemon=True)
    watch.start()
    try:
        yield
    finally:
        done.set()
        watch.join()
