"""Which threads read and wrote each element of a memory: finds races between threads and between blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pimflow.compiler.kernel_checks.findings import Fault

NOBODY, SEVERAL = -1, -2  # in place of the number of a thread, a warp or a block

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Report = Callable[[Fault, str, int], None]


@dataclass(frozen=True, kw_only=True)
class Accesses:
    """Accesses that happen at once, in arrays of one length.

    Attributes
    ----------
    elements, threads, warps, blocks : ndarray of int
        What is accessed, and by whom; numbers are those of a launch.
    epoch : int
        Barriers of the blocks so far.
    warp_epochs : ndarray of int
        Barriers of the warps so far.
    """

    elements: Ints
    threads: Ints
    warps: Ints
    blocks: Ints
    epoch: int
    warp_epochs: Ints


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

    def write(self, accesses: Accesses) -> None:
        """Record writes."""
        elements, threads = accesses.elements, accesses.threads
        written = (self._write_epoch[elements] == accesses.epoch) & (self._writer[elements] != threads)
        read = (self._read_epoch[elements] == accesses.epoch) & (self._reader[elements] != threads)
        if self._warps is not None:
            written &= ~self._warps.is_after_write(accesses)
            read &= ~self._warps.is_after_reads(accesses)
            self._warps.write(accesses)
        self._writer[elements], self._write_epoch[elements] = threads, accesses.epoch
        self._find(Fault.THREADS_RACE, elements, written | read | (self._writer[elements] != threads))
        if not self._is_shared:
            blocks = accesses.blocks
            race = _is_another(self._writing_block[elements], blocks)
            race |= _is_another(self._reading_block[elements], blocks)
            self._writing_block[elements] = blocks
            self._find(Fault.BLOCKS_RACE, elements, race | (self._writing_block[elements] != blocks))

    def read(self, accesses: Accesses) -> None:
        """Record reads."""
        elements, epoch = accesses.elements, accesses.epoch
        race = (self._write_epoch[elements] == epoch) & (self._writer[elements] != accesses.threads)
        is_recent = self._read_epoch[elements] == epoch
        if self._warps is not None:
            race &= ~self._warps.is_after_write(accesses)
            is_recent_in_warp = is_recent & ~self._warps.is_after_reads(accesses)
            self._warps.read(accesses, is_recent)
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


class _WarpLog:
    """Which warp accessed each element last, and at which of its barriers."""

    def __init__(self, elements: int):
        self._writer, self._reader = (np.full(elements, NOBODY, np.int64) for _ in range(2))
        self._write_epoch, self._read_epoch = (np.full(elements, NOBODY, np.int32) for _ in range(2))

    def is_after_write(self, accesses: Accesses) -> Bools:
        """Whether a barrier of the warp lies between the last write, by the same warp, and an access."""
        elements = accesses.elements
        is_same = self._writer[elements] == accesses.warps
        result: Bools = is_same & (self._write_epoch[elements] != accesses.warp_epochs)
        return result

    def is_after_reads(self, accesses: Accesses) -> Bools:
        """The same of the last reads, if they were all by the same warp."""
        elements = accesses.elements
        is_same = self._reader[elements] == accesses.warps
        result: Bools = is_same & (self._read_epoch[elements] != accesses.warp_epochs)
        return result

    def write(self, accesses: Accesses) -> None:
        """Record writes."""
        elements = accesses.elements
        self._writer[elements], self._write_epoch[elements] = accesses.warps, accesses.warp_epochs

    def read(self, accesses: Accesses, is_recent: Bools) -> None:
        """Record reads; `is_recent` where others have read it since the last barrier of the block."""
        elements = accesses.elements
        _merge(self._reader, elements, accesses.warps, np.where(is_recent, self._reader[elements], NOBODY))
        self._read_epoch[elements] = accesses.warp_epochs


def _is_another(numbers: Ints, own_numbers: Ints) -> Bools:
    result: Bools = (numbers != NOBODY) & (numbers != own_numbers)
    return result


def _merge(owners: Ints, elements: Ints, numbers: Ints, earlier: Ints) -> None:
    """Set who accessed each of `elements`, or `SEVERAL`."""
    owners[elements] = numbers
    several = (owners[elements] != numbers) | _is_another(earlier, numbers)
    owners[elements[several]] = SEVERAL
