"""PIM programs of WRITEs that append keys and values of new tokens to a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from pimflow.core.commands import Affine, GAct, Node, Write
from pimflow.core.program import PimProgram
from pimflow.pim_backend.programs.attention import build_program, matrix_geometry
from pimflow.pim_backend.programs.cache_layout import CacheLayout, KeyLayout, ValueLayout
from pimflow.pim_backend.programs.loop_rolling import roll_loops


def append_keys(layout: KeyLayout, first: int, tokens: int = 1) -> PimProgram:
    """The program that writes keys [tokens * matrices, 1, 1, head_size] of the tokens from `first` on."""
    layout.check_fit()

    def writes(channel: int) -> Iterator[tuple[Write, int]]:
        for token in range(first, first + tokens):
            share, part, tile = layout.token_place(token)
            if share != channel % layout.spread:
                continue
            gang, bank = divmod(token % layout.banks, layout.banks // layout.pim.gangs)
            for local, matrix in enumerate(layout.channel_matrices(channel)):
                for index, chunk in enumerate(layout.chunks):
                    row, column = layout.chunk_place(local * layout.parts + part, tile, index)
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

    return _append_program(layout, tokens, layout.attention.head_size, writes)


def append_values(layout: ValueLayout, first: int, tokens: int = 1) -> PimProgram:
    """The program that writes values [tokens * matrices, 1, 1, value_size] of the tokens from `first` on."""
    layout.check_fit()
    per_gang = layout.banks // layout.pim.gangs

    def writes(channel: int) -> Iterator[tuple[Write, int]]:
        for token in range(first, first + tokens):
            share, chunk, within, element = layout.token_place(token)
            if share != channel % layout.spread:
                continue
            for local, matrix in enumerate(layout.channel_matrices(channel)):
                for tile in range(layout.tiles):
                    row, column = layout.chunk_place(local, chunk, tile)
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

    return _append_program(layout, tokens, layout.attention.value_size, writes)


def _append_program(
    layout: CacheLayout, tokens: int, elements: int, writes: Callable[[int], Iterable[tuple[Write, int]]]
) -> PimProgram:
    streams = []
    for channel in range(layout.channels):
        nodes: list[Node] = []
        open_rows = [-1] * layout.pim.gangs
        # Each row is opened once; `simulators/src/step_writes.cc` uses the same order.
        for write, row in sorted(writes(channel), key=_write_order):
            if open_rows[write.gang] != row:
                nodes.append(GAct(gang=write.gang, row=Affine(row)))
                open_rows[write.gang] = row
            nodes.append(write)
        streams.append(tuple(roll_loops(nodes)))
    return write_program(layout, "append", (tokens * layout.matrices, elements), streams)


def write_program(
    layout: CacheLayout, name: str, size: tuple[int, int], streams: Sequence[tuple[Node, ...]]
) -> PimProgram:
    """A program of WRITEs from one stream a channel; `size` is the number of vectors and their elements."""
    return build_program(layout, name, matrix_geometry(*size, 1), streams, 1, "")


def _write_order(write: tuple[Write, int]) -> tuple[int, ...]:
    node, row = write
    return (row, node.gang, node.column.base, node.bank, node.element)
