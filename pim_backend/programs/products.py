"""Products in a given order as commands: which buffer holds a vector, which latch a sum, when results are
read.

The order decides everything; ``simulators/src/products.cc`` makes the commands, here and in an executable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pimflow.core.commands import Node, decoded
from pimflow.hardware import PimSpec
from pimflow.host import native

_product_commands = native.get("pimflow.simulators.product_commands")


class Vector(NamedTuple):
    """What a GWRITE puts into a buffer: elements from `k` on of the vectors of `pixels` from `pixel` on."""

    pixel: int
    pixels: int
    k: int
    columns: int


class Product(NamedTuple):
    """`count` columns of `row` from `column` on with `vector`: part of the sums at `pixel` and `channel`.

    `first` says where its operand begins along the tokens of a cache: in outputs of scores, in columns of
    values.
    """

    vector: Vector
    row: int
    column: int
    count: int
    pixel: int
    channel: int
    first: int


def product_table(products: Sequence[Product]) -> np.ndarray:
    """As ``products.cc`` reads them: int32 [products, 10]."""
    words = [(*product.vector, *product[1:]) for product in products]
    return np.array(words, np.int32).reshape(-1, 10)


def device_words(pim: PimSpec) -> list[int]:
    """What of a device decides the commands."""
    return [pim.global_buffers, pim.accumulators, pim.gangs, int(pim.comp_starts_at_row)]


def commands(pim: PimSpec, table: np.ndarray) -> list[Node]:
    """Those of one channel for all products of a table, in order."""
    import tvm_ffi

    sizes = np.array(device_words(pim), np.int64)
    words = _product_commands(tvm_ffi.from_dlpack(table), tvm_ffi.from_dlpack(sizes))
    return decoded(np.from_dlpack(words).tolist())
