"""PIM programs: loops over DRAM-PIM commands, per channel, and the memory image they run on.

A program is the one description from which everything about a PIM region is derived: commands,
cycles, values, traces. It is kept as loops, not as a flat list.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from pimflow.core.region import ELEMENT_BYTES, ConvGeometry
from pimflow.errors import TraceError

MAX_DEPTH = 4
FORMAT = "pimprog/1"
_SIZE_LIMIT = 1 << 31


@dataclass(frozen=True)
class Affine:
    """``base + sum(coefficient[d] * i[d])`` over the enclosing loops' counters, outermost first."""

    base: int
    coefficients: tuple[int, ...] = ()

    def at(self, counters: tuple[int, ...]) -> int:
        return self.base + sum(c * i for c, i in zip(self.coefficients, counters))


@dataclass(frozen=True, kw_only=True)
class Gwrite:
    """Fill global buffer `buffer` with im2col vectors, one beside the other.

    Slot ``s`` (of `pixels`) takes columns ``[s*columns, (s+1)*columns)``: elements
    ``[k, k + columns*elements_per_column)`` of the im2col vector of output pixel ``pixel + s``, zero
    where the window lies in padding or beyond the reduction.
    """

    buffer: int
    pixel: Affine
    pixels: int
    k: Affine
    columns: int

    @property
    def bursts(self) -> int:
        return self.pixels * self.columns


@dataclass(frozen=True, kw_only=True)
class GAct:
    """Open `row` in the banks of gang `gang`."""

    gang: int
    row: Affine


@dataclass(frozen=True, kw_only=True)
class Comp:
    """`count` COMPs on consecutive columns from `column` of the open row `row`, with buffer `buffer`."""

    buffer: int
    row: Affine
    column: Affine
    count: int


@dataclass(frozen=True, kw_only=True)
class Readres:
    """Read and clear the latches of `buffer`: bank ``b`` holds output channel ``channel + b`` of `pixel`."""

    buffer: int
    pixel: Affine
    channel: Affine


@dataclass(frozen=True, kw_only=True)
class Loop:
    """`extent` times `body`, in order."""

    extent: int
    body: tuple[Node, ...]


Node = Gwrite | GAct | Comp | Readres | Loop


@dataclass(frozen=True)
class Command:
    """One command of the expanded stream; fields that a command lacks are -1."""

    name: str
    gang: int = -1
    buffer: int = -1
    row: int = -1
    column: int = -1
    bursts: int = 0


