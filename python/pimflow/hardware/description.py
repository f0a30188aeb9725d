"""The embedded devices and their descriptions: values with units and sources, rules, derived figures.

A description is a JSON-like dictionary, printed as text or, for the PIM devices of docs/devices.md, as
Markdown.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

from pimflow.errors import UnknownNameError, UsageError
from pimflow.hardware import GpuSpec, PimSpec, System, spec_names, system
from pimflow.hardware.gpu import ENERGY as GPU_ENERGY
from pimflow.hardware.pim import ACTIVATION_ENERGY, ENERGY, LATCH_ENERGY, TIMING, WRITE_ENERGY
from pimflow.hardware.reader import read_toml, spec_path

Spec = PimSpec | GpuSpec | System
LOADERS: dict[str, Callable[[str], Spec]] = {"pim": PimSpec.load, "gpu": GpuSpec.load, "system": system}
KINDS = {"pim": "PIM device", "gpu": "GPU", "system": "system"}

_PIM_FIELDS = {
    "tCK_ps": "command clock period",
    "gangs": "gangs of a channel: what one G_ACT opens",
    "banks_per_gang": "banks of a gang",
    "faw_banks": "banks that may be opened within nFAW",
    "rows_per_bank": "rows of a bank",
    "row_base": "first row for weights",
    "columns_per_row": "column accesses of a row",
    "column_bytes": "bytes of a column access",
    "buffer_columns": "columns that a global buffer holds",
    "global_buffers": "global buffers of a channel",
    "result_lanes": "results per bank of one READRES",
    "refreshes_ahead": "refreshes that may be served before a program, in place of the first that fall due",
    "lane_elements": "elements of a vector in a buffer where products go by lanes; 0: they do not",
    "accumulators": "results that a bank holds for each global buffer",
    "latch_initial_value": "result latches can start from a bias",
    "activation_unit": "the device applies activations",
    "elementwise_multiply": "the device multiplies element by element",
    "comp_starts_at_row": "one instruction opens a row in all banks and multiplies",
    "dtypes": "storage types",
}
# Further latencies, which only the rules of some devices name.
_RULE_TIMING = {
    "nRCDW": "G_ACT to WRITE",
    "nRCDAF": "G_ACT to AF",
    "nWRP": "WRITE to PRE, from the last burst",
    "nWTC": "WRITE to COMP, from the last burst",
    "nWTR": "GWRITE to READRES, from the last burst",
    "nWTRL": "WRBIAS to READRES, from the last burst",
    "nMODCH": "change between commands on registers and on banks",
    "nTMOD": "the same, for an instruction that comes late",
    "nHOST": "READRES to the next instruction of the host",
    "nHOSTMOD": "READRES to a command on banks",
    "nISR": "instruction of the host to the next",
}
# Units by suffix of a field's name; the longest suffix that fits counts.
_UNITS = {
    "_ps": "ps",
    "_ns": "ns",
    "_pj": "pJ",
    "_w": "W",
    "_mhz": "MHz",
    "_bytes": "bytes",
    "_cycles": "cycles",
    "bytes_per_ns": "bytes/ns",
    "pj_per_bit": "pJ/bit",
    "pj_per_byte": "pJ/byte",
    "mw_per_channel": "mW",
    "bytes_per_channel": "bytes",
    "bytes_per_channel_cycle": "bytes/cycle",
}


def catalogue() -> list[dict[str, str]]:
    """Kind, name and description of every embedded device and system."""
    return [
        {"kind": kind, "name": name, "description": load(name).description}
        for kind, load in LOADERS.items()
        for name in spec_names(kind)
    ]


def load(name_or_path: str | os.PathLike[str]) -> Spec:
    """An embedded device or system of any kind, or a TOML file of one.

    Raises
    ------
    UnknownNameError, SpecError
        For an unknown name, and for a file that is invalid.
    """
    text = os.fspath(name_or_path)
    for kind, loader in LOADERS.items():
        if text in spec_names(kind):
            return loader(text)
    if not (text.endswith(".toml") or os.sep in text):
        raise UnknownNameError("device", text, [name for kind in LOADERS for name in spec_names(kind)])
    stem, table = read_toml("pim", text)
    if {"gpu", "pim"} & table.keys():
        return system(text)
    return GpuSpec.load(text) if "sms" in table else PimSpec.from_table(stem, table)


def unchecked_pim(name_or_path: str | os.PathLike[str]) -> PimSpec:
    """A PIM device that may break rules of DRAM (`device_rules`); raises what `load` does."""
    text = os.fspath(name_or_path)
    if text in spec_names("pim") or text.endswith(".toml") or os.sep in text:
        stem, table = read_toml("pim", text)
        if not {"gpu", "pim", "sms"} & table.keys():
            return PimSpec.from_table(stem, table, checks_rules=False)
    spec = load(text)
    raise UsageError(f"'{text}' is a {describe(spec)['kind']}: the rules of DRAM are for PIM devices")


def file_text(name_or_path: str | os.PathLike[str]) -> str:
    """The text of a device's or system's TOML file, as a template; raises what `load` does."""
    spec = load(name_or_path)
    kind = describe(spec)["kind"]
    return spec_path(kind, name_or_path).read_text(encoding="utf-8")


def describe(spec: Spec) -> dict[str, Any]:
    """All values of a device's file, and figures derived from them.

    Returns
    -------
    dict
        ``kind``, ``name``, ``description``; ``values``, a list of field, value, unit, meaning and source;
        for PIM also ``constraints``, ``derived`` (what, value, unit), ``used`` (what, how: how plans use
        features besides multipliers), and ``not_modelled``; ``assumed``, the fields without a public source.
    """
    kind = next(
        kind
        for kind, cls in (("pim", PimSpec), ("gpu", GpuSpec), ("system", System))
        if isinstance(spec, cls)
    )
    values = list(_values(spec))
    description = {"kind": kind, "name": spec.name, "description": spec.description, "values": values}
    if isinstance(spec, PimSpec):
        description["constraints"] = [
            dataclasses.asdict(rule)
            | {"cycles": spec.timing[rule.latency]}
            | {"per_burst_cycles": spec.timing[rule.per_burst] if rule.per_burst else 0}
            for rule in spec.constraints
        ]
        description["derived"] = _derive_figures(spec)
        if spec.operands:
            description["operands"] = [operand.to_dict() for operand in spec.operands]
        description["used"] = [{"what": feature, "how": use} for feature, use in _feature_uses(spec)]
        description["not_modelled"] = list(spec.not_modelled)
    description["assumed"] = [row["field"] for row in values if "assumed" in row["source"]]
    return description


def _values(spec: Spec) -> Iterator[dict[str, Any]]:
    skipped = {"name", "description", "constraints", "operands", "sources", "not_modelled"}
    skipped |= {"weights", "activations"}
    for field in dataclasses.fields(spec):
        if field.name in skipped:
            continue
        value = getattr(spec, field.name)
        if isinstance(value, GpuSpec | PimSpec):
            value = value.name
        entries = (
            {f"{field.name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {}
        )
        for name, item in (entries or {field.name: value}).items():
            yield {
                "field": name,
                "value": list(item) if isinstance(item, tuple) else item,
                "unit": _unit(name),
                "meaning": _meaning(spec, name),
                "source": spec.sources.get(name) or spec.sources.get(field.name, ""),
            }


def _unit(field: str) -> str:
    if field.startswith("timing."):
        return "cycles"
    return next((_UNITS[end] for end in sorted(_UNITS, key=len, reverse=True) if field.endswith(end)), "")


def _meaning(spec: Spec, field: str) -> str:
    section, _, key = field.rpartition(".")
    if isinstance(spec, GpuSpec) and section == "energy":
        return GPU_ENERGY.get(key, "per multiply-accumulate")
    if not isinstance(spec, PimSpec):
        return ""
    charged = ENERGY | WRITE_ENERGY | LATCH_ENERGY | ACTIVATION_ENERGY
    return (_PIM_FIELDS | TIMING | _RULE_TIMING | charged).get(key, "")


def _derive_figures(pim: PimSpec) -> list[dict[str, Any]]:
    dtype = pim.dtypes[0]
    macs_per_s = pim.macs_per_s(dtype)
    e, elements = pim.energy, pim.elements_per_column(dtype)
    mac_pj = e["multiply_pj"] + e["add_pj"] + (e["buffer_read_pj"] + e["column_read_pj"]) / elements
    bytes_per_s = macs_per_s / elements * pim.column_bytes
    rows = (
        ("command clock", 1e6 / pim.tCK_ps, "MHz"),
        ("banks that compute together", pim.banks, ""),
        (f"peak of a channel, {dtype}", macs_per_s / 1e9, "GMAC/s"),
        ("the same, less refresh", macs_per_s * (1 - pim.refresh_share) / 1e9, "GMAC/s"),
        ("bandwidth at the multipliers of a channel", bytes_per_s / 1e9, "GB/s"),
        ("bandwidth of a channel's bus", pim.column_bytes / (pim.timing["nBL"] * pim.tCK_ns), "GB/s"),
        ("share of time in refresh", 100 * pim.refresh_share, "%"),
        ("row switch, last COMP to next", pim.row_switch_cycles, "cycles"),
        ("COMPs on a row", pim.columns_per_row * pim.timing["nCCDS"], "cycles"),
        (f"results of a READRES, {dtype}", pim.readres_bursts(dtype), "bursts"),
        ("weights of a channel", pim.bytes_per_channel / 2**20, "MiB"),
        (f"energy of a multiply-accumulate, {dtype}", mac_pj, "pJ"),
        (
            "energy of opening a row in every bank",
            pim.banks * (e["activate_pj"] + e["precharge_pj"]) / 1e3,
            "nJ",
        ),
    )
    return [{"what": figure, "value": value, "unit": unit} for figure, value, unit in rows]


def _feature_uses(pim: PimSpec) -> Iterator[tuple[str, str]]:
    """Features of the device besides multipliers, and how plans use them."""
    yield "memory channels", "time-shared: plain memory for the GPU while no program runs"
    if pim.global_buffers > 1:
        yield "global_buffers", f"{pim.global_buffers} vectors, written while others are multiplied"
    if pim.accumulators > 1:
        yield "accumulators", f"{pim.accumulators} tiles a vector before results are read"
    if pim.latch_initial_value:
        written = "sums that are resumed; a bias or a residual, where nothing of the GPU's follows"
        yield "latch_initial_value", written if pim.can_write_latches else f"{NOT_USED}: {_UNWRITTEN}"
    if pim.result_lanes > 1:
        yield "result_lanes", "partial sums, which the GPU adds"
    if pim.activation_unit:
        applied = "ReLU and ReLU6 of sums; `--explain` has its price for others, which run on the GPU"
        lanes = f"{NOT_USED}: activations run on the GPU; it acts on lanes before they are added"
        yield "activation_unit", applied if pim.can_activate else lanes
    if pim.elementwise_multiply:
        yield "elementwise_multiply", f"{NOT_USED}: `--explain` has its price for grouped layers"
    if pim.lane_elements:
        yield "lane_elements", "products of attention that need no adder tree"
    if pim.comp_starts_at_row:
        yield "comp_starts_at_row", "loop orders keep to what its instructions can say"
    if pim.has_single_host:
        yield "host", "channels in lockstep: a vector for all of them is one instruction"
    for operand in pim.operands:
        row, wide = pim.narrow_row(operand), operand.activations in pim.dtypes[:1]
        yield (
            f"weights of {operand.weights}" + ("" if wide else f", vectors of {operand.activations}"),
            f"{operand.multiplications} a COMP, {row.comps * operand.multiplications} a row beside "
            f"{row.scale_columns} columns of scales ({operand.source})",
        )
    if pim.can_write:
        yield "WRITE", "a KV cache, appended to by every decode step"


NOT_USED = "not used"
_UNWRITTEN = "the GPU adds up the lanes of a result, and what follows with them"


def _number(value: object) -> str:
    """`value` as text: at most six digits; yes or no for truth values."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _quantity(row: dict[str, Any]) -> str:
    return f"{_number(row['value'])} {row['unit']}".rstrip()


