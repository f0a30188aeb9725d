"""The part of a report about a plan: its goal, its latency, and what that is compared with."""

from __future__ import annotations

from dataclasses import dataclass, field

from pimflow.core.json_form import FLAT, named, report_from
from pimflow.placement import Evaluation, SearchResult

BASELINE = "the network as it was given, on the GPU with all memory channels"
MIXTURE = "the best that it may become"


@dataclass(frozen=True, kw_only=True)
class GpuOnlyCost:
    """Latency and energy of a network on the GPU with all memory channels."""

    latency_ns: float
    energy_pj: float

    @classmethod
    def from_evaluation(cls, evaluation: Evaluation) -> GpuOnlyCost:
        """From an evaluation."""
        return report_from(cls, evaluation)

    def text(self) -> str:
        return f"{self.latency_ns / 1e6:.4f} ms and {self.energy_pj / 1e9:.2f} mJ"


@dataclass(frozen=True, kw_only=True)
class Baselines:
    """The networks on the GPU alone that a plan is compared with.

    `given` is the original network, `mixture` the best choice of original and decomposed layers; None if no
    layer may be decomposed. Both have fused kernels and primitives where the plan may have them.
    """

    given: GpuOnlyCost
    mixture: GpuOnlyCost | None

    @classmethod
    def from_search(cls, search_result: SearchResult) -> Baselines:
        """From a search result."""
        mixture = GpuOnlyCost.from_evaluation(search_result.mixture) if search_result.mixture else None
        return cls(given=GpuOnlyCost.from_evaluation(search_result.baseline), mixture=mixture)

    def text(self) -> str:
        """Both baselines in a line."""
        mixture_text = f", {MIXTURE} {self.mixture.text()}" if self.mixture else ""
        return f"{BASELINE}: {self.given.text()}{mixture_text}"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The goal of the search, and the proved quality of the plan.

    Attributes
    ----------
    modes : tuple of str
        Modes that regions may have, in lower case.
    pins : dict of str to str
        How pinned layers are done (`placement.Goal`).
    gap : float
        How much better another plan may be, at most, as a share of the objective; 0 if the search ended.
    lower_bound_ns : float
        Lower bound of the latency of all plans with these candidates.
    bounds : dict of str to float
        Bounds of the goal, by its fields.
    overlapped_ns : dict of str to float
        By region, the time that overlap with other regions saves.
    """

    objective: str
    modes: tuple[str, ...]
    pins: dict[str, str]
    solver: str
    gap: float
    lower_bound_ns: float
    bounds: dict[str, float]
    overlapped_ns: dict[str, float]

    @classmethod
    def from_search(cls, search_result: SearchResult) -> Estimate:
        """From a search result."""
        goal = search_result.goal
        return report_from(
            cls,
            goal,
            modes=tuple(mode.lower() for mode in goal.modes),
            pins=goal.how_by_layer,
            gap=search_result.gap,
            lower_bound_ns=search_result.plan.lower_bound_ns,
            overlapped_ns=search_result.evaluation.overlap_ns,
        )


@dataclass(frozen=True, kw_only=True)
class Convention:
    """Speed-ups over the GPU alone, under another convention than the plan's.

    Attributes
    ----------
    name : str
        As `compile` takes it, such as ``pim-launch=0``.
    what : str
        Such as ``PIM launch 0``.
    same_plan : float or None
        Of the plan, evaluated under the convention; None if it is impossible there.
    searched_again : float or None
        Of the best plan there; None if a plan was given, so that nothing is searched.
    gap : float
        How much better another plan may be there, at most, as a share of the objective; 0 if the search
        ended.
    """

    name: str
    what: str
    same_plan: float | None
    searched_again: float | None
    gap: float


@dataclass(frozen=True, kw_only=True)
class AccountingTerm:
    """The latency of a plan if `term` is charged too; see `commands.compile.conventions.accounting_terms`."""

    term: str
    latency_ns: float


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """The latency of a plan, and of what it is compared with.

    Attributes
    ----------
    baseline : str
        What the plan is compared with: the subject of all figures called ``gpu_only``.
    mixture_gpu_only : GpuOnlyCost, optional
        Figures there of the best choice of original and decomposed layers, if layers may be decomposed.
    """

    baseline: str
    mixture_gpu_only: GpuOnlyCost | None
    latency_gpu_only_ns: float
    latency_ns: float
    estimate: Estimate = field(metadata=FLAT)
    speedup: float

    @classmethod
    def from_search(cls, search_result: SearchResult) -> PlanReport:
        """From a search result."""
        return cls(
            baseline=BASELINE,
            mixture_gpu_only=Baselines.from_search(search_result).mixture,
            latency_gpu_only_ns=search_result.baseline.latency_ns,
            latency_ns=search_result.evaluation.latency_ns,
            estimate=Estimate.from_search(search_result),
            speedup=search_result.speedup,
        )


@dataclass(frozen=True, kw_only=True)
class ConventionsReport:
    """Speed-ups under other conventions than the plan's.

    Attributes
    ----------
    missing : tuple of str
        Names of conventions that were not searched: not requested, or the search was interrupted.
    accounting_terms : tuple of AccountingTerm
        Steps from the latency under the lesser accounting to that under the full one; empty if the other
        accounting was not searched.
    """

    searched: tuple[Convention, ...] = field(default=(), metadata=named("conventions"))
    missing: tuple[str, ...] = field(metadata=named("conventions_missing"))
    accounting_terms: tuple[AccountingTerm, ...] = ()