@dataclass(frozen=True, kw_only=True)
class PimProgram:
    """A region on DRAM-PIM.

    Attributes
    ----------
    region : str
        Region it computes.
    pim : str
        Name of the device it was lowered for.
    dtype : str
        Storage type of operands and results.
    geometry : ConvGeometry
        The convolution: it defines the im2col vector of an output pixel, in (kh, kw, c) order, and
        the pixel numbering, row-major over (n, oh, ow).
    pixel_begin, pixel_end : int
        Output pixels that the program computes; the results are ``[pixel_end - pixel_begin, oc]``.
    banks, gangs, columns_per_row, elements_per_column, buffers : int
        Organisation it was lowered for.
    readres_bursts : int
        Column-sized bursts of one READRES.
    row_begin, rows : int
        Rows ``[row_begin, row_begin + rows)`` of every bank belong to the region.
    channels : tuple of tuple of Node
        Command stream of each PIM channel.
    schedule : str
        The loop order that was chosen, for people.
    """

    region: str
    pim: str
    dtype: str
    geometry: ConvGeometry
    pixel_begin: int
    pixel_end: int
    banks: int
    gangs: int
    columns_per_row: int
    elements_per_column: int
    buffers: int
    readres_bursts: int
    row_begin: int
    rows: int
    channels: tuple[tuple[Node, ...], ...]
    schedule: str = ""

    def commands(self, channel: int) -> Iterator[Command]:
        """The channel's commands, expanded, in order."""
        yield from _expand(self.channels[channel], (), self.readres_bursts)

    def encoded(self, channel: int) -> np.ndarray:
        """The channel's stream as the int64 words that the C++ core walks.

        Each node is ``opcode, size in words, operands…``; an affine is its base and `MAX_DEPTH`
        coefficients. ``simulators/src/program.h`` documents the operands.
        """
        words: list[int] = []
        for node in self.channels[channel]:
            _encode(node, words)
        return np.asarray(words, dtype=np.int64)

    def packed(self) -> tuple[np.ndarray, np.ndarray]:
        """All channels' `encoded` words in one array, and where each begins ([channels + 1])."""
        streams = [self.encoded(channel) for channel in range(len(self.channels))]
        offsets = np.cumsum([0] + [len(stream) for stream in streams], dtype=np.int64)
        return np.concatenate(streams), offsets

    def header(self) -> np.ndarray:
        """The int64 words of ``Header`` in ``simulators/src/functional.cc``."""
        g = self.geometry
        return np.asarray(
            [
                *(g.n, g.h, g.w, g.c, g.oc, g.kh, g.kw, *g.stride, *g.dilation, g.padding[0], g.padding[1]),
                *(g.oh, g.ow, self.pixel_begin, self.pixel_end, self.banks, self.gangs, self.columns_per_row),
                *(self.elements_per_column, self.buffers, self.row_begin, self.rows, self.dtype == "fp16"),
            ],
            dtype=np.int64,
        )

    def to_json(self) -> str:
        """The ``.pimprog`` text: one node a line, loops indented."""
        header = {
            "format": FORMAT,
            **{
                name: getattr(self, name)
                for name in self.__dataclass_fields__
                if name not in ("geometry", "channels")
            },
            "geometry": dict(self.geometry.__dict__),
        }
        lines = [json.dumps(header)[:-1] + ', "channels": [']
        for index, nodes in enumerate(self.channels):
            lines.append(" [")
            _print(nodes, "  ", lines)
            lines.append(" ]," if index + 1 < len(self.channels) else " ]")
        lines.append("]}")
        return "\n".join(lines) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "<text>") -> PimProgram:
        """Read a ``.pimprog``; raises `TraceError` with file, line and text, or the field at fault."""
        try:
            table = json.loads(text)
        except json.JSONDecodeError as error:
            lines = text.splitlines()
            line = lines[error.lineno - 1].strip()[:80] if error.lineno <= len(lines) else ""
            raise TraceError(f"{where}:{error.lineno}: {error.msg}: {line!r}") from error
        except (ValueError, RecursionError) as error:  # numbers and nesting beyond what Python reads
            raise TraceError(f"{where}: {error}") from error
        if not isinstance(table, dict) or table.pop("format", None) != FORMAT:
            raise TraceError(f"{where}:1: not a {FORMAT} file")
        try:
            _check_names("field", table, cls)
            _check_names("field of 'geometry',", table["geometry"], ConvGeometry)
            if not isinstance(table["channels"], list):
                raise ValueError("field 'channels' is not a list")
            geometry = {
                key: tuple(value) if isinstance(value, list) else value
                for key, value in table.pop("geometry").items()
            }
            channels = tuple(
                _parse_body(nodes, 0, f"channel {index}") for index, nodes in enumerate(table.pop("channels"))
            )
            program = cls(**table, geometry=ConvGeometry(**geometry), channels=channels)
            program.validate()
        except ValueError as error:
            raise TraceError(f"{where}: {error}") from error
        return program

    def validate(self) -> None:
        """Raise `ValueError` for what cannot be executed.

        That is a field out of its range, a command that names a buffer, row, column or pixel that is
        not there, loops nested deeper than `MAX_DEPTH`, and an affine over more loops than enclose it.
        """
        self._validate_fields()
        if not 0 <= self.pixel_begin < self.pixel_end <= self.geometry.pixels:
            raise ValueError(f"pixels [{self.pixel_begin}, {self.pixel_end}) are not in the output")
        if not self.channels:
            raise ValueError("no channels")
        for index, nodes in enumerate(self.channels):
            try:
                for node, extents in _leaves(nodes, ()):
                    self._validate_node(node, extents)
            except ValueError as error:
                raise ValueError(f"channel {index}: {error}") from None

    def _validate_fields(self) -> None:
        for name in ("region", "pim", "schedule"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"field '{name}' is not a text")
        if self.dtype not in tuple(ELEMENT_BYTES):
            raise ValueError(f"field 'dtype' is none of {', '.join(ELEMENT_BYTES)}")
        positive = ("banks", "gangs", "columns_per_row", "elements_per_column", "buffers", "readres_bursts")
        for name in positive:
            _check_size(name, getattr(self, name), 1)
        for name in ("pixel_begin", "pixel_end", "row_begin", "rows"):
            _check_size(name, getattr(self, name), 0)
        if self.banks % self.gangs:
            raise ValueError(f"{self.banks} banks are not {self.gangs} gangs of the same size")
        for name, value in self.geometry.__dict__.items():
            least = 0 if name == "padding" else 1
            length = {"stride": 2, "dilation": 2, "padding": 4}.get(name)
            if length is None:
                _check_size(f"geometry.{name}", value, least)
            elif not isinstance(value, tuple) or len(value) != length:
                raise ValueError(f"field 'geometry.{name}' is not a list of {length}")
            else:
                for item in value:
                    _check_size(f"geometry.{name}", item, least)

    def _validate_node(self, node: Node, extents: tuple[int, ...]) -> None:
        for name in ("pixels", "columns", "count"):
            if hasattr(node, name):
                _check_size(name, getattr(node, name), 1)

        def within(what: str, affine: Affine, begin: int, end: int) -> None:
            if len(affine.coefficients) > len(extents):
                raise ValueError(f"{what} of {type(node).__name__} uses more loops than enclose it")
            for coefficient in affine.coefficients:
                _check_size(f"{what} coefficient", abs(coefficient), 0)
            reach = [c * (n - 1) for c, n in zip(affine.coefficients, extents)]
            low = affine.base + sum(min(0, r) for r in reach)
            high = affine.base + sum(max(0, r) for r in reach)
            if low < begin or high >= end:
                raise ValueError(f"{what} {low}..{high} of {type(node).__name__} is not in [{begin}, {end})")

        if isinstance(node, GAct):
            within("gang", Affine(node.gang), 0, self.gangs)
            within("row", node.row, self.row_begin, self.row_begin + self.rows)
            return
        within("buffer", Affine(node.buffer), 0, self.buffers)
        if isinstance(node, Gwrite):
            within("column", Affine(node.bursts - 1), 0, self.columns_per_row)
            within("pixel", node.pixel, self.pixel_begin, self.pixel_end - node.pixels + 1)
            within("element", node.k, 0, self.geometry.reduction)
        elif isinstance(node, Comp):
            within("row", node.row, self.row_begin, self.row_begin + self.rows)
            within("column", node.column, 0, self.columns_per_row - node.count + 1)
        else:
            within("pixel", node.pixel, self.pixel_begin, self.pixel_end)
            within("output channel", node.channel, 0, self.geometry.oc)


