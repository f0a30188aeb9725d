"""Trees of dataclasses as the plain data that JSON has."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Report = TypeVar("Report", bound="DataclassInstance")
Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

# Metadata of a dataclass field: its own fields stand in its place.
FLAT = {"flat": True}
# Metadata of a dataclass field: left out where it is None.
OMITTED = {"omitted": True}


def json_form(value: object) -> Json:
    """`value` as JSON has it: a dataclass is an object of its fields, in their order; tuples are lists.

    Raises
    ------
    TypeError
        If there is something in it that JSON has nothing for.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, Enum):
        return json_form(value.value)
    if isinstance(value, Mapping):
        return {str(key): json_form(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_form(each) for each in value]
    if hasattr(value, "to_table"):  # with a file form of its own
        return json_form(value.to_table())
    if dataclasses.is_dataclass(value):
        return fields_form(value)
    if hasattr(value, "item"):  # a number of NumPy's
        return json_form(value.item())
    raise TypeError(f"JSON has nothing for {type(value).__name__} {value!r}")


def report_of(kind: type[Report], source: object, **others: object) -> Report:
    """A dataclass of `kind` with the attributes of `source` that its fields are named after, but `others`."""
    same = {f.name: getattr(source, f.name) for f in dataclasses.fields(kind) if f.name not in others}
    return kind(**same, **others)


class JsonTree:
    """A dataclass whose fields are plain data, or trees of such."""

    def to_json(self) -> dict[str, Json]:
        """What its command prints with ``--json``."""
        return fields_form(self)


def fields_form(tree: object) -> dict[str, Json]:
    """A dataclass as a JSON object; see `FLAT` and `OMITTED`."""
    assert dataclasses.is_dataclass(tree)
    row: dict[str, Json] = {}
    for field in dataclasses.fields(tree):
        value = getattr(tree, field.name)
        if field.metadata.get("flat"):
            row |= fields_form(value)
        elif value is not None or not field.metadata.get("omitted"):
            row[field.name] = json_form(value)
    return row
