"""PIM programs: loops over DRAM-PIM commands, per channel, and the memory image they run on.

A program is the one description from which everything about a PIM region is derived: commands,
cycles, values, traces. It is kept as loops, not as a flat list.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pimflow.core.commands import (
    Af,
    Affine,
    Bursts,
    Command,
    CommandNode,
    CommandStream,
    Comp,
    GAct,
    Gwrite,
    Node,
    Wrbias,
    Write,
    check_size,
    encode,
    expand,
    expand_table,
    leaves,
    parse_nodes,
    print_nodes,
    residues,
    span,
)
from pimflow.core.region import ELEMENT_BYTES, ConvGeometry
from pimflow.core.table_files import parse_json, read_text
from pimflow.errors import TraceError

FORMAT = "pimprog/1"
# Values of fields that a file leaves out.
_LEFT_OUT = (
    ("pim_digest", ""),
    ("accumulators", 1),
    ("initial", ""),
    ("matrices", 1),
    ("lanes", 1),
    ("added_channels", 0),
    ("activation", ""),
)
# What latches can start from.
INITIAL = ("", "bias", "add")
# What AFs can make of sums. Tables of functions lie in the first rows of the banks, in this order.
ACTIVATIONS = ("", "relu", "relu6")
# Bound on buffers smaller than a row: `validate` looks at each of their COMPs. Devices have tens of columns.
MAX_BUFFER_COLUMNS = 4096
MAX_CHANNELS = 4096  # no system has a tenth of them; each has an array of its own
_PAGE_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "int8": "int8"}
# The enumeration `Storage` of ``simulators/src/lanes.h``.
_STORAGE = {"fp32": 0, "fp16": 1, "bf16": 2, "int8": 3}


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
        Storage type of operands and results: ``fp16``, ``bf16``, ``fp32``, or ``int8``, whose results
        are int32.
    geometry : ConvGeometry
        The convolution: it defines the im2col vector of an output pixel, in (kh, kw, c) order, and
        the pixel numbering, row-major over (n, oh, ow).
    pixel_begin, pixel_end : int
        Output pixels that the program computes; the results are ``[pixel_end - pixel_begin, oc]``.
    banks, gangs, columns_per_row, elements_per_column, buffers : int
        Organisation it was lowered for.
    buffer_columns : int, optional
        Columns that one global buffer holds; as many as a row by default. A COMP at column ``c`` of the
        row takes column ``c mod buffer_columns`` of the buffer.
    readres_bursts : int
        Column-sized bursts of one READRES.
    result_lanes : int
        Partial sums that a READRES returns for each bank, for the host to add. The value of a program
        is their total: the products of a column go through one adder tree however many lanes there are.
    row_begin, rows : int
        Rows ``[row_begin, row_begin + rows)`` of every bank belong to the region.
    channels : tuple of sequence of Node
        Command stream of each PIM channel.
    schedule : str
        The loop order that was chosen, for people.
    tile_gangs : int
        The first so many gangs hold weights, compute, and deliver results; 0 for all.
    accumulators : int
        Latches of each buffer that it uses. The buffer of a COMP or READRES is then a latch: latch ``l``
        takes vectors from buffer ``l mod buffers``. Left out of the file where it is 1.
    initial : str
        What sums start from, each by a WRBIAS: ``bias``, a value for each output channel, or ``add``, a
        tensor like the whole result that is added to it. Empty, and left out of the file, where they start
        from zero. One of `INITIAL`.
    matrices : int
        Matrices of weights. Of a dense layer, its output pixels are dealt to them, one after the other:
        pixel ``p`` is multiplied with matrix ``p mod matrices``. Of a grouped convolution, each has as many
        of its groups: see `vectors`. Left out of the file where it is 1.
    lanes : int
        Where products go by lanes, multipliers of a bank: each is one of `banks` then, and a column has
        so many fewer elements. A burst on the bus is so many elements of a vector. Left out of the file where
        it is 1.
    added_channels : int
        The last so many channels of `geometry`, as many as it has output channels: those of a tensor like the
        whole result, which is added to it, since their weights are the identity. 0, and left out of the file,
        where all channels are the layer's own.
    activation : str
        What becomes of each sum, by an AF before it is read: ``relu``, ``max(x, 0)``, or ``relu6``,
        ``min(max(x, 0), 6)``. Empty, and left out of the file, where sums are read as they are. One of
        `ACTIVATIONS`.
    pim_digest : str
        Digest of the device (`PimSpec.digest`), where it is not the catalogue's device of that name; else
        empty, and left out of the file.
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
    channels: tuple[Sequence[Node], ...]
    schedule: str = ""
    buffer_columns: int = None  # type: ignore[assignment]  # `__post_init__` puts the number there
    result_lanes: int = 1
    tile_gangs: int = 0
    accumulators: int = 1
    initial: str = ""
    matrices: int = 1
    lanes: int = 1
    added_channels: int = 0
    activation: str = ""
    pim_digest: str = ""

    def __post_init__(self) -> None:
        if self.buffer_columns is None:
            object.__setattr__(self, "buffer_columns", self.columns_per_row)

    def __repr__(self) -> str:
        """In a line: commands are many."""
        return f"PimProgram({self.region}: {self.schedule}, {len(self.channels)} channels of {self.pim})"

    @functools.cached_property
    def vectors(self) -> ConvGeometry:
        """The dense convolution whose pixels, elements and output channels the commands name.

        That is the layer or, of a grouped one, `ConvGeometry.dense`: pixel ``m * pixels + p`` is pixel ``p``
        of the layer with the `m`-th part of the channels, and is multiplied with matrix `m`.
        """
        g = self.geometry
        return g if g.groups == 1 else g.dense(g.groups // self.matrices)

    def matrix_of(self, pixel: np.ndarray) -> np.ndarray:
        """Which matrix the vectors of pixels are multiplied with."""
        grouped = self.geometry.groups > 1
        return pixel // self.geometry.pixels if grouped else pixel % self.matrices

    @property
    def computing_gangs(self) -> int:
        """Gangs whose rows must be open for a COMP."""
        return self.tile_gangs or self.gangs

    @functools.cached_property
    def resumes(self) -> bool:
        """Whether sums are read before they are complete, and resumed by a WRBIAS."""
        every = (node for nodes in self.channels for node, _ in leaves(nodes, ()))
        return any(isinstance(node, Wrbias) and node.resumed for node in every)

    @property
    def sets_latches(self) -> bool:
        """Whether it has WRBIASs."""
        return bool(self.initial) or self.resumes

    @property
    def table_row(self) -> int:
        """Row of every bank in which the table of its activation function lies; -1 without one."""
        return table_row(self.activation)

    @property
    def latches(self) -> int:
        """What a COMP adds to and a READRES reads: so many a channel."""
        return self.buffers * self.accumulators

    @property
    def tile_banks(self) -> int:
        """Banks that compute, and hold a result of each READRES."""
        return self.banks // self.gangs * self.computing_gangs

    @property
    def bursts(self) -> Bursts:
        """What its commands move over the bus."""
        return Bursts(self.readres_bursts, self.lanes)

    def commands(self, channel: int) -> Iterator[Command]:
        """The channel's commands, expanded, in order."""
        yield from expand(self.channels[channel], (), self.bursts)

    def table(self, channel: int) -> np.ndarray:
        """The channel's commands as an array; see `expand_table`."""
        return expand_table(self.channels[channel], self.bursts)

    def encoded(self, channel: int) -> np.ndarray:
        """The channel's stream as the int64 words that the C++ core walks.

        Each node is ``opcode, size in words, operands…``; an affine is its base and `MAX_DEPTH`
        coefficients. ``simulators/src/program.h`` documents the operands. Kept for the next call: do not
        write into it.
        """
        return self._encoded[channel]

    @functools.cached_property
    def _encoded(self) -> tuple[np.ndarray, ...]:
        """`encoded` of every channel: timing, checking and execution ask for the same words."""
        streams: dict[int, np.ndarray] = {}  # channels may have the very same nodes
        for nodes in self.channels:
            if isinstance(nodes, CommandStream):
                streams[id(nodes)] = nodes.words
            elif id(nodes) not in streams:
                words: list[int] = []
                for node in nodes:
                    encode(node, words)
                streams[id(nodes)] = np.asarray(words, dtype=np.int64)
        return tuple(streams[id(nodes)] for nodes in self.channels)

    def __getstate__(self) -> dict[str, object]:
        """Without what is kept: processes hand programs to one another."""
        return {name: value for name, value in vars(self).items() if name != "_encoded"}

    def packed(self) -> tuple[np.ndarray, np.ndarray]:
        """All channels' `encoded` words in one array, and where each begins ([channels + 1])."""
        streams = [self.encoded(channel) for channel in range(len(self.channels))]
        offsets = np.cumsum([0] + [len(stream) for stream in streams], dtype=np.int64)
        return np.concatenate(streams), offsets

    def header(self) -> np.ndarray:
        """The int64 words of ``Header`` in ``simulators/src/functional.cc``."""
        g, one = self.geometry, self.vectors
        sizes = (g.n, g.h, g.w, one.c, one.oc, g.kh, g.kw)
        return np.asarray(
            [
                *(*sizes, *g.stride, *g.dilation, g.padding[0], g.padding[1]),
                *(g.oh, g.ow, self.pixel_begin, self.pixel_end, self.banks, self.gangs, self.columns_per_row),
                *(self.elements_per_column, self.buffers, self.row_begin, self.rows),
                *(_STORAGE[self.dtype], self.buffer_columns, self.tile_banks, self.latches),
                self.matrices if g.groups > 1 else 1,
                self.table_row,
            ],
            dtype=np.int64,
        )

    def to_json(self) -> str:
        """The ``.pimprog`` text: one node a line, loops indented."""
        return self._text

    @functools.cached_property
    def _text(self) -> str:
        text = self._print()
        _PRINTED[text] = self
        return text

    def _print(self) -> str:
        header = {
            "format": FORMAT,
            **{
                name: getattr(self, name)
                for name in self.__dataclass_fields__
                if name not in ("geometry", "channels") and (name, getattr(self, name)) not in _LEFT_OUT
            },
            "geometry": _fields(self.geometry),
        }
        lines = [json.dumps(header)[:-1] + ', "channels": [']
        for index, nodes in enumerate(self.channels):
            lines.append(" [")
            print_nodes(nodes, "  ", lines)
            lines.append(" ]," if index + 1 < len(self.channels) else " ]")
        lines.append("]}")
        return "\n".join(lines) + "\n"

    @classmethod
    def printed(cls, text: str) -> PimProgram | None:
        """The program that `to_json` printed as `text` and that still lives, validated; None if none does.

        Modules carry programs as text. To parse text that this process has just printed would take as long
        as the rest of code generation.

        Raises
        ------
        TraceError
            As from `from_json`.
        """
        program = _PRINTED.get(text)
        if program is not None:
            try:
                program.validate()
            except ValueError as error:
                raise TraceError(f"<text>: {error}") from error
        return program

    @classmethod
    def from_json(cls, text: str, where: str = "<text>") -> PimProgram:
        """Read a ``.pimprog``; raises `TraceError` with file, line and text, or the field at fault."""
        table = parse_json(text, where, TraceError)
        if not isinstance(table, dict) or table.pop("format", None) != FORMAT:
            raise TraceError(f"{where}:1: not a {FORMAT} file")
        try:
            _check_names("field", table, cls)
            _check_names("field of 'geometry',", table["geometry"], ConvGeometry)
            if not isinstance(table["channels"], list):
                raise ValueError("field 'channels' is not a list")
            geometry: dict[str, Any] = {  # `validate` looks at the values
                key: tuple(value) if isinstance(value, list) else value
                for key, value in table.pop("geometry").items()
            }
            channels = tuple(
                parse_nodes(nodes, 0, f"channel {index}") for index, nodes in enumerate(table.pop("channels"))
            )
            program = cls(**table, geometry=ConvGeometry(**geometry), channels=channels)
            program.validate()
        except ValueError as error:
            raise TraceError(f"{where}: {error}") from error
        return program

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PimProgram:
        """Read a ``.pimprog`` file; raises `TraceError`."""
        return cls.from_json(read_text(path, TraceError), str(path))

    def validate(self) -> None:
        """Raise `ValueError` for what cannot be executed.

        That is a field out of its range, a command that names a buffer, row, column or pixel that is
        not there, a run of COMPs that leaves its buffer in the middle, loops nested deeper than
        `MAX_DEPTH`, and an affine over more loops than enclose it.
        """
        self._validate_fields()
        if not 0 <= self.pixel_begin < self.pixel_end <= self.geometry.pixels:
            raise ValueError(f"pixels [{self.pixel_begin}, {self.pixel_end}) are not in the output")
        if not 1 <= len(self.channels) <= MAX_CHANNELS:
            raise ValueError(f"{len(self.channels)} channels; a program has 1 to {MAX_CHANNELS}")
        for index, nodes in enumerate(self.channels):
            try:
                for node, extents in leaves(nodes, ()):
                    self._validate_node(node, extents)
            except ValueError as error:
                raise ValueError(f"channel {index}: {error}") from None

    def _validate_fields(self) -> None:
        for name in ("region", "pim", "schedule", "pim_digest"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"field '{name}' is not a text")
        if self.dtype not in tuple(ELEMENT_BYTES):
            raise ValueError(f"field 'dtype' is none of {', '.join(ELEMENT_BYTES)}")
        if self.initial not in INITIAL:
            raise ValueError(f"field 'initial' is {self.initial!a:.60}, not one of 'bias' and 'add'")
        if self.activation not in ACTIVATIONS:
            known = " and ".join(f"'{each}'" for each in ACTIVATIONS[1:])
            raise ValueError(f"field 'activation' is {self.activation!a:.60}, not one of {known}")
        if self.activation and self.row_begin <= self.table_row:
            table = f"row {self.table_row} has the table of '{self.activation}'"
            raise ValueError(f"field 'row_begin' is {self.row_begin}: {table}")
        positive = ("banks", "gangs", "columns_per_row", "elements_per_column", "buffers", "buffer_columns")
        for name in (*positive, "readres_bursts", "result_lanes", "accumulators", "matrices", "lanes"):
            check_size(name, getattr(self, name), 1)
        per_buffer = self.buffer_columns * self.elements_per_column
        check_size("buffers * buffer_columns * elements_per_column", self.buffers * per_buffer, 1)
        check_size("buffers * accumulators * banks", self.latches * self.banks, 1)
        for name in ("pixel_begin", "pixel_end", "row_begin", "rows", "tile_gangs", "added_channels"):
            check_size(name, getattr(self, name), 0)
        if self.banks % self.gangs:
            raise ValueError(f"{self.banks} banks are not {self.gangs} gangs of the same size")
        if self.banks // self.gangs % self.lanes:
            raise ValueError(f"{self.banks // self.gangs} banks a gang are no multiple of {self.lanes} lanes")
        if self.tile_gangs > self.gangs:
            raise ValueError(f"field 'tile_gangs' is {self.tile_gangs} of {self.gangs} gangs")
        for name, value in _fields(self.geometry).items():
            least = 0 if name == "padding" else 1
            length = {"stride": 2, "dilation": 2, "padding": 4}.get(name)
            if length is None:
                check_size(f"geometry.{name}", value, least)
            elif not isinstance(value, tuple) or len(value) != length:
                raise ValueError(f"field 'geometry.{name}' is not a list of {length}")
            else:
                for item in value:
                    check_size(f"geometry.{name}", item, least)
        g = self.geometry
        if g.groups > 1 and (g.c % g.groups or g.oc % g.groups or g.groups % self.matrices):
            raise ValueError(
                f"{g.c} channels, {g.oc} output channels and {self.matrices} matrices do not go together "
                f"with {g.groups} groups"
            )
        if self.added_channels and (not g.pointwise or g.c <= g.oc or self.added_channels != g.oc):
            raise ValueError(
                f"field 'added_channels' is {self.added_channels}: of a product with one tap and more than "
                f"{g.oc} channels, as many as output channels may be added"
            )

    def _validate_node(self, node: CommandNode, extents: tuple[int, ...]) -> None:
        layer, one = self.geometry, self.vectors

        def within(what: str, affine: Affine, begin: int, end: int) -> None:
            low = high = affine.base
            if affine.coefficients:
                low, high = span(f"{what} of {type(node).__name__}", affine, extents)
            if low < begin or high >= end:
                raise ValueError(f"{what} {low}..{high} of {type(node).__name__} is not in [{begin}, {end})")

        def pixel(affine: Affine, pixels: int = 1) -> None:
            what = "pixel"
            if layer.groups > 1:
                matrix, affine = _matrix_and_pixel(affine, layer.pixels)
                within("matrix", matrix, 0, self.matrices)
                what = "pixel of its matrix"
            within(what, affine, self.pixel_begin, self.pixel_end - pixels + 1)

        if isinstance(node, GAct):
            within("gang", Affine(node.gang), 0, self.computing_gangs)
            if self.activation and node.row.base == self.table_row and not any(node.row.coefficients):
                return
            within("row", node.row, self.row_begin, self.row_begin + self.rows)
            return
        if isinstance(node, Write):
            self._validate_write(node, within)
            return
        latches = self.buffers if isinstance(node, Gwrite) else self.latches
        within("buffer", Affine(node.buffer), 0, latches)
        if isinstance(node, Af):
            if not self.activation:
                raise ValueError("an AF, but field 'activation' does not say what it applies")
            within("row", node.row, self.table_row, self.table_row + 1)
            return
        if isinstance(node, Gwrite):
            check_size("pixels", node.pixels, 1)
            check_size("columns", node.columns, 1)
            within("column", Affine(node.bursts - 1), 0, self.buffer_columns)
            pixel(node.pixel, node.pixels)
            within("element", node.k, 0, one.reduction)
        elif isinstance(node, Comp):
            check_size("count", node.count, 1)
            within("row", node.row, self.row_begin, self.row_begin + self.rows)
            within("column", node.column, 0, self.columns_per_row - node.count + 1)
            if self.buffer_columns < self.columns_per_row:
                self._validate_run(node, extents)
        else:
            if isinstance(node, Wrbias):
                within("resumed", Affine(node.resumed), 0, 2)
                if not (node.resumed or self.initial):
                    raise ValueError("a WRBIAS, but field 'initial' does not say what latches start from")
            pixel(node.pixel)
            within("output channel", node.channel, 0, one.oc)

    def _validate_write(self, node: Write, within: Callable[[str, Affine, int, int], None]) -> None:
        for name in ("banks", "count", "elements"):
            check_size(name, getattr(node, name), 1)
        banks_per_gang = self.banks // self.gangs
        within("gang", Affine(node.gang), 0, self.gangs)
        within("bank", Affine(node.bank), 0, banks_per_gang - node.banks + 1)
        within("row", node.row, self.row_begin, self.row_begin + self.rows)
        within("column", node.column, 0, self.columns_per_row - node.count + 1)
        within("element", Affine(node.element), 0, self.elements_per_column - node.elements + 1)
        within("pixel", node.pixel, self.pixel_begin, self.pixel_end)
        within("element", node.k, 0, self.vectors.reduction)
        lane = node.bank % self.lanes
        if (lane or node.banks % self.lanes) and lane + node.banks > self.lanes:
            raise ValueError(f"{node.banks} lanes of Write from {node.bank} on are of parts of banks")

    def _validate_run(self, comp: Comp, extents: tuple[int, ...]) -> None:
        """Raise `ValueError` if some run of `comp` crosses from the end of its buffer to the begin."""
        if self.buffer_columns > MAX_BUFFER_COLUMNS:
            raise ValueError(
                f"field 'buffer_columns' is {self.buffer_columns}: buffers smaller than a row hold at most "
                f"{MAX_BUFFER_COLUMNS} columns"
            )
        begins = residues(comp.column, extents, self.buffer_columns)
        last = begins.bit_length() - 1
        if last + comp.count > self.buffer_columns:
            raise ValueError(
                f"{comp.count} columns of Comp from {last} of the buffer on leave its {self.buffer_columns}"
            )


