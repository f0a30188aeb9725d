"""Devices and systems as text: every field for keys of results, a line for people, a table for notebooks."""

from __future__ import annotations

import dataclasses
import html
from typing import Any


def fields_text(value: Any) -> str:
    """Every field of a dataclass by name, of those in it too; equal values have equal texts.

    Fields that are no part of what a dataclass shows (``repr=False``) are left out.
    """
    if not dataclasses.is_dataclass(value):
        return repr(value)
    parts = (
        f"{field.name}={fields_text(getattr(value, field.name))}"
        for field in dataclasses.fields(value)
        if field.repr
    )
    return f"{type(value).__name__}({', '.join(parts)})"


def html_table(spec: Any) -> str:
    """The fields of a device or a system as a table of HTML, without their sources."""
    cells = {field.name: _field_text(getattr(spec, field.name)) for field in dataclasses.fields(spec)}
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(text)}</td></tr>"
        for name, text in cells.items()
        if name != "sources"
    )
    return f"<table>{rows}</table>"


def _field_text(value: Any) -> str:
    if isinstance(value, tuple) and len(value) > 4:
        return f"{len(value)} of {type(value[0]).__name__}"
    return str(value)
