"""The layers of a report as a table for spreadsheets and data frames."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import Any


def layers_table(report: Mapping[str, Any]) -> str:
    """The layers of a report as CSV: a row for each, without its candidates and programs.

    Parts of a field are columns of their own, such as ``busy_ns.gpu``; shapes are as ``1x3x224x224``.
    """
    rows = [_flat_row(row) for row in report["regions"]]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _flat_row(row: Mapping[str, Any]) -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{part}": item for part, item in value.items()}
        elif name not in ("candidates", "programs"):
            flat[name] = _cell(value)
    return flat


def _cell(value: object) -> object:
    """A value for a table; what a spreadsheet would take for a formula gets an apostrophe."""
    if isinstance(value, list | tuple):
        inner = "x" if all(isinstance(item, int) for item in value) else " + "
        value = inner.join(str(_cell(item)) for item in value)
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@")) else value
