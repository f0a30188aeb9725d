"""Products in a given order as commands: which buffer holds a vector, which latch a sum, when results are
read.

The order decides everything. A vector is written when a product needs it and no buffer holds it, a row
opened when it is not open, results read when a product needs a latch and none is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pimflow.core.commands import Affine, Comp, GAct, Gwrite, Node, Readres
from pimflow.hardware import PimSpec


class Vector(NamedTuple):
    """What a GWRITE puts into a buffer: elements from `k` on of the vectors of `pixels` from `pixel` on."""

    pixel: int
    pixels: int
    k: int
    columns: int


class Product(NamedTuple):
    """`count` columns of `row` from `column` on with `vector`: part of the sums at `pixel` and `channel`."""

    vector: Vector
    row: int
    column: int
    count: int
    pixel: int
    channel: int


class ProductStream:
    """The commands of one channel.

    Parameters
    ----------
    buffers : int
        Global buffers to use.
    """

    def __init__(self, pim: PimSpec, buffers: int):
        self.pim, self.buffers = pim, buffers
        self.held: list[Vector | None] = [None] * buffers
        self.free = [list(range(b, buffers * pim.accumulators, buffers)) for b in range(buffers)]
        self.latches: dict[tuple[int, int], int] = {}
        self.done: list[tuple[int, int]] = []
        self.row = -1
        self.nodes: list[Node] = []

    def commands(self, products: Sequence[Product]) -> list[Node]:
        """All of `products`, in order."""
        last_use = {product.vector: index for index, product in enumerate(products)}
        last_part = {product[4:]: index for index, product in enumerate(products)}
        following = _following(products)
        for index, product in enumerate(products):
            self._product(product, index, last_use)
            if last_part[product[4:]] == index:
                self.done.append(product[4:])
            self._ahead(following[index], index, last_use)
        self._read()
        return self.nodes

    def _product(self, product: Product, index: int, last_use: dict[Vector, int]) -> None:
        result = product[4:]
        opens = (
            () if product.row == self.row else [GAct(gang=g, row=Affine(product.row)) for g in self._gangs]
        )
        if not self.pim.comp_starts_at_row:  # what the bus does then hides behind the activation
            self.nodes += opens
        latch = self.latches.get(result)
        buffer = self._buffer(product.vector, latch, index, last_use)
        if latch is None:
            if not self.free[buffer]:
                self._read()
            latch = self.latches[result] = self.free[buffer].pop(0)
        if self.held[buffer] != product.vector:
            self._write(buffer, product.vector)
        if self.pim.comp_starts_at_row:
            self.nodes += opens
        self.row = product.row
        first = Affine(product.column)
        self.nodes.append(Comp(buffer=latch, row=Affine(product.row), column=first, count=product.count))

    @property
    def _gangs(self) -> range:
        return range(self.pim.gangs)

    def _buffer(self, vector: Vector, latch: int | None, index: int, last_use: dict[Vector, int]) -> int:
        """The buffer of `vector`: where it is, where its sum is, or one that is needed no more."""
        if latch is not None:
            return latch % self.buffers
        if vector in self.held:
            return self.held.index(vector)
        return min(range(self.buffers), key=lambda b: self._needed_until(b, index, last_use))

    def _needed_until(self, buffer: int, index: int, last_use: dict[Vector, int]) -> int:
        held = self.held[buffer]
        return -1 if held is None or last_use[held] < index else last_use[held]

    def _ahead(self, vector: Vector | None, index: int, last_use: dict[Vector, int]) -> None:
        """Write the vector that is needed next into a buffer that is needed no more, while products go on."""
        if vector is None or vector in self.held:
            return
        for buffer in range(self.buffers):
            busy = len(self.free[buffer]) < self.pim.accumulators and any(
                latch % self.buffers == buffer and result not in self.done
                for result, latch in self.latches.items()
            )
            if self._needed_until(buffer, index + 1, last_use) < 0 and not busy:
                self._write(buffer, vector)
                return

    def _write(self, buffer: int, vector: Vector) -> None:
        pixel, pixels, k, columns = vector
        self.held[buffer] = vector
        node = Gwrite(buffer=buffer, pixel=Affine(pixel), pixels=pixels, k=Affine(k), columns=columns)
        self.nodes.append(node)

    def _read(self) -> None:
        """Read all results that are complete."""
        for result in self.done:
            latch = self.latches.pop(result)
            self.free[latch % self.buffers].append(latch)
            self.nodes.append(Readres(buffer=latch, pixel=Affine(result[0]), channel=Affine(result[1])))
        for latches in self.free:
            latches.sort()
        self.done.clear()


def _following(products: Sequence[Product]) -> list[Vector | None]:
    """For each product, the next vector that is another one."""
    found: list[Vector | None] = [None] * len(products)
    for index in range(len(products) - 2, -1, -1):
        after = products[index + 1].vector
        found[index] = after if after != products[index].vector else found[index + 1]
    return found
