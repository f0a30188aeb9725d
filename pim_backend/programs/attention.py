"""The two products of a decode step of attention as PIM programs.

An output pixel of a program is a vector: pixel ``member * M + matrix`` belongs to query head `member` of its
group and to one of M matrices. Vectors of neighbouring matrices are neighbours, so that one GWRITE writes
them all. A matrix may be cut in two ways: keys by tokens, which lie in different channels or slots and give
scores of different tokens; values by chunks of tokens, which give partial sums that the host adds.
`AttentionProduct` gathers the operands of the programs and combines their results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from pimflow.core.attention import Attention
from pimflow.core.commands import Node
from pimflow.core.kernel import ConvGeometry
from pimflow.core.program import PimProgram
from pimflow.hardware import PimSpec
from pimflow.pim_backend.programs.cache_layout import CacheLayout, KeyLayout, ValueLayout
from pimflow.pim_backend.programs.loop_rolling import roll_loops, shift
from pimflow.pim_backend.programs.products import BankProduct, BufferVector, product_commands, product_table

# What stays in place while the other changes: the vector in its buffer, or the open row.
ORDERS = ("vector", "row")


@dataclass(frozen=True, kw_only=True)
class ProductOrders:
    """The products of every channel, in the order in which they are computed.

    Channels of one kind compute the same products, but for an offset of their pixels and outputs.

    Attributes
    ----------
    kinds : tuple of ndarray
        A `product_table` for each kind of channel.
    channels : tuple of (int, int, int)
        For each channel its kind, and the offsets of its pixels and of its outputs.
    """

    kinds: tuple[np.ndarray, ...]
    channels: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, kw_only=True)
class AttentionProduct:
    """One product of a decode step: its programs, their operands, and how their results are combined.

    Attributes
    ----------
    programs : tuple of PimProgram
        They run one after the other, on the same image.
    orders : tuple of ProductOrders
        For each program, the products that its commands compute.
    operand_indices : tuple of ndarray
        For each program, int32 [pixels, elements]: the index of each element of its input in the product's
        vectors [batch, heads, elements]; -1 for zero.
    result_indices : ndarray
        int32 [terms, batch, heads, outputs]: indices into the concatenated results of all programs; the
        results of all terms add up to an element of the product.
    """

    programs: tuple[PimProgram, ...]
    orders: tuple[ProductOrders, ...]
    operand_indices: tuple[np.ndarray, ...]
    result_indices: np.ndarray

    def operands(self, x: np.ndarray) -> list[np.ndarray]:
        """Inputs of the programs, float32 [pixels, 1, 1, elements], from vectors [batch, heads, elements]."""
        flat = np.append(np.asarray(x, np.float32).reshape(-1), np.float32(0))  # index -1 is the zero
        return [flat[indices].reshape(len(indices), 1, 1, -1) for indices in self.operand_indices]

    def result(self, outputs: Sequence[np.ndarray]) -> np.ndarray:
        """The product, [batch, heads, outputs], from the programs' outputs."""
        flat = np.concatenate([output.reshape(-1) for output in outputs])
        total: np.ndarray = flat[self.result_indices].sum(axis=0, dtype=flat.dtype)
        return total


