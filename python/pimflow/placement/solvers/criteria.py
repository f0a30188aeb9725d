"""Criteria that are minimised or bounded."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from pimflow.core.candidate import Candidate


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """A weighted sum over a plan that is minimised, or bounded by `upper_bound`.

    Attributes
    ----------
    per_ns, per_pj, per_error, per_row_byte, per_filter_byte : float
        Weights of the latency, the energy of the tasks, the error, the bytes of PIM's rows and of filters.
    tolerance : float
        In a front, how much worse a dominating label may be at each position.
    """

    per_ns: float = 0.0
    per_pj: float = 0.0
    per_error: float = 0.0
    per_row_byte: float = 0.0
    per_filter_byte: float = 0.0
    upper_bound: float = math.inf
    tolerance: float = 0.0

    def value(self, latency_ns: float, energy_pj: float, candidates: Iterable[Candidate]) -> float:
        """The value for a plan, from its latency, the energy of its tasks and its errors."""
        error = sum(candidate.alternative.error for candidate in candidates)
        return self.per_ns * latency_ns + self.per_pj * energy_pj + self.per_error * error


LATENCY = Criterion(per_ns=1.0)
ERROR = Criterion(per_error=1.0)
