"""Executors of independent items: this process, several processes, or workers of a Dask scheduler."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from pimflow.errors import ProfilerError, UnknownNameError, UsageError
from pimflow.host import workers
from pimflow.host.result_cache import sources_digest

if TYPE_CHECKING:
    import distributed

Item = TypeVar("Item")
Result = TypeVar("Result")

DASK = "dask://"
CONNECT_SECONDS = 10.0
START_SECONDS = 1.0  # about the start of a worker: less work is faster without workers


class Executor(Protocol):
    """Applies a function to independent items."""

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[tuple[int, Result]]:
        """(Position of an item, its result), in the order in which results are ready.

        Raises what `function` raises, and `ProfilerError` if workers die repeatedly.
        """


@dataclass(frozen=True)
class Serial:
    """This process, one item after the other."""

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[tuple[int, Result]]:
        """See `Executor`."""
        for position, item in enumerate(items):
            yield position, function(item)


@dataclass(frozen=True)
class Processes:
    """Processes of this machine. An item whose worker dies is repeated.

    Parameters
    ----------
    serial_seconds : float
        Time in which this process does items itself, before worker processes do the rest; 0 by default.
    """

    jobs: int
    serial_seconds: float = 0.0

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[tuple[int, Result]]:
        """See `Executor`."""
        done, deadline = 0, time.monotonic() + self.serial_seconds
        while done < len(items) and (
            self.jobs == 1 or len(items) - done == 1 or (self.serial_seconds and time.monotonic() < deadline)
        ):
            yield done, function(items[done])
            done += 1
        if done < len(items):
            for position, result in workers.map_items(function, items[done:], self.jobs):
                yield done + position, result


@dataclass(frozen=True)
class Dask:
    """Workers of a Dask scheduler, with the same pimflow. An item whose worker dies goes to another.

    Parameters
    ----------
    address : str
        ``HOST:PORT`` of the scheduler.
    """

    address: str

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[tuple[int, Result]]:
        """See `Executor`; raises `UsageError` if Dask is not installed."""
        try:
            import distributed
        except ImportError as error:
            raise UsageError(
                "an executor dask:// needs Dask, which is not installed: pip install 'pimflow[dask]'"
            ) from error
        if not items:
            return
        try:
            client = distributed.Client(self.address, timeout=CONNECT_SECONDS, set_as_default=False)
        except (OSError, ValueError, TimeoutError) as error:
            raise ProfilerError(f"executor '{DASK}{self.address}': {error}") from error
        with client:
            self._check_workers(client)
            futures = {
                client.submit(function, item, pure=False, retries=workers.ATTEMPTS): position
                for position, item in enumerate(items)
            }
            for future in distributed.as_completed(list(futures), loop=client.loop):
                try:
                    result = future.result()
                except distributed.KilledWorker as error:
                    raise ProfilerError(f"executor '{DASK}{self.address}': {error}") from error
                yield futures[future], result

    def _check_workers(self, client: distributed.Client) -> None:
        digests = client.run(sources_digest)
        if not digests:
            raise ProfilerError(f"executor '{DASK}{self.address}': the scheduler has no workers")
        others = sorted(worker for worker, digest in digests.items() if digest != sources_digest())
        if others:
            raise ProfilerError(
                f"executor '{DASK}{self.address}': another pimflow than here runs on {', '.join(others)}"
            )


def parse_executor(text: str, jobs: int | None = None) -> Executor:
    """The executor that ``processes`` or ``dask://HOST:PORT`` names.

    Parameters
    ----------
    jobs : int, optional
        Worker processes; by default as many as processors.

    Raises
    ------
    UsageError
        If `text` names no executor, if `jobs` is not positive, or if it is given for Dask.
    """
    if jobs is not None and jobs < 1:
        raise UsageError(f"--jobs {jobs}: at least one is needed")
    if text.startswith(DASK):
        address = text.removeprefix(DASK)
        host, colon, port = address.rpartition(":")
        if not (host and colon and port.isdigit()):
            raise UsageError(f"executor '{text}' is not of the form {DASK}HOST:PORT")
        if jobs is not None:
            raise UsageError("--jobs is for --executor processes; a Dask scheduler has its own workers")
        return Dask(address)
    if text != "processes":
        raise UnknownNameError("executor", text, ["processes", f"{DASK}HOST:PORT"])
    return Processes(jobs or os.cpu_count() or 1, serial_seconds=START_SECONDS)
