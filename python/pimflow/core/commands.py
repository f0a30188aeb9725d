"""DRAM-PIM commands as nodes of a loop nest: expansion, encoding for C++, and text."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, NamedTuple, overload

import numpy as np

MAX_DEPTH = 4
_SIZE_LIMIT = 1 << 31


class Affine(NamedTuple):
    """``base + sum(coefficient[d] * i[d])`` over the enclosing loops' counters, outermost first."""

    base: int
    coefficients: tuple[int, ...] = ()

    def value(self, counters: tuple[int, ...]) -> int:
        """Its value for these loop counters."""
        return self.base + sum(c * i for c, i in zip(self.coefficients, counters))

    def max_value(self, extents: tuple[int, ...]) -> int:
        """Its maximum in loops of these extents."""
        return self.base + sum(max(0, c * (extent - 1)) for c, extent in zip(self.coefficients, extents))


@dataclass(frozen=True, kw_only=True, slots=True)
class Gwrite:
    """Fill global buffer `buffer` with parts of im2col vectors, one after the other.

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
        """Columns of the buffer that it fills: as many as bursts on the bus, unless products go by lanes."""
        return self.pixels * self.columns


@dataclass(frozen=True, kw_only=True, slots=True)
class GAct:
    """Open `row` in the banks of gang `gang`."""

    gang: int
    row: Affine


@dataclass(frozen=True, kw_only=True, slots=True)
class Comp:
    """`count` COMPs on consecutive columns from `column` of the open row `row`, with buffer `buffer`."""

    buffer: int
    row: Affine
    column: Affine
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Readres:
    """Read and clear the latches of `buffer`: bank ``b`` holds output channel ``channel + b`` of `pixel`."""

    buffer: int
    pixel: Affine
    channel: Affine


@dataclass(frozen=True, kw_only=True, slots=True)
class Write:
    """Write elements of the im2col vector of `pixel` into the open row `row` of banks of `gang`.

    Bank ``bank + b`` of the gang takes, in column ``column + c``, elements ``[element, element + elements)``:
    those from ``k + (b*count + c) * elements`` on of the vector, zero beyond the reduction. The other
    elements of the column stay as they are.
    """

    gang: int
    bank: int
    banks: int
    row: Affine
    column: Affine
    count: int
    element: int
    elements: int
    pixel: Affine
    k: Affine


@dataclass(frozen=True, kw_only=True, slots=True)
class Wrbias:
    """Set the latches of `buffer` to the initial values of the sums that a later READRES reads.

    Bank ``b`` starts from the initial value of output channel ``channel + b`` of `pixel`
    (`PimProgram.initial`), rounded to the storage type; banks beyond the last channel start from zero. With
    `resumed` (1, else 0), it starts from the partial sum that the last READRES with the same operands read.
    """

    buffer: int
    pixel: Affine
    channel: Affine
    resumed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Af:
    """Apply the activation function whose table lies in the open row `row` to the latches of `buffer`.

    The sum in each bank's latch is rounded to the storage type and replaced by the function's value
    (`PimProgram.activation`).
    """

    buffer: int
    row: Affine


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """`body`, `extent` times."""

    extent: int
    body: tuple[Node, ...]


CommandNode = Gwrite | GAct | Comp | Readres | Write | Wrbias | Af
Node = CommandNode | Loop


@dataclass(frozen=True)
class Command:
    """One command of an expanded stream; fields that it does not have are -1."""

    name: str
    gang: int = -1
    buffer: int = -1
    row: int = -1
    column: int = -1
    bursts: int = 0


class Bursts(NamedTuple):
    """Figures that decide how many column-sized bursts a command moves; see `PimProgram`."""

    readres: int
    lanes: int = 1

    def burst_count(self, node: CommandNode) -> int:
        """Bursts that a command moves; 0 if it moves no data."""
        if isinstance(node, Gwrite):
            return -(-node.bursts // self.lanes)
        if isinstance(node, Write):
            return -(-node.banks // self.lanes) * node.count
        return self.readres if isinstance(node, Readres | Wrbias) else 0


def expand(nodes: Sequence[Node], counters: tuple[int, ...], bursts: Bursts) -> Iterator[Command]:
    """The commands of `nodes`, with loops unrolled."""
    for node in nodes:
        if isinstance(node, Loop):
            for i in range(node.extent):
                yield from expand(node.body, (*counters, i), bursts)
        elif isinstance(node, Gwrite):
            yield Command("GWRITE", buffer=node.buffer, bursts=bursts.burst_count(node))
        elif isinstance(node, GAct):
            yield Command("G_ACT", gang=node.gang, row=node.row.value(counters))
        elif isinstance(node, Comp):
            row, first_column = node.row.value(counters), node.column.value(counters)
            for column in range(first_column, first_column + node.count):
                yield Command("COMP", buffer=node.buffer, row=row, column=column)
        elif isinstance(node, Write):
            row, column = node.row.value(counters), node.column.value(counters)
            yield Command("WRITE", gang=node.gang, row=row, column=column, bursts=bursts.burst_count(node))
        elif isinstance(node, Af):
            yield Command("AF", buffer=node.buffer, row=node.row.value(counters))
        else:
            yield Command(_TEXT[type(node)], buffer=node.buffer, bursts=bursts.burst_count(node))


KINDS = ("GWRITE", "G_ACT", "COMP", "READRES", "WRITE", "WRBIAS", "AF")
FIELDS = ("gang", "buffer", "row", "column", "bursts")  # of a `Command`, after its name
_ROW, _COLUMN, _COUNT = 3, 4, 6
_ROW_STEPS = 7  # first of the coefficients of the row; those of the column follow


def expand_table(nodes: Sequence[Node], bursts: Bursts) -> np.ndarray:
    """What `expand` yields, [commands, 6]: index into `KINDS`, then `FIELDS`; -1 where there is none."""
    runs = _run_rows(nodes, 0, bursts)
    counts = runs[:, _COUNT]
    table = np.repeat(runs[:, :_COUNT], counts, axis=0)
    table[:, _COLUMN] += np.arange(len(table)) - np.repeat(np.cumsum(counts) - counts, counts)
    return table


def _run_rows(nodes: Sequence[Node], depth: int, bursts: Bursts) -> np.ndarray:
    """A row for each command node and iteration of the loops from `depth` on; see `_run_row`."""
    pieces, command_rows = [np.empty((0, _ROW_STEPS + 2 * MAX_DEPTH), np.int64)], []
    for node in nodes:
        if not isinstance(node, Loop):
            command_rows.append(_run_row(node, bursts))
            continue
        if command_rows:
            pieces.append(np.array(command_rows, np.int64))
            command_rows = []
        body = _run_rows(node.body, depth + 1, bursts)
        iteration = np.repeat(np.arange(node.extent), len(body))
        body_rows = np.tile(body, (node.extent, 1))
        body_rows[:, _ROW] += iteration * body_rows[:, _ROW_STEPS + depth]
        body_rows[:, _COLUMN] += iteration * body_rows[:, _ROW_STEPS + MAX_DEPTH + depth]
        pieces.append(body_rows)
    if command_rows:
        pieces.append(np.array(command_rows, np.int64))
    return np.concatenate(pieces)


def _run_row(node: CommandNode, bursts: Bursts) -> tuple[int, ...]:
    """A command node as a row: kind, `FIELDS`, count, and coefficients of its row and column."""
    missing = Affine(-1)
    gang, buffer = getattr(node, "gang", -1), getattr(node, "buffer", -1)
    row, column = getattr(node, "row", missing), getattr(node, "column", missing)
    steps = [affine.coefficients + _ZEROS[len(affine.coefficients)] for affine in (row, column)]
    kind, count = _OPCODES[type(node)] - 1, node.count if isinstance(node, Comp) else 1
    return (kind, gang, buffer, row.base, column.base, bursts.burst_count(node), count, *steps[0], *steps[1])


def command_leaves(
    nodes: Sequence[Node], extents: tuple[int, ...]
) -> Iterator[tuple[CommandNode, tuple[int, ...]]]:
    """All command nodes with the extents of the loops around them; `ValueError` for an invalid loop."""
    for node in nodes:
        if isinstance(node, Loop):
            check_size("extent", node.extent, 1)
            if len(extents) == MAX_DEPTH:
                raise ValueError(f"loops are nested deeper than {MAX_DEPTH}")
            yield from command_leaves(node.body, (*extents, node.extent))
        else:
            yield node, extents


def value_range(name: str, affine: Affine, extents: tuple[int, ...]) -> tuple[int, int]:
    """Minimum and maximum of `affine` in loops of `extents`; `ValueError` if it uses more loops."""
    if len(affine.coefficients) > len(extents):
        raise ValueError(f"{name} uses more loops than enclose it")
    minimum = maximum = affine.base
    for coefficient, extent in zip(affine.coefficients, extents):
        check_size(f"{name} coefficient", abs(coefficient), 0)
        reach = coefficient * (extent - 1)
        minimum, maximum = minimum + min(0, reach), maximum + max(0, reach)
    return minimum, maximum


def residues(affine: Affine, extents: tuple[int, ...], modulus: int) -> int:
    """Values of `affine` modulo `modulus` in loops of `extents`, as a bit set: bit ``r`` for value ``r``."""
    all_bits = (1 << modulus) - 1
    bits = 1 << affine.base % modulus
    for coefficient, extent in zip(affine.coefficients, extents):
        rounds, step = 1, coefficient % modulus
        extent = min(extent, modulus)
        while rounds < extent:
            repeats = min(rounds, extent - rounds)
            shift = step * repeats % modulus
            bits |= (bits << shift | bits >> (modulus - shift)) & all_bits
            rounds += repeats
    return bits


def check_size(name: str, value: object, minimum: int) -> None:
    """Raise `ValueError` unless `value` is an integer of at least `minimum` that fits the C++ core."""
    if type(value) is not int or not minimum <= value < _SIZE_LIMIT:
        raise ValueError(f"field '{name}' is {value!a:.60}, not an integer in [{minimum}, {_SIZE_LIMIT})")


_OPCODES: dict[type[Node], int] = {
    Loop: 0,
    Gwrite: 1,
    GAct: 2,
    Comp: 3,
    Readres: 4,
    Write: 5,
    Wrbias: 6,
    Af: 7,
}
_NAMES: dict[str, type[Node]] = {
    "LOOP": Loop,
    "GWRITE": Gwrite,
    "G_ACT": GAct,
    "COMP": Comp,
    "READRES": Readres,
    "WRITE": Write,
    "WRBIAS": Wrbias,
    "AF": Af,
}
_ZEROS = [(0,) * (MAX_DEPTH - count) for count in range(MAX_DEPTH + 1)]
_AFFINE = {cls: {field.name: field.type == "Affine" for field in fields(cls)} for cls in _NAMES.values()}
_TEXT = {cls: name for name, cls in _NAMES.items()}
_CLASSES = {opcode: cls for cls, opcode in _OPCODES.items()}
# The operands of a command node, in the order of its fields.
operands = {cls: attrgetter(*names) for cls, names in _AFFINE.items() if cls is not Loop}


def encode(node: Node, words: list[int]) -> None:
    """Append the int64 words of `node`; see `PimProgram.channel_words`."""
    start = len(words)
    words += [_OPCODES[type(node)], 0]
    if isinstance(node, Loop):
        words.append(node.extent)
        for child in node.body:
            encode(child, words)
    else:
        for value in operands[type(node)](node):
            if type(value) is Affine:
                words.append(value.base)
                words += value.coefficients
                words += _ZEROS[len(value.coefficients)]
            else:
                words.append(value)
    words[start + 1] = len(words) - start


def decode(words: Sequence[int]) -> list[Node]:
    """The inverse of `encode`. Affines come back without coefficients after the last that is not 0."""
    nodes: list[Node] = []
    begin = 0
    while begin < len(words):
        size = words[begin + 1]
        if words[begin] == _OPCODES[Loop]:
            body = tuple(decode(words[begin + 3 : begin + size]))
            nodes.append(Loop(extent=words[begin + 2], body=body))
        else:
            nodes.append(_decode_command(tuple(words[begin : begin + size])))
        begin += size
    return nodes


# Cached: channels of a program, and programs of a network, have most of their commands in common.
@functools.lru_cache(maxsize=1 << 16)
def _decode_command(words: tuple[int, ...]) -> CommandNode:
    """The command of its words."""
    cls: type[Any] = _CLASSES[words[0]]
    values: dict[str, Any] = {}
    position = 2
    for name, is_affine in _AFFINE[cls].items():
        size = 1 + MAX_DEPTH if is_affine else 1
        values[name] = _affine(words[position : position + size]) if is_affine else words[position]
        position += size
    command: CommandNode = cls(**values)
    return command


def _affine(words: Sequence[int]) -> Affine:
    base, *coefficients = words
    while coefficients and not coefficients[-1]:
        coefficients.pop()
    return Affine(base, tuple(coefficients))


class CommandStream(Sequence[Node]):
    """The nodes of a channel, decoded from their words (`PimProgram.channel_words`) at the first access."""

    def __init__(self, words: np.ndarray):
        self.words = words

    @functools.cached_property
    def nodes(self) -> tuple[Node, ...]:
        """The decoded nodes."""
        return tuple(decode(self.words.tolist()))

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    @overload
    def __getitem__(self, index: int) -> Node: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Node, ...]: ...

    def __getitem__(self, index: int | slice) -> Node | tuple[Node, ...]:
        return self.nodes[index]

    def __eq__(self, stream: object) -> bool:
        if isinstance(stream, CommandStream):
            return np.array_equal(self.words, stream.words)
        return self.nodes == stream

    def __hash__(self) -> int:
        return hash(self.nodes)

    def __reduce__(self) -> tuple[type[CommandStream], tuple[np.ndarray]]:
        return CommandStream, (self.words,)


def print_nodes(nodes: Sequence[Node], indent: str, lines: list[str], texts: dict[int, str]) -> None:
    """Append the ``.pimprog`` lines of `nodes`; `texts` keeps those of commands, by identity."""
    for index, node in enumerate(nodes):
        comma = "," if index + 1 < len(nodes) else ""
        if isinstance(node, Loop):
            lines.append(f'{indent}["LOOP", {node.extent}, [')
            print_nodes(node.body, indent + " ", lines, texts)
            lines.append(f"{indent}]]{comma}")
        else:
            text = texts.get(id(node))
            if text is None:
                text = texts[id(node)] = _command_text(node)
            lines.append(f"{indent}{text}{comma}")


def _command_text(node: CommandNode) -> str:
    values = [
        [value.base, *value.coefficients] if type(value) is Affine else value
        for value in operands[type(node)](node)
    ]
    if type(node) is Wrbias and not node.resumed:
        values.pop()
    # Python prints integers and lists of them as JSON does, five times as fast as `json.dumps`.
    return f'["{_TEXT[type(node)]}", {str(values)[1:]}'


def parse_nodes(nodes: object, depth: int, where: str) -> tuple[Node, ...]:
    """The inverse of `print_nodes`, from parsed JSON; a `ValueError` names the wrong command."""
    if not isinstance(nodes, list):
        raise ValueError(f"{where}: {nodes!a:.60} is not a list of commands")
    return tuple(_parse_node(node, depth, where) for node in nodes)


def _parse_node(node: object, depth: int, where: str) -> Node:
    if not isinstance(node, list) or not node or not isinstance(node[0], str) or node[0] not in _NAMES:
        raise ValueError(f"{where}: {node!a:.60} is no command")
    cls, arguments = _NAMES[node[0]], node[1:]
    if cls is Loop:
        if depth == MAX_DEPTH or len(arguments) != 2 or type(arguments[0]) is not int or arguments[0] < 1:
            raise ValueError(f"{where}: a loop is [LOOP, extent, body], at most {MAX_DEPTH} deep")
        return Loop(extent=arguments[0], body=parse_nodes(arguments[1], depth + 1, where))
    names = _AFFINE[cls]
    if len(arguments) != len(names) and (cls is not Wrbias or len(arguments) != len(names) - 1):
        raise ValueError(f"{where}: {node[0]} takes {', '.join(names)}")
    values: dict[str, Any] = {}  # an `Affine` or an integer, as `_AFFINE` says of the field
    for (name, affine), value in zip(names.items(), arguments):
        numbers = value if affine else [value]
        if type(numbers) is not list or set(map(type, numbers)) != {int}:
            raise ValueError(f"{where}: {node[0]} has a bad {name}: {value!a:.60}")
        if affine and len(numbers) > depth + 1:
            raise ValueError(f"{where}: {name} of {node[0]} uses more loops than enclose it")
        values[name] = Affine(value[0], tuple(value[1:])) if affine else value
    return cls(**values)