def scores(layout: KeyLayout, tokens: int, order: str = "vector") -> AttentionProduct:
    """``Q K^T`` over the first `tokens` tokens of the cache.

    Raises
    ------
    UnsupportedOpError, InfeasibleError
        As from `layout.fits`.
    """
    layout.check_fit()
    a, parts = layout.attention, layout.parts
    M = layout.matrices * parts
    tiles = layout.tiles(tokens)
    has_full_tiles = parts > 1 or layout.pim.has_single_host
    outputs = tiles * layout.banks if has_full_tiles else tokens

    def channel_work(channel: int) -> _ChannelWork:
        """The products of a channel, and its first pixel and output."""
        share, matrices = channel % layout.spread, layout.channel_matrices(channel)
        turns = range(-(-max(0, tiles - share) // layout.spread))
        return _ChannelWork(
            kind=(len(matrices), turns), pixels=matrices.start * parts, outputs=share * layout.banks
        )

    def products(channel: int) -> Iterator[BankProduct]:
        return _scores_of_channel(layout, channel, M, channel_work(channel).kind[1], order)

    orders = _orders(layout, products, channel_work)
    geometry = matrix_geometry(a.group * M, a.head_size, outputs)
    program = _program(layout, "scores", geometry, orders, M, order)
    token = np.arange(tokens)
    channel, part, tile = layout.token_place(token)
    output = (tile * layout.spread + channel) * layout.banks + token % layout.banks
    operand_indices = np.repeat(_member_indices(a, a.head_size), parts, axis=1).reshape(-1, a.head_size)
    results = np.arange(a.group * M * outputs).reshape(a.group, layout.matrices, parts, outputs)
    result_indices = _head_major(a, results[:, :, part, output])[None]
    return AttentionProduct(
        programs=(program,),
        orders=(orders,),
        operand_indices=(_indices(operand_indices),),
        result_indices=_indices(result_indices),
    )


def mix(
    layout: ValueLayout, tokens: int, order: str = "vector", accumulate: bool = False
) -> AttentionProduct:
    """``S V`` over the first `tokens` tokens of the cache; results are partial sums by chunk and channel.

    Parameters
    ----------
    accumulate : bool
        Whether the latches keep the sums of a vector over all chunks; see `can_accumulate`.

    Raises
    ------
    UnsupportedOpError, InfeasibleError
        As from `layout.fits`.
    """
    layout.check_fit()
    columns, chunk_columns = layout.columns(tokens), layout.buffer_columns
    full_chunks = columns // chunk_columns
    pieces = (
        [range(1)] if accumulate else [range(full_chunks), range(full_chunks, -(-columns // chunk_columns))]
    )
    products = [mix_of_chunks(layout, tokens, chunks, order, accumulate) for chunks in pieces if chunks]
    sizes = [product.programs[0].geometry.pixels * layout.attention.value_size for product in products]
    begins = np.cumsum([0, *sizes])
    return AttentionProduct(
        programs=tuple(product.programs[0] for product in products),
        orders=tuple(product.orders[0] for product in products),
        operand_indices=tuple(product.operand_indices[0] for product in products),
        result_indices=_indices(
            np.concatenate([product.result_indices + begin for product, begin in zip(products, begins)])
        ),
    )


def mix_of_chunks(
    layout: ValueLayout, tokens: int, chunks: range, order: str = "vector", accumulate: bool = False
) -> AttentionProduct:
    """The part of `mix` over some chunks of tokens, the last of which may be shorter.

    With `accumulate` it is all of `mix`. If no chunk is shorter, its program forms all products of its
    geometry.
    """
    a, E, chunk_columns = layout.attention, layout.elements, layout.buffer_columns
    columns, M = layout.columns(tokens), len(chunks) * layout.spread * layout.matrices
    length = columns if accumulate else min(chunk_columns, columns - chunks.start * chunk_columns)

    def channel_work(channel: int) -> _ChannelWork:
        """The products of a channel, and its first pixel and output."""
        share, matrices = channel % layout.spread, layout.channel_matrices(channel)
        return _ChannelWork(kind=(len(matrices),), pixels=share * layout.matrices + matrices.start, outputs=0)

    products = functools.partial(
        _mix_of_channel, layout, chunks=chunks, columns=columns, order=order, accumulate=accumulate
    )
    orders = _orders(layout, products, channel_work)
    geometry = matrix_geometry(a.group * M, length * E, a.value_size)
    # Token of each element of the vector of a chunk and channel; `tokens` or more where there is none.
    column = (np.array(chunks)[:, None] * chunk_columns + np.arange(length))[:, None] * layout.spread
    column = column + np.arange(layout.spread)[:, None]
    token = (column[..., None] * E + np.arange(E)).reshape(len(chunks) * layout.spread, -1)
    places = _member_indices(a, tokens)[:, :, np.minimum(token, tokens - 1)]
    places[:, :, token >= tokens] = -1
    # Indices of the sums of each chunk and channel: [group, chunks * channels, matrices, value_size].
    sums = np.arange(a.group * M * a.value_size).reshape(a.group, -1, layout.matrices, a.value_size)
    result_indices = [_head_major(a, sums[:, index]) for index in range(sums.shape[1])]
    return AttentionProduct(
        programs=(_program(layout, "mix", geometry, orders, M, order),),
        orders=(orders,),
        operand_indices=(_indices(places.swapaxes(1, 2).reshape(-1, token.shape[1])),),
        result_indices=_indices(np.stack(result_indices)),
    )


def can_accumulate(layout: ValueLayout) -> bool:
    """Whether a bank has enough latches to keep the sums of a vector over all chunks of tokens."""
    return layout.tiles <= layout.pim.accumulators and layout.slots == 1


class _ChannelWork(NamedTuple):
    """The work of a channel; channels of one `kind` differ only in their first pixel and output."""

    kind: tuple[Any, ...]
    pixels: int
    outputs: int


def _scores_of_channel(
    layout: KeyLayout, channel: int, M: int, tiles: range, order: str
) -> Iterator[BankProduct]:
    share, w = channel % layout.spread, layout.columns
    begin = layout.channel_matrices(channel).start * layout.parts
    for first, slots in layout.blocks(channel):
        pixels = [member * M + begin + first for member in range(layout.attention.group)]
        if len(layout.chunks) > 1:
            yield from _scores_of_long_keys(layout, pixels, first, tiles, share)
            continue
        vectors = [BufferVector(pixel, slots, 0, w) for pixel in pixels]
        for vector, tile in _vector_tile_order(vectors, tiles, layout.places_per_row, layout.pim, order):
            for slot in range(slots):
                row, column = layout.chunk_place(first + slot, tile)
                output = (tile * layout.spread + share) * layout.banks
                yield BankProduct(vector, row, column, w, vector.pixel + slot, output, output)


def _scores_of_long_keys(
    layout: KeyLayout, pixels: Sequence[int], slot: int, tiles: range, share: int
) -> Iterator[BankProduct]:
    """Each chunk of a vector is multiplied with as many tiles as a bank has accumulators, chunk by chunk."""
    step = layout.pim.accumulators
    for pixel in pixels:
        for begin in range(0, len(tiles), step):
            for index, chunk in enumerate(layout.chunks):
                vector = BufferVector(pixel, 1, chunk.start * layout.elements, len(chunk))
                for tile in tiles[begin : begin + step]:
                    row, column = layout.chunk_place(slot, tile, index)
                    output = (tile * layout.spread + share) * layout.banks
                    yield BankProduct(vector, row, column, len(chunk), pixel, output, output)


def _mix_of_channel(
    layout: ValueLayout, channel: int, chunks: range, columns: int, order: str, accumulate: bool
) -> Iterator[BankProduct]:
    """Products of each of `chunks`, up to `columns`; with `accumulate`, a vector has those of all chunks."""
    share, matrices = channel % layout.spread, layout.channel_matrices(channel)
    chunk_columns, M = layout.buffer_columns, len(chunks) * layout.spread * layout.matrices
    group, tiles = range(layout.attention.group), range(layout.tiles)

    def part(chunk: int, k: int) -> tuple[int, int, int]:
        return chunk, k, min(chunk_columns, columns - chunk * chunk_columns)

    for first, slots in layout.blocks(channel):
        for index, chunk in enumerate(chunks):
            pixel = (index * layout.spread + share) * layout.matrices + matrices.start + first
            parts = [part(chunk, 0)]
            if accumulate:
                parts = [
                    part(c, c * chunk_columns * layout.elements) for c in range(-(-columns // chunk_columns))
                ]
            for members in _buffer_passes(group, layout.pim.global_buffers) if accumulate else [group]:
                for part_chunk, k, count in parts:
                    width = layout.width if slots > 1 else count
                    vectors = [BufferVector(member * M + pixel, slots, k, width) for member in members]
                    for vector, tile in _vector_tile_order(
                        vectors, tiles, layout.places_per_row, layout.pim, order
                    ):
                        for slot in range(slots):
                            row, column = layout.chunk_place(first + slot, part_chunk, tile)
                            output = tile * layout.banks
                            yield BankProduct(
                                vector,
                                row,
                                column,
                                count,
                                vector.pixel + slot,
                                output,
                                part_chunk * chunk_columns,
                            )


def _buffer_passes(members: range, buffers: int) -> list[range]:
    """The members of a group in parts of at most `buffers`, so that each member has a buffer."""
    return [members[b : b + buffers] for b in range(0, len(members), buffers)]


def _vector_tile_order(
    vectors: Sequence[BufferVector], tiles: range, per_row: int, pim: PimSpec, order: str
) -> Iterator[tuple[BufferVector, int]]:
    """Each vector with each tile: either the vectors stay in their buffers, or the row stays open."""
    rows = [tiles[b : b + per_row] for b in range(0, len(tiles), per_row)]
    if order == "vector":
        for begin in range(0, len(vectors), pim.global_buffers):
            for row in rows:
                for vector in vectors[begin : begin + pim.global_buffers]:
                    yield from ((vector, tile) for tile in row)
            rows.reverse()  # the next vectors begin with the open row
        return
    turn = list(vectors)
    for row in rows:
        for vector in turn:
            yield from ((vector, tile) for tile in row)
        turn.reverse()  # the next row begins with the vector in the buffer


def _member_indices(a: Attention, elements: int) -> np.ndarray:
    """Indices into [batch, heads, elements], arranged as [group, batch * kv_heads, elements]."""
    indices = np.arange(a.batch * a.heads * elements).reshape(a.batch, a.kv_heads, a.group, elements)
    return indices.transpose(2, 0, 1, 3).reshape(a.group, -1, elements)


def _head_major(a: Attention, x: np.ndarray) -> np.ndarray:
    """`x`, [group, batch * kv_heads, elements], arranged as [batch, heads, elements]."""
    grouped = x.reshape(a.group, a.batch, a.kv_heads, -1).transpose(1, 2, 0, 3)
    return grouped.reshape(a.batch, a.heads, -1)


def _indices(array: np.ndarray) -> np.ndarray:
    """Indices as runtime modules take them: int32, contiguous."""
    return np.ascontiguousarray(array, np.int32)


def matrix_geometry(pixels: int, reduction: int, outputs: int) -> ConvGeometry:
    """A product of `pixels` vectors with a matrix [outputs, reduction], as a 1x1 convolution."""
    return ConvGeometry(n=pixels, h=1, w=1, c=reduction, oc=outputs)


def _orders(
    layout: CacheLayout, products: Callable[[int], Iterable[BankProduct]], work: Callable[[int], _ChannelWork]
) -> ProductOrders:
    """The `products` of each channel, computed once for all channels of a kind (`work`)."""
    kinds_by_key: dict[tuple[Any, ...], tuple[int, _ChannelWork]] = {}
    kinds: list[np.ndarray] = []
    channels: list[tuple[int, int, int]] = []
    for channel in range(layout.channels):
        channel_work = work(channel)
        if channel_work.kind not in kinds_by_key:
            kinds_by_key[channel_work.kind] = len(kinds), channel_work
            kinds.append(product_table(list(products(channel))))
        kind, first = kinds_by_key[channel_work.kind]
        channels.append((kind, channel_work.pixels - first.pixels, channel_work.outputs - first.outputs))
    return ProductOrders(kinds=tuple(kinds), channels=tuple(channels))


def _program(
    layout: CacheLayout, name: str, geometry: ConvGeometry, orders: ProductOrders, matrices: int, order: str
) -> PimProgram:
    """The program that computes products in a given order."""
    kind_nodes = [tuple(roll_loops(product_commands(layout.pim, table))) for table in orders.kinds]
    streams = [
        tuple(shift(node, pixels, 0, outputs) for node in kind_nodes[kind])
        if pixels or outputs
        else kind_nodes[kind]
        for kind, pixels, outputs in orders.channels
    ]
    return build_program(layout, name, geometry, streams, matrices, order)


def build_program(
    layout: CacheLayout,
    name: str,
    geometry: ConvGeometry,
    streams: Sequence[tuple[Node, ...]],
    matrices: int,
    schedule: str,
) -> PimProgram:
    """A program over the caches of `layout`, from the command stream of each channel."""
    pim = layout.pim
    activations = None if pim.activations == layout.dtype else pim.activations or None
    return PimProgram(
        region=name,
        pim=pim.name,
        pim_digest=pim.custom_digest,
        dtype=layout.dtype,
        geometry=replace(geometry, weights=pim.weights or None, activations=activations),
        pixel_begin=0,
        pixel_end=geometry.pixels,
        banks=layout.banks,
        gangs=pim.gangs,
        columns_per_row=pim.columns_per_row,
        elements_per_column=layout.elements,
        buffers=pim.global_buffers,
        buffer_columns=layout.buffer_columns,
        result_lanes=pim.result_lanes if layout.lanes == 1 else 1,
        readres_bursts=pim.readres_bursts(layout.dtype, layout.lanes),
        row_begin=layout.first_row,
        rows=layout.rows,
        channels=tuple(streams),
        schedule=schedule,
        accumulators=pim.accumulators,
        matrices=matrices,
        lanes=layout.lanes,
    )
