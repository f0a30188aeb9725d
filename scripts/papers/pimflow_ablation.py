"""Why speed-ups differ from the published ones, by one term of the accounting or of the GPU at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from papers.pimflow_comparison import OURS, PIMFLOW, Configuration, Row, Searches, plan_figures, read_once
from pimflow.hardware import GpuSpec, System
from pimflow.hardware.systems import CHARGES
from pimflow.placement import Goal
from pimflow.simulators.gpu.model import KernelCost, KernelRequest
from pimflow.simulators.profiler import Analytic

MODEL = "mobilenet-v2"
# Of the GPU alone on MODEL, from the artifact: cycles at the core clock of its simulated part, and kernels.
PUBLISHED_CYCLES = 1_445_620
PUBLISHED_KERNELS = 107
# In the order in which they are switched on; together they are full accounting and strict timing.
# Channel modes cost nothing there: the channels of the published system are partitioned.
TERMS = ("timing", *(charge for charge in CHARGES if charge != "channel-modes"))
ALL_TERMS = ("timing", *CHARGES)


@dataclass(frozen=True)
class ScaledAnalytic:
    """The analytic model with execution times scaled by a factor; launches are not scaled."""

    factor: float
    computes: ClassVar[bool] = True
    primitives: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return f"analytic, executions x {self.factor!r}"

    def costs(self, requests: Sequence[KernelRequest], gpu: GpuSpec, dtype: str) -> list[KernelCost]:
        """The analytic costs with execution times multiplied by the factor."""
        analytic_costs = Analytic().costs(requests, gpu, dtype)
        return [replace(cost, execution_ns=cost.execution_ns * self.factor) for cost in analytic_costs]


def system_with_charges(configuration: Configuration, terms: Sequence[str]) -> System:
    """The system of a configuration with the paper's accounting, and `terms` of `ALL_TERMS` charged too."""
    charges = [term for term in terms if term in CHARGES]
    timing = "strict" if "timing" in terms else "ramulator-pimflow"
    return configuration.system("+".join(["paper", *charges]), timing)


def terms(searches: Searches, models: Sequence[str], configuration: Configuration = PIMFLOW) -> list[Row]:
    """Rows from the paper's accounting to the full one, of each network.

    Each charges a term ``alone``, and ``together`` with all terms before it.
    """
    rows = []
    for model in models:
        base = _search_row(searches, model, configuration, ())
        rows.append({"model": model, "term": "paper", "alone": base, "together": base})
        for count, term in enumerate(TERMS, start=1):
            alone, together = (
                _search_row(searches, model, configuration, charged) for charged in ((term,), TERMS[:count])
            )
            rows.append({"model": model, "term": term, "alone": alone, "together": together})
    return rows


def _search_row(
    searches: Searches, model: str, configuration: Configuration, charged_terms: Sequence[str]
) -> Row:
    return plan_figures(
        searches.search(
            model, system_with_charges(configuration, charged_terms), Goal(modes=configuration.modes)
        )
    )


def gains(searches: Searches, model: str = MODEL) -> list[Row]:
    """Rows of what this search adds to the paper's, step by step, by both accountings."""
    steps = {
        "as published": PIMFLOW,
        "the best splits": replace(PIMFLOW, splits=OURS.splits),
        "all loop orders, depthwise layers on PIM": replace(OURS, channel_sharing=PIMFLOW.channel_sharing),
        "channels that the GPU uses too": OURS,
    }
    return [
        {
            "term": step,
            "paper": _search_row(searches, model, configuration, ()),
            "full": _search_row(searches, model, configuration, ALL_TERMS),
        }
        for step, configuration in steps.items()
    ]


def gpu_side(
    searches: Searches,
    model: str = MODEL,
    published_ns: float | None = None,
    published_kernels: int = PUBLISHED_KERNELS,
    configuration: Configuration = PIMFLOW,
) -> list[Row]:
    """Rows by the paper's accounting, with launches or executions of the GPU, or both, as published.

    ``energy_change_read_once`` is the change of energy at the price of `read_once`.

    Parameters
    ----------
    published_ns : float, optional
        Latency of the GPU alone; that of `PUBLISHED_CYCLES` by default.
    published_kernels : int
        Number of its kernels; a launch takes as long as here.
    """
    base = system_with_charges(configuration, ())
    published_ns = published_ns or PUBLISHED_CYCLES / base.gpu.clock_mhz * 1e3
    ours = searches.search(model, base, Goal(modes=configuration.modes))
    launch_ns, events = base.gpu.launch_ns, ours.gpu_only.timeline.events
    kernels = sum(event.launched for event in events if event.resource == "gpu")
    execution_ns = ours.gpu_only.latency_ns - kernels * launch_ns
    scaled = ScaledAnalytic((published_ns - published_kernels * launch_ns) / execution_ns)
    longer_launch_ns = launch_ns * published_kernels / kernels
    cases = {
        "as here": (launch_ns, None),
        "launches": (longer_launch_ns, None),
        "executions": (launch_ns, scaled),
        "both": (longer_launch_ns, scaled),
        "no launches": (0.0, None),
    }
    rows = []
    for case, (gpu_ns, profiler) in cases.items():
        profiling = replace(searches.profiling, gpu=profiler) if profiler else searches.profiling
        changed = base.with_launches(gpu_ns=gpu_ns, pim_ns=base.pim_launch_ns)
        row, cheaper = (
            plan_figures(searches.search(model, variant, Goal(modes=configuration.modes), profiling))
            for variant in (changed, read_once(changed))
        )
        figures = {"kernels": kernels, "launch_ns": gpu_ns, "execution_factor": 1.0}
        if profiler:
            figures["execution_factor"] = profiler.factor
        figures["energy_change_read_once"] = cheaper["energy_change"]
        rows.append({"way": case, **figures, **row})
    return rows
