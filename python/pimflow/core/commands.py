"""DRAM-PIM commands as nodes of a loop nest, and their expansion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
    vector: int = 1

    def burst_count(self, node: CommandNode) -> int:
        """Bursts that a command moves; 0 if it moves no data."""
        if isinstance(node, Gwrite):
            return -(-node.bursts * self.vector // self.lanes)
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
            yield Command(NAMES[type(node)], buffer=node.buffer, bursts=bursts.burst_count(node))


KINDS = ("GWRITE", "G_ACT", "COMP", "READRES", "WRITE", "WRBIAS", "AF")
FIELDS = ("gang", "buffer", "row", "column", "bursts")  # of a `Command`, after its name


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


OPCODES: dict[type[Node], int] = {
    cls: opcode for opcode, cls in enumerate((Loop, Gwrite, GAct, Comp, Readres, Write, Wrbias, Af))
}
NAMES: dict[type[Node], str] = dict(zip(OPCODES, ("LOOP", *KINDS)))
# By number of coefficients, those that are missing.
ZERO_COEFFICIENTS = [(0,) * (MAX_DEPTH - count) for count in range(MAX_DEPTH + 1)]
