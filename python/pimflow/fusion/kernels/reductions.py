"""Reductions over windows and channels: sums of products, means, maxima."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tvm import tirx

from pimflow.core.ranges import RangeMap
from pimflow.core.region import ConvGeometry
from pimflow.fusion.kernels.formula import LOWEST, At, Formula, Read, Reduction, Weight


def _inside(position: tirx.Expr, axis: RangeMap) -> list[tirx.Expr]:
    padded = axis.pad_before > 0 or axis.pad_after > 0
    return [position >= 0, position < axis.extent] if padded else []


def _taps(window: ConvGeometry) -> tuple[Callable[[At, At], tuple], Callable[[At, At], tirx.Expr | None]]:
    """Functions for the row and column that taps read, and for whether these are in the map."""
    rows, columns = window.rows, window.columns

    def place(at: At, taps: At) -> tuple:
        return tuple(
            at[axis] * m.stride - m.pad_before + tap * m.dilation
            for axis, m, tap in ((1, rows, taps[0]), (2, columns, taps[1]))
        )

    def valid(at: At, taps: At) -> tirx.Expr | None:
        h, w = place(at, taps)
        checks = _inside(h, rows) + _inside(w, columns)
        return tirx.all(*checks) if checks else None

    return place, valid


def convolved(window: ConvGeometry) -> tuple[Reduction, int]:
    """The sum of a convolution, and the number of consecutive channels with the same taps.

    Weights of a filter are in the order of the taps: rows, columns, channels of the first operand.
    """
    size, per, kw = window.c // window.groups, window.oc // window.groups, window.kw
    place, valid = _taps(window)
    depthwise = size == per == 1

    def term(read: Read, weight: Weight, at: At, taps: At, _) -> tirx.Expr:
        h, w = place(at, taps)
        group = at[3] if depthwise else 0 if per == window.oc else at[3] // per
        source = read(0, (at[0], h, w, group * size + taps[2]))
        return source * weight((taps[0] * kw + taps[1]) * size + taps[2], at[3])

    total = Reduction(initial=0.0, taps=(window.kh, kw, size), valid=valid, term=term)
    return total, window.oc if depthwise else per


def pooled(window: ConvGeometry, largest: bool) -> Reduction:
    """The maximum, or the sum, over the windows of a pooling."""
    place, valid = _taps(window)

    def term(read: Read, _, at: At, taps: At, __) -> tirx.Expr:
        return read(0, (at[0], *place(at, taps), at[3]))

    return Reduction(
        initial=LOWEST if largest else 0.0,
        taps=(window.kh, window.kw),
        valid=valid,
        term=term,
        combine=tirx.max if largest else lambda done, value: done + value,
    )


def taps_counted(window: ConvGeometry, at: At, padding_counts: bool) -> tirx.Expr | float:
    """Divisor of a mean over a window: the number of taps that count."""
    if padding_counts:
        return float(window.kh * window.kw)
    return tirx.Cast("float32", _taps_inside(at[1], window.rows) * _taps_inside(at[2], window.columns))


def _taps_inside(at: tirx.Expr, axis: RangeMap) -> tirx.Expr:
    """Number of taps of the window at `at` that are in the map; their dilation is 1."""
    first = at * axis.stride - axis.pad_before
    last = tirx.min(first + axis.window, tirx.const(axis.extent, "int32"))
    return last - tirx.max(first, tirx.const(0, "int32"))


def softmax(channels: int) -> Formula:
    """Formula of a softmax over channels: the maximum, then the sum of exponentials."""

    def term(read: Read, _, at: At, taps: At, done: list[tirx.Expr]) -> tirx.Expr:
        x = read(0, (*at[:3], taps[0]))
        return tirx.exp(x - done[0]) if done else x

    def result(read: Read, _, at: At, done: list[tirx.Expr]) -> tirx.Expr:
        return tirx.exp(read(0, at) - done[0]) / done[1]

    common = dict(taps=(channels,), valid=lambda at, taps: None, term=term)
    steps = (Reduction(initial=LOWEST, combine=tirx.max, **common), Reduction(initial=0.0, **common))
    return Formula(channels=(0, channels), result=result, reductions=steps)


def response_normalisation(window: RangeMap, attributes: Mapping[str, float]) -> Formula:
    """Formula of a local response normalisation, with ONNX's attributes."""
    names = (("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0))
    alpha, beta, bias = (attributes.get(name, default) for name, default in names)

    def channel(at: At, taps: At) -> tirx.Expr:
        return at[3] - window.pad_before + taps[0]

    def term(read: Read, _, at: At, taps: At, __) -> tirx.Expr:
        x = read(0, (*at[:3], channel(at, taps)))
        return x * x

    def result(read: Read, _, at: At, done: list[tirx.Expr]) -> tirx.Expr:
        base = done[0] * float(alpha / window.window) + float(bias)
        return read(0, at) / tirx.power(base, tirx.const(beta, "float32"))

    def valid(at: At, taps: At) -> tirx.Expr:
        return tirx.all(channel(at, taps) >= 0, channel(at, taps) < window.extent)

    squares = Reduction(initial=0.0, taps=(window.window,), valid=valid, term=term)
    return Formula(channels=(0, window.extent), result=result, reductions=(squares,))
