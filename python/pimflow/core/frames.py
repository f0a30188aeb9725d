"""Rows of figures as a table of pandas, where that is installed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pimflow.core.json_form import json_form
from pimflow.errors import UsageError

if TYPE_CHECKING:
    from pandas import DataFrame


def frame(rows: Iterable[Any]) -> DataFrame:
    """A row each of `rows`: by its `to_json` if it has one, else its fields.

    Raises
    ------
    UsageError
        Where pandas is not installed.
    """
    try:
        import pandas
    except ImportError:
        raise UsageError("tables need pandas; pip install pandas") from None
    return pandas.DataFrame([row.to_json() if hasattr(row, "to_json") else json_form(row) for row in rows])
