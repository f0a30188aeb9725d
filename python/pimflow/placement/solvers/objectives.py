"""The goal of a search: the objective, the solver and the bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from pimflow.core.candidate import Candidate
from pimflow.core.goal import GoalOptions
from pimflow.core.keywords import check_keywords
from pimflow.errors import InfeasibleError
from pimflow.placement.solvers.evaluate import Evaluation

# Bounds are met up to rounding: times of the same plan are summed in different orders.
ROUNDING = 1e-9


GIVEN_PLAN_LEVER = "a search instead of the plan"


def with_rounding(bound: float) -> float:
    """`bound` with what sums of the same terms may differ by."""
    return bound + ROUNDING * max(bound, 1.0)


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A quantity of plans that a goal may bound, and the option that sets the bound.

    Attributes
    ----------
    option_unit, factor, digits
        Unit of the option's value, how many of `unit` that is, and decimals to which it is rounded up.
    amount : callable
        How much of it a plan takes.
    """

    quantity: str
    unit: str
    option: str
    option_unit: str
    factor: float = 1.0
    digits: int = 3
    amount: Callable[[EvaluatedPlan], float]

    def lever(self, amount: float) -> str:
        """The option with a value that `amount` meets."""
        rounded = math.ceil(amount / self.factor * 10**self.digits) / 10**self.digits
        return f"{self.option} {rounded:.{self.digits}f}{self.option_unit}"


# By field of a goal; errors name them in this order.
BOUNDS = {
    "max_latency_ns": Bound(
        quantity="latency",
        unit="ns",
        option="--max-latency",
        option_unit="us",
        factor=1e3,
        amount=lambda plan: plan.evaluation.latency_ns,
    ),
    "max_energy_pj": Bound(
        quantity="energy",
        unit="pJ",
        option="--max-energy",
        option_unit="uJ",
        factor=1e6,
        amount=lambda plan: plan.evaluation.energy_pj,
    ),
    "max_memory_bytes": Bound(
        quantity="memory",
        unit="bytes",
        option="--memory-budget",
        option_unit="B",
        digits=0,
        amount=lambda plan: plan.memory_bytes,
    ),
    "max_error": Bound(
        quantity="error", unit="", option="--max-error", option_unit="", amount=lambda plan: plan.error
    ),
}


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
        How many CPU seconds a search may be exact. After that, partial plans are dropped; the plan comes
        with a bound on how much better another one may be. An exhaustive search that takes longer, by an
        estimate, is refused.
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
    kernel_device : str
        Whose kernels' workspaces count as memory: ``gpu``, or ``cpu``, its stand-in; none by default.

    Raises
    ------
    UnknownNameError, UsageError
        For an unknown objective, solver, mode or pin, a bound that is no number above zero, and modes
        without ``gpu``.
    """

    kernel_device: str = ""

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
        bounds = {field: getattr(self, field) for field in BOUNDS}
        return {field: bound for field, bound in bounds.items() if bound is not None}

    def allows(self, plan: EvaluatedPlan) -> bool:
        """Whether a plan keeps to the bounds."""
        return all(BOUNDS[field].amount(plan) <= with_rounding(bound) for field, bound in self.bounds.items())

    def require(self, network: str, plan: EvaluatedPlan) -> None:
        """Raise `InfeasibleError` unless a plan that was given, not searched, keeps to the bounds."""
        for field, limit in self.bounds.items():
            bound = BOUNDS[field]
            if (needed := bound.amount(plan)) > with_rounding(limit):
                subject = f"{bound.quantity} of the plan for '{network}'"
                raise InfeasibleError(subject, needed, limit, bound.unit, [GIVEN_PLAN_LEVER])

    def require_error(self, network: str, error: float) -> None:
        """Raise `InfeasibleError` if the sum of the errors of a network's layers exceeds the bound."""
        if self.max_error is not None and error > with_rounding(self.max_error):
            levers = (BOUNDS["max_error"].lever(error), "where=pays, which keeps layers as they came")
            raise InfeasibleError(f"error of '{network}'", error, self.max_error, "", levers)


@dataclass(frozen=True, kw_only=True)
class EvaluatedPlan:
    """Candidates in the order of their first regions, with their evaluation and memory (`PlanMemory`).

    Attributes
    ----------
    value, bound : float
        The value that was minimised, and a lower bound of it for all plans within the bounds; 0 without a
        search.
    """

    candidates: tuple[Candidate, ...]
    evaluation: Evaluation
    memory_bytes: int
    value: float = 0.0
    bound: float = 0.0

    @property
    def uses_pim(self) -> bool:
        """Whether PIM computes any part of it."""
        return any(candidate.uses_pim for candidate in self.candidates)

    @property
    def gap(self) -> float:
        """By what share of the value another plan may be better, at most; 0 if the search ended."""
        return max(0.0, 1 - self.bound / self.value) if self.value else 0.0

    @property
    def error(self) -> float:
        """The sum of the candidates' errors."""
        return sum(candidate.alternative.error for candidate in self.candidates)

    @property
    def figures(self) -> tuple[float, float, int]:
        """What fronts compare, latency, energy and memory; less is better."""
        return self.evaluation.latency_ns, self.evaluation.energy_pj, self.memory_bytes

    def is_as_good(self, plan: EvaluatedPlan) -> bool:
        """Whether it is as good as `plan` in every figure, up to rounding."""
        return all(a <= b * (1 + ROUNDING) for a, b in zip(self.figures, plan.figures))
