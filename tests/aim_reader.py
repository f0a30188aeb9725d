"""A reader of AiM ISR traces, strict in all that the public simulator's grammar says of what we write.

`pimflow.simulators.exports.aim_isr` names the source of the grammar.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pimflow.simulators.exports.aim_isr import BANKS, CHANNELS, COLUMNS, ROWS

# Operands by opcode, in order; `RANGES` has the values of each.
OPERANDS = {
    "W CFR": ("CFR id", "data"),
    "WR_SBK": ("gpr", "mask", "bank", "row"),
    "WR_ABK": ("gpr", "mask", "row"),
    "WR_GB": ("opsize", "gpr", "mask"),
    "WR_BIAS": ("gpr", "mask"),
    "RD_MAC": ("gpr", "mask"),
    "RD_AF": ("gpr", "mask"),
    "MAC_ABK": ("opsize", "mask", "row"),
    "AF": ("mask",),
    "EOC": (),
}
RANGES = {
    "opsize": range(1, COLUMNS + 1),
    "gpr": range(1 << 31),
    "mask": range(1, 1 << CHANNELS),
    "bank": range(BANKS),
    "row": range(ROWS),
    "CFR id": range(3),
    "data": range(1 << 16),
}
# The PIM command that an instruction executes.
COMMANDS = {
    **{"WR_GB": "GWRITE", "MAC_ABK": "COMP", "RD_MAC": "READRES", "RD_AF": "READRES", "AF": "AF"},
    **{"WR_BIAS": "WRBIAS", "WR_SBK": "WRITE", "WR_ABK": "WRITE"},
}


@dataclass(frozen=True, slots=True)
class AimInstruction:
    """One line of a trace; operands by the names in `OPERANDS`."""

    opcode: str
    operands: dict[str, int]


def read(path) -> Iterator[AimInstruction]:
    """The instructions of a file."""
    text = Path(path).read_text(encoding="ascii")
    assert text.endswith("AiM EOC\n") and text.count("EOC") == 1
    for line in text.splitlines():
        kind, opcode, *values = line.split(" ")
        opcode = opcode if kind == "AiM" else f"{kind} {opcode}"
        operands = {name: int(value, 0) for name, value in zip(OPERANDS[opcode], values, strict=True)}
        assert all(value in RANGES[name] for name, value in operands.items()), line
        assert opcode != "WR_ABK" or operands["mask"].bit_count() == 1, line
        yield AimInstruction(opcode, operands)


def counts(path) -> Counter[str]:
    """PIM commands of a trace, over all channels; COMPs count columns, WRITEs columns of a bank."""
    totals: Counter[str] = Counter(dict.fromkeys(COMMANDS.values(), 0))
    written_mask = 0  # channels whose last instruction was a WR_GB, of which a next one is a further piece
    for instruction in read(path):
        if name := COMMANDS.get(instruction.opcode):
            mask = instruction.operands["mask"]
            columns = instruction.operands["opsize"] if name == "COMP" else 1
            columns *= BANKS if instruction.opcode == "WR_ABK" else 1
            totals[name] += columns * (mask & ~written_mask if name == "GWRITE" else mask).bit_count()
            written_mask = written_mask | mask if name == "GWRITE" else written_mask & ~mask
    return totals
