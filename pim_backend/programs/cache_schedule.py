"""Schedule of attention over a cache in PIM: where keys and values lie, and the order of products."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from pimflow.core.attention import Attention
from pimflow.errors import InfeasibleError, UnsupportedOpError
from pimflow.hardware import PimSpec
from pimflow.pim_backend.programs import attention as programs
from pimflow.pim_backend.programs.cache_layout import CacheLayout, KeyLayout, ValueLayout
from pimflow.weight_types import plain_type

Layout = TypeVar("Layout", bound=CacheLayout)
ProductLayout = KeyLayout | ValueLayout
KEYS, VALUES = KeyLayout.kind, ValueLayout.kind


def cache_device(pim: PimSpec, attention: Attention, dtype: str) -> PimSpec:
    """The device as it is for the caches of `attention`; itself if it widens them."""
    return pim.with_weights(plain_type(attention.cache_type), dtype)


@dataclass(frozen=True, kw_only=True)
class ProductSchedule:
    """Schedule of one of the two products: with keys or with values.

    Attributes
    ----------
    order : str
        One of `programs.attention.ORDERS`: what stays in place, the vector or the row.
    spread : int
        Channels that share each matrix; see `CacheLayout`.
    lanes : int
        Lanes of a bank that compute separate products, or 1.
    accumulate : bool
        For values: whether the latches keep the sums over all chunks.
    """

    order: str
    spread: int
    lanes: int = 1
    accumulate: bool = False

    def layout(
        self, kind: type[Layout], attention: Attention, pim: PimSpec, dtype: str, channels: int
    ) -> Layout:
        """The layout of keys or values, from row 0 on, narrow if the device takes their type.

        `kind` is its class.
        """
        return kind(
            attention=attention,
            pim=cache_device(pim, attention, dtype),
            dtype=dtype,
            channels=channels,
            spread=self.spread,
            lanes=self.lanes,
        )

    def attention_product(self, layout: ProductLayout, tokens: int) -> programs.AttentionProduct:
        """``Q K^T`` or ``S V`` over the first `tokens` tokens of keys or values in `layout`."""
        if isinstance(layout, KeyLayout):
            return programs.scores(layout, tokens, self.order)
        return programs.mix(layout, tokens, self.order, self.accumulate)

    def __str__(self) -> str:
        lanes = f" by {self.lanes} lanes" if self.lanes > 1 else ""
        sums = ", sums kept" if self.accumulate else ""
        return f"{self.order}-stationary, spread {self.spread}{lanes}{sums}"


@dataclass(frozen=True, kw_only=True)
class CacheSchedule:
    """Schedule of both products of attention over a cache.

    Attributes
    ----------
    parts : int
        Groups of matrices (requests and KV heads) that are computed one after the other: the GPU takes the
        softmax of one while PIM computes products of the next.
    """

    keys: ProductSchedule
    values: ProductSchedule
    parts: int = 1

    def group(self, attention: Attention) -> Attention:
        """Attention of one of the `parts` groups: of some requests, or of some KV heads of one request.

        The requests and heads of group g follow those of group g - 1.

        Raises
        ------
        UnsupportedOpError
            If requests and KV heads cannot be divided evenly into so many groups.
        """
        requests = math.gcd(attention.batch, self.parts)
        heads = self.parts // requests
        if attention.kv_heads % heads or (heads > 1 and requests < attention.batch):
            raise UnsupportedOpError(
                f"{attention.batch} requests of {attention.kv_heads} KV heads are not dealt evenly to "
                f"{self.parts} parts"
            )
        return replace(
            attention,
            batch=attention.batch // requests,
            heads=attention.heads // heads,
            kv_heads=attention.kv_heads // heads,
        )

    def layouts(
        self, attention: Attention, pim: PimSpec, dtype: str, channels: int, row_begin: int = 0
    ) -> tuple[tuple[KeyLayout, ValueLayout], ...]:
        """Layouts of the keys and the values of each group, one after the other from row `row_begin` on.

        They do not depend on how many places are read, so that all steps of a decoder share the caches.

        Raises
        ------
        UnsupportedOpError
            As `group`.
        """
        group, group_layouts = self.group(attention).with_full_cache(), []
        keys = self.keys.layout(KeyLayout, group, pim, dtype, channels)
        values = self.values.layout(ValueLayout, group, pim, dtype, channels)
        for _ in range(self.parts):
            value_begin = row_begin + keys.rows
            group_layouts.append((replace(keys, row_begin=row_begin), replace(values, row_begin=value_begin)))
            row_begin = value_begin + values.rows
        return tuple(group_layouts)

    def __str__(self) -> str:
        parts = f"; {self.parts} parts" if self.parts > 1 else ""
        return f"keys {self.keys}; values {self.values}{parts}"

    @classmethod
    def parse(cls, text: str) -> CacheSchedule:
        """The inverse of ``str``; raises `ValueError` if `text` is no schedule of attention."""
        product = r"(vector|row)-stationary, spread (\d+)(?: by (\d+) lanes)?(, sums kept)?"
        match = re.fullmatch(rf"keys {product}; values {product}(?:; ([1-9]\d*) parts)?", text)
        if match is None:
            raise ValueError(f"'{text}' is no schedule of attention")

        def product_schedule(order: str, spread: str, lanes: str | None, sums: str | None) -> ProductSchedule:
            return ProductSchedule(
                order=order, spread=int(spread), lanes=int(lanes or 1), accumulate=sums is not None
            )

        groups = match.groups()
        return cls(
            keys=product_schedule(*groups[:4]),
            values=product_schedule(*groups[4:8]),
            parts=int(groups[8] or 1),
        )


def all_schedules(
    product: str, attention: Attention, pim: PimSpec, dtype: str, channels: int
) -> list[tuple[ProductSchedule, ProductLayout]]:
    """All schedules of a product of `attention`, each with the layout of its cache.

    Raises
    ------
    UnsupportedOpError, InfeasibleError
        If no layout is possible; see `CacheLayout.check_fit`.
    """
    alternatives, unsupported_layouts = [], []
    for spread in _divisors(channels):
        device = cache_device(pim, attention, dtype)
        for lanes in (1, device.elements_per_column(dtype)) if device.lane_elements else (1,):
            default_schedule = ProductSchedule(order=programs.ORDERS[0], spread=spread, lanes=lanes)
            layout = product_layout(product, default_schedule, attention, pim, dtype, channels)
            try:
                layout.check_fit()
            except (UnsupportedOpError, InfeasibleError):
                unsupported_layouts.append(layout)
                continue
            alternatives += [(schedule, layout) for schedule in _orders(default_schedule, layout)]
    if not alternatives:
        unsupported_layouts[0].check_fit()  # raises the reason
    return alternatives


def product_layout(
    product: str, schedule: ProductSchedule, attention: Attention, pim: PimSpec, dtype: str, channels: int
) -> ProductLayout:
    """The layout of the cache of a product, `KEYS` or `VALUES`, by a schedule."""
    if product == KEYS:
        return schedule.layout(KeyLayout, attention, pim, dtype, channels)
    return schedule.layout(ValueLayout, attention, pim, dtype, channels)


def _orders(default_schedule: ProductSchedule, layout: ProductLayout) -> Iterator[ProductSchedule]:
    """The orders that differ: with one vector for each matrix, all orders are the same."""
    shared = layout.attention.group > 1
    yield from (
        replace(default_schedule, order=order)
        for order in (programs.ORDERS if shared else programs.ORDERS[:1])
    )
    if isinstance(layout, ValueLayout) and programs.can_accumulate(layout):
        yield replace(default_schedule, accumulate=True)


def _divisors(channels: int) -> list[int]:
    """Divisors of `channels`, the largest first: with all channels on each matrix, any layout is possible."""
    return [spread for spread in range(channels, 0, -1) if channels % spread == 0]
