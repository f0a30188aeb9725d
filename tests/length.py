"""How long the tests take: a quick part by default, everything with ``-m ""`` (see `conftest.py`)."""

import math
from collections.abc import Collection, Iterable, Mapping

import pytest
from hypothesis import settings

EVERY_EXAMPLE = 100  # Hypothesis's own number


def examples(count: int) -> int:
    """The profile's share (see `conftest.py`) of `count` generated examples."""
    return max(2, math.ceil(count * settings().max_examples / EVERY_EXAMPLE))


def long_but(quick: Iterable, values: Collection | Mapping) -> list:
    """Parameters of a test: all of `values`, which are long except those in `quick`.

    Of a mapping, the keys are the parameters' names, and `quick` holds some of them.
    """
    quick = set(quick)
    assert quick <= set(values), f"no parameters: {quick - set(values)}"
    return [
        pytest.param(
            values[value] if isinstance(values, Mapping) else value,
            id=value if isinstance(values, Mapping) else None,
            marks=() if value in quick else pytest.mark.long,
        )
        for value in values
    ]
