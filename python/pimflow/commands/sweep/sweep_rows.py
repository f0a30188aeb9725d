"""The rows of a sweep."""

from __future__ import annotations

from dataclasses import dataclass

from pimflow.core.json_form import Json, fields_form, json_form
from pimflow.core.options import declarations, field_names
from pimflow.hardware import System
from pimflow.hardware.settings import Value
from pimflow.placement import SearchResult

ROWS = "sweep.json"  # the file of a sweep
# Settings that are not of a design.
CONVENTIONS = [name for name, declaration in declarations(System).items() if declaration.is_convention]


@dataclass(frozen=True, kw_only=True)
class SweepFigures:
    """Figures of a searched plan.

    Attributes
    ----------
    latency_gpu_only_ns, energy_gpu_only_pj : float
        Of the original network on the GPU with all memory channels.
    latency_mixture_gpu_only_ns, energy_mixture_gpu_only_pj : float
        There, of the best choice of original and decomposed layers.
    pim_busy_ns, gpu_busy_ns, crossbar_busy_ns : float
        Time that tasks of the plan occupy each, launches included.
    launching_ns : float
        Time of launches on the GPU and PIM, which is part of the above.
    """

    latency_gpu_only_ns: float
    latency_ns: float
    speedup: float
    energy_gpu_only_pj: float
    energy_pj: float
    latency_mixture_gpu_only_ns: float
    energy_mixture_gpu_only_pj: float
    regions: int
    regions_with_pim: int
    pim_busy_ns: float
    gpu_busy_ns: float
    crossbar_busy_ns: float
    launching_ns: float

    @classmethod
    def from_search(cls, search_result: SearchResult) -> SweepFigures:
        """From a search result."""
        plan, gpu_only = search_result.evaluation, search_result.baseline
        mixture = search_result.mixture or gpu_only
        choices = search_result.plan.choices
        timeline = plan.timeline
        launching_ps = sum(event.begun_ps - event.start_ps for event in timeline.events)
        return cls(
            latency_gpu_only_ns=gpu_only.latency_ns,
            latency_ns=plan.latency_ns,
            speedup=gpu_only.latency_ns / plan.latency_ns,
            energy_gpu_only_pj=gpu_only.energy_pj,
            energy_pj=plan.energy_pj,
            latency_mixture_gpu_only_ns=mixture.latency_ns,
            energy_mixture_gpu_only_pj=mixture.energy_pj,
            regions=len(choices),
            regions_with_pim=sum(choice.uses_pim for choice in choices),
            pim_busy_ns=timeline.busy_ps("pim") / 1000,
            gpu_busy_ns=timeline.busy_ps("gpu") / 1000,
            crossbar_busy_ns=timeline.busy_ps("crossbar") / 1000,
            launching_ns=launching_ps / 1000,
        )


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """A network under some settings.

    Attributes
    ----------
    settings : dict of str to Value
        By name.
    figures : SweepFigures or None
        None if there is no plan; `error` is the reason.
    pareto : bool
        Whether no other row of the network under the same conventions dominates it in latency and energy.
    report : str
        Path of its report in the directory of the sweep, if it was compiled.
    """

    model: str
    settings: dict[str, Value]
    figures: SweepFigures | None
    error: str
    pareto: bool = False
    report: str = ""

    @property
    def convention(self) -> dict[str, Value]:
        """Those of its settings that are conventions, not part of the design."""
        return {name: value for name, value in self.settings.items() if name in CONVENTIONS}

    def dominates(self, rival: SweepRow) -> bool:
        """Whether it dominates another row of the same network under the same conventions."""
        is_comparable = (self.model, self.convention) == (rival.model, rival.convention)
        if not self.figures or not rival.figures or not is_comparable:
            return False
        costs, rival_costs = (
            (figures.latency_ns, figures.energy_pj) for figures in (self.figures, rival.figures)
        )
        return costs != rival_costs and all(a <= b for a, b in zip(costs, rival_costs))

    def to_json(self) -> dict[str, Json]:
        """A row of the table: settings and figures by name; figures are empty without a plan."""
        figures = fields_form(self.figures) if self.figures else dict.fromkeys(field_names(SweepFigures), "")
        settings = {name: json_form(value) for name, value in self.settings.items()}
        ends: dict[str, Json] = {"error": self.error, "pareto": self.pareto, "report": self.report}
        return {"model": self.model, **settings, **figures, **ends}
