"""The commands of a channel as tables of numbers, from its words (`PimProgram.channel_words`)."""

from __future__ import annotations

import functools

import numpy as np

from pimflow.core.command_forms import OPERAND_WORDS
from pimflow.core.commands import (
    FIELDS,
    KINDS,
    MAX_DEPTH,
    OPCODES,
    Af,
    Bursts,
    Comp,
    GAct,
    Gwrite,
    Loop,
    Node,
    Readres,
    Wrbias,
    Write,
)

# Columns of a table: index into `KINDS`; buffer or gang; values of two affines; two more numbers.
KIND, UNIT, A, B, COUNT, COLUMNS = range(6)
_STEPS = 6  # first of the coefficients of `A`; those of `B` follow
_WIDTH = _STEPS + 2 * MAX_DEPTH
# What stands in `UNIT`, `A`, `B`, `COUNT` and `COLUMNS`: a field of the command, or a number.
_OPERANDS: dict[type[Node], tuple[str, str, str | None, str | int, str | int]] = {
    Gwrite: ("buffer", "pixel", "k", "pixels", "columns"),
    GAct: ("gang", "row", None, 1, 1),
    Comp: ("buffer", "row", "column", "count", 1),
    Readres: ("buffer", "pixel", "channel", 1, 1),
    Write: ("gang", "row", "column", "count", "banks"),
    Wrbias: ("buffer", "pixel", "channel", "resumed", 1),
    Af: ("buffer", "row", None, 1, 1),
}
_GWRITE, _G_ACT, _COMP, _READRES, _WRITE, _WRBIAS, _AF = range(len(KINDS))

# The loops of a stream: a slice of its commands, or an extent and what it repeats.
_Nest = list["slice | tuple[int, _Nest]"]


class CommandNest:
    """The commands of a channel and the loops around them.

    Attributes
    ----------
    rows : ndarray, [commands, columns]
        One row for each command node, with its values in the first iteration; the columns are those above,
        then the coefficients of `A` and of `B`.
    extents : ndarray, [commands, MAX_DEPTH]
        Extents of the loops around each command; 1 for those that are not there.
    """

    def __init__(self, words: np.ndarray):
        begins: list[int] = []
        extents: list[tuple[int, ...]] = []
        self._nest = _read_loops(words.tolist(), 0, len(words), (), begins, extents)
        self.rows = _command_rows(words, np.array(begins, np.int64))
        self.extents = np.array(extents, np.int64).reshape(-1, MAX_DEPTH)

    @functools.cached_property
    def shape(self) -> bytes:
        """Equal for streams whose loops have the same extents and commands."""
        return repr(self._nest).encode()

    @property
    def iterations(self) -> int:
        """Rows of `expand`."""
        return int(self.extents.prod(axis=1).sum())

    def max_values(self, column: int) -> np.ndarray:
        """By command, the largest value of `A` or `B` in all iterations."""
        begin = _STEPS + (0 if column == A else MAX_DEPTH)
        reach = self.rows[:, begin : begin + MAX_DEPTH] * (self.extents - 1)
        return np.asarray(self.rows[:, column] + np.maximum(reach, 0).sum(axis=1))

    def expand(self) -> np.ndarray:
        """A row for each command and iteration, in order, [iterations, 6]."""
        return np.ascontiguousarray(self._expand(self._nest, 0)[:, :_STEPS])

    def _expand(self, nest: _Nest, depth: int) -> np.ndarray:
        pieces = []
        for item in nest:
            if isinstance(item, slice):
                pieces.append(self.rows[item])
                continue
            extent, body = item
            first = self._expand(body, depth + 1)
            turns = np.repeat(first[None], extent, axis=0)
            turn = np.arange(extent)[:, None]
            turns[:, :, A] += turn * first[:, _STEPS + depth]
            turns[:, :, B] += turn * first[:, _STEPS + MAX_DEPTH + depth]
            pieces.append(turns.reshape(-1, _WIDTH))
        return np.concatenate(pieces) if pieces else np.empty((0, _WIDTH), np.int64)


