"""Trees of dataclasses as JSON values."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Report = TypeVar("Report", bound="DataclassInstance")
Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

# Metadata of a dataclass field: in JSON, the fields of its value replace it.
FLAT = {"flat": True}
# Metadata of a dataclass field: omitted in JSON if it is None.
OMITTED = {"omitted": True}


def named(key: str) -> dict[str, str]:
    """Metadata of a dataclass field: its key in JSON, if that is not its name."""
    return {"key": key}


def json_form(value: object) -> Json:
    """`value` as a JSON value: a dataclass becomes an object of its fields, in order, a tuple a list.

    Raises
    ------
    TypeError
        If it contains something that has no JSON form.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, Enum):
        return json_form(value.value)
    if isinstance(value, Mapping):
        return {str(key): json_form(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_form(item) for item in value]
    if hasattr(value, "to_table"):  # defines its own form in files
        return json_form(value.to_table())
    if dataclasses.is_dataclass(value):
        return fields_form(value)
    if hasattr(value, "item"):  # a number of NumPy's
        return json_form(value.item())
    raise TypeError(f"JSON has nothing for {type(value).__name__} {value!r}")


def report_from(kind: type[Report], source: object, **values: object) -> Report:
    """A dataclass of `kind`: fields in `values`, and all further ones from attributes of `source`."""
    copied_fields = {
        f.name: getattr(source, f.name) for f in dataclasses.fields(kind) if f.name not in values
    }
    return kind(**copied_fields, **values)


class JsonTree:
    """A dataclass whose fields are plain data, or trees of such dataclasses."""

    def to_json(self) -> dict[str, Json]:
        """The JSON object that its command prints with ``--json``."""
        return fields_form(self)

    def _repr_html_(self) -> str:
        """What a notebook shows: the lines that its command prints."""
        text = getattr(self, "text", None)
        return f"<pre>{html.escape(text() if callable(text) else repr(self))}</pre>"


def fields_form(tree: object) -> dict[str, Json]:
    """A dataclass as a JSON object; see `FLAT`, `OMITTED` and `named`."""
    assert dataclasses.is_dataclass(tree)
    row: dict[str, Json] = {}
    for field in dataclasses.fields(tree):
        value = getattr(tree, field.name)
        if field.metadata.get("flat"):
            row |= fields_form(value)
        elif value is not None or not field.metadata.get("omitted"):
            row[field.metadata.get("key", field.name)] = json_form(value)
    return row
