"""Distributions that inputs are drawn from, and their text, such as ``uniform(0,1)``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from pimflow.errors import UsageError
from pimflow.zoo import weights

KINDS = ("uniform", "normal", "int", "distinct")
_WHOLE = ("int", "distinct")
_TEXT = re.compile(rf"({'|'.join(KINDS)})\(([^(),]+),([^(),]+)\)")
_LARGEST_INTEGER = 2**53  # that double precision, in which values are drawn, tells from its neighbours


@dataclass(frozen=True)
class Draw:
    """A distribution of the elements of an input.

    Attributes
    ----------
    kind : str
        ``uniform``: real numbers from `first` to `second`. ``normal``: mean `first` and standard deviation
        `second`, within three of these (a sum of three uniforms). ``int``: whole numbers from `first` to
        `second`, both included. ``distinct``: the same, none of them twice if there are enough.

    Raises
    ------
    UsageError
        If the numbers are not finite, or out of order.
    """

    kind: str
    first: float
    second: float

    def __post_init__(self) -> None:
        largest = _LARGEST_INTEGER if self.kind in _WHOLE else float(np.finfo(np.float32).max) / 4
        ordered = self.second >= 0 if self.kind == "normal" else self.first <= self.second
        whole = self.kind not in _WHOLE or (self.first == int(self.first) and self.second == int(self.second))
        if not (abs(self.first) <= largest and abs(self.second) <= largest and ordered and whole):
            raise UsageError(f"'{self}': give finite numbers, the smaller first, whole ones to int")

    @classmethod
    def parse(cls, text: str) -> Draw:
        """Read the text of a distribution, such as ``uniform(0,1)``; raises `UsageError`."""
        match = _TEXT.fullmatch(text.replace(" ", ""))
        try:
            if match and all(map(math.isfinite, numbers := [float(match[2]), float(match[3])])):
                return cls(match[1], *numbers)
        except ValueError:
            pass
        raise UsageError(
            f"'{text}' is no distribution; give uniform(LOW,HIGH), normal(MEAN,DEVIATION), int(LOW,HIGH) "
            "or distinct(LOW,HIGH)"
        )

    def __str__(self) -> str:
        """The text that `parse` reads."""
        return f"{self.kind}({_number_text(self.first)},{_number_text(self.second)})"

    def array(self, name: str, shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
        """An input of this name, bit-identical everywhere.

        Raises
        ------
        UsageError
            If `dtype` does not hold the numbers.
        """
        kind = np.dtype(dtype)
        if kind.kind in "iu":
            spread = 3 * self.second if self.kind == "normal" else 0.0
            low, high = self.first - spread, max(self.first + spread, self.second)
            if not np.iinfo(kind).min <= low <= high <= np.iinfo(kind).max:
                raise UsageError(f"input '{name}' is {kind}, which does not hold numbers of {self}")
        first, second, third = weights.uniform(name, 3 * math.prod(shape), seed).reshape(3, -1)
        unit = (first.astype(np.float64) + 1) / 2
        if self.kind == "normal":
            values = self.first + self.second * (first + second + third).astype(np.float64)
        elif self.kind == "distinct":
            count = int(self.second - self.first) + 1
            values = self.first + np.argsort(np.argsort(first)) * max(1, count // max(1, first.size)) % count
        elif self.kind == "int":
            values = self.first + np.floor(unit * (self.second - self.first + 1))
        else:
            values = self.first + unit * (self.second - self.first)
        return np.asarray(values.reshape(shape), kind)  # an array also of rank 0


def _number_text(number: float) -> str:
    return str(int(number)) if number == int(number) and abs(number) < 1e15 else repr(number)
