"""A product of attention over as many tokens as there are: what an executable has of it.

How many tokens a cache holds is known only when a step runs. So an executable has the products over a full
cache in their order, and a step computes those of its tokens: ``simulators/src/products.cc`` leaves the
others out, and makes commands of the rest. They are those of a program for just so many tokens
(`attention.scores`, `attention.mix`), for layouts and orders depend on the whole cache alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pimflow.core.program import PimProgram
from pimflow.host import native
from pimflow.pim_backend.programs.attention import Orders, Step, mix_of_chunks, scores
from pimflow.pim_backend.programs.cache_layout import KeyLayout, ValueLayout
from pimflow.pim_backend.programs.cache_schedule import ProductSchedule
from pimflow.pim_backend.programs.products import device_words

_products_of_tokens = native.get("pimflow.simulators.products_of_tokens")


@dataclass(frozen=True, kw_only=True)
class GrowingProduct:
    """One product of a step, over any number of tokens up to the places that it may read.

    Attributes
    ----------
    whole : Step
        Over all these places, as one program: a chunk that is shorter than the others is part of it.
    sizes : ndarray
        int64: what of the device decides the commands, the tokens that each of `limits` is good for, the
        columns of a chunk (0 if sums go on from chunk to chunk), and whether the last products of few tokens
        are shorter.
    limits : ndarray
        int64: where the operands of so many tokens end; see `Product.first`.
    begins : ndarray
        int32: from which token on there are the elements of the result of a query head: its scores, or its
        partial sums one behind the other.
    """

    whole: Step
    sizes: np.ndarray
    limits: np.ndarray
    begins: np.ndarray

    @classmethod
    def of(cls, layout: KeyLayout | ValueLayout, schedule: ProductSchedule, places: int) -> GrowingProduct:
        """Of the first `places` keys, or values, that lie so; raises what `CacheLayout.fits` does."""
        device = device_words(layout.pim)
        if isinstance(layout, KeyLayout):
            ends = range(layout.banks, places + layout.banks, layout.banks)
            return cls(
                whole=scores(layout, places, schedule.order),
                sizes=np.array([*device, layout.banks, 0, 0], np.int64),
                limits=np.array([layout.tiles(tokens) * layout.banks for tokens in ends], np.int64),
                begins=np.arange(places, dtype=np.int32),
            )
        columns, most = layout.columns(places), layout.buffer_columns
        chunks = range(1 if schedule.accumulate else -(-columns // most))
        together = layout.elements * layout.spread
        of_chunk = layout.spread * layout.attention.value_size
        return cls(
            whole=mix_of_chunks(layout, places, chunks, schedule.order, schedule.accumulate),
            sizes=np.array([*device, together, 0 if schedule.accumulate else most, 1], np.int64),
            limits=np.arange(1, columns + 1, dtype=np.int64),
            begins=np.repeat(np.arange(len(chunks), dtype=np.int32) * most * together, of_chunk),
        )

    @property
    def program(self) -> PimProgram:
        """Over all places; where a chunk is shorter, `commands` has others, with that chunk by itself."""
        return self.whole.programs[0]

    @property
    def orders(self) -> Orders:
        return self.whole.orders[0]

    def arrays(self) -> list[np.ndarray]:
        """As ``products_of_tokens`` in C++ takes them: products, begins of kinds, channels, sizes, limits."""
        kinds = self.orders.kinds
        begins = np.cumsum([0, *map(len, kinds)], dtype=np.int64)
        channels = np.array(self.orders.channels, np.int64)
        return [np.concatenate(kinds), begins, channels, self.sizes, self.limits]

    def commands(self, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Words and offsets (`PimProgram.packed`) of the commands over so many tokens."""
        import tvm_ffi

        words, offsets = _products_of_tokens(*map(tvm_ffi.from_dlpack, self.arrays()), tokens)
        return np.from_dlpack(words), np.from_dlpack(offsets)
