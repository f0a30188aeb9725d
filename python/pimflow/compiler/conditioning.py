"""Error bounds of outputs where the network amplifies rounding errors.

The bound of a storage type, `output_error.OUTPUT_BOUND`, holds for networks that do not amplify them. If an
output exceeds it, the reference runs again: once with the tensors that the build stores in a narrower type
rounded to the nearest, and `RUNS` times with these and all sums rounded in random directions
(`frontend.perturbed_onnx`). The first counts where many weights are equal: all of them move the same way,
which random directions do not. The bound of every output is then `DEVIATION_MULTIPLE` times the largest
deviation of these runs. If no output exceeds the bound, the reference runs once. Elements that jump in these
runs, such as an angle at its period or the place of a maximum where two values are nearly equal, are right if
they are as in a run; there may be few of them.

Both numbers are chosen for the worst case: an output whose error has one degree of freedom, such as a
scalar. If the errors of the build and of the runs are from one normal distribution, the error of the build
is more than twice the largest of eight runs in 0.8 % of networks; with ten degrees of freedom, in 0.01 %.
The runs round to fp16 in a random direction, which moves a tensor 1.7 times as far (root mean square) as
rounding to nearest, which a build does. With that, fewer than 0.1 % of correct builds fail in the worst
case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from pimflow.core.output_error import (
    DEVIATION_MULTIPLE,
    LARGEST_BOUND,
    OUTPUT_BOUND,
    OutputCheck,
    magnitude,
    relative_error,
)
from pimflow.frontend.reference import Fp16Storage, Perturbed, Run

RUNS = 8
# Of the elements of an output: if more jump in a run, nothing is verified. Whole numbers, as places of
# maxima, have to be equal to those of a run, so that more may jump.
MOST_UNDECIDED = {"real": 0.1, "whole": 0.5}


@dataclass(frozen=True, kw_only=True)
class OutputReference:
    """What the outputs of a network are compared with.

    Attributes
    ----------
    expected : sequence of ndarray
        Outputs of the reference, in fp32.
    perturbed : Perturbed, optional
        The network's reference with random roundings; it runs if an output exceeds the bound of its type.
    tolerance : float, optional
        A fixed bound instead.
    rounded : frozenset of int
        Indices of outputs that are rounded to integers. A rounding before can move one of these to the next
        integer, which is far: as many may be off as twice the most in a run, and one more, by no more than
        in a run, or by one.
    """

    expected: Sequence[np.ndarray]
    perturbed: Perturbed | None = None
    tolerance: float | None = None
    rounded: frozenset[int] = frozenset()


def output_checks(
    reference: OutputReference,
    stored: Fp16Storage,
    dtype: str,
    inputs: Mapping[str, np.ndarray],
    outputs: Sequence[np.ndarray],
) -> tuple[OutputCheck, ...]:
    """Compare every output with its reference.

    Parameters
    ----------
    dtype : str
        The storage type: fp16 or fp32.
    """
    expected, perturbed, tolerance = reference.expected, reference.perturbed, reference.tolerance
    errors = [relative_error(y, y_expected) for y, y_expected in zip(outputs, expected, strict=True)]
    floors = [max(OUTPUT_BOUND[dtype], last_place(y)) if tolerance is None else tolerance for y in expected]
    is_beyond = any(not error <= floor for error, floor in zip(errors, floors))
    if not is_beyond or tolerance is not None or perturbed is None:
        pairs = zip(errors, floors)
        return tuple(OutputCheck(relative_error=error, bound=floor) for error, floor in pairs)
    run = perturbed(stored)
    runs = [run(inputs) for _ in range(1 + RUNS)]
    return tuple(
        (_integer_check if i in reference.rounded else _deviation_check)(
            y, y_expected, [outputs[i] for outputs in runs], floor
        )
        for i, (y, y_expected, floor) in enumerate(zip(outputs, expected, floors, strict=True))
    )


def _integer_check(
    y: np.ndarray, expected: np.ndarray, runs: Sequence[np.ndarray], floor: float
) -> OutputCheck:
    """Compare an output of rounded integers by how many of them are off in `runs`, and by how much."""
    if y.shape != expected.shape:
        return OutputCheck(relative_error=float("inf"), bound=floor)
    runs = [np.rint(value) for value in runs]  # the results too are moved by random roundings
    steps = np.abs(y.astype(np.float64) - expected)
    largest_step = max(1.0, *(float(np.abs(value - expected).max()) for value in runs))
    is_off = (steps > 0) & (steps <= largest_step) & (steps == np.rint(steps))
    most = DEVIATION_MULTIPLE * max(int((value != expected).sum()) for value in runs) + 1
    is_excused = is_off if is_off.sum() <= most else np.zeros_like(is_off)
    deviation = max(relative_error(value, expected) for value in runs)
    return OutputCheck(
        relative_error=relative_error(y, expected, ~is_excused),
        bound=floor,
        reference_deviation=deviation,
        undecided=int(is_excused.sum()),
    )


def _deviation_check(
    y: np.ndarray, expected: np.ndarray, runs: Sequence[np.ndarray], floor: float
) -> OutputCheck:
    """Compare an output by what roundings do to the reference in `runs`.

    The first, to the nearest, is what a right build gives: it widens the bound, and excuses no element.
    """
    is_decided, undecided = np.ones(expected.shape, bool), 0
    scale = magnitude(expected)
    values = np.stack([np.asarray(value, np.float64) for value in (expected, *runs[1:])])
    with np.errstate(invalid="ignore"):
        low, high = values.min(0), values.max(0)
        jumps = high - low > LARGEST_BOUND * scale
        share = (np.abs(values[1:] - values[0]) > LARGEST_BOUND * scale).mean()  # of a run
        kind = "whole" if expected.dtype.kind in "biu" else "real"
        if y.shape == expected.shape and 0 < share <= MOST_UNDECIDED[kind]:
            is_possible = (y >= low - floor * scale) & (y <= high + floor * scale)
            if kind == "whole":
                is_possible = (values == y).any(0)
            is_decided, undecided = ~(jumps & is_possible), int((jumps & is_possible).sum())
    error = relative_error(y, expected, is_decided)
    deviations = [relative_error(value, expected, ~jumps if undecided else None) for value in runs]
    finite = [deviation for deviation in deviations if np.isfinite(deviation)]
    deviation, allowed = max(finite, default=None), floor
    # An infinite deviation means that a run left the range of fp16: it does not widen the bound.
    if deviation is not None and len(finite) == len(deviations):
        allowed = min(LARGEST_BOUND, DEVIATION_MULTIPLE * deviation)
    return OutputCheck(
        relative_error=error, bound=max(floor, allowed), reference_deviation=deviation, undecided=undecided
    )


def last_place(y: np.ndarray) -> float:
    """Distance of neighbouring values in the type of `y`, relative to the largest value; 0 for integers."""
    return 0.0 if y.dtype.kind in "biu" else float(ml_dtypes.finfo(y.dtype).eps)  # type: ignore[no-untyped-call]


def reference_deviations(
    run: Run, inputs: Mapping[str, np.ndarray], expected: Sequence[np.ndarray]
) -> list[float]:
    """The largest `relative_error` of every output in a run to the nearest, and in `RUNS` runs."""
    runs_outputs = [run(inputs) for _ in range(1 + RUNS)]
    return [max(relative_error(outputs[i], y) for outputs in runs_outputs) for i, y in enumerate(expected)]
