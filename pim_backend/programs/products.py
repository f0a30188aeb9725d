"""Commands for products in a given order.

The order alone decides which buffer holds a vector, which latch holds a sum, and when results are read.
``simulators/src/products.cc`` makes the commands, here and in an executable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pimflow.core.command_forms import decode
from pimflow.core.commands import Node
from pimflow.hardware import PimSpec
from pimflow.host import native

_product_commands = native.get("pimflow.simulators.product_commands")
_PRODUCT = native.Record("pimflow.simulators.product")
_SIZES = native.Record("pimflow.simulators.product_sizes")


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
    """Products as ``products.cc`` reads them, a row each."""
    rows = [(*product.vector, *product[1:]) for product in products]
    vector, sums = BufferVector._fields, ("row", "column", "count", "result_pixel", "result_channel", "first")
    return _PRODUCT.table((*vector, *sums), rows)


def product_sizes(
    pim: PimSpec, tokens_per_limit: int = 0, chunk_columns: int = 0, shortens: bool = False
) -> np.ndarray:
    """``ProductSizes`` of ``products.cc``: sizes of a device and of a product with a cache."""
    return _SIZES.row(
        buffers=pim.global_buffers,
        accumulators=pim.accumulators,
        gangs=pim.gangs,
        comp_starts_at_row=pim.comp_starts_at_row,
        tokens_per_limit=tokens_per_limit,
        chunk_columns=chunk_columns,
        shortens=shortens,
    )


def product_commands(pim: PimSpec, table: np.ndarray) -> list[Node]:
    """Commands of one channel that compute all products of a table, in order."""
    import tvm_ffi

    words = _product_commands(tvm_ffi.from_dlpack(table), tvm_ffi.from_dlpack(product_sizes(pim)))
    return decode(np.from_dlpack(words).tolist())
