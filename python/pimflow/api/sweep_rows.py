"""The rows of a sweep."""

from __future__ import annotations

from dataclasses import dataclass

from pimflow.api.options import names
from pimflow.core.json_form import Json, fields_form, json_form
from pimflow.hardware.settings import Value
from pimflow.placement import Searched

CONVENTIONS = ("accounting", "timing", "copies", "padding", "launches")  # settings that are no designs


@dataclass(frozen=True, kw_only=True)
class SweepFigures:
    """What a search finds.

    Attributes
    ----------
    latency_gpu_only_ns, energy_gpu_only_pj : float
        Of the network as it was given, on the GPU with all memory channels.
    latency_mixture_gpu_only_ns, energy_mixture_gpu_only_pj : float
        Of the best that the network may become, there.
    regions_with_pim : int
        Of `regions`, those that are not the GPU's alone.
    pim_busy_ns, gpu_busy_ns, crossbar_busy_ns : float
        How long tasks of the plan occupy each, launches included.
    launching_ns : float
        Of that, what launches take on the GPU and PIM.
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
    def of(cls, searched: Searched) -> SweepFigures:
        plan, gpu_only = searched.evaluation, searched.baseline
        mixture = searched.mixture or gpu_only
        modes = [choice.mode for choice in searched.plan.choices]
        timeline = plan.timeline
        launching_ps = sum(each.begun_ps - each.start_ps for each in timeline.events)
        return cls(
            latency_gpu_only_ns=gpu_only.latency_ns,
            latency_ns=plan.latency_ns,
            speedup=gpu_only.latency_ns / plan.latency_ns,
            energy_gpu_only_pj=gpu_only.energy_pj,
            energy_pj=plan.energy_pj,
            latency_mixture_gpu_only_ns=mixture.latency_ns,
            energy_mixture_gpu_only_pj=mixture.energy_pj,
            regions=len(modes),
            regions_with_pim=sum(mode != "GPU" for mode in modes),
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
        None if there is no plan, for the reason that `error` says.
    pareto : bool
        Whether no other row of the network, under the same conventions, is better in latency or energy and
        as good in the other.
    """

    model: str
    settings: dict[str, Value]
    figures: SweepFigures | None
    error: str
    pareto: bool = False

    @property
    def convention(self) -> dict[str, Value]:
        """Those of its settings that say how a design is counted, and are no part of one."""
        return {name: value for name, value in self.settings.items() if name in CONVENTIONS}

    def beats(self, other: SweepRow) -> bool:
        """Whether it makes another row of the same network, counted the same way, needless."""
        alike = (self.model, self.convention) == (other.model, other.convention)
        if not self.figures or not other.figures or not alike:
            return False
        own, its = ((each.latency_ns, each.energy_pj) for each in (self.figures, other.figures))
        return own != its and all(a <= b for a, b in zip(own, its))

    def to_json(self) -> dict[str, Json]:
        """As a row of a table: settings and figures by name; empty figures where there are none."""
        figures = fields_form(self.figures) if self.figures else dict.fromkeys(names(SweepFigures), "")
        settings = {name: json_form(value) for name, value in self.settings.items()}
        return {"model": self.model, **settings, **figures, "error": self.error, "pareto": self.pareto}
