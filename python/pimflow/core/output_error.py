"""Errors of outputs against a reference, and their bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pimflow.errors import VerificationError

OUTPUT_BOUND = {"fp16": 2e-3, "fp32": 1e-5}  # on `relative_error`, by storage type
# Where rounding alone changes the reference much, the bound is this multiple of that change
# (`compiler.conditioning`), but at most `LARGEST_BOUND`: an output of zeros has an error of 1.
DEVIATION_MULTIPLE = 2.0
LARGEST_BOUND = 0.1


def relative_error(result: np.ndarray, reference: np.ndarray, is_compared: np.ndarray | None = None) -> float:
    """Maximum error over the reference's maximum magnitude.

    Where the reference is NaN or infinite, the same is right. The error is infinite for another shape, or for
    NaN or infinity elsewhere.

    Parameters
    ----------
    is_compared : ndarray of bool, optional
        The elements that count; all by default.
    """
    if result.shape != reference.shape:
        return float("inf")
    is_finite = np.isfinite(reference)
    same = ~is_finite & ((result == reference) | (np.isnan(result) & np.isnan(reference)))
    counted = ~same if is_compared is None else ~same & is_compared
    if not (np.isfinite(result) & is_finite)[counted].all():
        return float("inf")
    difference = np.abs(result[counted].astype(np.float64) - reference[counted])
    scale, error = magnitude(reference), float(difference.max(initial=0))
    return error / scale if scale else error


def magnitude(reference: np.ndarray) -> float:
    """The largest magnitude of its finite elements."""
    return float(np.abs(reference[np.isfinite(reference)].astype(np.float64)).max(initial=0))


@dataclass(frozen=True, kw_only=True)
class OutputCheck:
    """One output of a network against its reference.

    Attributes
    ----------
    bound : float
        Maximum `relative_error` that matches.
    reference_deviation : float or None
        Maximum `relative_error` of runs of the reference with random rounding; None without such runs.
    undecided : int
        Elements that roundings alone make to jump, such as the place of a maximum if two are nearly equal.
        They have values as in these runs, and count in no error.
    """

    relative_error: float
    bound: float
    reference_deviation: float | None = None
    undecided: int = 0

    @property
    def matches(self) -> bool:
        """Whether the error is within the bound."""
        return self.relative_error <= self.bound

    @property
    def error_over_bound(self) -> float:
        """The error as a multiple of the bound."""
        return self.relative_error / self.bound

    def require_match(self, subject: str) -> None:
        """Raise `VerificationError` unless it matches.

        Parameters
        ----------
        subject : str
            The outputs, as subject of the message's sentence.
        """
        if self.matches:
            return
        if not np.isfinite(self.relative_error):
            raise VerificationError(
                f"{subject} differ from the reference by inf: they have NaN, infinity or another shape, "
                "which "
                "no rounding explains; if values leave the storage type, try --dtype fp32, else it is our bug"
            )
        difference = f"{subject} differ from the reference by {self.relative_error:.2e} of the largest value"
        deviation = self.reference_deviation
        if deviation is None and self.relative_error > LARGEST_BOUND:
            explanation = f"{self.bound:.0e}, and no rounding explains so much: a layer outside PIM is wrong"
        elif deviation is None:
            explanation = f"{self.bound:.0e}; if the network amplifies rounding, allow it with --tolerance"
        elif DEVIATION_MULTIPLE * deviation > LARGEST_BOUND:
            explanation = (
                f"{self.bound:.0e}; the network amplifies rounding so much that roundings alone move the "
                f"reference by {deviation:.1e}: try --dtype fp32, or allow it with --tolerance"
            )
        else:
            explanation = (
                f"{self.bound:.1e}; roundings alone move the reference by {deviation:.1e}, which does not "
                "explain it: a layer outside PIM is wrong, which is a bug of ours"
            )
        raise VerificationError(f"{difference}; the bound is {explanation}")


def max_error_check(checks: Sequence[OutputCheck]) -> OutputCheck:
    """The check with the largest error relative to its bound."""
    return max(checks, key=lambda check: check.error_over_bound)


def error_text(check: OutputCheck) -> str:
    """Error of an output as text, with the effect of rounding on the reference if it is known."""
    text, deviation = f"max rel {check.relative_error:.1e}", check.reference_deviation
    if deviation is None:
        return text
    text = f"{text}, bound {check.bound:.1e}: rounding moves the reference by {deviation:.1e}"
    return f"{text}, and decides {check.undecided} elements" if check.undecided else text
