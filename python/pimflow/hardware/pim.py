"""DRAM-PIM devices: organisation, clock, timing constraints, energies, capabilities."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import TypeVar

from pimflow.core.kernel import ELEMENT_BYTES, RESULT_BYTES
from pimflow.core.keywords import check_keywords
from pimflow.core.program import ACTIVATIONS, MAX_BUFFER_COLUMNS, PimProgram
from pimflow.core.table_files import parse_json
from pimflow.core.typed_values import from_fields
from pimflow.errors import SpecError, hint
from pimflow.hardware.constraints import BEGIN, COMMANDS, LEVELS, Constraint
from pimflow.hardware.device_rules import rule_faults
from pimflow.hardware.operands import NarrowRow, Operand, narrow_row
from pimflow.hardware.reader import (
    Table,
    build,
    read_toml,
    require_not_negative,
    require_positive,
    spec_names,
)
from pimflow.hardware.spec_text import html_table

Listed = TypeVar("Listed", Constraint, Operand)

__all__ = ["BEGIN", "COMMANDS", "ENERGY", "LEVELS", "TIMING", "Constraint", "PimSpec"]

# Latencies, in cycles of the command clock, that every device file has.
TIMING = {
    "nBL": "burst of one column on the channel's bus",
    "nCCDS": "COMP to COMP",
    "nCL": "READRES to its first data",
    "nRCDR": "G_ACT to COMP",
    "nRP": "PRE to G_ACT or REF",
    "nRAS": "G_ACT to PRE",
    "nRC": "G_ACT to G_ACT of the same gang",
    "nRRD": "G_ACT to G_ACT of another gang",
    "nFAW": "window of four bank activations",
    "nRTP": "COMP to PRE",
    "nREFI": "interval of refreshes",
    "nRFC": "REF to the next command",
    "nTREE": "COMP to READRES of its results",
    "nTURN": "turnaround of the bus, from the last burst",
}
# JEDEC: four activations in a window of tFAW.
FAW_BANKS = 4
# Latencies that must be at least 1.
_NONZERO_TIMING = ("nBL", "nCCDS", "nREFI")
# Bound on gangs and on buffers: the simulators have a state for each.
_MAX_STATES = 256
# Bound on a row of all banks of a channel, which execution by value allocates; real devices have 64 KiB.
_MAX_ROW_BYTES = 64 << 20

# Energies that every device file has, and what each is charged for, by `simulators.pim.energy`.
ENERGY = {
    "multiply_pj": "per multiplication",
    "add_pj": "per addition",
    "buffer_read_pj": "global-buffer read, per COMP and bank",
    "buffer_write_pj": "global-buffer write, per column",
    "column_read_pj": "array read, per COMP and bank",
    "latch_read_pj": "per READRES",
    "activate_pj": "per bank that a G_ACT opens",
    "precharge_pj": "per bank that a PRE closes",
    "refresh_pj": "per REF",
    "background_mw_per_channel": "static power of a channel",
    "io_pj_per_bit": "per bit over the channel's pins",
}
# Further energy of devices with WRITE.
WRITE_ENERGY = {"column_write_pj": "array write, per column of a bank that a WRITE writes"}
MAX_REFRESHES_AHEAD = 8  # JESD79-3: pulling in more does not reduce the refreshes needed later
# Further energy of devices whose latches can be written (`PimSpec.can_write_latches`).
LATCH_ENERGY = {"latch_write_pj": "per WRBIAS"}
# Further energy of devices that apply activations (`PimSpec.can_activate`).
ACTIVATION_ENERGY = {"activation_pj": "per AF"}


@check_keywords
@dataclass(frozen=True, kw_only=True)
class PimSpec:
    """A DRAM whose banks compute.

    Attributes
    ----------
    tCK_ps : float
        Period of the command clock, in picoseconds.
    gangs, banks_per_gang : int
        Gangs of a channel, and banks of a gang, which one G_ACT opens.
    faw_banks : int
        Banks of a channel that may be opened within nFAW: JEDEC's four, unless the device lifts that.
    columns_per_row, column_bytes : int
        Columns of a row of one bank, and bytes of a column: the multipliers consume one column per COMP.
    buffer_columns : int
        Columns of one global buffer, a divisor of `columns_per_row`: a COMP at column ``c`` of a row uses
        column ``c % buffer_columns`` of its buffer.
    rows_per_bank, row_base : int
        Rows of a bank, and the first row for weights; tables of activation functions lie before it.
    accumulators : int
        Results that a bank holds for each global buffer: products of so many tiles with one vector may be
        computed before results are read.
    result_lanes : int
        Results per bank that one READRES returns: 1 with an adder tree for the products of a column; else the
        number of multipliers, whose results the host adds.
    latch_initial_value : bool
        Whether a result latch can start from a bias: by a WRBIAS (`can_write_latches`), unless the device
        returns sums of lanes, which a GPU kernel adds anyway.
    elementwise_multiply : bool
        Whether it multiplies two vectors element by element, without adding the products. Programs do not use
        it: `simulators.pim.elementwise_bound` computes the time of depthwise convolutions with it.
    activation_unit : bool
        Whether the device applies activations: by an AF (`can_activate`), unless it returns sums of lanes,
        since an activation of partial sums is not that of their sum.
    comp_starts_at_row : bool
        Whether one instruction opens a row in all banks and multiplies. Then no command can come between a
        G_ACT and its COMPs.
    lane_elements : int
        Elements of a vector in a global buffer where products go by lanes: each multiplier of a bank
        accumulates its own output, and consumes one element of the vector at a time. 0 for a device that has
        only adder trees.
    refreshes_ahead : int
        Refreshes of a channel that the controller may do before a program, in place of the first that are due
        while it runs. They take the same time, but overlap the launch.
    dtypes : tuple of str
        Storage types that the multipliers accept.
    operands : tuple of Operand
        Narrow weights that they take beside these. All other weights are stored in the network's type.
    weights : str
        Of a device as it is for narrow weights (`with_weights`), their type; else empty.
    activations : str
        Of such a device, the type of the vectors that they are multiplied with.
    timing : dict of str to int
        JEDEC-style latencies, in cycles of the command clock: those of `TIMING`, and others that constraints
        name.
    constraints : tuple of Constraint
        The rules of the ``strict`` timing.
    energy : dict of str to float
        The energies of `ENERGY`, and further ones that its commands need.
    not_modelled : tuple of str
        Sentences about behaviour of the device that is not modelled.
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
    faw_banks: int = FAW_BANKS
    comp_starts_at_row: bool = False
    accumulators: int = 1
    elementwise_multiply: bool = False
    lane_elements: int = 0
    refreshes_ahead: int = 0
    # Not in `fields_text`, so that keys of devices without them stay valid: `narrow_text` has them.
    operands: tuple[Operand, ...] = field(default=(), repr=False)
    weights: str = field(default="", repr=False)
    activations: str = field(default="", repr=False)
    not_modelled: tuple[str, ...] = ()
    sources: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = (
            *("tCK_ps", "gangs", "banks_per_gang", "rows_per_bank", "columns_per_row", "column_bytes"),
            *("faw_banks", "buffer_columns", "global_buffers", "result_lanes", "accumulators"),
        )
        require_positive(**{name: getattr(self, name) for name in sizes})
        require_not_negative(
            row_base=self.row_base,
            lane_elements=self.lane_elements,
            refreshes_ahead=self.refreshes_ahead,
            **{f"timing.{key}": value for key, value in self.timing.items()},
            **{f"energy.{key}": value for key, value in self.energy.items()},
        )
        if self.refreshes_ahead > MAX_REFRESHES_AHEAD:
            raise ValueError(
                f"field 'refreshes_ahead': {self.refreshes_ahead} is more than the {MAX_REFRESHES_AHEAD} "
                "that JEDEC lets come before they are due"
            )
        if self.row_base >= self.rows_per_bank:
            raise ValueError(f"field 'row_base': {self.row_base} leaves none of {self.rows_per_bank} rows")
        self._check_buffers()
        self._check_dtypes()
        if self.comp_starts_at_row and self.buffer_columns < self.columns_per_row:
            raise ValueError(
                f"field 'comp_starts_at_row': products that start at column 0 leave the rest of a row unused "
                f"where a buffer holds {self.buffer_columns} of its {self.columns_per_row} columns"
            )
        for number, rule in enumerate(self.constraints, 1):
            for name in filter(None, (rule.latency, rule.per_burst)):
                if name not in self.timing:
                    raise ValueError(
                        f"constraint {number} names latency '{name}', which [timing] lacks; "
                        f"{hint(name, self.timing)}"
                    )

    def _check_buffers(self) -> None:
        """Raise `ValueError` unless buffers divide a row; short ones must keep to `PimProgram`'s bound."""
        columns, row = self.buffer_columns, self.columns_per_row
        if columns > row:
            raise ValueError(f"field 'buffer_columns': {columns} is more than the {row} columns of a row")
        if row % columns:
            raise ValueError(f"field 'buffer_columns': {columns} does not divide the {row} columns of a row")
        if MAX_BUFFER_COLUMNS < columns < row:
            raise ValueError(
                f"field 'buffer_columns': {columns}; buffers shorter than a row hold at most "
                f"{MAX_BUFFER_COLUMNS} columns"
            )

    def _check_dtypes(self) -> None:
        if not self.dtypes:
            raise ValueError("field 'dtypes' is empty")
        for dtype in self.dtypes:
            if dtype not in ELEMENT_BYTES:
                raise ValueError(f"dtype '{dtype}' is none of {', '.join(ELEMENT_BYTES)}")
            if self.column_bytes % ELEMENT_BYTES[dtype]:
                raise ValueError(
                    f"field 'column_bytes': {self.column_bytes} holds no whole number of {dtype}"
                )
            if self.elements_per_column(dtype) % self.result_lanes:
                raise ValueError(
                    f"field 'result_lanes': {self.result_lanes} does not divide the "
                    f"{self.elements_per_column(dtype)} {dtype} of a column"
                )

    @classmethod
    def load(cls, name_or_path: str | os.PathLike[str]) -> PimSpec:
        """The embedded device of that name, or that of a TOML file."""
        text = os.fspath(name_or_path)
        return _load_embedded(text) if text in spec_names("pim") else cls.from_table(*read_toml("pim", text))

    @classmethod
    def from_table(cls, stem: str, table: Table, *, checks_rules: bool = True) -> PimSpec:
        """The device of the table of a TOML file, with the name `stem`; it keeps to `device_rules`."""
        where = f"pim '{stem}'"
        table = dict(table)
        rules = _read_list(Constraint, table.pop("constraints", None), where, "constraints")
        operands = _read_list(Operand, table.pop("operands", []), where, "operands")
        for key in ("weights", "activations"):
            if key in table:
                raise SpecError(
                    f"{where}: unknown field '{key}'; [[operands]] say which narrow weights it takes"
                )
        own = {"name": stem, "weights": "", "activations": "", "constraints": rules, "operands": operands}
        spec = build(cls, table, where, **own)
        for fault in itertools.chain(spec.faults(), rule_faults(spec) if checks_rules else ()):
            raise SpecError(f"{where}: {fault}")
        return spec

    def to_json(self) -> str:
        """All fields as JSON, for a compiled directory."""
        table = asdict(self) | {"operands": [operand.to_dict() for operand in self.operands]}
        for name in ("operands", "weights", "activations"):
            if not table[name]:
                del table[name]
        return json.dumps(table, indent=1, default=lambda number: number.item()) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "<text>") -> PimSpec:
        """The inverse of `to_json`; raises `SpecError` for invalid JSON."""
        return from_fields(cls, parse_json(text, where, SpecError))

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of all values that programs, cycles and energies depend on; not of names and sources."""
        rules = tuple(replace(rule, source="") for rule in self.constraints)
        plain = replace(self, name="", description="", not_modelled=(), sources={}, constraints=rules)
        text = json.dumps(json.loads(plain.to_json()), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def __hash__(self) -> int:
        """Hash of the digest: fields with mappings cannot be hashed, but devices are keys of caches."""
        return hash(self.digest)

    @functools.cached_property
    def custom_digest(self) -> str:
        """`digest`; empty if the catalogue's device of this name is the same."""
        is_catalogued = self.name in spec_names("pim") and PimSpec.load(self.name).digest == self.digest
        return "" if is_catalogued else self.digest

    def is_target_of(self, program: PimProgram) -> bool:
        """Whether `program` was lowered for this device: by name and, if the program has one, by digest."""
        return program.pim == self.name and program.pim_digest in ("", self.with_weights_of(program).digest)

    @property
    def narrow_text(self) -> str:
        """The narrow weights that it takes, as a part of keys; empty if there are none."""
        capacities = tuple(operand.buffer_elements for operand in self.operands)
        further = repr((self.activations, capacities)) if self.activations or any(capacities) else ""
        return repr((self.operands, self.weights)) + further if self.operands else ""

    def operand(self, weights: str | None, activations: str) -> Operand | None:
        """How multipliers take weights of a narrow type, with such a vector; None if they do not."""
        if weights is None:
            return None
        return self._operand_by_types.get((weights, activations))

    def takes(self, weights: str | None, activations: str) -> bool:
        """Whether the multipliers take weights of a narrow type, with a vector of `activations`."""
        return self.operand(weights, activations) is not None

    def with_weights(self, weights: str | None, activations: str) -> PimSpec:
        """The device as it is for weights of a type, and such vectors; itself if it widens them.

        Its columns are those that one COMP multiplies, and a row has as many as it holds beside the scales.
        """
        if (weights, activations) == (self.weights, self.activations) or not self.takes(weights, activations):
            return self
        assert weights is not None
        return self._narrow_devices[weights, activations]

    def with_weights_of(self, program: PimProgram) -> PimSpec:
        """The device as it is for the weights of a program."""
        return self.with_weights(program.geometry.weights, program.activations)

    @functools.cached_property
    def _operand_by_types(self) -> dict[tuple[str, str], Operand]:
        """By types of weights and vectors, the first of `operands`, then those of caches."""
        plain = [operand.plain for operand in self.operands]
        operands = (*self.operands, *(operand for operand in plain if operand is not None))
        return {(o.weights, o.activations): o for o in reversed(operands)}

    @functools.cached_property
    def _narrow_devices(self) -> dict[tuple[str, str], PimSpec]:
        return {types: self._with_operand(operand) for types, operand in self._operand_by_types.items()}

    def narrow_row(self, operand: Operand) -> NarrowRow:
        """How weights of one of `operands` lie in a row; raises as `operands.narrow_row`."""
        return narrow_row(operand, self.columns_per_row, self.column_bytes, self.buffer_columns)

    def _with_operand(self, operand: Operand) -> PimSpec:
        """The device as programs with weights of `operand` see it: columns are what one COMP multiplies.

        Opening a row takes longer by the reads of its scales; these are charged as column reads. A COMP reads
        as many bursts of the global buffer as the vector's elements take. Multiplications and additions have
        the energy of the device's other types, since no source has one of narrow weights.
        """
        row, energy = self.narrow_row(operand), dict(self.energy)
        energy["activate_pj"] += row.scale_columns * energy["column_read_pj"]
        column_share = operand.multiplications / operand.weight_type.column_values(self.column_bytes)
        for name in ("column_read_pj", "column_write_pj"):
            if name in energy:
                energy[name] *= column_share
        opening = self.timing["nRCDR"] + row.scale_columns * self.timing["nCCDS"]
        narrow = replace(
            self,
            weights=operand.weights,
            activations=operand.activations,
            columns_per_row=row.comps,
            buffer_columns=row.buffer_columns,
            timing={**self.timing, "nRCDR": opening},
            energy=energy,
        )
        energy["buffer_read_pj"] *= narrow.vector_bursts(operand.container)
        return narrow

    def faults(self) -> Iterator[str]:
        """Faults of a device from a file or a sweep; a device made in Python may have them."""
        rule_timings = {name for rule in self.constraints for name in (rule.latency, rule.per_burst)}
        for section, needed, values, optional in (
            ("timing", TIMING, self.timing, rule_timings),
            ("energy", ENERGY | self._optional_energy, self.energy, set()),
        ):
            for key in sorted(values.keys() - needed.keys() - optional):
                yield f"unknown field '{section}.{key}'; {hint(key, needed)}"
            for key in sorted(needed.keys() - values.keys()):
                yield f"missing field '{section}.{key}': {needed[key]}"
        for operand in self.operands:
            try:
                self.with_weights(operand.weights, operand.activations)
            except ValueError as error:
                yield str(error)
        for key in ("gangs", "global_buffers", "accumulators"):
            if getattr(self, key) > _MAX_STATES:
                yield f"field '{key}': {getattr(self, key)} is more than {_MAX_STATES}"
        row_bytes = self.banks * self.columns_per_row * self.column_bytes
        if row_bytes > _MAX_ROW_BYTES:
            yield (
                f"fields 'banks_per_gang', 'columns_per_row', 'column_bytes': a row of all {self.banks} "
                f"banks has {row_bytes} bytes, more than {_MAX_ROW_BYTES}"
            )
        for key in _NONZERO_TIMING:
            if self.timing[key] < 1:
                yield f"field 'timing.{key}': {self.timing[key]} is not above zero"
        if self.latch_initial_value and self.result_lanes == 1 and not self.can_write_latches:
            yield "field 'latch_initial_value': no constraint says when a WRBIAS may come"
        if self.activation_unit and self.result_lanes == 1 and not self.can_activate:
            yield "field 'activation_unit': no constraint says when an AF may come"
        tables = len(ACTIVATIONS) - 1
        if self.can_activate and self.row_base < tables:
            yield f"field 'row_base': {self.row_base} rows before weights have no room for {tables} tables"
        if self.reopen_cycles >= self.timing["nREFI"]:
            yield (
                f"field 'timing.nREFI': {self.timing['nREFI']} leaves no time to compute: a refresh, with "
                f"closing and reopening the rows, takes {self.reopen_cycles} cycles"
            )
        for key, cycles in self.timing.items():
            if key != "nREFI" and cycles >= self.timing["nREFI"]:
                yield (
                    f"field 'timing.{key}': {cycles} leaves no time to compute: it is not below the "
                    f"{self.timing['nREFI']} of nREFI"
                )
        first: dict[tuple[object, ...], int] = {}
        for number, constraint in enumerate(self.constraints, 1):
            if constraint.rule in first:
                yield f"constraint {number} repeats constraint {first[constraint.rule]}"
            first[constraint.rule] = number

    @property
    def has_single_host(self) -> bool:
        """Whether one host issues the instructions of all channels, one after the other.

        An instruction goes to a set of channels and is the same for each; a GWRITE also writes the same
        vectors. Therefore programs keep the channels in lockstep, and GWRITEs of channel groups with
        different vectors follow one another.
        """
        return any(rule.level == "host" for rule in self.constraints)

    @property
    def can_write_latches(self) -> bool:
        """Whether a WRBIAS can set initial values of sums."""
        ruled = any("WRBIAS" in rule.after for rule in self.constraints)
        return self.latch_initial_value and self.result_lanes == 1 and ruled

    @property
    def can_activate(self) -> bool:
        """Whether an AF can apply an activation function to sums."""
        ruled = any("AF" in rule.after for rule in self.constraints)
        return self.activation_unit and self.result_lanes == 1 and ruled

    @property
    def _optional_energy(self) -> dict[str, str]:
        """Energies of the commands that only some devices have."""
        write_energy = WRITE_ENERGY if self.can_write else {}
        activation_energy = ACTIVATION_ENERGY if self.can_activate else {}
        return write_energy | activation_energy | (LATCH_ENERGY if self.can_write_latches else {})

    @property
    def can_write(self) -> bool:
        """Whether it has WRITE: there are rules after the G_ACT of its row, and before a PRE."""
        command_pairs = {
            pair
            for rule in self.constraints
            for pair in ((before, after) for before in rule.before for after in rule.after)
        }
        return {("G_ACT", "WRITE"), ("WRITE", "PRE")} <= command_pairs

    def __repr__(self) -> str:
        """One line; `spec_text.fields_text` has all fields."""
        return (
            f"PimSpec({self.name}: {self.gangs} gangs of {self.banks_per_gang} banks a channel, "
            f"tCK {self.tCK_ps:.6g} ps, {', '.join(self.dtypes)})"
        )

    def _repr_html_(self) -> str:
        """What a notebook shows: each field in a row."""
        return html_table(self)

    @property
    def banks(self) -> int:
        """Banks of a channel, which compute together."""
        return self.gangs * self.banks_per_gang

    @property
    def tCK_ns(self) -> float:
        """Period of the command clock."""
        return self.tCK_ps / 1000

    @property
    def usable_rows(self) -> int:
        """Rows of each bank for weights and caches."""
        return self.rows_per_bank - self.row_base

    @property
    def bytes_per_channel(self) -> int:
        """Bytes of weights that the banks of a channel can hold."""
        return self.banks * self.usable_rows * self.columns_per_row * self.column_bytes

    def macs_per_s(self, dtype: str) -> float:
        """Peak rate of a channel: COMPs back to back, without refresh."""
        macs = self.banks * self.elements_per_column(dtype)
        return macs / (self.timing["nCCDS"] * self.tCK_ps * 1e-12)

    @property
    def refresh_share(self) -> float:
        """Share of the time in which a channel refreshes, without closing and reopening rows."""
        return self.timing["nRFC"] / self.timing["nREFI"]

    @property
    def row_switch_cycles(self) -> int:
        """Cycles from the last COMP on a row to the first on another, in all gangs, if nRAS does not bind."""
        switch_cycles = self.timing["nRTP"] + self.timing["nRP"] + self._open_cycles(closed=False)
        return max(switch_cycles, self.timing["nCCDS"])

    @property
    def reopen_cycles(self) -> int:
        """Cycles from the activation of a row to the first COMP after a refresh in between."""
        closing = self.timing["nRAS"] + self.gangs + self.timing["nRP"]
        return closing + self.timing["nRFC"] + self._open_cycles(closed=True)

    def _open_cycles(self, closed: bool) -> int:
        """Cycles from the first G_ACT to a COMP; if not `is_optimal`, each gang must be closed first."""
        rules = [
            (self.timing[rule.latency], rule.window)
            for rule in self.constraints
            if rule.level == "channel" and "G_ACT" in rule.before and "G_ACT" in rule.after
        ]
        min_gap = 1 if closed else 1 + self.timing["nRP"]
        clocks = [0]
        while len(clocks) < self.gangs:
            earliest = [clocks[-window] + cycles for cycles, window in rules if window <= len(clocks)]
            clocks.append(max(clocks[-1] + min_gap, *earliest, 0))
        return clocks[-1] + self.timing["nRCDR"]

    def elements_per_column(self, dtype: str) -> int:
        """Elements of `dtype`, or `weights`, that a COMP multiplies in a bank."""
        operand = self.operand(self.weights, self.activations) if self.weights else None
        return operand.multiplications if operand else self.column_bytes // ELEMENT_BYTES[dtype]

    def vector_bursts(self, dtype: str) -> int:
        """Bursts for the elements of a vector that a COMP multiplies."""
        operand = self.operand(self.weights, self.activations) if self.weights else None
        bits = operand.vector_bits if operand else self.elements_per_column(dtype) * ELEMENT_BYTES[dtype] * 8
        return -(-bits // (8 * self.column_bytes))

    def elements_per_row(self, dtype: str) -> int:
        """Elements of `dtype` in one row of a bank."""
        return self.columns_per_row * self.elements_per_column(dtype)

    def vector_columns(self, lanes: int = 1) -> int:
        """Columns of a global buffer for programs with `lanes` (`PimProgram.lanes`)."""
        return self.buffer_columns if lanes == 1 else min(self.lane_elements, self.columns_per_row)

    def readres_bursts(self, dtype: str, lanes: int = 1) -> int:
        """Column-sized bursts in which one READRES returns the results of every bank.

        A bank has `result_lanes` results, or `lanes` where products go by lanes.
        """
        results = self.banks * (self.result_lanes if lanes == 1 else lanes)
        return -(-results * RESULT_BYTES[dtype] // self.column_bytes)


def _read_list(kind: type[Listed], tables: object, where: str, field_name: str) -> tuple[Listed, ...]:
    """Instances of a list of tables; raises `SpecError`."""
    if not isinstance(tables, list):
        raise SpecError(f"{where}: field '{field_name}' is not a list of tables")
    singular = field_name.removesuffix("s")
    return tuple(
        build(kind, table, f"{where}: {singular} {number}") for number, table in enumerate(tables, 1)
    )


@functools.cache
def _load_embedded(name: str) -> PimSpec:
    """The embedded device of that name, read once: its file does not change."""
    return PimSpec.from_table(*read_toml("pim", name))
