"""The goal of a search: the objective, the solver and the bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pimflow.core.goal import GoalOptions
from pimflow.core.keywords import check_keywords
from pimflow.errors import InfeasibleError
from pimflow.placement.solvers.evaluate import Evaluation
from pimflow.placement.solvers.solution import Solution

BOUNDS = ("max_latency_ns", "max_energy_pj", "max_memory_bytes", "max_error")

# Bounds are met up to rounding: times of the same plan are summed in different orders.
ROUNDING = 1e-9


def round_up(amount: float, unit: str, factor: float) -> str:
    """`amount` in a larger unit as text, rounded up, so that it is a bound that `amount` meets."""
    return f"{math.ceil(amount / factor * 1000) / 1000:.3f}{unit}"


@check_keywords
@dataclass(frozen=True, kw_only=True)
class Goal(GoalOptions):
    """The goal of a search: the objective, the solver and the bounds.

    Attributes
    ----------
    objective : str
        ``latency``, ``energy`` or ``edp``, their product; or ``memory``, and of equally small plans the
        fastest.
    solver : str
        ``label``: the label-setting search. ``exhaustive``: every cover of a network of at most 8 regions.
    search_seconds : float
        How long a search may be exact. After that, partial plans are dropped; the plan comes with a bound on
        how much better another one may be. An exhaustive search that takes longer, by an estimate in CPU
        seconds, is refused.
    max_latency_ns, max_energy_pj : float or None
        Bounds on latency and energy.
    max_memory_bytes : float or None
        Bound on the pool of tensors (`placement.solvers.plan_memory`), without weights.
    max_error : float or None
        Bound on the sum of the candidates' errors (`core.candidate.LayerAlternative.error`), 0 or more.
    modes : sequence of str, or str
        The allowed modes of regions: ``gpu``, which is required, ``pim``, ``split`` and ``pipeline``, in
        upper or lower case; a sequence, or one text with commas.
    pins : mapping of str to str
        How layers are done, all others being searched: ``gpu``, ``pim``, ``split``, or ``split:SHARE`` with
        the GPU's share, such as ``split:0.4``. Kept as pairs, in order of names.
    primitives : bool
        Whether the GPU may compute convolutions by primitives, in fp32.

    Raises
    ------
    UnknownNameError, UsageError
        For an unknown objective, solver, mode or pin, a bound that is no number above zero, and modes
        without ``gpu``.
    """

    def value(self, evaluation: Evaluation) -> float:
        """The value of the objective for a plan; for ``memory`` its latency, which decides between equals."""
        return {
            "latency": evaluation.latency_ns,
            "energy": evaluation.energy_pj,
            "edp": evaluation.latency_ns * evaluation.energy_pj,
            "memory": evaluation.latency_ns,
        }[self.objective]

    @property
    def saves_memory(self) -> bool:
        """Whether memory matters: it is the objective, or has a bound."""
        return self.objective == "memory" or self.max_memory_bytes is not None

    def rank(self, plan: EvaluatedPlan) -> tuple[float, float]:
        """The sort key of a plan: the better the plan, the smaller the key."""
        return plan.memory_bytes if self.objective == "memory" else 0.0, self.value(plan.evaluation)

    @property
    def bounds(self) -> dict[str, float]:
        """The bounds that are set, by field."""
        bounds = {name: getattr(self, name) for name in BOUNDS}
        return {name: bound for name, bound in bounds.items() if bound is not None}

    def allows(self, evaluation: Evaluation) -> bool:
        """Whether a plan keeps to the bounds on latency and energy."""
        return evaluation.latency_ns <= (self.max_latency_ns or math.inf) * (
            1 + ROUNDING
        ) and evaluation.energy_pj <= (self.max_energy_pj or math.inf) * (1 + ROUNDING)

    def require(self, network: str, evaluation: Evaluation, memory_bytes: float) -> None:
        """Raise `InfeasibleError` unless a plan that was given, not searched, keeps to the bounds."""
        for quantity_name, needed, bound, unit in (
            ("latency", evaluation.latency_ns, self.max_latency_ns, "ns"),
            ("energy", evaluation.energy_pj, self.max_energy_pj, "pJ"),
            ("memory", memory_bytes, self.max_memory_bytes, "bytes"),
        ):
            if bound and needed > bound * (1 + ROUNDING):
                levers = ("a search instead of the plan",)
                raise InfeasibleError(
                    f"{quantity_name} of the plan for '{network}'", needed, bound, unit, levers
                )

    def require_error(self, network: str, error: float) -> None:
        """Raise `InfeasibleError` if the sum of the errors of a network's layers exceeds the bound."""
        if self.max_error is not None and error > self.max_error + ROUNDING:
            levers = (
                f"--max-error {round_up(error, '', 1.0)}",
                "where=pays, which keeps layers as they came",
            )
            raise InfeasibleError(f"error of '{network}'", error, self.max_error, "", levers)


@dataclass(frozen=True, kw_only=True)
class EvaluatedPlan:
    """A solution with its evaluation and its memory (`plan_memory.PlanMemory`)."""

    solution: Solution
    evaluation: Evaluation
    memory_bytes: int

    @property
    def error(self) -> float:
        """The sum of the candidates' errors."""
        return sum(candidate.alternative.error for candidate in self.solution.candidates)
