"""Where keys and values of attention lie in the banks.

A product of attention multiplies many small matrices, one for each request and KV head, with the vectors of
the query heads that share it. Vectors of several matrices lie side by side in a global buffer, in *slots*,
and so do their matrices in a row of a bank. So rows are full, and one GWRITE serves all matrices of a row.

Keys: a token lies as a whole in one bank, or in one lane. Tokens are dealt round-robin to the banks, then to
the channels that share a matrix (`spread`). Values lie transposed: each element of the value in one bank,
tokens along the row. Where products are computed by lanes, each element lies in one lane, and each column has
a token.
"""

from __future__ import annotations

import abc
import functools
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from pimflow.core.attention import Attention
from pimflow.core.kernel import ELEMENT_BYTES
from pimflow.errors import InfeasibleError, UnsupportedOpError
from pimflow.hardware import PimSpec
from pimflow.weight_types import WEIGHT_TYPES

Index = Any  # an int, or an array of int64, which gives arrays


class SlotRange(NamedTuple):
    """Slots that lie side by side: `size` slots of a channel from slot `first` on."""

    first: int
    size: int


@dataclass(frozen=True, kw_only=True)
class CacheLayout(abc.ABC):
    """What the layouts of keys and of values have in common.

    Attributes
    ----------
    attention : Attention
        Its `keys` is the number of tokens that the cache has room for.
    pim : PimSpec
        The device as it is for the type of the cache (`cache_schedule.cache_device`).
    channels, spread : int
        PIM channels, and how many of them (a divisor) share each matrix and take turns with its tokens.
    row_begin : int
        First row of the cache in every bank, counted from the first row that the device leaves free.
    lanes : int
        Lanes of a bank that compute separate products, or 1.
    """

    attention: Attention
    pim: PimSpec
    dtype: str
    channels: int
    spread: int
    row_begin: int = 0
    lanes: int = 1

    kind: ClassVar[str]  # "keys" or "values"

    @property
    def first_row(self) -> int:
        """First row of the cache in every bank, counted from row 0."""
        return self.pim.row_base + self.row_begin

    @property
    def matrices(self) -> int:
        """Number of matrices: one for each request and KV head."""
        return self.attention.batch * self.attention.kv_heads

    @property
    def banks(self) -> int:
        """Banks of a channel; where products are computed by lanes, all lanes."""
        return self.pim.banks * self.lanes

    @property
    def elements(self) -> int:
        """Elements of a column."""
        return self.pim.elements_per_column(self.dtype) // self.lanes

    @property
    def element_bits(self) -> int:
        """Bits of an element of the cache."""
        kind = self.pim.weights
        return WEIGHT_TYPES[kind].bits if kind else ELEMENT_BYTES[self.dtype] * 8

    @property
    def buffer_columns(self) -> int:
        """Columns of a vector that a global buffer holds."""
        return self.pim.vector_columns(self.lanes)

    @property
    def places_per_row(self) -> int:
        """How many times the width of a buffer fits into a row."""
        return self.pim.columns_per_row // self.buffer_columns

    def channel_matrices(self, channel: int) -> range:
        """Matrices that a channel holds a share of."""
        group, groups = channel // self.spread, self.channels // self.spread
        return range(group * self.matrices // groups, (group + 1) * self.matrices // groups)

    @property
    def max_channel_matrices(self) -> int:
        """Largest number of matrices that a channel holds a share of."""
        return max(len(self.channel_matrices(channel)) for channel in range(self.channels))

    @property
    @abc.abstractmethod
    def rows(self) -> int:
        """Rows of each bank that the cache takes."""

    def check_fit(self) -> None:
        """Raise `InfeasibleError` if the banks lack rows, `UnsupportedOpError` for other reasons."""
        a, pim = self.attention, self.pim
        if not pim.can_write:
            raise UnsupportedOpError(f"pim '{pim.name}' has no rules for WRITE, so it cannot hold caches")
        if self.channels % self.spread or self.lanes not in (1, pim.elements_per_column(self.dtype)):
            raise UnsupportedOpError(
                f"pim '{pim.name}': {self.spread} of {self.channels} channels share no matrix"
            )
        if pim.has_single_host and self.matrices % (self.channels // self.spread):
            raise UnsupportedOpError(
                f"pim '{pim.name}': {self.matrices} KV heads are not dealt evenly to channels in lockstep"
            )
        room = pim.rows_per_bank - pim.row_base - self.row_begin
        if self.rows > room:
            row_bytes = pim.banks * pim.elements_per_row(self.dtype) * self.element_bits // 8
            token_bytes = self.rows * row_bytes * self.channels / a.keys
            raise InfeasibleError(
                f"KV cache of {a.keys} tokens, {token_bytes:.0f} bytes a token for its {self.kind} alone, "
                f"on {self.channels} channels",
                self.rows * row_bytes * self.channels,
                room * row_bytes * self.channels,
                "bytes",
                ("fewer tokens", "a smaller batch", "more PIM channels"),
            )


@dataclass(frozen=True, kw_only=True)
class KeyLayout(CacheLayout):
    """Keys: token t of a matrix in bank ``t mod banks``, ``columns`` columns in its slot.

    Where products are computed by lanes, each token lies in one lane. A key that is longer than a buffer is
    cut into *chunks*, which lie side by side.
    """

    kind = "keys"

    @property
    def columns(self) -> int:
        """Columns of a key."""
        return -(-self.attention.head_size // self.elements)

    @property
    def chunks(self) -> list[range]:
        """Columns of each chunk of a key: as many as a buffer holds."""
        chunk_columns = self.buffer_columns
        return [range(b, min(b + chunk_columns, self.columns)) for b in range(0, self.columns, chunk_columns)]

    @property
    def slots(self) -> int:
        """Slots of a buffer."""
        return max(1, self.buffer_columns // self.columns)

    @functools.cached_property
    def parts(self) -> int:
        """Slots of one matrix; its tokens are dealt to them in turn, so that few slots of a row stay empty.

        The number that minimises the cycles of row changes and COMPs over the whole cache.
        """
        turns = -(-self.attention.keys // (self.banks * self.spread))

        def cycles(parts: int) -> int:
            """Cycles of row changes and COMPs with so many parts."""
            slots, tiles = self.max_channel_matrices * parts, -(-turns // parts)
            rows = -(-slots // self.slots) * -(-tiles * len(self.chunks) // self.places_per_row)
            products = slots * tiles * self.columns * self.pim.timing["nCCDS"]
            return rows * self.pim.row_switch_cycles + products

        return min(range(1, self.slots + 1), key=cycles)

    def blocks(self, channel: int) -> list[SlotRange]:
        """Ranges of slots that share rows in a channel; slot ``i * parts + part`` belongs to matrix i."""
        total = len(self.channel_matrices(channel)) * self.parts
        return [SlotRange(b, min(self.slots, total - b)) for b in range(0, total, self.slots)]

    def tiles(self, tokens: int) -> int:
        """Tiles (one token a bank) of the first part of a matrix, over all channels that share it."""
        last = -(-tokens // self.banks) - 1
        turn, channel = divmod(last, self.spread)
        if self.pim.has_single_host:  # in lockstep, all channels do the same work
            channel = self.spread - 1
        full_turns, part = divmod(turn, self.parts)
        return full_turns * self.spread + (self.spread if part else channel + 1)

    @property
    def rows_per_block(self) -> int:
        """Rows of a block of slots."""
        tiles = -(-self.tiles(self.attention.keys) // self.spread)
        return -(-tiles * len(self.chunks) // self.places_per_row)

    @property
    def rows(self) -> int:
        """Rows of each bank that the cache takes."""
        blocks = max(len(self.blocks(channel)) for channel in range(self.channels))
        return blocks * self.rows_per_block

    def token_place(self, token: Index) -> tuple[Index, Index, Index]:
        """For tokens: channel (among those that share the matrix), part, and tile within the channel."""
        turn, channel = divmod(token // self.banks, self.spread)
        tile, part = divmod(turn, self.parts)
        return channel, part, tile

    def chunk_place(self, slot: Index, tile: Index, chunk: Index = 0) -> tuple[Index, Index]:
        """Row and first column of a chunk of a tile, for the matrix in this slot of its channel."""
        block, slot_in_block = divmod(slot, self.slots)
        row, position = divmod(tile * len(self.chunks) + chunk, self.places_per_row)
        first = position * self.buffer_columns + slot_in_block * self.columns
        return self.first_row + block * self.rows_per_block + row, first


@dataclass(frozen=True, kw_only=True)
class ValueLayout(CacheLayout):
    """Values: their elements over the banks, tile by tile, tokens along the row.

    Columns of tokens (of one token, where products are computed by lanes) are dealt to the channels that
    share a matrix. As many columns as a buffer holds are a *chunk*.
    """

    kind = "values"

    @property
    def tiles(self) -> int:
        """Tiles of the elements of a value: one element a bank."""
        return -(-self.attention.value_size // self.banks)

    def columns(self, tokens: int) -> int:
        """Columns of so many tokens in the channel that has the most of them."""
        return -(-tokens // (self.elements * self.spread))

    @property
    def width(self) -> int:
        """Columns of a slot: those of a buffer, or fewer if the whole context needs fewer."""
        return min(self.buffer_columns, self.columns(self.attention.keys))

    @property
    def slots(self) -> int:
        """Slots of a buffer."""
        return self.buffer_columns // self.width

    @property
    def chunks(self) -> int:
        """Chunks of the whole context."""
        return -(-self.columns(self.attention.keys) // self.buffer_columns)

    def blocks(self, channel: int) -> list[SlotRange]:
        """Ranges of matrices that share rows in a channel."""
        total = len(self.channel_matrices(channel))
        return [SlotRange(b, min(self.slots, total - b)) for b in range(0, total, self.slots)]

    @property
    def rows(self) -> int:
        """Rows of each bank that the cache takes."""
        blocks = max(len(self.blocks(channel)) for channel in range(self.channels))
        return -(-blocks * self.chunks * self.tiles // self.places_per_row)

    def chunk_place(self, slot: Index, chunk: Index, tile: Index) -> tuple[Index, Index]:
        """Row and first column of a chunk of a tile, for the matrix in this slot of its channel."""
        block, slot_in_block = divmod(slot, self.slots)
        row, position = divmod((block * self.chunks + chunk) * self.tiles + tile, self.places_per_row)
        return self.first_row + row, position * self.buffer_columns + slot_in_block * self.width

    def token_place(self, token: Index) -> tuple[Index, Index, Index, Index]:
        """For tokens: channel (among those that share the matrix), chunk, column in it, and element."""
        column, element = divmod(token, self.elements)
        local_column, channel = divmod(column, self.spread)
        chunk, column_in_chunk = divmod(local_column, self.buffer_columns)
        return channel, chunk, column_in_chunk, element
