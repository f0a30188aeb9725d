"""The two products of a decode step of attention as PIM programs.

Output pixels of a program are vectors: pixel ``member * M + matrix`` is that of a query head, the `member`
of its group, with one of M matrices. So the vectors of neighbouring matrices are neighbours, and one GWRITE
takes them. Sums of a program are complete, but a matrix may be cut: into tokens of different channels or
slots (keys), whose results are scores of other tokens; or into chunks of tokens (values), whose results are
partial sums for the host to add. `Step` makes operands, and puts results together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pimflow.core.attention import Attention
from pimflow.core.commands import Node
from pimflow.core.program import PimProgram
from pimflow.core.region import ConvGeometry
from pimflow.hardware import PimSpec
from pimflow.pim_backend.programs.cache_layout import CacheLayout, KeyLayout, ValueLayout
from pimflow.pim_backend.programs.products import Product, Vector, commands, product_table
from pimflow.pim_backend.programs.rolling import compact, shifted

# Which stays while the other changes: a vector in its buffer, or an open row.
ORDERS = ("vector", "row")


@dataclass(frozen=True, kw_only=True)
class Orders:
    """The products of every channel, in the order in which they are computed.

    Attributes
    ----------
    kinds : tuple of ndarray
        Of channels that do the same from another pixel and output on: a `product_table`.
    channels : tuple of (int, int, int)
        The kind of each, and by how much its pixels and its outputs are further on.
    """

    kinds: tuple[np.ndarray, ...]
    channels: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One product of a decode step: programs, what they read, and what comes of their results.

    Attributes
    ----------
    programs : tuple of PimProgram
        To be run one after the other, on the same image.
    orders : tuple of Orders
        What the commands of each are made of.
    taken : tuple of ndarray
        Of each program, int32 [pixels, elements]: which element of the product's vectors
        [batch, heads, elements] each element of its input is; -1 for zero.
    found : ndarray
        int32 [terms, batch, heads, outputs]: which of the results of all programs, one behind the other, add
        up to each element of the product.
    """

    programs: tuple[PimProgram, ...]
    orders: tuple[Orders, ...]
    taken: tuple[np.ndarray, ...]
    found: np.ndarray

    def operands(self, x: np.ndarray) -> list[np.ndarray]:
        """Inputs of the programs, float32 [pixels, 1, 1, elements], of vectors [batch, heads, elements]."""
        flat = np.append(np.asarray(x, np.float32).reshape(-1), np.float32(0))  # -1 is its last
        return [flat[each].reshape(len(each), 1, 1, -1) for each in self.taken]

    def result(self, found: Sequence[np.ndarray]) -> np.ndarray:
        """The product, [batch, heads, outputs], of the programs' outputs."""
        flat = np.concatenate([each.reshape(-1) for each in found])
        total: np.ndarray = flat[self.found].sum(axis=0, dtype=flat.dtype)
        return total


