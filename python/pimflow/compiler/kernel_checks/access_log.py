"""Which threads read and wrote each element of a memory: finds races between threads and between blocks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pimflow.compiler.kernel_checks.findings import Fault

NOBODY, SEVERAL = -1, -2  # in place of the number of a thread or a block

Ints = npt.NDArray[np.int64]
Report = Callable[[Fault, str, int], None]


class AccessLog:
    """Accesses to the elements of one memory during a launch.

    Two accesses to one element, of which at least one is a write, are a race if no barrier orders them: by
    two threads between two barriers, or by two blocks at any time. Accesses are compared, not values, so a
    race is found in whatever order the threads run.

    Parameters
    ----------
    name : str
        Name of the memory, for findings.
    elements : int
    is_shared : bool
        Whether each block has its own part of it.
    report : callable
        Takes a fault, the name of the memory, and an element.
    """

    def __init__(self, name: str, elements: int, is_shared: bool, report: Report):
        self._name, self._is_shared, self._report = name, is_shared, report
        self._writer, self._reader = (np.full(elements, NOBODY, np.int64) for _ in range(2))
        self._write_epoch, self._read_epoch = (np.full(elements, NOBODY, np.int32) for _ in range(2))
        self._writing_block, self._reading_block = (np.full(elements, NOBODY, np.int64) for _ in range(2))

    def write(self, elements: Ints, threads: Ints, blocks: Ints, epoch: int) -> None:
        """Record writes, in arrays of one length; `epoch` counts the barriers so far."""
        writer, reader = self._writer[elements], self._reader[elements]
        race = (self._write_epoch[elements] == epoch) & (writer != threads)
        race |= (self._read_epoch[elements] == epoch) & (reader != threads)
        self._writer[elements], self._write_epoch[elements] = threads, epoch
        self._find(Fault.THREADS_RACE, elements, race | (self._writer[elements] != threads))
        if not self._is_shared:
            race = _is_another(self._writing_block[elements], blocks)
            race |= _is_another(self._reading_block[elements], blocks)
            self._writing_block[elements] = blocks
            self._find(Fault.BLOCKS_RACE, elements, race | (self._writing_block[elements] != blocks))

    def read(self, elements: Ints, threads: Ints, blocks: Ints, epoch: int) -> None:
        """Record reads; see `write`."""
        race = (self._write_epoch[elements] == epoch) & (self._writer[elements] != threads)
        self._find(Fault.THREADS_RACE, elements, race)
        earlier = np.where(self._read_epoch[elements] == epoch, self._reader[elements], NOBODY)
        self._read_epoch[elements] = epoch
        _merge(self._reader, elements, threads, earlier)
        if not self._is_shared:
            self._find(Fault.BLOCKS_RACE, elements, _is_another(self._writing_block[elements], blocks))
            _merge(self._reading_block, elements, blocks, self._reading_block[elements])

    def written(self) -> npt.NDArray[np.bool_]:
        """By element, whether a thread has written it."""
        result: npt.NDArray[np.bool_] = self._writer != NOBODY
        return result

    def _find(self, fault: Fault, elements: Ints, race: npt.NDArray[np.bool_]) -> None:
        if race.any():
            self._report(fault, self._name, int(elements[race.argmax()]))


def _is_another(numbers: Ints, own_numbers: Ints) -> npt.NDArray[np.bool_]:
    result: npt.NDArray[np.bool_] = (numbers != NOBODY) & (numbers != own_numbers)
    return result


def _merge(owners: Ints, elements: Ints, numbers: Ints, earlier: Ints) -> None:
    """Set who accessed each of `elements`, or `SEVERAL`."""
    owners[elements] = numbers
    several = (owners[elements] != numbers) | _is_another(earlier, numbers)
    owners[elements[several]] = SEVERAL