def _rule_cells(rule: dict[str, Any]) -> list[str]:
    per_burst = f" + {rule['per_burst']} a further burst" if rule["per_burst"] else ""
    per_burst += f" that a queue of {rule['queue']} does not take" if rule["queue"] else ""
    window = f", {rule['window']} back" if rule["window"] > 1 else ""
    return [
        rule["level"],
        f"{' '.join(rule['before'])} → {' '.join(rule['after'])}",
        f"{rule['latency']}{per_burst}{window}",
        str(rule["cycles"]) + (f" + {rule['per_burst_cycles']}" if rule["per_burst"] else ""),
        rule["source"],
    ]


_HEADINGS = {
    "values": ["field", "value", "meaning", "source"],
    "constraints": ["level", "commands", "rule", "cycles", "source"],
    "derived": ["derived", "value"],
    "used": ["what it has", "what plans do with it"],
}


def _tables(description: dict[str, Any]) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Headings and rows of every table of a description."""
    values = [[row["field"], _quantity(row), row["meaning"], row["source"]] for row in description["values"]]
    yield _HEADINGS["values"], values
    if "used" in description:
        yield _HEADINGS["used"], [[row["what"], row["how"]] for row in description["used"]]
    if "constraints" in description:
        yield _HEADINGS["constraints"], [_rule_cells(rule) for rule in description["constraints"]]
    if "derived" in description:
        yield _HEADINGS["derived"], [[row["what"], _quantity(row)] for row in description["derived"]]


def description_text(description: dict[str, Any]) -> str:
    """A description for a terminal."""
    lines = [f"{KINDS[description['kind']]} {description['name']}: {description['description']}"]
    for head, rows in _tables(description):
        columns = [i for i, title in enumerate(head) if any(row[i] for row in rows)]
        lines += ["", *_align_columns([[row[i] for i in columns] for row in (head, *rows)])]
    lines += ["", f"assumed: {', '.join(description['assumed']) or 'nothing'}"]
    if "not_modelled" in description:
        lines += ["", "not modelled:", *(f"- {sentence}" for sentence in description["not_modelled"])]
    return "\n".join(lines)


def _align_columns(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def catalogue_text() -> str:
    """The catalogue for a terminal."""
    return "\n".join(
        _align_columns([["kind", "name", "description"], *([*row.values()] for row in catalogue())])
    )


def description_markdown(description: dict[str, Any]) -> str:
    """A description for a page of documentation."""
    lines = [f"{description['description']}."]
    for head, rows in _tables(description):
        lines += ["", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    lines += ["", f"Assumed: {', '.join(f'`{field}`' for field in description['assumed']) or 'nothing'}."]
    if "not_modelled" in description:
        lines += ["", "Not modelled:", "", *(f"- {sentence}" for sentence in description["not_modelled"])]
    return "\n".join(lines)