def scores(layout: KeyLayout, tokens: int, order: str = "vector") -> Step:
    """``Q K^T`` over the first `tokens` tokens of the cache.

    Raises
    ------
    UnsupportedOpError, InfeasibleError
        As from `layout.fits`.
    """
    layout.fits()
    a, parts = layout.attention, layout.parts
    M = layout.matrices * parts
    tiles = layout.tiles(tokens)
    whole = parts > 1 or layout.pim.one_host
    outputs = tiles * layout.banks if whole else tokens

    def own(channel: int) -> _Work:
        share, held = channel % layout.spread, layout.held(channel)
        turns = range(-(-max(0, tiles - share) // layout.spread))
        return _Work(kind=(len(held), turns), pixels=held.start * parts, outputs=share * layout.banks)

    def products(channel: int) -> Iterator[Product]:
        return _scores_of_channel(layout, channel, M, own(channel).kind[1], order)

    orders = _orders(layout, products, own)
    geometry = matrix_geometry(a.group * M, a.head_size, outputs)
    program = _program(layout, "scores", geometry, orders, M, order)
    token = np.arange(tokens)
    channel, part, tile = layout.share(token)
    output = (tile * layout.spread + channel) * layout.banks + token % layout.banks
    taken = np.repeat(_by_member(a, a.head_size), parts, axis=1).reshape(-1, a.head_size)
    each = np.arange(a.group * M * outputs).reshape(a.group, layout.matrices, parts, outputs)
    found = _by_head(a, each[:, :, part, output])[None]
    return Step(programs=(program,), orders=(orders,), taken=(_indices(taken),), found=_indices(found))


def mix(layout: ValueLayout, tokens: int, order: str = "vector", accumulate: bool = False) -> Step:
    """``S V`` over the first `tokens` tokens of the cache; results are sums over chunks and channels.

    Parameters
    ----------
    accumulate : bool
        Whether sums stay in the latches from chunk to chunk; see `may_accumulate`.

    Raises
    ------
    UnsupportedOpError, InfeasibleError
        As from `layout.fits`.
    """
    layout.fits()
    columns, most = layout.columns(tokens), layout.buffer_columns
    full = columns // most
    pieces = [range(1)] if accumulate else [range(full), range(full, -(-columns // most))]
    steps = [mix_of_chunks(layout, tokens, chunks, order, accumulate) for chunks in pieces if chunks]
    sizes = [step.programs[0].geometry.pixels * layout.attention.value_size for step in steps]
    begins = np.cumsum([0, *sizes])
    return Step(
        programs=tuple(step.programs[0] for step in steps),
        orders=tuple(step.orders[0] for step in steps),
        taken=tuple(step.taken[0] for step in steps),
        found=_indices(np.concatenate([step.found + begin for step, begin in zip(steps, begins)])),
    )


def mix_of_chunks(
    layout: ValueLayout, tokens: int, chunks: range, order: str = "vector", accumulate: bool = False
) -> Step:
    """The part of `mix` that has some chunks of tokens, the last maybe shorter; all of it if `accumulate`.

    Its program forms all products of its geometry if none is shorter.
    """
    a, E, most = layout.attention, layout.elements, layout.buffer_columns
    columns, M = layout.columns(tokens), len(chunks) * layout.spread * layout.matrices
    length = columns if accumulate else min(most, columns - chunks.start * most)

    def own(channel: int) -> _Work:
        share, held = channel % layout.spread, layout.held(channel)
        return _Work(kind=(len(held),), pixels=share * layout.matrices + held.start, outputs=0)

    products = functools.partial(
        _mix_of_channel, layout, chunks=chunks, columns=columns, M=M, order=order, accumulate=accumulate
    )
    orders = _orders(layout, products, own)
    geometry = matrix_geometry(a.group * M, length * E, a.value_size)
    # Token of each element of the vector of a chunk and channel; `tokens` for none.
    column = (np.array(chunks)[:, None] * most + np.arange(length))[:, None] * layout.spread
    column = column + np.arange(layout.spread)[:, None]
    token = (column[..., None] * E + np.arange(E)).reshape(len(chunks) * layout.spread, -1)
    places = _by_member(a, tokens)[:, :, np.minimum(token, tokens - 1)]
    places[:, :, token >= tokens] = -1
    # Sums of a chunk and channel, [group, chunks and channels, matrices, value_size].
    sums = np.arange(a.group * M * a.value_size).reshape(a.group, -1, layout.matrices, a.value_size)
    found = [_by_head(a, sums[:, index]) for index in range(sums.shape[1])]
    return Step(
        programs=(_program(layout, "mix", geometry, orders, M, order),),
        orders=(orders,),
        taken=(_indices(places.swapaxes(1, 2).reshape(-1, token.shape[1])),),
        found=_indices(np.stack(found)),
    )


def may_accumulate(layout: ValueLayout) -> bool:
    """Whether a bank has the latches to keep the sums of a vector while chunks of tokens go by."""
    return layout.tiles <= layout.pim.accumulators and layout.slots == 1


class _Work(NamedTuple):
    """What a channel has to do: channels of one `kind` do the same from another pixel and output on."""

    kind: tuple[Any, ...]
    pixels: int
    outputs: int


def _scores_of_channel(layout: KeyLayout, channel: int, M: int, own: range, order: str) -> Iterator[Product]:
    share, w = channel % layout.spread, layout.columns
    begin = layout.held(channel).start * layout.parts
    for first, slots in layout.blocks(channel):
        pixels = [member * M + begin + first for member in range(layout.attention.group)]
        if len(layout.chunks) > 1:
            yield from _scores_of_long_keys(layout, pixels, first, own, share)
            continue
        vectors = [Vector(pixel, slots, 0, w) for pixel in pixels]
        for vector, tile in _ordered(vectors, own, layout.places_per_row, layout.pim, order):
            for slot in range(slots):
                row, column = layout.place(first + slot, tile)
                output = (tile * layout.spread + share) * layout.banks
                yield Product(vector, row, column, w, vector.pixel + slot, output, output)


def _scores_of_long_keys(
    layout: KeyLayout, pixels: Sequence[int], slot: int, own: range, share: int
) -> Iterator[Product]:
    """Chunk after chunk of a vector meets as many tiles as a bank has accumulators."""
    step = layout.pim.accumulators
    for pixel in pixels:
        for begin in range(0, len(own), step):
            for index, chunk in enumerate(layout.chunks):
                vector = Vector(pixel, 1, chunk.start * layout.elements, len(chunk))
                for tile in own[begin : begin + step]:
                    row, column = layout.place(slot, tile, index)
                    output = (tile * layout.spread + share) * layout.banks
                    yield Product(vector, row, column, len(chunk), pixel, output, output)


def _mix_of_channel(
    layout: ValueLayout, channel: int, chunks: range, columns: int, M: int, order: str, accumulate: bool
) -> Iterator[Product]:
    """Products of each of `chunks`, as far as there are `columns`; if `accumulate`, a vector has them all."""
    share, held, most = channel % layout.spread, layout.held(channel), layout.buffer_columns
    group, tiles = range(layout.attention.group), range(layout.tiles)

    def part(chunk: int, k: int) -> tuple[int, int, int]:
        return chunk, k, min(most, columns - chunk * most)

    for first, slots in layout.blocks(channel):
        for index, chunk in enumerate(chunks):
            pixel = (index * layout.spread + share) * layout.matrices + held.start + first
            parts = [part(chunk, 0)]
            if accumulate:
                parts = [part(c, c * most * layout.elements) for c in range(-(-columns // most))]
            for members in _passes(group, layout.pim.global_buffers) if accumulate else [group]:
                for at, k, count in parts:
                    width = layout.width if slots > 1 else count
                    vectors = [Vector(member * M + pixel, slots, k, width) for member in members]
                    for vector, tile in _ordered(vectors, tiles, layout.places_per_row, layout.pim, order):
                        for slot in range(slots):
                            row, column = layout.place(first + slot, at, tile)
                            output = tile * layout.banks
                            yield Product(vector, row, column, count, vector.pixel + slot, output, at * most)


def _passes(members: range, buffers: int) -> list[range]:
    """Members of a group of which each has a buffer."""
    return [members[b : b + buffers] for b in range(0, len(members), buffers)]


def _ordered(
    vectors: Sequence[Vector], tiles: range, per_row: int, pim: PimSpec, order: str
) -> Iterator[tuple[Vector, int]]:
    """Each vector with each tile: rows pass by the vectors in the buffers, or vectors by the open row."""
    rows = [tiles[b : b + per_row] for b in range(0, len(tiles), per_row)]
    if order == "vector":
        for begin in range(0, len(vectors), pim.global_buffers):
            for row in rows:
                for vector in vectors[begin : begin + pim.global_buffers]:
                    yield from ((vector, tile) for tile in row)
            rows.reverse()  # begin with the row that is open
        return
    turn = list(vectors)
    for row in rows:
        for vector in turn:
            yield from ((vector, tile) for tile in row)
        turn.reverse()  # and with the vector that is there


def _by_member(a: Attention, elements: int) -> np.ndarray:
    """Which elements of [batch, heads, elements] lie at [group, batch * kv_heads, elements]."""
    each = np.arange(a.batch * a.heads * elements).reshape(a.batch, a.kv_heads, a.group, elements)
    return each.transpose(2, 0, 1, 3).reshape(a.group, -1, elements)


def _by_head(a: Attention, x: np.ndarray) -> np.ndarray:
    """[batch, heads, elements] of [group, batch * kv_heads, elements]."""
    each = x.reshape(a.group, a.batch, a.kv_heads, -1).transpose(1, 2, 0, 3)
    return each.reshape(a.batch, a.heads, -1)


def _indices(each: np.ndarray) -> np.ndarray:
    """As a runtime module has them."""
    return np.ascontiguousarray(each, np.int32)


def matrix_geometry(pixels: int, reduction: int, outputs: int) -> ConvGeometry:
    return ConvGeometry(n=pixels, h=1, w=1, c=reduction, oc=outputs)


def _orders(
    layout: CacheLayout, products: Callable[[int], Iterable[Product]], work: Callable[[int], _Work]
) -> Orders:
    """The `products` of each channel, made once for channels with the same `work`."""
    made: dict[tuple[Any, ...], tuple[int, _Work]] = {}
    kinds, channels = [], []
    for channel in range(layout.channels):
        own = work(channel)
        if own.kind not in made:
            made[own.kind] = len(kinds), own
            kinds.append(product_table(list(products(channel))))
        kind, first = made[own.kind]
        channels.append((kind, own.pixels - first.pixels, own.outputs - first.outputs))
    return Orders(kinds=tuple(kinds), channels=tuple(channels))


def _program(
    layout: CacheLayout, name: str, geometry: ConvGeometry, orders: Orders, matrices: int, order: str
) -> PimProgram:
    """The program of products in an order."""
    made = [tuple(compact(commands(layout.pim, table))) for table in orders.kinds]
    streams = [
        tuple(shifted(node, pixels, 0, outputs) for node in made[kind]) if pixels or outputs else made[kind]
        for kind, pixels, outputs in orders.channels
    ]
    return program_of(layout, name, geometry, streams, matrices, order)


def program_of(
    layout: CacheLayout,
    name: str,
    geometry: ConvGeometry,
    streams: Sequence[tuple[Node, ...]],
    matrices: int,
    schedule: str,
) -> PimProgram:
    pim = layout.pim
    return PimProgram(
        region=name,
        pim=pim.name,
        pim_digest=pim.uncatalogued_digest,
        dtype=layout.dtype,
        geometry=geometry,
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