def expand_table(words: np.ndarray, bursts: Bursts) -> np.ndarray:
    """What `expand` yields, [commands, 6]: index into `KINDS`, then `FIELDS`; -1 where there is none."""
    runs = CommandNest(words).expand()
    kind, unit, counts = runs[:, KIND], runs[:, UNIT], runs[:, COUNT]
    is_write, of_gang = kind == _WRITE, (kind == _G_ACT) | (kind == _WRITE)
    has_column = is_write | (kind == _COMP)
    moved = np.zeros(len(runs), np.int64)
    moved[(kind == _READRES) | (kind == _WRBIAS)] = bursts.readres
    moved = np.where(kind == _GWRITE, -(-counts * runs[:, COLUMNS] * bursts.vector // bursts.lanes), moved)
    moved = np.where(is_write, -(-runs[:, COLUMNS] // bursts.lanes) * counts, moved)
    columns = {
        "gang": np.where(of_gang, unit, -1),
        "buffer": np.where(of_gang, -1, unit),
        "row": np.where(of_gang | has_column | (kind == _AF), runs[:, A], -1),
        "column": np.where(has_column, runs[:, B], -1),
        "bursts": moved,
    }
    repeats = np.where(kind == _COMP, counts, 1)
    table = np.repeat(np.stack([kind, *(columns[name] for name in FIELDS)], axis=1), repeats, axis=0)
    step = np.arange(len(table)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    table[:, 1 + FIELDS.index("column")] += step
    return table


def _read_loops(
    words: list[int],
    begin: int,
    end: int,
    outer: tuple[int, ...],
    begins: list[int],
    extents: list[tuple[int, ...]],
) -> _Nest:
    """The nest of the words between `begin` and `end`; appends each command's begin and extents."""
    nest: _Nest = []
    loop, first = OPCODES[Loop], len(begins)
    command_extents = outer + (1,) * (MAX_DEPTH - len(outer))
    while begin < end:
        size = words[begin + 1]
        if words[begin] == loop:
            if first < len(begins):
                nest.append(slice(first, len(begins)))
            extent = words[begin + 2]
            body = _read_loops(words, begin + 3, begin + size, (*outer, extent), begins, extents)
            nest.append((extent, body))
            first = len(begins)
        else:
            begins.append(begin)
            extents.append(command_extents)
        begin += size
    if first < len(begins):
        nest.append(slice(first, len(begins)))
    return nest


def _command_rows(words: np.ndarray, begins: np.ndarray) -> np.ndarray:
    rows = np.zeros((len(begins), _WIDTH), np.int64)
    opcodes = words[begins]
    for opcode, (columns, positions, constants) in _SOURCES.items():
        places = np.flatnonzero(opcodes == opcode)
        if len(places):
            rows[places] = constants
            rows[places[:, None], columns] = words[begins[places][:, None] + positions]
    return rows


def _sources(cls: type[Node]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Columns of a row that words of a command fill, the positions of these words, and the row without."""
    constants, positions = np.zeros(_WIDTH, np.int64), dict[int, int]()
    constants[KIND] = OPCODES[cls] - 1
    offsets = OPERAND_WORDS[cls]
    for column, operand in zip((UNIT, A, B, COUNT, COLUMNS), _OPERANDS[cls]):
        if isinstance(operand, int):
            constants[column] = operand
        elif operand is not None:
            positions[column] = offsets[operand]
            if column in (A, B):
                steps = _STEPS + (0 if column == A else MAX_DEPTH)
                positions |= {steps + depth: offsets[operand] + 1 + depth for depth in range(MAX_DEPTH)}
    return np.array([*positions]), np.array([*positions.values()]), constants


_SOURCES = {OPCODES[cls]: _sources(cls) for cls in _OPERANDS}