@dataclass(frozen=True, kw_only=True)
class MemoryImage:
    """What the banks hold: rows of weights, shared between channels that hold the same.

    Attributes
    ----------
    row_begin : int
        Row of the first page.
    pages : ndarray, [pages, banks, elements_per_row], float16 or float32
        Distinct row contents over all banks of a channel.
    table : ndarray, [channels, rows], int32
        Page in each row of each channel; -1 where a channel holds nothing of the region.
    """

    row_begin: int
    pages: np.ndarray
    table: np.ndarray = field(repr=False)

    @property
    def placed_bytes(self) -> int:
        """Bytes written into the banks of all channels."""
        return int((self.table >= 0).sum()) * self.pages[0].nbytes if len(self.pages) else 0


def _expand(nodes: tuple[Node, ...], counters: tuple[int, ...], readres: int) -> Iterator[Command]:
    for node in nodes:
        if isinstance(node, Loop):
            for i in range(node.extent):
                yield from _expand(node.body, (*counters, i), readres)
        elif isinstance(node, Gwrite):
            yield Command("GWRITE", buffer=node.buffer, bursts=node.bursts)
        elif isinstance(node, GAct):
            yield Command("G_ACT", gang=node.gang, row=node.row.at(counters))
        elif isinstance(node, Comp):
            row, first = node.row.at(counters), node.column.at(counters)
            for column in range(first, first + node.count):
                yield Command("COMP", buffer=node.buffer, row=row, column=column)
        else:
            yield Command("READRES", buffer=node.buffer, bursts=readres)


