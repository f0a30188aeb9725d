"""PIM programs: loops over DRAM-PIM commands, per channel, and the memory image they run on.

Commands, cycles, values and traces of a PIM region are all derived from its program. It consists of loops,
not of a flat list of commands.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pimflow.core.command_forms import CommandStream, encode, parse_nodes, print_nodes
from pimflow.core.command_tables import expand_table
from pimflow.core.commands import (
    Af,
    Affine,
    Bursts,
    Command,
    CommandNode,
    Comp,
    GAct,
    Gwrite,
    Node,
    Wrbias,
    Write,
    check_size,
    command_leaves,
    expand,
    residues,
    value_range,
)
from pimflow.core.kernel import ACTIVATION_BITS, ELEMENT_BYTES, ConvGeometry
from pimflow.core.loop_order import LoopOrder
from pimflow.core.table_files import parse_json, read_text
from pimflow.errors import TraceError
from pimflow.weight_types import WEIGHT_TYPES

FORMAT = "pimprog/1"
# Fields that a file omits if they have these values.
_OMITTED_DEFAULTS = (
    ("pim_digest", ""),
    ("accumulators", 1),
    ("initial", ""),
    ("matrices", 1),
    ("lanes", 1),
    ("vector_bursts", 1),
    ("added_channels", 0),
    ("activation", ""),
)
_POSITIVE_FIELDS = (
    *("banks", "gangs", "columns_per_row", "elements_per_column", "buffers", "buffer_columns"),
    *("readres_bursts", "result_lanes", "accumulators", "matrices", "lanes", "vector_bursts"),
)
# Initial values of latches.
INITIAL = ("", "bias", "add")
# Functions that an AF can apply. Their tables lie in the first rows of the banks, in this order.
ACTIVATIONS = ("", "relu", "relu6")
# Bound on buffers smaller than a row, whose COMPs `validate` checks one by one. Devices have tens of columns.
MAX_BUFFER_COLUMNS = 4096
MAX_CHANNELS = 4096  # ten times as many as any system has; each takes an array
_PAGE_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "int8": "int8"}
# The enumeration `Storage` of ``simulators/src/lanes.h``.
_STORAGE = {"fp32": 0, "fp16": 1, "bf16": 2, "int8": 3}


@dataclass(frozen=True, kw_only=True)
class PimProgram:
    """The program of one region on DRAM-PIM.

    Attributes
    ----------
    pim : str
        Name of the device that it was lowered for.
    dtype : str
        Storage type of operands and results: ``fp16``, ``bf16``, ``fp32``, or ``int8``, whose results
        are int32.
    geometry : ConvGeometry
        The convolution: it defines the im2col vector of an output pixel, in (kh, kw, c) order, and
        the pixel numbering, row-major over (n, oh, ow).
    pixel_begin, pixel_end : int
        Output pixels that the program computes; the results are ``[pixel_end - pixel_begin, oc]``.
    banks, gangs, columns_per_row, elements_per_column, buffers : int
        Organisation of a channel that it was lowered for.
    buffer_columns : int, optional
        Columns of one global buffer; by default those of a row. A COMP at column ``c`` of the row uses column
        ``c mod buffer_columns`` of the buffer.
    readres_bursts : int
        Column-sized bursts of one READRES.
    result_lanes : int
        Partial sums that a READRES returns for each bank, which the host adds. Execution by value gives their
        total: it adds the products of a column in one adder tree for any number of lanes.
    row_begin, rows : int
        Rows ``[row_begin, row_begin + rows)`` of every bank belong to the region.
    schedule : LoopOrder or str
        The loop order of a layer; of other programs a text for people.
    tile_gangs : int
        Number of gangs, from the first on, that hold weights, compute and return results; 0 for all.
    accumulators : int
        Latches of each buffer that it uses. The `buffer` of a COMP or READRES is the number of a latch; latch
        ``l`` takes vectors from buffer ``l mod buffers``. Omitted in the file if it is 1.
    initial : str
        Initial value of the sums, set by WRBIAS: ``bias``, a value for each output channel, or ``add``, a
        residual of the whole result's shape. Empty, and omitted in the file, if sums start from zero. One of
        `INITIAL`.
    matrices : int
        Number of weight matrices. In a dense layer, pixel ``p`` is multiplied with matrix
        ``p mod matrices``. In a grouped convolution, each matrix has an equal share of the groups: see
        `vector_geometry`. Omitted in the file if it is 1.
    lanes : int
        If products go by lanes, the multipliers of a bank: each counts as one of `banks`, a column has
        `lane_bits` times fewer elements, and a burst on the bus carries `lane_bits` elements of a vector.
        Omitted in the file if it is 1.
    vector_bursts : int
        Bursts of the vector's elements that one column is multiplied with; more than 1 where weights are
        narrower than the vector. Omitted in the file if it is 1.
    added_channels : int
        Number of the last channels of `geometry`, as many as output channels, that are a residual of the
        whole result's shape; their weights are the identity. 0, and omitted in the file, without one.
    activation : str
        Function that an AF applies to each sum before it is read: ``relu``, ``max(x, 0)``, or ``relu6``,
        ``min(max(x, 0), 6)``. Empty, and omitted in the file, without one. One of `ACTIVATIONS`.
    pim_digest : str
        Digest of the device (`PimSpec.digest`) if it is not the catalogue's device of that name; else empty,
        and omitted in the file.
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
    schedule: LoopOrder | str = ""
    buffer_columns: int = None  # type: ignore[assignment]  # `__post_init__` puts the number there
    result_lanes: int = 1
    tile_gangs: int = 0
    accumulators: int = 1
    initial: str = ""
    matrices: int = 1
    lanes: int = 1
    vector_bursts: int = 1
    added_channels: int = 0
    activation: str = ""
    pim_digest: str = ""

    def __post_init__(self) -> None:
        if self.buffer_columns is None:
            object.__setattr__(self, "buffer_columns", self.columns_per_row)

    def __repr__(self) -> str:
        """One line, without the commands."""
        return f"PimProgram({self.region}: {self.schedule}, {len(self.channels)} channels of {self.pim})"

    @functools.cached_property
    def vector_geometry(self) -> ConvGeometry:
        """The dense convolution whose pixels, elements and output channels the commands name.

        That is the layer or, of a grouped one, `ConvGeometry.dense`: pixel ``m * pixels + p`` is pixel ``p``
        of the layer with the `m`-th part of the channels, and is multiplied with matrix `m`.
        """
        g = self.geometry
        return g if g.groups == 1 else g.dense(g.groups // self.matrices)

    def matrix_indices(self, pixel: np.ndarray) -> np.ndarray:
        """Indices of the weight matrices by which the vectors of pixels are multiplied."""
        grouped = self.geometry.groups > 1
        return pixel // self.geometry.pixels if grouped else pixel % self.matrices

    @property
    def computing_gangs(self) -> int:
        """Number of gangs whose rows must be open for a COMP."""
        return self.tile_gangs or self.gangs

    @functools.cached_property
    def resumes(self) -> bool:
        """Whether partial sums are read, and resumed later by a WRBIAS."""
        return any(isinstance(node, Wrbias) and node.resumed for _, node, _ in self._distinct_commands)

    @functools.cached_property
    def command_kinds(self) -> frozenset[type[CommandNode]]:
        """The kinds of its commands."""
        return frozenset(type(node) for _, node, _ in self._distinct_commands)

    @functools.cached_property
    def _distinct_commands(self) -> tuple[tuple[int, CommandNode, tuple[int, ...]], ...]:
        """Commands in loops of different extents, each with its first channel and these extents.

        Channels have most of their commands in common. Raises `ValueError` for an invalid loop.
        """
        distinct: dict[tuple[int, tuple[int, ...]], tuple[int, CommandNode, tuple[int, ...]]] = {}
        for channel, nodes in enumerate(self.channels):
            try:
                for node, extents in command_leaves(nodes, ()):
                    distinct.setdefault((id(node), extents), (channel, node, extents))
            except ValueError as error:
                raise ValueError(f"channel {channel}: {error}") from None
        return tuple(distinct.values())

    @property
    def activations(self) -> str:
        """Type of the vectors that its weights are multiplied with."""
        return self.geometry.activations or self.dtype

    @property
    def sets_latches(self) -> bool:
        """Whether it has WRBIAS commands."""
        return bool(self.initial) or self.resumes

    @property
    def table_row(self) -> int:
        """Row of every bank that holds the table of its activation function; -1 without one."""
        return table_row(self.activation)

    @property
    def latches(self) -> int:
        """Number of latches of a channel."""
        return self.buffers * self.accumulators

    @property
    def tile_banks(self) -> int:
        """Number of banks that compute, and return a result for each READRES."""
        return self.banks // self.gangs * self.computing_gangs

    @property
    def bursts(self) -> Bursts:
        """The figures that decide how many bursts its commands move."""
        return Bursts(self.readres_bursts, self.lanes, self.vector_bursts)

    def commands(self, channel: int) -> Iterator[Command]:
        """The channel's commands, expanded, in order."""
        yield from expand(self.channels[channel], (), self.bursts)

    def table(self, channel: int) -> np.ndarray:
        """The channel's commands as an array; see `expand_table`."""
        return expand_table(self.channel_words(channel), self.bursts)

    def channel_words(self, channel: int) -> np.ndarray:
        """The channel's stream as the int64 words that the C++ core walks.

        Each node is ``opcode, size in words, operands…``; an affine is its base and `MAX_DEPTH`
        coefficients. ``simulators/src/program.h`` documents the operands. The array is cached: do not write
        into it.
        """
        return self._channel_words[channel]

    @functools.cached_property
    def _channel_words(self) -> tuple[np.ndarray, ...]:
        """`channel_words` of every channel, cached: timing, checking and execution use the same words."""
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
        """The fields without cached words and commands, to keep pickles between processes small."""
        cached = ("_channel_words", "_distinct_commands")
        return {name: value for name, value in vars(self).items() if name not in cached}

    def program_words(self) -> tuple[np.ndarray, np.ndarray]:
        """The `channel_words` words of all channels in one array, and their offsets, [channels + 1]."""
        streams = [self.channel_words(channel) for channel in range(len(self.channels))]
        offsets = np.cumsum([0] + [len(stream) for stream in streams], dtype=np.int64)
        return np.concatenate(streams), offsets

    def header(self) -> dict[str, int]:
        """The fields of ``ProgramHeader`` in ``simulators/src/program_header.h``."""
        g, vectors = self.geometry, self.vector_geometry
        return {
            **{"n": g.n, "h": g.h, "w": g.w, "c": vectors.c, "oc": vectors.oc, "kh": g.kh, "kw": g.kw},
            **dict(zip(("stride_h", "stride_w"), g.stride)),
            **dict(zip(("dilation_h", "dilation_w"), g.dilation)),
            **dict(zip(("pad_top", "pad_left"), g.padding)),
            **{"oh": g.oh, "ow": g.ow, "pixel_begin": self.pixel_begin, "pixel_end": self.pixel_end},
            **{"banks": self.banks, "gangs": self.gangs, "columns": self.columns_per_row},
            **{"elements_per_column": self.elements_per_column, "buffers": self.buffers},
            **{"row_begin": self.row_begin, "rows": self.rows, "storage": _STORAGE[self.dtype]},
            **{"buffer_columns": self.buffer_columns, "tile_banks": self.tile_banks},
            **{"latches": self.latches, "parts": self.matrices if g.groups > 1 else 1},
            "table_row": self.table_row,
        }

    def to_json(self) -> str:
        """The ``.pimprog`` text: one node a line, loops indented."""
        return self._text

    @functools.cached_property
    def _text(self) -> str:
        text = self._print()
        _PROGRAM_BY_TEXT[text] = self
        return text

    def _print(self) -> str:
        header = {
            "format": FORMAT,
            **{
                name: getattr(self, name)
                for name in self.__dataclass_fields__
                if name not in ("geometry", "channels")
                and (name, getattr(self, name)) not in _OMITTED_DEFAULTS
            },
            "schedule": str(self.schedule),
            "geometry": _fields(self.geometry),
        }
        lines, texts = [json.dumps(header)[:-1] + ', "channels": ['], dict[int, str]()
        for index, nodes in enumerate(self.channels):
            lines.append(" [")
            print_nodes(nodes, "  ", lines, texts)
            lines.append(" ]," if index + 1 < len(self.channels) else " ]")
        lines.append("]}")
        return "\n".join(lines) + "\n"

    @classmethod
    def from_printed_text(cls, text: str) -> PimProgram | None:
        """The living program whose `to_json` is `text`, validated; None if there is none.

        Modules contain programs as text. To parse text that this process has just printed would take as long
        as the rest of code generation.

        Raises
        ------
        TraceError
            As from `from_json`.
        """
        program = _PROGRAM_BY_TEXT.get(text)
        if program is not None:
            try:
                program.validate()
            except ValueError as error:
                raise TraceError(f"<text>: {error}") from error
        return program

    @classmethod
    def from_json(cls, text: str, where: str = "<text>") -> PimProgram:
        """Read a ``.pimprog``; raises `TraceError` with file, line and text, or with the wrong field."""
        table = parse_json(text, where, TraceError)
        if not isinstance(table, dict) or table.pop("format", None) != FORMAT:
            raise TraceError(f"{where}:1: not a {FORMAT} file")
        try:
            _require_names("field", table, cls)
            _require_names("field of 'geometry',", table["geometry"], ConvGeometry)
            if not isinstance(table["channels"], list):
                raise ValueError("field 'channels' is not a list")
            geometry: dict[str, Any] = {  # `validate` looks at the values
                key: tuple(value) if isinstance(value, list) else value
                for key, value in table.pop("geometry").items()
            }
            channels = tuple(
                parse_nodes(nodes, 0, f"channel {index}") for index, nodes in enumerate(table.pop("channels"))
            )
            with contextlib.suppress(ValueError, TypeError):  # other texts are for people
                table["schedule"] = LoopOrder.parse(table["schedule"])
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

        That is a field out of its range; a command with a buffer, row, column or pixel that does not exist; a
        COMP whose columns cross the end of its buffer; loops nested deeper than `MAX_DEPTH`; an affine over
        more loops than enclose it.
        """
        self._validate_texts()
        self._validate_sizes()
        self._validate_geometry()
        if not 0 <= self.pixel_begin < self.pixel_end <= self.geometry.pixels:
            raise ValueError(f"pixels [{self.pixel_begin}, {self.pixel_end}) are not in the output")
        if not 1 <= len(self.channels) <= MAX_CHANNELS:
            raise ValueError(f"{len(self.channels)} channels; a program has 1 to {MAX_CHANNELS}")
        for channel, node, extents in self._distinct_commands:
            try:
                self._validate_node(node, extents)
            except ValueError as error:
                raise ValueError(f"channel {channel}: {error}") from None

    def _validate_texts(self) -> None:
        for name in ("region", "pim", "schedule", "pim_digest"):
            if not isinstance(getattr(self, name), (str, LoopOrder) if name == "schedule" else str):
                raise ValueError(f"field '{name}' is not a text")
        if self.dtype not in tuple(ELEMENT_BYTES):
            raise ValueError(f"field 'dtype' is none of {', '.join(ELEMENT_BYTES)}")
        if self.initial not in INITIAL:
            raise ValueError(f"field 'initial' is {self.initial!a:.60}, not one of 'bias' and 'add'")
        if self.activation not in ACTIVATIONS:
            choices = " and ".join(f"'{activation}'" for activation in ACTIVATIONS[1:])
            raise ValueError(f"field 'activation' is {self.activation!a:.60}, not one of {choices}")
        if self.activation and self.row_begin <= self.table_row:
            table = f"row {self.table_row} has the table of '{self.activation}'"
            raise ValueError(f"field 'row_begin' is {self.row_begin}: {table}")

    def _validate_sizes(self) -> None:
        for name in _POSITIVE_FIELDS:
            check_size(name, getattr(self, name), 1)
        buffer_elements = self.buffer_columns * self.elements_per_column
        check_size("buffers * buffer_columns * elements_per_column", self.buffers * buffer_elements, 1)
        check_size("buffers * accumulators * banks", self.latches * self.banks, 1)
        for name in ("pixel_begin", "pixel_end", "row_begin", "rows", "tile_gangs", "added_channels"):
            check_size(name, getattr(self, name), 0)
        if self.banks % self.gangs:
            raise ValueError(f"{self.banks} banks are not {self.gangs} gangs of the same size")
        if self.banks // self.gangs % self.lanes:
            raise ValueError(f"{self.banks // self.gangs} banks a gang are no multiple of {self.lanes} lanes")
        if self.tile_gangs > self.gangs:
            raise ValueError(f"field 'tile_gangs' is {self.tile_gangs} of {self.gangs} gangs")

    def _validate_geometry(self) -> None:
        for name, value in _fields(self.geometry).items():
            if name == "weights":
                if value not in WEIGHT_TYPES:
                    raise ValueError(
                        f"field 'geometry.weights' is {value!a:.60}, which is no type of weights"
                    )
                continue
            if name == "activations":
                if value not in ACTIVATION_BITS:
                    choices = ", ".join(ACTIVATION_BITS)
                    raise ValueError(f"field 'geometry.activations' is {value!a:.60}, none of {choices}")
                continue
            minimum = 0 if name == "padding" else 1
            length = {"stride": 2, "dilation": 2, "padding": 4}.get(name)
            if length is None:
                check_size(f"geometry.{name}", value, minimum)
            elif not isinstance(value, tuple) or len(value) != length:
                raise ValueError(f"field 'geometry.{name}' is not a list of {length}")
            else:
                for item in value:
                    check_size(f"geometry.{name}", item, minimum)
        g = self.geometry
        if g.groups > 1 and (g.c % g.groups or g.oc % g.groups or g.groups % self.matrices):
            raise ValueError(
                f"{g.c} channels, {g.oc} output channels and {self.matrices} matrices do not go together "
                f"with {g.groups} groups"
            )
        if self.added_channels and (not g.is_pointwise or g.c <= g.oc or self.added_channels != g.oc):
            raise ValueError(
                f"field 'added_channels' is {self.added_channels}: of a product with one tap and more than "
                f"{g.oc} channels, as many as output channels may be added"
            )

    def _validate_node(self, node: CommandNode, extents: tuple[int, ...]) -> None:
        operands = _NodeOperands(type(node).__name__, extents)
        if isinstance(node, Write):
            self._validate_write(node, operands)
            return
        if isinstance(node, GAct):
            operands.require("gang", Affine(node.gang), 0, self.computing_gangs)
            is_table_row = node.row.base == self.table_row and not any(node.row.coefficients)
            if not (self.activation and is_table_row):
                operands.require("row", node.row, self.row_begin, self.row_begin + self.rows)
            return
        latches = self.buffers if isinstance(node, Gwrite) else self.latches
        operands.require("buffer", Affine(node.buffer), 0, latches)
        if isinstance(node, Af):
            if not self.activation:
                raise ValueError("an AF, but field 'activation' does not say what it applies")
            operands.require("row", node.row, self.table_row, self.table_row + 1)
        elif isinstance(node, Gwrite):
            check_size("pixels", node.pixels, 1)
            check_size("columns", node.columns, 1)
            operands.require("column", Affine(node.bursts - 1), 0, self.buffer_columns)
            self._require_pixels(operands, node.pixel, node.pixels)
            operands.require("element", node.k, 0, self.vector_geometry.reduction)
        elif isinstance(node, Comp):
            check_size("count", node.count, 1)
            operands.require("row", node.row, self.row_begin, self.row_begin + self.rows)
            operands.require("column", node.column, 0, self.columns_per_row - node.count + 1)
            if self.buffer_columns < self.columns_per_row:
                self._validate_run(node, extents)
        else:
            if isinstance(node, Wrbias):
                operands.require("resumed", Affine(node.resumed), 0, 2)
                if not (node.resumed or self.initial):
                    raise ValueError("a WRBIAS, but field 'initial' does not say what latches start from")
            self._require_pixels(operands, node.pixel)
            operands.require("output channel", node.channel, 0, self.vector_geometry.oc)

    def _require_pixels(self, operands: _NodeOperands, affine: Affine, pixels: int = 1) -> None:
        """Raise `ValueError` unless all `pixels` from `affine` on are pixels of the program."""
        name = "pixel"
        if self.geometry.groups > 1:
            matrix, affine = _matrix_and_pixel(affine, self.geometry.pixels)
            operands.require("matrix", matrix, 0, self.matrices)
            name = "pixel of its matrix"
        operands.require(name, affine, self.pixel_begin, self.pixel_end - pixels + 1)

    def _validate_write(self, node: Write, operands: _NodeOperands) -> None:
        for name in ("banks", "count", "elements"):
            check_size(name, getattr(node, name), 1)
        banks_per_gang = self.banks // self.gangs
        operands.require("gang", Affine(node.gang), 0, self.gangs)
        operands.require("bank", Affine(node.bank), 0, banks_per_gang - node.banks + 1)
        operands.require("row", node.row, self.row_begin, self.row_begin + self.rows)
        operands.require("column", node.column, 0, self.columns_per_row - node.count + 1)
        operands.require("element", Affine(node.element), 0, self.elements_per_column - node.elements + 1)
        operands.require("pixel", node.pixel, self.pixel_begin, self.pixel_end)
        operands.require("element", node.k, 0, self.vector_geometry.reduction)
        lane = node.bank % self.lanes
        if (lane or node.banks % self.lanes) and lane + node.banks > self.lanes:
            raise ValueError(f"{node.banks} lanes of Write from {node.bank} on are of parts of banks")

    def _validate_run(self, comp: Comp, extents: tuple[int, ...]) -> None:
        """Raise `ValueError` if `comp` crosses the end of its buffer in some iteration."""
        if self.buffer_columns > MAX_BUFFER_COLUMNS:
            raise ValueError(
                f"field 'buffer_columns' is {self.buffer_columns}: buffers smaller than a row hold at most "
                f"{MAX_BUFFER_COLUMNS} columns"
            )
        begins = residues(comp.column, extents, self.buffer_columns)
        last_begin = begins.bit_length() - 1
        if last_begin + comp.count > self.buffer_columns:
            raise ValueError(
                f"{comp.count} columns of Comp from {last_begin} of the buffer on leave its "
                f"{self.buffer_columns}"
            )


class _NodeOperands(NamedTuple):
    """Operands of a node, whose affines are over loops of `extents`."""

    node_name: str
    extents: tuple[int, ...]

    def require(self, name: str, affine: Affine, begin: int, end: int) -> None:
        """Raise `ValueError` unless `affine` stays in ``[begin, end)``."""
        minimum = maximum = affine.base
        if affine.coefficients:
            minimum, maximum = value_range(f"{name} of {self.node_name}", affine, self.extents)
        if minimum < begin or maximum >= end:
            raise ValueError(f"{name} {minimum}..{maximum} of {self.node_name} is not in [{begin}, {end})")


def table_row(activation: str) -> int:
    """Row of every bank that holds the table of a function of `ACTIVATIONS`; -1 for none."""
    return ACTIVATIONS.index(activation) - 1


_PROGRAM_BY_TEXT: weakref.WeakValueDictionary[str, PimProgram] = weakref.WeakValueDictionary()


@dataclass(frozen=True, kw_only=True)
class MemoryImage:
    """Contents of the banks: rows of weights; channels with equal rows share their pages.

    Attributes
    ----------
    pages : ndarray, [pages, banks, elements_per_row], float16, bfloat16, float32 or int8
        The distinct contents of a row in all banks of a channel.
    table : ndarray, [channels, rows], int32
        Index of the page in each row of each channel; -1 if the row is not used.
    scales : ndarray, [oc], float32, optional
        Of pages of integers, by what the sums of each output are multiplied as they are read.
    """

    row_begin: int
    pages: np.ndarray
    table: np.ndarray = field(repr=False)
    scales: np.ndarray | None = field(default=None, repr=False)

    @property
    def dtype(self) -> str:
        """Storage type of the pages; empty if it is none."""
        return _PAGE_DTYPES.get(self.pages.dtype.name, "")

    @property
    def lane_bits(self) -> np.ndarray:
        """Bits of the pages in the executor's layout, [pages, elements_per_row, banks].

        Shares memory with `pages` if they have this layout, as from ``memory_image``.
        """
        bits = {1: np.int8, 2: np.uint16, 4: np.float32}[self.pages.dtype.itemsize]
        return np.ascontiguousarray(self.pages.swapaxes(1, 2)).view(bits)

    @property
    def weight_bytes(self) -> int:
        """Bytes written into the banks of all channels."""
        return int((self.table >= 0).sum()) * self.pages[0].nbytes if len(self.pages) else 0


def _matrix_and_pixel(affine: Affine, pixels: int) -> tuple[Affine, Affine]:
    """Matrix and pixel of the layer, from a pixel of `PimProgram.vector_geometry`."""
    steps = [divmod(c, pixels) if c % pixels == 0 else (0, c) for c in affine.coefficients]
    matrix, pixel = divmod(affine.base, pixels)
    return Affine(matrix, tuple(s for s, _ in steps)), Affine(pixel, tuple(s for _, s in steps))


def _fields(geometry: ConvGeometry) -> dict[str, object]:
    """The fields of a geometry in files: types only where they are not the program's."""
    fields = {name: getattr(geometry, name) for name in ConvGeometry.__dataclass_fields__}
    return {name: value for name, value in fields.items() if value is not None}


def _require_names(name_kind: str, table: object, cls: type) -> None:
    if not isinstance(table, dict):
        raise ValueError(f"{name_kind} {table!a:.60} is not a table")
    fields = dataclasses.fields(cls)
    for f in fields:
        if f.name not in table and f.default is dataclasses.MISSING:
            raise ValueError(f"{name_kind} '{f.name}' is missing")
    for name in sorted(table.keys() - {f.name for f in fields}):
        raise ValueError(f"{name_kind} '{name}' is unknown")
