"""The two products of a decode step of attention, and what appends to its cache, as PIM programs.

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
from pimflow.core.commands import Affine, GAct, Node, Write
from pimflow.core.program import PimProgram
from pimflow.core.region import ConvGeometry
from pimflow.hardware import PimSpec
from pimflow.pim_backend.programs.cache_layout import CacheLayout, KeyLayout, ValueLayout
from pimflow.pim_backend.programs.products import Product, ProductStream, Vector
from pimflow.pim_backend.programs.rolling import compact, shifted

# Which stays while the other changes: a vector in its buffer, or an open row.
ORDERS = ("vector", "row")


@dataclass(frozen=True, kw_only=True)
class Step:
    """One product of a decode step: programs, what they read, and what comes of their results.

    Attributes
    ----------
    programs : tuple of PimProgram
        To be run one after the other, on the same image.
    taken : tuple of ndarray
        Of each program, int32 [pixels, elements]: which element of the product's vectors
        [batch, heads, elements] each element of its input is; -1 for zero.
    found : ndarray
        int32 [terms, batch, heads, outputs]: which of the results of all programs, one behind the other, add
        up to each element of the product.
    """

    programs: tuple[PimProgram, ...]
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

    geometry = _matrix_geometry(a.group * M, a.head_size, outputs)
    program = _program(layout, "scores", geometry, products, own, M, order)
    token = np.arange(tokens)
    channel, part, tile = layout.share(token)
    output = (tile * layout.spread + channel) * layout.banks + token % layout.banks
    taken = np.repeat(_by_member(a, a.head_size), parts, axis=1).reshape(-1, a.head_size)
    each = np.arange(a.group * M * outputs).reshape(a.group, layout.matrices, parts, outputs)
    found = _by_head(a, each[:, :, part, output])[None]
    return Step(programs=(program,), taken=(_indices(taken),), found=_indices(found))


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
    a, E = layout.attention, layout.elements
    columns, most = layout.columns(tokens), layout.buffer_columns
    if accumulate:
        pieces = [(range(1), columns)]
    else:
        full = columns // most
        pieces = [(range(full), most)] * (full > 0) + [(range(full, full + 1), columns % most)] * (
            columns % most > 0
        )
    programs, taken, found, begin = [], [], [], 0
    for chunks, length in pieces:
        M = len(chunks) * layout.spread * layout.matrices

        def own(channel: int) -> _Work:
            share, held = channel % layout.spread, layout.held(channel)
            return _Work(kind=(len(held),), pixels=share * layout.matrices + held.start, outputs=0)

        products = functools.partial(
            _mix_of_channel, layout, chunks=chunks, length=length, M=M, order=order, accumulate=accumulate
        )
        geometry = _matrix_geometry(a.group * M, length * E, a.value_size)
        programs.append(_program(layout, "mix", geometry, products, own, M, order))
        # Token of each element of the vector of a chunk and channel; `tokens` for none.
        column = (np.array(chunks)[:, None] * most + np.arange(length))[:, None] * layout.spread
        column = column + np.arange(layout.spread)[:, None]
        token = (column[..., None] * E + np.arange(E)).reshape(len(chunks) * layout.spread, -1)
        places = _by_member(a, tokens)[:, :, np.minimum(token, tokens - 1)]
        places[:, :, token >= tokens] = -1
        taken.append(_indices(places.swapaxes(1, 2).reshape(-1, token.shape[1])))
        # Sums of a chunk and channel, [group, chunks and channels, matrices, value_size].
        sums = begin + np.arange(a.group * M * a.value_size).reshape(
            a.group, -1, layout.matrices, a.value_size
        )
        found += [_by_head(a, sums[:, index]) for index in range(sums.shape[1])]
        begin += sums.size
    return Step(programs=tuple(programs), taken=tuple(taken), found=_indices(np.stack(found)))


def may_accumulate(layout: ValueLayout) -> bool:
    """Whether a bank has the latches to keep the sums of a vector while chunks of tokens go by."""
    return layout.tiles <= layout.pim.accumulators and layout.slots == 1


def append_keys(layout: KeyLayout, first: int, tokens: int = 1) -> PimProgram:
    """What writes keys [tokens * matrices, 1, 1, head_size] of the tokens from `first` on."""
    layout.fits()

    def writes(channel: int) -> Iterator[tuple[Write, int]]:
        for token in range(first, first + tokens):
            share, part, tile = layout.share(token)
            if share != channel % layout.spread:
                continue
            gang, bank = divmod(token % layout.banks, layout.banks // layout.pim.gangs)
            for local, matrix in enumerate(layout.held(channel)):
                for index, chunk in enumerate(layout.chunks):
                    row, column = layout.place(local * layout.parts + part, tile, index)
                    yield (
                        Write(
                            gang=gang,
                            bank=bank,
                            banks=1,
                            row=Affine(row),
                            column=Affine(column),
                            count=len(chunk),
                            element=0,
                            elements=layout.elements,
                            pixel=Affine((token - first) * layout.matrices + matrix),
                            k=Affine(chunk.start * layout.elements),
                        ),
                        row,
                    )

    return _append(layout, tokens, layout.attention.head_size, writes)


def append_values(layout: ValueLayout, first: int, tokens: int = 1) -> PimProgram:
    """What writes values [tokens * matrices, 1, 1, value_size] of the tokens from `first` on."""
    layout.fits()
    per_gang = layout.banks // layout.pim.gangs

    def writes(channel: int) -> Iterator[tuple[Write, int]]:
        for token in range(first, first + tokens):
            share, chunk, within, element = layout.share(token)
            if share != channel % layout.spread:
                continue
            for local, matrix in enumerate(layout.held(channel)):
                for tile in range(layout.tiles):
                    row, column = layout.place(local, chunk, tile)
                    for gang in range(layout.pim.gangs):
                        k = tile * layout.banks + gang * per_gang
                        if k < layout.attention.value_size:
                            yield (
                                Write(
                                    gang=gang,
                                    bank=0,
                                    banks=per_gang,
                                    row=Affine(row),
                                    column=Affine(column + within),
                                    count=1,
                                    element=element,
                                    elements=1,
                                    pixel=Affine((token - first) * layout.matrices + matrix),
                                    k=Affine(k),
                                ),
                                row,
                            )

    return _append(layout, tokens, layout.attention.value_size, writes)


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
                yield Product(vector, row, column, w, vector.pixel + slot, output)


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
                    yield Product(vector, row, column, len(chunk), pixel, output)


def _mix_of_channel(
    layout: ValueLayout, channel: int, chunks: range, length: int, M: int, order: str, accumulate: bool
) -> Iterator[Product]:
    """Products of `length` columns of each of `chunks`; if `accumulate`, of all chunks of one vector."""
    share, held, most = channel % layout.spread, layout.held(channel), layout.buffer_columns
    group, tiles = range(layout.attention.group), range(layout.tiles)
    for first, slots in layout.blocks(channel):
        for index, chunk in enumerate(chunks):
            pixel = (index * layout.spread + share) * layout.matrices + held.start + first
            parts = [(chunk, 0, length)]
            if accumulate:
                parts = [(c, c * most, min(most, length - c * most)) for c in range(-(-length // most))]
            for members in _passes(group, layout.pim.global_buffers) if accumulate else [group]:
                for at, begin, columns in parts:
                    width = layout.width if slots > 1 else columns
                    k = begin * layout.elements
                    vectors = [Vector(member * M + pixel, slots, k, width) for member in members]
                    for vector, tile in _ordered(vectors, tiles, layout.places_per_row, layout.pim, order):
                        for slot in range(slots):
                            row, column = layout.place(first + slot, at, tile)
                            output = tile * layout.banks
                            yield Product(vector, row, column, columns, vector.pixel + slot, output)


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


def _matrix_geometry(pixels: int, reduction: int, outputs: int) -> ConvGeometry:
    return ConvGeometry(n=pixels, h=1, w=1, c=reduction, oc=outputs)


def _append(
    layout: CacheLayout,
    tokens: int,
    elements: int,
    writes: Callable[[int], Iterable[tuple[Write, int]]],
) -> PimProgram:
    streams = []
    for channel in range(layout.channels):
        nodes: list[Node] = []
        opened = [-1] * layout.pim.gangs
        # Rows are opened once; `simulators/src/chosen.cc` has the same order.
        for write, row in sorted(writes(channel), key=_place_of):
            if opened[write.gang] != row:
                nodes.append(GAct(gang=write.gang, row=Affine(row)))
                opened[write.gang] = row
            nodes.append(write)
        streams.append(tuple(compact(nodes)))
    return of_streams(layout, "append", (tokens * layout.matrices, elements), streams)


def of_streams(
    layout: CacheLayout, name: str, size: tuple[int, int], streams: Sequence[tuple[Node, ...]]
) -> PimProgram:
    """The program of WRITEs of so many vectors of so many elements, a stream a channel."""
    return _of_streams(layout, name, _matrix_geometry(*size, 1), streams, 1, "")


def _place_of(write: tuple[Write, int]) -> tuple[int, ...]:
    node, row = write
    return (row, node.gang, node.column.base, node.bank, node.element)


def _program(
    layout: CacheLayout,
    name: str,
    geometry: ConvGeometry,
    products: Callable[[int], Iterable[Product]],
    work: Callable[[int], _Work],
    matrices: int,
    order: str,
) -> PimProgram:
    """The program of the `products` of each channel, made once for channels with the same `work`."""
    made: dict[tuple[Any, ...], tuple[_Work, tuple[Node, ...]]] = {}
    streams = []
    for channel in range(layout.channels):
        own = work(channel)
        if own.kind not in made:
            stream = ProductStream(layout.pim, layout.pim.global_buffers)
            made[own.kind] = own, tuple(compact(stream.commands(list(products(channel)))))
        first, nodes = made[own.kind]
        by = own.pixels - first.pixels, 0, own.outputs - first.outputs
        streams.append(tuple(shifted(node, *by) for node in nodes) if any(by) else nodes)
    return _of_streams(layout, name, geometry, streams, matrices, order)


def _of_streams(
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