def _leaves(nodes: tuple[Node, ...], extents: tuple[int, ...]) -> Iterator[tuple[Node, tuple[int, ...]]]:
    """Every command node with the extents of the loops around it; `ValueError` for an impossible loop."""
    for node in nodes:
        if isinstance(node, Loop):
            _check_size("extent", node.extent, 1)
            if len(extents) == MAX_DEPTH:
                raise ValueError(f"loops are nested deeper than {MAX_DEPTH}")
            yield from _leaves(node.body, (*extents, node.extent))
        else:
            yield node, extents


def _check_size(name: str, value: object, least: int) -> None:
    if type(value) is not int or not least <= value < _SIZE_LIMIT:
        raise ValueError(f"field '{name}' is {value!a:.60}, not an integer in [{least}, {_SIZE_LIMIT})")


_OPCODES: dict[type, int] = {Loop: 0, Gwrite: 1, GAct: 2, Comp: 3, Readres: 4}
_NAMES: dict[str, type] = {"LOOP": Loop, "GWRITE": Gwrite, "G_ACT": GAct, "COMP": Comp, "READRES": Readres}
_TEXT = {cls: name for name, cls in _NAMES.items()}


def _encode(node: Node, words: list[int]) -> None:
    start = len(words)
    words += [_OPCODES[type(node)], 0]
    if isinstance(node, Loop):
        words.append(node.extent)
        for child in node.body:
            _encode(child, words)
    else:
        for name in node.__dataclass_fields__:
            value = getattr(node, name)
            if isinstance(value, Affine):
                words.append(value.base)
                words += [*value.coefficients, *[0] * (MAX_DEPTH - len(value.coefficients))]
            else:
                words.append(value)
    words[start + 1] = len(words) - start


def _print(nodes: tuple[Node, ...], indent: str, lines: list[str]) -> None:
    for index, node in enumerate(nodes):
        comma = "," if index + 1 < len(nodes) else ""
        if isinstance(node, Loop):
            lines.append(f'{indent}["LOOP", {node.extent}, [')
            _print(node.body, indent + " ", lines)
            lines.append(f"{indent}]]{comma}")
        else:
            operands = [
                [value.base, *value.coefficients] if isinstance(value, Affine) else value
                for value in node.__dict__.values()
            ]
            lines.append(f"{indent}{json.dumps([_TEXT[type(node)], *operands])}{comma}")


def _check_names(what: str, table: object, cls: type) -> None:
    if not isinstance(table, dict):
        raise ValueError(f"{what} {table!a:.60} is not a table")
    fields = dataclasses.fields(cls)
    for f in fields:
        if f.name not in table and f.default is dataclasses.MISSING:
            raise ValueError(f"{what} '{f.name}' is missing")
    for name in sorted(table.keys() - {f.name for f in fields}):
        raise ValueError(f"{what} '{name}' is unknown")


def _parse_body(nodes: object, depth: int, where: str) -> tuple[Node, ...]:
    if not isinstance(nodes, list):
        raise ValueError(f"{where}: {nodes!a:.60} is not a list of commands")
    return tuple(_parse(node, depth, where) for node in nodes)


def _parse(node: object, depth: int, where: str) -> Node:
    if not isinstance(node, list) or not node or not isinstance(node[0], str) or node[0] not in _NAMES:
        raise ValueError(f"{where}: {node!a:.60} is no command")
    cls, operands = _NAMES[node[0]], node[1:]
    if cls is Loop:
        if depth == MAX_DEPTH or len(operands) != 2 or type(operands[0]) is not int or operands[0] < 1:
            raise ValueError(f"{where}: a loop is [LOOP, extent, body], at most {MAX_DEPTH} deep")
        return Loop(extent=operands[0], body=_parse_body(operands[1], depth + 1, where))
    fields = cls.__dataclass_fields__
    if len(operands) != len(fields):
        raise ValueError(f"{where}: {node[0]} takes {', '.join(fields)}")
    values = {}
    for (name, spec), value in zip(fields.items(), operands):
        affine = spec.type == "Affine"
        numbers = value if affine else [value]
        if not isinstance(numbers, list) or not numbers or any(type(v) is not int for v in numbers):
            raise ValueError(f"{where}: {node[0]} has a bad {name}: {value!a:.60}")
        if affine and len(numbers) > depth + 1:
            raise ValueError(f"{where}: {name} of {node[0]} uses more loops than enclose it")
        values[name] = Affine(value[0], tuple(value[1:])) if affine else value
    return cls(**values)
