"""Rows of figures as a data frame, where pandas is installed."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pimflow.core.json_form import Json, json_form
from pimflow.errors import UsageError

if TYPE_CHECKING:
    from pandas import DataFrame

Row = TypeVar("Row")


class Rows(list[Row]):
    """A list of results of one kind that converts to a table."""

    def to_json(self) -> list[Json]:
        """The rows as JSON."""
        return [row_json(row) for row in self]

    def _repr_html_(self) -> str:
        """What a notebook shows: a table."""
        rows = [json_row for json_row in self.to_json() if isinstance(json_row, dict)]
        names = list(dict.fromkeys(name for json_row in rows for name in json_row))
        lines = ["".join(f"<th>{html.escape(name)}</th>" for name in names)]
        lines += [
            "".join(f"<td>{html.escape(str(json_row.get(name, '')))}</td>" for name in names)
            for json_row in rows
        ]
        return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"

    def to_pandas(self) -> DataFrame:
        """The rows as a data frame; raises `UsageError` where pandas is not installed."""
        return data_frame(self)


class Tabular:
    """A result that converts to a table: a row for each element of its attribute named by ``rows``."""

    _rows: ClassVar[str]

    def __init_subclass__(cls, rows: str = "", **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls._rows = rows or cls._rows

    def to_pandas(self) -> DataFrame:
        """The rows as a data frame; raises `UsageError` where pandas is not installed."""
        return data_frame(getattr(self, self._rows))


def row_json(row: Any) -> Json:
    """A result as JSON: what its `to_json` gives if it has one, else its fields."""
    json_row: Json = row.to_json() if hasattr(row, "to_json") else json_form(row)
    return json_row


def data_frame(rows: Iterable[Any]) -> DataFrame:
    """A data frame with a row for each of `rows`; see `row_json`.

    Raises
    ------
    UsageError
        Where pandas is not installed.
    """
    try:
        import pandas
    except ImportError:
        raise UsageError("tables need pandas; pip install pandas") from None
    return pandas.DataFrame([row_json(row) for row in rows])
