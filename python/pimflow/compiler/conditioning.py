"""How far outputs may be from their reference where the network amplifies rounding.

The bound of a storage type, `output_error.OUTPUT_BOUND`, stands for networks that do not. If an output is
beyond it, the reference runs again `RUNS` times, each time with other random roundings of sums and of what
the build stores narrower (`frontend.perturbed_onnx`), and every output may be `DEVIATION_MULTIPLE` times as
far off as the farthest of these. Where no output is beyond the bound, nothing runs again.

Both numbers are for the worst case: an output whose error has one degree of freedom, such as a scalar. If
the errors of the build and of the runs are drawn from one normal distribution, the first is more than twice
the largest of eight others in 0.8 % of networks; with ten degrees of freedom, in 0.01 %. The runs round to
fp16 at random, which moves a tensor 1.7 times as far (root mean square) as taking the nearest value, as a
build does; with that, fewer than 0.1 % of right builds are refused in the worst case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np

from pimflow.core.output_error import (
    DEVIATION_MULTIPLE,
    LARGEST_BOUND,
    OUTPUT_BOUND,
    OutputCheck,
    relative_error,
)
from pimflow.frontend.reference import Perturbed, Run, Stored

RUNS = 8


def output_checks(
    perturbed: Perturbed | None,
    stored: Stored,
    dtype: str,
    inputs: Mapping[str, np.ndarray],
    outputs: Sequence[np.ndarray],
    expected: Sequence[np.ndarray],
    tolerance: float | None = None,
) -> tuple[OutputCheck, ...]:
    """Every output against its reference.

    Parameters
    ----------
    perturbed : Perturbed or None
        The reference with roundings, as a network has it; runs if an output is beyond the bound of `dtype`.
    stored : Stored
        What the build stores in fp16.
    dtype : str
        The storage type: fp16 or fp32.
    expected : sequence of ndarray
        Outputs of the reference, in fp32.
    tolerance : float, optional
        The bound, in place of all that.
    """
    errors = [relative_error(y, reference) for y, reference in zip(outputs, expected, strict=True)]
    floors = [max(OUTPUT_BOUND[dtype], last_place(y)) if tolerance is None else tolerance for y in expected]
    beyond = any(not error <= floor for error, floor in zip(errors, floors))
    if not beyond or tolerance is not None or perturbed is None:
        pairs = zip(errors, floors)
        return tuple(OutputCheck(relative_error=error, bound=floor) for error, floor in pairs)
    deviations = reference_deviations(perturbed(stored), inputs, expected)
    checks = []
    for error, floor, deviation in zip(errors, floors, deviations, strict=True):
        # One that is infinite left the range of fp16: that widens nothing.
        allowed = min(LARGEST_BOUND, DEVIATION_MULTIPLE * deviation) if np.isfinite(deviation) else floor
        bound = max(floor, allowed)
        checks.append(OutputCheck(relative_error=error, bound=bound, reference_deviation=deviation))
    return tuple(checks)


def last_place(y: np.ndarray) -> float:
    """How far rounding to the type of a tensor may move apart what differs by little, over the largest."""
    return 0.0 if y.dtype.kind in "biu" else float(ml_dtypes.finfo(y.dtype).eps)


def reference_deviations(
    run: Run, inputs: Mapping[str, np.ndarray], expected: Sequence[np.ndarray]
) -> list[float]:
    """The largest `relative_error` of every output in `RUNS` runs."""
    made = [run(inputs) for _ in range(RUNS)]
    return [max(relative_error(outputs[i], y) for outputs in made) for i, y in enumerate(expected)]
