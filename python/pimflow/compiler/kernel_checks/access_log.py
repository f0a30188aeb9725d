"""Which threads read and wrote each element of a memory: finds races between threads and between blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pimflow.compiler.kernel_checks.findings import Fault

NOBODY, SEVERAL = -1, -2  # in place of the number of a thread, a warp or a block
MAX_ELEMENTS = 1 << 22  # of accesses that are kept to find intervals that are alike

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Report = Callable[[Fault, str, int], None]
# What may follow in an interval: by access, the access itself, and what may follow it.
_Interval = dict[tuple[int, bool], tuple["Accesses", "_Interval"]]


@dataclass(frozen=True, kw_only=True)
class Accesses:
    """Accesses that happen at once, in arrays of one length.

    Attributes
    ----------
    elements, threads, warps, blocks : ndarray of int
        What is accessed, and by whom; numbers are those of a launch.
    lanes : ndarray of int
        The places of the threads among those that run.
    """

    elements: Ints
    threads: Ints
    warps: Ints
    blocks: Ints
    lanes: Ints


class AccessLog:
    """Accesses to the elements of one memory during a launch.

    Two accesses to one element, of which at least one is a write, are a race if no barrier orders them: by
    two threads between two barriers, or by two blocks at any time. A barrier of a warp orders the accesses
    of its threads. Accesses are compared, not values, so a race is found in whatever order the threads run.

    Parameters
    ----------
    name : str
        Name of the memory, for findings.
    elements : int
    is_shared : bool
        Whether each block has its own part of it.
    report : callable
        Takes a fault, the name of the memory, and an element.
    has_warp_barriers : bool
        Whether warps have barriers of their own.
    """

    def __init__(
        self, name: str, elements: int, is_shared: bool, report: Report, has_warp_barriers: bool = False
    ):
        self._name, self._is_shared, self._report = name, is_shared, report
        self._writer, self._reader = (np.full(elements, NOBODY, np.int64) for _ in range(2))
        self._write_epoch, self._read_epoch = (np.full(elements, NOBODY, np.int32) for _ in range(2))
        self._writing_block, self._reading_block = (np.full(elements, NOBODY, np.int64) for _ in range(2))
        self._warps = _WarpLog(elements) if has_warp_barriers else None
        self._intervals = _Intervals() if is_shared and not has_warp_barriers else None

    def write(self, accesses: Accesses, epoch: int, warp_epochs: Ints) -> None:
        """Record writes behind `epoch` barriers, and `warp_epochs` of warps, by the threads that run."""
        if self._intervals is None:
            self._write(accesses, epoch, warp_epochs)
            return
        for unknown, is_write in self._intervals.unknown(accesses, epoch, True):
            (self._write if is_write else self._read)(unknown, epoch, warp_epochs)

    def read(self, accesses: Accesses, epoch: int, warp_epochs: Ints) -> None:
        """Record reads; see `write`."""
        if self._intervals is None:
            self._read(accesses, epoch, warp_epochs)
            return
        for unknown, is_write in self._intervals.unknown(accesses, epoch, False):
            (self._write if is_write else self._read)(unknown, epoch, warp_epochs)

    def _write(self, accesses: Accesses, epoch: int, warp_epochs: Ints) -> None:
        elements, threads = accesses.elements, accesses.threads
        written = (self._write_epoch[elements] == epoch) & (self._writer[elements] != threads)
        read = (self._read_epoch[elements] == epoch) & (self._reader[elements] != threads)
        if self._warps is not None:
            epochs = warp_epochs[accesses.lanes]
            written &= ~self._warps.is_after_write(accesses, epochs)
            read &= ~self._warps.is_after_reads(accesses, epochs)
            self._warps.write(accesses, epochs)
        self._writer[elements], self._write_epoch[elements] = threads, epoch
        self._find(Fault.THREADS_RACE, elements, written | read | (self._writer[elements] != threads))
        if not self._is_shared:
            blocks = accesses.blocks
            race = _is_another(self._writing_block[elements], blocks)
            race |= _is_another(self._reading_block[elements], blocks)
            self._writing_block[elements] = blocks
            self._find(Fault.BLOCKS_RACE, elements, race | (self._writing_block[elements] != blocks))

    def _read(self, accesses: Accesses, epoch: int, warp_epochs: Ints) -> None:
        elements = accesses.elements
        race = (self._write_epoch[elements] == epoch) & (self._writer[elements] != accesses.threads)
        is_recent = self._read_epoch[elements] == epoch
        if self._warps is not None:
            epochs = warp_epochs[accesses.lanes]
            race &= ~self._warps.is_after_write(accesses, epochs)
            is_recent_in_warp = is_recent & ~self._warps.is_after_reads(accesses, epochs)
            self._warps.read(accesses, epochs, is_recent)
        else:
            is_recent_in_warp = is_recent
        self._find(Fault.THREADS_RACE, elements, race)
        self._read_epoch[elements] = epoch
        earlier = np.where(is_recent_in_warp, self._reader[elements], NOBODY)
        _merge(self._reader, elements, accesses.threads, earlier)
        if not self._is_shared:
            blocks = accesses.blocks
            self._find(Fault.BLOCKS_RACE, elements, _is_another(self._writing_block[elements], blocks))
            _merge(self._reading_block, elements, blocks, self._reading_block[elements])

    def written(self) -> Bools:
        """By element, whether a thread has written it."""
        result: Bools = self._writer != NOBODY
        return result

    def _find(self, fault: Fault, elements: Ints, race: Bools) -> None:
        if race.any():
            self._report(fault, self._name, int(elements[race.argmax()]))


class _Intervals:
    """Intervals between two barriers of a block, as the accesses that begin them.

    In the shared memory of a block, accesses race only with those of their own interval. So an interval
    that has the accesses of one before it needs no look: a loop's second iteration is like the third.
    """

    def __init__(self) -> None:
        self._epoch, self._elements = NOBODY, 0
        self._root: _Interval = {}
        self._place = self._root
        self._passed: list[tuple[Accesses, bool]] | None = None  # of this interval; None if it is a new one

    def unknown(self, accesses: Accesses, epoch: int, is_write: bool) -> list[tuple[Accesses, bool]]:
        """Accesses to look at, and whether they write: none as long as an interval is like another."""
        if epoch != self._epoch:
            if self._elements > MAX_ELEMENTS:
                self._root, self._elements = {}, 0
            self._epoch, self._place, self._passed = epoch, self._root, []
        key = (id(accesses), is_write)
        known = self._place.get(key)
        if known is not None and self._passed is not None:
            self._passed.append((accesses, is_write))
            self._place = known[1]
            return []
        unknown = [*(self._passed or []), (accesses, is_write)]
        self._elements += len(accesses.elements)
        self._passed, self._place = None, self._place.setdefault(key, (accesses, {}))[1]
        return unknown


class _WarpLog:
    """Which warp accessed each element last, and at which of its barriers."""

    def __init__(self, elements: int):
        self._writer, self._reader = (np.full(elements, NOBODY, np.int64) for _ in range(2))
        self._write_epoch, self._read_epoch = (np.full(elements, NOBODY, np.int32) for _ in range(2))

    def is_after_write(self, accesses: Accesses, epochs: Ints) -> Bools:
        """Whether a barrier of the warp lies between the last write, by the same warp, and an access."""
        elements = accesses.elements
        is_same = self._writer[elements] == accesses.warps
        result: Bools = is_same & (self._write_epoch[elements] != epochs)
        return result

    def is_after_reads(self, accesses: Accesses, epochs: Ints) -> Bools:
        """The same of the last reads, if they were all by the same warp."""
        elements = accesses.elements
        is_same = self._reader[elements] == accesses.warps
        result: Bools = is_same & (self._read_epoch[elements] != epochs)
        return result

    def write(self, accesses: Accesses, epochs: Ints) -> None:
        """Record writes."""
        elements = accesses.elements
        self._writer[elements], self._write_epoch[elements] = accesses.warps, epochs

    def read(self, accesses: Accesses, epochs: Ints, is_recent: Bools) -> None:
        """Record reads; `is_recent` where others have read it since the last barrier of the block."""
        elements = accesses.elements
        _merge(self._reader, elements, accesses.warps, np.where(is_recent, self._reader[elements], NOBODY))
        self._read_epoch[elements] = epochs


def _is_another(numbers: Ints, own_numbers: Ints) -> Bools:
    result: Bools = (numbers != NOBODY) & (numbers != own_numbers)
    return result


def _merge(owners: Ints, elements: Ints, numbers: Ints, earlier: Ints) -> None:
    """Set who accessed each of `elements`, or `SEVERAL`."""
    owners[elements] = numbers
    several = (owners[elements] != numbers) | _is_another(earlier, numbers)
    owners[elements[several]] = SEVERAL
