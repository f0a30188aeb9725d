"""Commands for products in a given order.

The order alone decides which buffer holds a vector, which latch holds a sum, and when results are read.
``simulators/src/products.cc`` makes the commands, here and in an executable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pimflow.core.commands import Node, decode
from pimflow.hardware import PimSpec
from pimflow.host import native

_product_commands = native.get("pimflow.simulators.product_commands")


class BufferVector(NamedTuple):
    """Contents of a buffer: elements from `k` on of the vectors of `pixels` pixels from `pixel` on."""

    pixel: int
    pixels: int
    k: int
    columns: int


class BankProduct(NamedTuple):
    """`columns` columns of `row` from `column` on times `vector`: part of the sums at `pixel` and `channel`.

    `first` is the place along the tokens of a cache where its operand begins: for scores counted in outputs,
    for values in columns.
    """

    vector: BufferVector
    row: int
    column: int
    columns: int
    pixel: int
    channel: int
    first: int


def product_table(products: Sequence[BankProduct]) -> np.ndarray:
    """Products as ``products.cc`` reads them: int32 [products, 10]."""
    words = [(*product.vector, *product[1:]) for product in products]
    return np.array(words, np.int32).reshape(-1, 10)


def device_words(pim: PimSpec) -> list[int]:
    """Sizes of a device that decide the commands."""
    return [pim.global_buffers, pim.accumulators, pim.gangs, int(pim.comp_starts_at_row)]


def product_commands(pim: PimSpec, table: np.ndarray) -> list[Node]:
    """Commands of one channel that compute all products of a table, in order."""
    import tvm_ffi

    sizes = np.array(device_words(pim), np.int64)
    words = _product_commands(tvm_ffi.from_dlpack(table), tvm_ffi.from_dlpack(sizes))
    return decode(np.from_dlpack(words).tolist())
