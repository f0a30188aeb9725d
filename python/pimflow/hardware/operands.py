"""Narrow weights that the multipliers of a DRAM-PIM device take, and how they lie in its rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace

from pimflow.core.kernel import ACTIVATION_BITS
from pimflow.weight_types import WEIGHT_TYPES, WeightType

# The type in which execution by value holds activations: integers are exact in int8, and fp8 (E4M3) in fp16.
_CONTAINERS = {"int4": "int8", "fp8": "fp16"}
ACCUMULATORS = ("fp32", "int32")  # what execution by value adds up in
# Where scales are applied: ``unit``: to each weight before it is multiplied, by registers that are filled
# from the open row; ``result``: to a result, one an output, by what reads it; ``none``: the type has none.
SCALES = ("unit", "result", "none")
# By type of weights, the integers that a multiplier takes if their scale is 1, as in caches.
_PLAIN = {
    **dict.fromkeys(("int8", "q8_0"), "plain_int8"),
    **dict.fromkeys(("int4", "int4_g128", "q4_0"), "plain_int4"),
}
BUFFER_PARTS = (1, 2, 4)  # a chunk of a vector fills the global buffer, its half, or a quarter


@dataclass(frozen=True, kw_only=True)
class Operand:
    """Weights of a type that multipliers take as they are stored.

    Attributes
    ----------
    weights : str
        Type of the weights, of `weight_types.WEIGHT_TYPES`.
    activations : str
        Type of the vector that they are multiplied with, of `ACTIVATION_BITS`.
    multiplications : int
        Products of a bank in one COMP, at most those with the weights of a column; fewer take more COMPs.
    accumulator : str
        One of `ACCUMULATORS`.
    scales : str
        One of `SCALES`.
    buffer_elements : int
        Elements of a vector that a global buffer holds; 0 for as many as its columns have room for.
    """

    weights: str
    activations: str
    multiplications: int
    accumulator: str
    scales: str
    buffer_elements: int = field(
        default=0, repr=False
    )  # not in keys of devices without: `PimSpec.narrow_text`
    source: str = ""

    def __post_init__(self) -> None:
        for name, choices in (
            ("weights", tuple(WEIGHT_TYPES)),
            ("activations", tuple(ACTIVATION_BITS)),
            ("accumulator", ACCUMULATORS),
            ("scales", SCALES),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} '{getattr(self, name)}' is none of {', '.join(choices)}")
        if self.buffer_elements < 0:
            raise ValueError(f"field 'buffer_elements': {self.buffer_elements} is below zero")
        if (self.scales == "none") != (self.weight_type.scale_bytes == 0) or (
            self.scales == "result" and self.weight_type.block
        ):
            raise ValueError(f"scales '{self.scales}' does not suit {self.weights}")
        if (self.accumulator == "int32") != (self.container == "int8") or (
            self.accumulator == "int32" and self.scales == "unit"
        ):
            raise ValueError(
                f"accumulator '{self.accumulator}' does not suit vectors of {self.activations} and scales "
                f"'{self.scales}'"
            )
        if self.multiplications < 1:
            raise ValueError(f"field 'multiplications': {self.multiplications} is not above zero")

    def to_dict(self) -> dict[str, object]:
        """The fields, as in a file: without the capacity of a buffer where it is not given."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: value for name, value in values.items() if name != "buffer_elements" or value}

    @property
    def weight_type(self) -> WeightType:
        """The type of the weights."""
        return WEIGHT_TYPES[self.weights]

    @property
    def container(self) -> str:
        """The storage type of programs with these operands."""
        return _CONTAINERS.get(self.activations, self.activations)

    @property
    def vector_bits(self) -> int:
        """Bits of the elements of a vector that a COMP multiplies in a bank."""
        return self.multiplications * ACTIVATION_BITS[self.activations]

    @property
    def plain(self) -> Operand | None:
        """The operand of a cache: the integers of these weights, without scales; None if there is none."""
        name = _PLAIN.get(self.weights)
        return None if name is None else replace(self, weights=name, scales="none")

    @property
    def has_row_scales(self) -> bool:
        """Whether scales lie in the rows of the banks."""
        return self.scales == "unit"


@dataclass(frozen=True, kw_only=True)
class NarrowRow:
    """How narrow weights lie in a row of a bank: columns of values, then columns of their scales.

    Attributes
    ----------
    buffer_columns : int
        COMPs on a chunk, the part of a vector that is in a global buffer at once.
    """

    buffer_columns: int
    chunks: int
    scale_columns: int

    @property
    def comps(self) -> int:
        """COMPs on a row."""
        return self.buffer_columns * self.chunks


def narrow_row(operand: Operand, columns_per_row: int, column_bytes: int, buffer_columns: int) -> NarrowRow:
    """The layout of a row with the most weights, and of these the one with the largest chunks.

    Scales of a block lie in the row of its values; they are as many as whole blocks of the values need, and
    with one scale an output one for each chunk. Raises `ValueError` if no chunk fits a row.
    """
    kind = operand.weight_type
    vector_bytes = buffer_columns * column_bytes
    buffer_elements = operand.buffer_elements or vector_bytes * 8 // ACTIVATION_BITS[operand.activations]
    column_values = kind.column_values(column_bytes)
    rows = []
    for parts in BUFFER_PARTS:
        columns = buffer_elements // operand.multiplications // parts
        chunk_elements = columns * operand.multiplications
        for chunks in range(1, columns_per_row * column_values // max(chunk_elements, 1) + 1):
            scale_bytes = chunks * (kind.output_scale_bytes(chunk_elements) if operand.has_row_scales else 0)
            scale_columns = math.ceil(scale_bytes / column_bytes)
            value_columns = math.ceil(chunks * chunk_elements / column_values)
            if columns and value_columns + scale_columns <= columns_per_row:
                rows.append(NarrowRow(buffer_columns=columns, chunks=chunks, scale_columns=scale_columns))
    if not rows:
        raise ValueError(
            f"operand {operand.weights}: a quarter of the global buffer is more than a row has room for"
        )
    return max(rows, key=lambda row: (row.comps, row.buffer_columns))
