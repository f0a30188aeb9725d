"""What a check of a kernel finds."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Fault(enum.Enum):
    """What may be wrong with a kernel, whatever values it is given."""

    BLOCKS_RACE = "two blocks access an element in one launch, and one of them writes it"
    THREADS_RACE = "two threads access an element between two barriers, and one of them writes it"
    UNFINISHED_COPY = "an access to an element that a copy writes, before its thread has waited for the copy"
    OUT_OF_BOUNDS = "an access lies outside its buffer"
    DIVERGENT_BARRIER = "a barrier that not all threads of a block reach"
    UNWRITTEN = "an element of the result that no block writes"
    WRONG_VALUE = "a value that is not that of the kernel before its schedule"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A fault of a kernel, with the first element where it was seen."""

    fault: Fault
    memory: str
    element: int

    def __str__(self) -> str:
        where = f" ({self.memory}[{self.element}])" if self.memory else ""
        return f"{self.fault.value}{where}"
