"""Worker processes of this machine, which end whenever the process that started them ends.

A worker and its owner share one socket. When the owner ends, also by SIGKILL, the kernel closes its end, and
the worker exits. They share nothing else, so that no named socket, folder, semaphore or helper process can
remain, as with `multiprocessing`. Workers ignore Ctrl-C, which a terminal sends to them too; the owner
handles it. Idle workers wait for further items: to start one takes longer than most items.
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
from pimflow.host import partial_tvm

Item = TypeVar("Item")
Result = TypeVar("Result")

ATTEMPTS = 3  # number of workers that may die at one item before it is an error
PRELOAD = ("pimflow.placement.costs.pim_runs",)  # imported once, in the worker that the others fork from
_POLL_MS = 200  # interval at which a watch checks whether its block has ended


def map_items(
    function: Callable[[Item], Result], items: Sequence[Item], jobs: int
) -> Iterator[tuple[int, Result]]:
    """(Position of an item, its result), in the order in which results are ready.

    Parameters
    ----------
    function, items
        Pickled by reference, and by value. Workers do not find definitions in a program's main module.
    jobs : int
        Number of workers, at least 1.

    Raises
    ------
    ProfilerError
        If `ATTEMPTS` workers die at one item.
    Exception
        What `function` raises.
    """
    queue = deque(range(len(items)))
    deaths: Counter[int] = Counter()
    with contextlib.ExitStack() as stack:
        busy: dict[Connection, int] = {}

        def assign_item(worker: Connection) -> None:
            """Send the next item to a worker."""
            busy[worker] = position = queue.popleft()
            with contextlib.suppress(ConnectionError):  # it is dead: `recv` fails below
                worker.send((function, items[position]))

        for worker in stack.enter_context(_borrow_workers(min(jobs, len(items)))):
            assign_item(worker)
        while busy:
            ready = wait(list(busy))
            for worker in [connection for connection in busy if connection in ready]:
                position = busy.pop(worker)
                try:
                    succeeded, result = worker.recv()
                except (EOFError, ConnectionError):
                    deaths[position] += 1
                    if deaths[position] == ATTEMPTS:
                        remaining = len(queue) + len(busy) + 1
                        raise ProfilerError(
                            f"{ATTEMPTS} times a worker process died with {remaining} of {len(items)} items "
                            "left; memory may be short: use fewer (--jobs)"
                        ) from None
                    queue.append(position)
                    (worker,) = stack.enter_context(_borrow_workers(1))
                    assign_item(worker)
                    continue
                if not succeeded:
                    error, trace_text = result
                    raise error from _WorkerTraceback(trace_text)
                if queue:
                    assign_item(worker)
                yield position, result


class _WorkerTraceback(Exception):
    """The traceback of an error in a worker, as its cause."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


# Idle workers, by the paths that they import from.
_idle_workers: defaultdict[tuple[str, ...], list[Connection]] = defaultdict(list)


@contextlib.contextmanager
def _borrow_workers(count: int) -> Iterator[list[Connection]]:
    """The owner's ends of the sockets of `count` workers, which are idle again after the block.

    After an error they exit, because some may still be busy.
    """
    idle = _idle_workers[tuple(sys.path)]
    workers = [idle.pop() for _ in range(min(count, len(idle)))]
    try:
        if len(workers) < count:
            workers += _start_workers(count - len(workers))
        yield workers
    except BaseException:
        for worker in workers:
            worker.close()
        raise
    # A dead worker has an end of file to read.
    idle += [worker for worker in workers if not (worker.closed or worker.poll())]


def _start_workers(count: int) -> list[Connection]:
    """The owner's ends of the sockets of `count` new workers, which exit when these are closed."""
    pairs = [Pipe() for _ in range(count)]
    numbers = [worker_end.fileno() for _, worker_end in pairs]
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from pimflow.host.workers import serve; serve({numbers!r})"
    )
    # Workers inherit blocked signals, so that Ctrl-C never interrupts them.
    signal_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=numbers,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    finally:
        for _, worker_end in pairs:
            worker_end.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)
    atexit.register(_kill_worker, process)
    return [owner_end for owner_end, _ in pairs]


def _kill_worker(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def serve(numbers: Sequence[int]) -> None:
    """Run a worker for each socket of `numbers`: this process, and processes that it forks."""
    partial_tvm.install()
    with _watch(numbers[0]):
        for module in PRELOAD:
            importlib.import_module(module)
    socket_number = numbers[0]  # each child has one of the others
    for number in numbers[1:]:
        if not os.fork():
            socket_number = number
            break
    for number in set(numbers) - {socket_number}:
        os.close(number)
    with (
        _watch(socket_number),
        Connection(socket_number) as owner,
        contextlib.suppress(EOFError, ConnectionError),
    ):
        while True:
            owner.send_bytes(_serve_request(owner.recv_bytes()))
    os._exit(0)


def _serve_request(request: bytes) -> memoryview:
    """The answer to a request, pickled: (True, result), or (False, (error, its traceback))."""
    try:
        function, item = ForkingPickler.loads(request)
        return ForkingPickler.dumps((True, function(item)))
    except Exception as error:
        trace_text = traceback.format_exc()
        try:
            answer = ForkingPickler.dumps((False, (error, trace_text)))
            ForkingPickler.loads(answer)
        except Exception:  # an error that cannot be pickled
            answer = ForkingPickler.dumps(
                (False, (RuntimeError(f"{type(error).__name__}: {error}"), trace_text))
            )
        return answer


@contextlib.contextmanager
def _watch(number: int) -> Iterator[None]:
    """In the block, end this process as soon as the other end of socket `number` is closed."""
    poll = select.poll()
    poll.register(number, 0)  # a hang-up is always reported
    done = threading.Event()

    def poll_socket() -> None:
        """Poll the socket until the block ends."""
        while not done.is_set():
            if poll.poll(_POLL_MS):
                os._exit(1)

    watch = threading.Thread(target=poll_socket, daemon=True)
    watch.start()
    try:
        yield
    finally:
        done.set()
        watch.join()
