"""A product of attention over a number of tokens that is known only at run time, as an executable holds it.

An executable holds the products over a full cache, in order. A step computes those of its tokens:
``simulators/src/products.cc`` drops the others and makes commands of the rest. These are the commands of a
program for exactly that many tokens (`attention.scores`, `attention.mix`), because layouts and orders depend
only on the size of the whole cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pimflow.core.program import PimProgram
from pimflow.host import native
from pimflow.pim_backend.programs.attention import AttentionProduct, ProductOrders, mix_of_chunks, scores
from pimflow.pim_backend.programs.cache_layout import KeyLayout, ValueLayout
from pimflow.pim_backend.programs.cache_schedule import ProductSchedule
from pimflow.pim_backend.programs.products import device_words

_token_products = native.get("pimflow.simulators.token_products")


@dataclass(frozen=True, kw_only=True)
class DynamicProduct:
    """One product of a step, over any number of tokens up to the number of places that it may read.

    Attributes
    ----------
    full_product : AttentionProduct
        The product over all these places, as one program, a shorter last chunk included.
    sizes : ndarray
        int64: the sizes of the device that decide the commands (`device_words`); tokens for each of `limits`;
        columns of a chunk (0 if latches keep sums over all chunks); whether the last products are shorter
        where tokens do not fill a chunk.
    limits : ndarray
        int64: where the operands of the tokens end, for each possible number of tokens.
    first_tokens : ndarray
        int32: for each element of the result of a query head (its scores, or its concatenated partial sums),
        the first token from which on it exists.
    """

    full_product: AttentionProduct
    sizes: np.ndarray
    limits: np.ndarray
    first_tokens: np.ndarray

    @classmethod
    def from_layout(
        cls, layout: KeyLayout | ValueLayout, schedule: ProductSchedule, places: int
    ) -> DynamicProduct:
        """The product with the first `places` places of `layout`.

        Raises what `CacheLayout.check_fit` does.
        """
        device = device_words(layout.pim)
        if isinstance(layout, KeyLayout):
            ends = range(layout.banks, places + layout.banks, layout.banks)
            return cls(
                full_product=scores(layout, places, schedule.order),
                sizes=np.array([*device, layout.banks, 0, 0], np.int64),
                limits=np.array([layout.tiles(tokens) * layout.banks for tokens in ends], np.int64),
                first_tokens=np.arange(places, dtype=np.int32),
            )
        columns, chunk_columns = layout.columns(places), layout.buffer_columns
        chunks = range(1 if schedule.accumulate else -(-columns // chunk_columns))
        tokens_per_column = layout.elements * layout.spread
        results_per_chunk = layout.spread * layout.attention.value_size
        return cls(
            full_product=mix_of_chunks(layout, places, chunks, schedule.order, schedule.accumulate),
            sizes=np.array(
                [*device, tokens_per_column, 0 if schedule.accumulate else chunk_columns, 1], np.int64
            ),
            limits=np.arange(1, columns + 1, dtype=np.int64),
            first_tokens=np.repeat(
                np.arange(len(chunks), dtype=np.int32) * chunk_columns * tokens_per_column, results_per_chunk
            ),
        )

    @property
    def program(self) -> PimProgram:
        """The program over all places; if a chunk is shorter, `commands` computes that chunk separately."""
        return self.full_product.programs[0]

    @property
    def orders(self) -> ProductOrders:
        """The products of that program, in order."""
        return self.full_product.orders[0]

    def arrays(self) -> list[np.ndarray]:
        """Arguments of ``token_products`` in C++: products, begins of kinds, channels, sizes, limits."""
        kinds = self.orders.kinds
        begins = np.cumsum([0, *map(len, kinds)], dtype=np.int64)
        channels = np.array(self.orders.channels, np.int64)
        return [np.concatenate(kinds), begins, channels, self.sizes, self.limits]

    def commands(self, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Words and offsets (`PimProgram.program_words`) of the commands over so many tokens."""
        import tvm_ffi

        words, offsets = _token_products(*map(tvm_ffi.from_dlpack, self.arrays()), tokens)
        return np.from_dlpack(words), np.from_dlpack(offsets)
