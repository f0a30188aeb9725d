"""Which words of banks a program that only stores, such as an append to a cache, writes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pimflow.core.commands import Comp, Readres, Write
from pimflow.core.program import PimProgram
from pimflow.simulators.pim.expansion import walk


@dataclass(frozen=True, kw_only=True)
class StoreCoverage:
    """Counts of elements that the WRITEs of a program store.

    Attributes
    ----------
    elements : int
        Elements of its vectors: pixels times K.
    missing, repeated : int
        Elements that are never stored, or stored again after the first time.
    overwritten : int
        Elements that are stored where the program stored another one before.
    """

    elements: int
    missing: int
    repeated: int
    overwritten: int

    @property
    def exact(self) -> bool:
        """Whether each element is stored once, in a place of its own."""
        return not (self.missing or self.repeated or self.overwritten)

    def __str__(self) -> str:
        if self.exact:
            return f"each of {self.elements} elements stored once"
        counts = {
            "missing": self.missing,
            "repeated": self.repeated,
            "in a place that was stored to": self.overwritten,
        }
        return f"of {self.elements} elements " + ", ".join(f"{n} {kind}" for kind, n in counts.items() if n)


def is_store_only(program: PimProgram) -> bool:
    """Whether `program` only stores values: it has WRITEs, and neither COMPs nor READRESs."""
    return Write in program.command_kinds and not program.command_kinds & {Comp, Readres}


def store_coverage(program: PimProgram) -> StoreCoverage:
    """Counts of the elements that the WRITEs of `program` store, over all channels."""
    K, banks_per_gang = program.vector_geometry.reduction, program.banks // program.gangs
    sources: list[np.ndarray] = [np.empty(0, np.int64)]
    places: list[np.ndarray] = [np.empty(0, np.int64)]
    for channel, nodes in enumerate(program.channels):
        for node, counters in walk(nodes):
            if not isinstance(node, Write):
                continue
            size = (node.banks, node.count, node.elements)
            bank, column, element = (axis.reshape(-1) for axis in np.indices(size))
            k = node.k.value(counters) + np.arange(len(bank))
            real = k < K
            cell = (channel * program.banks + node.gang * banks_per_gang + node.bank + bank) * program.rows
            cell = (cell + node.row.value(counters) - program.row_begin) * program.columns_per_row
            cell = (cell + node.column.value(counters) + column) * program.elements_per_column
            sources.append((node.pixel.value(counters) * K + k)[real])
            places.append((cell + node.element + element)[real])
    source, place = np.concatenate(sources), np.concatenate(places)
    expected = program.vector_geometry.pixels * K
    distinct = len(np.unique(source))
    return StoreCoverage(
        elements=expected,
        missing=expected - distinct,
        repeated=len(source) - distinct,
        overwritten=len(place) - len(np.unique(place)),
    )
