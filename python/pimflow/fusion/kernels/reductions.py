"""Reductions over windows and channels: sums of products, means, maxima."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tvm import tirx

from pimflow.core.kernel import ConvGeometry
from pimflow.core.ranges import RangeMap
from pimflow.fusion.kernels.formula import LOWEST, Formula, Index, Read, TapReduction, Weight


def _range_checks(position: tirx.Expr, axis: RangeMap) -> list[tirx.Expr]:
    padded = axis.pad_before > 0 or axis.pad_after > 0
    return [position >= 0, position < axis.extent] if padded else []


def _taps(
    window: ConvGeometry,
) -> tuple[Callable[[Index, Index], tuple], Callable[[Index, Index], tirx.Expr | None]]:
    """Functions for the row and column that taps read, and for whether these are in the map."""
    rows, columns = window.rows, window.columns

    def place(index: Index, taps: Index) -> tuple:
        return tuple(
            index[axis] * m.stride - m.pad_before + tap * m.dilation
            for axis, m, tap in ((1, rows, taps[0]), (2, columns, taps[1]))
        )

    def valid(index: Index, taps: Index) -> tirx.Expr | None:
        """Whether the taps lie in the map; None if they always do."""
        h, w = place(index, taps)
        checks = _range_checks(h, rows) + _range_checks(w, columns)
        return tirx.all(*checks) if checks else None

    return place, valid


def convolution_sum(window: ConvGeometry) -> tuple[TapReduction, int]:
    """The sum of a convolution, and the number of consecutive channels with the same taps.

    Weights of a filter are in the order of the taps: rows, columns, channels of the first operand.
    """
    size, filters_per_group, kw = window.c // window.groups, window.oc // window.groups, window.kw
    place, valid = _taps(window)
    depthwise = size == filters_per_group == 1

    def term(read: Read, weight: Weight, index: Index, taps: Index, _) -> tirx.Expr:
        """The term to combine, at a result's index and taps."""
        h, w = place(index, taps)
        group = (
            index[3] if depthwise else 0 if filters_per_group == window.oc else index[3] // filters_per_group
        )
        source = read(0, (index[0], h, w, group * size + taps[2]))
        return source * weight((taps[0] * kw + taps[1]) * size + taps[2], index[3])

    total = TapReduction(initial=0.0, taps=(window.kh, kw, size), valid=valid, term=term)
    return total, window.oc if depthwise else filters_per_group


def pooling_reduction(window: ConvGeometry, is_max: bool) -> TapReduction:
    """The maximum, or the sum, over the windows of a pooling."""
    place, valid = _taps(window)

    def term(read: Read, _, index: Index, taps: Index, __) -> tirx.Expr:
        return read(0, (index[0], *place(index, taps), index[3]))

    return TapReduction(
        initial=LOWEST if is_max else 0.0,
        taps=(window.kh, window.kw),
        valid=valid,
        term=term,
        combine=tirx.max if is_max else lambda total, value: total + value,
    )


def mean_divisor(window: ConvGeometry, index: Index, padding_counts: bool) -> tirx.Expr | float:
    """Divisor of a mean over a window: the number of taps that count."""
    if padding_counts:
        return float(window.kh * window.kw)
    return tirx.Cast("float32", _taps_inside(index[1], window.rows) * _taps_inside(index[2], window.columns))


def _taps_inside(position: tirx.Expr, axis: RangeMap) -> tirx.Expr:
    """Number of taps of the window at `position` that are in the map; their dilation is 1."""
    first = position * axis.stride - axis.pad_before
    last = tirx.min(first + axis.window, tirx.const(axis.extent, "int32"))
    return last - tirx.max(first, tirx.const(0, "int32"))


def softmax(channels: int) -> Formula:
    """Formula of a softmax over channels: the maximum, then the sum of exponentials."""

    def term(read: Read, _, index: Index, taps: Index, reduced: list[tirx.Expr]) -> tirx.Expr:
        """The term to combine, at a result's index and taps."""
        x = read(0, (*index[:3], taps[0]))
        return tirx.exp(x - reduced[0]) if reduced else x

    def result(read: Read, _, index: Index, reduced: list[tirx.Expr]) -> tirx.Expr:
        return tirx.exp(read(0, index) - reduced[0]) / reduced[1]

    common = dict(taps=(channels,), valid=lambda index, taps: None, term=term)
    steps = (TapReduction(initial=LOWEST, combine=tirx.max, **common), TapReduction(initial=0.0, **common))
    return Formula(channels=(0, channels), result=result, reductions=steps)


def response_normalisation(window: RangeMap, attributes: Mapping[str, float]) -> Formula:
    """Formula of a local response normalisation, with ONNX's attributes."""
    names = (("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0))
    alpha, beta, bias = (attributes.get(name, default) for name, default in names)

    def channel(index: Index, taps: Index) -> tirx.Expr:
        return index[3] - window.pad_before + taps[0]

    def term(read: Read, _, index: Index, taps: Index, __) -> tirx.Expr:
        """The term to combine, at a result's index and taps."""
        x = read(0, (*index[:3], channel(index, taps)))
        return x * x

    def result(read: Read, _, index: Index, reduced: list[tirx.Expr]) -> tirx.Expr:
        """The result at an index, from the reductions."""
        base = reduced[0] * float(alpha / window.window) + float(bias)
        return read(0, index) / tirx.power(base, tirx.const(beta, "float32"))

    def valid(index: Index, taps: Index) -> tirx.Expr:
        return tirx.all(channel(index, taps) >= 0, channel(index, taps) < window.extent)

    squares = TapReduction(initial=0.0, taps=(window.window,), valid=valid, term=term)
    return Formula(channels=(0, window.extent), result=result, reductions=(squares,))
