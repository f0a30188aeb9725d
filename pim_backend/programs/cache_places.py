"""A program that writes every place of a cache once; each step issues only the WRITEs of its own tokens.

The position of a token is known only when a step runs. So an executable holds the WRITEs of all positions, as
loops over rows, columns and heads, and a step selects those of its position
(``simulators/src/step_writes.cc``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from pimflow.core.commands import Affine, GAct, Loop, Node, Write
from pimflow.core.program import PimProgram
from pimflow.pim_backend.programs.cache_appends import write_program
from pimflow.pim_backend.programs.cache_layout import KeyLayout, ValueLayout


def all_places_program(layout: KeyLayout | ValueLayout) -> PimProgram:
    """The program that writes every place of a cache, [places * matrices, 1, 1, size].

    Pixel ``t * matrices + m`` is token t of matrix m.
    Rows are filled completely, so there may be more places than the context has tokens.
    """
    layout.check_fit()
    size = layout.attention.head_size if isinstance(layout, KeyLayout) else layout.attention.value_size
    nodes_by_count: dict[int, list[tuple[int, tuple[Node, ...]]]] = {}
    streams = []
    for channel in range(layout.channels):
        matrices, share = layout.channel_matrices(channel), channel % layout.spread
        if len(matrices) not in nodes_by_count:
            nodes_by_count[len(matrices)] = list(_writes(layout, len(matrices))) if matrices else []
        per_share = _tokens_per_share(layout) * layout.matrices
        streams.append(
            tuple(
                _shift_pixels(node, matrices.start + share * per_share + pixels)
                for pixels, nodes in nodes_by_count[len(matrices)]
                for node in nodes
            )
        )
    return write_program(layout, "places", (place_count(layout) * layout.matrices, size), streams)


def place_count(layout: KeyLayout | ValueLayout) -> int:
    """Tokens that fit into the rows of a cache."""
    if isinstance(layout, KeyLayout):
        return _tile_count(layout) * layout.parts * layout.spread * layout.banks
    return layout.chunks * layout.width * layout.spread * layout.elements


def _tokens_per_share(layout: KeyLayout | ValueLayout) -> int:
    """Consecutive tokens that lie in one channel, before the next channel that shares the matrix."""
    return layout.banks if isinstance(layout, KeyLayout) else layout.elements


def _tile_count(layout: KeyLayout) -> int:
    return layout.rows_per_block * layout.places_per_row // len(layout.chunks)


def _writes(layout: KeyLayout | ValueLayout, matrix_count: int) -> Iterator[tuple[int, tuple[Node, ...]]]:
    """Nodes of a channel that has the first matrices and the first share, each with its offset in pixels."""
    if isinstance(layout, KeyLayout):
        return _key_writes(layout, matrix_count)
    return _value_writes(layout, matrix_count)


def _key_writes(layout: KeyLayout, matrix_count: int) -> Iterator[tuple[int, tuple[Node, ...]]]:
    matrix = np.arange(matrix_count)
    per_gang = layout.banks // layout.pim.gangs
    period = layout.places_per_row // math.gcd(layout.places_per_row, len(layout.chunks))
    full_tiles = _tile_count(layout) // period * period
    grids = [np.arange(full_tiles).reshape(-1, period), np.arange(full_tiles, _tile_count(layout))[None]]
    for part in range(layout.parts):
        for index, chunk in enumerate(layout.chunks):
            for tiles in grids:
                if not tiles.size:
                    continue
                tile = tiles[..., None]
                row, column = layout.chunk_place(matrix * layout.parts + part, tile, index)
                token = (tile * layout.parts + part) * layout.spread * layout.banks
                values = _grid(row, column, token * layout.matrices + matrix, chunk.start * layout.elements)
                for bank in range(layout.banks):
                    write = _write(
                        gang=bank // per_gang,
                        bank=bank % per_gang,
                        banks=1,
                        count=len(chunk),
                        element=0,
                        elements=layout.elements,
                    )
                    yield bank * layout.matrices, tuple(_nest(values, (), write))


def _value_writes(layout: ValueLayout, matrix_count: int) -> Iterator[tuple[int, tuple[Node, ...]]]:
    matrix, per_gang = np.arange(matrix_count), layout.banks // layout.pim.gangs
    period = layout.places_per_row // math.gcd(layout.places_per_row, layout.tiles)
    column_in_chunk = np.arange(layout.width)[:, None, None]
    for gang in range(layout.pim.gangs):
        first = gang * per_gang
        tile = np.arange(-(-(layout.attention.value_size - first) // layout.banks))[:, None]
        if not tile.size:
            continue
        for begin in range(min(period, layout.chunks)):
            chunk = np.arange(begin, layout.chunks, period)[:, None, None, None]
            row, column = layout.chunk_place(matrix, chunk, tile)
            token = (chunk * layout.buffer_columns + column_in_chunk) * layout.spread * layout.elements
            pixel = token * layout.matrices + matrix
            values = _grid(row, column + column_in_chunk, pixel, tile * layout.banks + first)
            for element in range(layout.elements):
                write = _write(gang=gang, bank=0, banks=per_gang, count=1, element=element, elements=1)
                yield element * layout.matrices, tuple(_nest(values, (), write))


def _write(**fixed: int) -> Write:
    zero = Affine(0)
    return Write(**fixed, row=zero, column=zero, pixel=zero, k=zero)


def _grid(*axes: np.ndarray | int) -> np.ndarray:
    """Row, column, pixel and element of each WRITE of a grid, stacked: [4, ...]."""
    return np.stack(np.broadcast_arrays(*axes))


def _nest(values: np.ndarray, steps: Sequence[np.ndarray], write: Write) -> Iterator[Node]:
    """The WRITEs of a grid, with a loop wherever all values grow by the same steps along an axis."""
    if values.ndim == 1:
        row, column, pixel, k = (
            Affine(int(base), tuple(int(step[n]) for step in steps)) for n, base in enumerate(values)
        )
        yield GAct(gang=write.gang, row=row)
        yield replace(write, row=row, column=column, pixel=pixel, k=k)
        return
    moves = np.diff(values, axis=1).reshape(4, values.shape[1] - 1, math.prod(values.shape[2:]))
    even = (moves == moves[:, :, :1]).all(axis=(0, 2))
    begin = 0
    while begin < values.shape[1]:
        end = begin + 1
        while end < values.shape[1] and even[end - 1] and (moves[:, end - 1, 0] == moves[:, begin, 0]).all():
            end += 1
        if end - begin == 1:
            yield from _nest(values[:, begin], steps, write)
        else:
            body = _nest(values[:, begin], (*steps, moves[:, begin, 0]), write)
            yield Loop(extent=end - begin, body=tuple(body))
        begin = end


def _shift_pixels(node: Node, pixels: int) -> Node:
    """`node` with `pixels` added to all its pixels."""
    if isinstance(node, Loop):
        return replace(node, body=tuple(_shift_pixels(child, pixels) for child in node.body))
    if isinstance(node, Write) and pixels:
        return replace(node, pixel=Affine(node.pixel.base + pixels, node.pixel.coefficients))
    return node
