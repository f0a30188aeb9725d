"""DRAM-PIM devices: organisation, clock, timing constraints, energies, capabilities."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field

from pimflow.core.region import ELEMENT_BYTES, RESULT_BYTES
from pimflow.errors import SpecError
from pimflow.hardware.reader import build, not_negative, positive, read_toml

COMMANDS = ("GWRITE", "G_ACT", "COMP", "READRES", "PRE", "REF")
LEVELS = ("channel", "gang", "buffer")


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """Minimum gap between two commands, in command-clock cycles.

    Attributes
    ----------
    level : str
        What the two commands must share for the rule to hold: the ``channel``, a ``gang`` (the banks
        that one G_ACT opens; COMP uses every open gang, REF all) or a global ``buffer``.
    before, after : tuple of str
        Commands; every command of `before` delays every later command of `after`.
    latency : str
        Name in `PimSpec.timing`.
    per_burst : str
        Name in `PimSpec.timing` of the cycles added for each 32-byte burst of the earlier command
        after its first, empty for none: a GWRITE of a whole buffer holds the bus for 32 bursts.
    window : int
        The rule binds the `window`-th command of `before` that went by, not just the last.
    source : str
        Where the rule comes from.
    """

    level: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    latency: str
    per_burst: str = ""
    window: int = 1
    source: str = ""

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"level '{self.level}' is none of {', '.join(LEVELS)}")
        for command in self.before + self.after:
            if command not in COMMANDS:
                raise ValueError(f"command '{command}' is none of {', '.join(COMMANDS)}")
        if not 1 <= self.window <= 8:
            raise ValueError(f"field 'window': {self.window} is not in 1..8")


@dataclass(frozen=True, kw_only=True)
class PimSpec:
    """A memory whose banks compute.

    Attributes
    ----------
    tCK_ps : float
        Period of the command clock, in picoseconds.
    gangs, banks_per_gang : int
        Banks opened by one G_ACT, and how many such gangs a channel has.
    columns_per_row, column_bytes : int
        Column accesses per row of one bank and bytes of each: the multipliers consume one column a
        COMP.
    buffer_columns : int
        Columns that one global buffer holds: a COMP at column ``c`` of a row takes column
        ``c % buffer_columns`` of its buffer.
    rows_per_bank, row_base : int
        Rows of a bank, and the first one that weights may use.
    global_buffers : int
        Global buffers per channel.
    result_lanes : int
        Results per bank that one READRES returns: 1 where an adder tree sums the products of a column,
        else as many as there are multipliers, and the host adds them.
    latch_initial_value, activation_unit : bool
        Whether a result latch can start from a bias, and whether the device applies activations. The
        lowering uses neither yet: bias and activation are charged, and run, on the GPU.
    dtypes : tuple of str
        Storage types the multipliers take.
    timing : dict of str to int
        JEDEC-style latencies, in cycles of the command clock (``n`` prefix).
    constraints : tuple of Constraint
        The rules of the ``strict`` timing.
    energy : dict of str to float
        ``*_pj`` energies; `simulators.energy` documents the keys.
    not_modelled : tuple of str
        What the device does that neither this file nor the simulators describe, a sentence each.
    sources : dict of str to str
        Where each field's value comes from.
    """

    name: str
    description: str
    tCK_ps: float
    gangs: int
    banks_per_gang: int
    rows_per_bank: int
    row_base: int = 0
    columns_per_row: int
    column_bytes: int
    buffer_columns: int
    global_buffers: int
    result_lanes: int
    latch_initial_value: bool
    activation_unit: bool
    dtypes: tuple[str, ...]
    timing: dict[str, int]
    constraints: tuple[Constraint, ...]
    energy: dict[str, float]
    not_modelled: tuple[str, ...] = ()
    sources: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        positive(
            tCK_ps=self.tCK_ps,
            gangs=self.gangs,
            banks_per_gang=self.banks_per_gang,
            rows_per_bank=self.rows_per_bank,
            columns_per_row=self.columns_per_row,
            column_bytes=self.column_bytes,
            buffer_columns=self.buffer_columns,
            global_buffers=self.global_buffers,
            result_lanes=self.result_lanes,
        )
        not_negative(
            row_base=self.row_base,
            **{f"timing.{key}": value for key, value in self.timing.items()},
            **{f"energy.{key}": value for key, value in self.energy.items()},
        )
        if self.row_base >= self.rows_per_bank:
            raise ValueError(f"field 'row_base': {self.row_base} leaves none of {self.rows_per_bank} rows")
        for dtype in self.dtypes:
            if dtype not in ELEMENT_BYTES:
                raise ValueError(f"dtype '{dtype}' is none of {', '.join(ELEMENT_BYTES)}")
        for rule in self.constraints:
            for name in filter(None, (rule.latency, rule.per_burst)):
                if name not in self.timing:
                    raise ValueError(f"a constraint names latency '{name}', which [timing] lacks")

    @classmethod
    def load(cls, name_or_path: str | os.PathLike) -> PimSpec:
        """The embedded device of that name, or a TOML file of the same form."""
        stem, table = read_toml("pim", name_or_path)
        where = f"pim '{stem}'"
        table, sources = dict(table), {}
        if not isinstance(table.get("constraints"), list):
            raise SpecError(f"{where}: field 'constraints' is not a list of tables")
        rules = tuple(
            build(Constraint, rule, f"{where}: constraint {index + 1}")
            for index, rule in enumerate(table.pop("constraints"))
        )
        for section in ("timing", "energy"):
            plain = {}
            if not isinstance(table.get(section, {}), dict):
                raise SpecError(f"{where}: field '{section}' is not a table")
            for key, value in table.get(section, {}).items():
                if isinstance(value, dict):
                    sources[f"{section}.{key}"] = str(value.get("source", ""))
                    value = value.get("value")
                plain[key] = value
            table[section] = plain
        spec = build(cls, table, where, name=stem, constraints=rules)
        return dataclasses.replace(spec, sources=spec.sources | sources)

    @property
    def banks(self) -> int:
        """Banks that compute together: the results of one READRES."""
        return self.gangs * self.banks_per_gang

    @property
    def tCK_ns(self) -> float:
        return self.tCK_ps / 1000

    def elements_per_column(self, dtype: str) -> int:
        """Elements of `dtype` in one column access."""
        return self.column_bytes // ELEMENT_BYTES[dtype]

    def elements_per_row(self, dtype: str) -> int:
        """Elements of `dtype` in one row of a bank."""
        return self.columns_per_row * self.elements_per_column(dtype)

    def readres_bursts(self, dtype: str) -> int:
        """Column-sized bursts in which one READRES returns the results of every bank."""
        return -(-self.banks * self.result_lanes * RESULT_BYTES[dtype] // self.column_bytes)