def table_row(activation: str) -> int:
    """Row of every bank in which the table of a function of `ACTIVATIONS` lies; -1 for none."""
    return ACTIVATIONS.index(activation) - 1


_PRINTED: weakref.WeakValueDictionary[str, PimProgram] = weakref.WeakValueDictionary()


@dataclass(frozen=True, kw_only=True)
class MemoryImage:
    """What the banks hold: rows of weights, shared between channels that hold the same.

    Attributes
    ----------
    row_begin : int
        Row of the first page.
    pages : ndarray, [pages, banks, elements_per_row], float16, bfloat16, float32 or int8
        Distinct row contents over all banks of a channel.
    table : ndarray, [channels, rows], int32
        Page in each row of each channel; -1 where a channel holds nothing of the region.
    """

    row_begin: int
    pages: np.ndarray
    table: np.ndarray = field(repr=False)

    @property
    def dtype(self) -> str:
        """Storage type of the pages; empty if it is none."""
        return _PAGE_DTYPES.get(self.pages.dtype.name, "")

    @property
    def lanes(self) -> np.ndarray:
        """The pages' bits as the executor reads them, [pages, elements_per_row, banks].

        Shares memory with `pages` where they lie so, as ``memory_image`` leaves them.
        """
        bits = {1: np.int8, 2: np.uint16, 4: np.float32}[self.pages.dtype.itemsize]
        return np.ascontiguousarray(self.pages.swapaxes(1, 2)).view(bits)

    @property
    def placed_bytes(self) -> int:
        """Bytes written into the banks of all channels."""
        return int((self.table >= 0).sum()) * self.pages[0].nbytes if len(self.pages) else 0


def _matrix_and_pixel(affine: Affine, pixels: int) -> tuple[Affine, Affine]:
    """Of a pixel of `PimProgram.vectors`, its matrix and which of the layer's `pixels` it is."""
    steps = [divmod(c, pixels) if c % pixels == 0 else (0, c) for c in affine.coefficients]
    matrix, pixel = divmod(affine.base, pixels)
    return Affine(matrix, tuple(s for s, _ in steps)), Affine(pixel, tuple(s for _, s in steps))


def _fields(geometry: ConvGeometry) -> dict[str, object]:
    return {name: getattr(geometry, name) for name in ConvGeometry.__dataclass_fields__}


def _check_names(what: str, table: object, cls: type) -> None:
    if not isinstance(table, dict):
        raise ValueError(f"{what} {table!a:.60} is not a table")
    fields = dataclasses.fields(cls)
    for f in fields:
        if f.name not in table and f.default is dataclasses.MISSING:
            raise ValueError(f"{what} '{f.name}' is missing")
    for name in sorted(table.keys() - {f.name for f in fields}):
        raise ValueError(f"{what} '{name}' is unknown")
