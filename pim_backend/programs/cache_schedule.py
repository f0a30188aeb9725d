"""How attention over a cache in PIM is computed: where keys and values lie, in which order rows are read."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ProductSchedule:
    """One of the two products, with keys or with values.

    Attributes
    ----------
    order : str
        One of `programs.attention.ORDERS`: which stays while the other changes.
    spread : int
        Channels that share each matrix; see `CacheLayout`.
    lanes : int
        Lanes of a bank by which products go, or 1.
    accumulate : bool
        Of values: whether sums stay in the latches from chunk to chunk.
    """

    order: str
    spread: int
    lanes: int = 1
    accumulate: bool = False

    def __str__(self) -> str:
        lanes = f" by {self.lanes} lanes" if self.lanes > 1 else ""
        sums = ", sums kept" if self.accumulate else ""
        return f"{self.order}-stationary, spread {self.spread}{lanes}{sums}"


@dataclass(frozen=True, kw_only=True)
class CacheSchedule:
    """Both products of attention over a cache, and what writes to it.

    Attributes
    ----------
    keys, values : ProductSchedule
    parts : int
        Groups of matrices (requests and KV heads) that are computed one after the other: the GPU takes the
        softmax of one while PIM computes products of the next.
    """

    keys: ProductSchedule
    values: ProductSchedule
    parts: int = 1

    def __str__(self) -> str:
        parts = f"; {self.parts} parts" if self.parts > 1 else ""
        return f"keys {self.keys}; values {self.values}{parts}"

    @classmethod
    def parse(cls, text: str) -> CacheSchedule:
        """The inverse of ``str``; raises `ValueError` if `text` is no schedule of attention."""
        product = r"(vector|row)-stationary, spread (\d+)(?: by (\d+) lanes)?(, sums kept)?"
        match = re.fullmatch(rf"keys {product}; values {product}(?:; (\d+) parts)?", text)
        if match is None:
            raise ValueError(f"'{text}' is no schedule of attention")

        def made(order: str, spread: str, lanes: str | None, sums: str | None) -> ProductSchedule:
            return ProductSchedule(
                order=order, spread=int(spread), lanes=int(lanes or 1), accumulate=sums is not None
            )

        groups = match.groups()
        return cls(keys=made(*groups[:4]), values=made(*groups[4:8]), parts=int(groups[8] or 1))
