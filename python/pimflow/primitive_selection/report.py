"""Reports on convolution primitives: as dataclasses, from which JSON is written, and as text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from pimflow.core.candidate import Cost
from pimflow.core.json_form import OMITTED, named, report_from
from pimflow.core.rewrite import OPERATOR_KERNELS
from pimflow.placement import SearchResult
from pimflow.primitive_selection.problem import Transform
from pimflow.primitive_selection.profile import NetworkTimeReport
from pimflow.primitives import PRIMITIVES
from pimflow.primitives.launches import usable_primitives

SHOWN_LAYERS = 3  # names of layers that a line has at most


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Time, memory and workspace of a selection.

    Attributes
    ----------
    guessed_ns : float
        The part of the time that is predicted or modelled, not measured.
    """

    time_ns: float
    memory_bytes: int
    workspace_bytes: int
    guessed_ns: float

    def text(self) -> str:
        """The figures as one line."""
        mib = 2**20
        share = self.guessed_ns / self.time_ns if self.time_ns else 0.0
        return (
            f"{self.time_ns / 1e6:.3f} ms ({share:.0%} not measured), memory {self.memory_bytes / mib:.2f} "
            f"MiB, workspace {self.workspace_bytes / mib:.2f} MiB"
        )


@dataclass(frozen=True, kw_only=True)
class Baseline(Figures):
    """One kind of primitive in all layers.

    Attributes
    ----------
    substituted : tuple of str
        The layers to which it does not apply, and which another kind computes.
    """

    substituted: tuple[str, ...]

    def text(self) -> str:
        """The figures as one line, with the layers that another kind computes."""
        if not self.substituted:
            return super().text()
        names = ", ".join(self.substituted[:SHOWN_LAYERS])
        more = ", …" if len(self.substituted) > SHOWN_LAYERS else ""
        return f"{super().text()}; does not apply to {len(self.substituted)} layers ({names}{more})"


@dataclass(frozen=True, kw_only=True)
class ChosenPrimitive:
    """The primitive that computes a convolution.

    Attributes
    ----------
    known : str
        Source of its time: ``measured``, ``predicted`` or ``analytic``.
    """

    layer: str
    primitive: str
    input_layout: str
    output_layout: str
    time_ns: float
    known: str
    workspace_bytes: int
    filter_bytes: int


@dataclass(frozen=True, kw_only=True)
class OtherLayer:
    """The layout of a layer without primitives."""

    layer: str
    layout: str
    time_ns: float


@dataclass(frozen=True, kw_only=True)
class TimesReport:
    """How many primitives that apply to the layers have a time.

    Attributes
    ----------
    primitives, applicable : int
        Number of primitives with a measured time, and of all that apply.
    layouts_untimed : int
        Layouts of other layers without times.
    """

    primitives: int
    applicable: int = field(metadata=named("of"))
    predicted: int
    failed: int
    layouts_untimed: int


@dataclass(frozen=True, kw_only=True)
class SelectionFrontPoint(Figures):
    """A point of a front, and the time of the paper's greedy selection within the same budget."""

    greedy_time_ns: float | None


@dataclass(frozen=True, kw_only=True)
class SelectionReport:
    """A selection of primitives.

    Attributes
    ----------
    status : str
        ``optimal`` or ``time limit``.
    transforms : tuple of Transform
        Layout transforms.
    greedy_time_ns : float or None
        Of the paper's greedy selection; None if it finds none.
    gap : float
        Gap to the bound of the integer program.
    guessed_ns : float
        The part of the time that is predicted or modelled, not measured.
    """

    network: str
    status: str
    minimize: str
    memory_model: str
    time_ns: float
    memory_bytes: int
    workspace_bytes: int
    guessed_ns: float
    choices: tuple[ChosenPrimitive, ...]
    others: tuple[OtherLayer, ...]
    transforms: tuple[Transform, ...]
    greedy_time_ns: float | None
    baselines: dict[str, Baseline]
    solve_seconds: float
    gap: float
    device: str
    measured: TimesReport
    network_time: NetworkTimeReport | None = field(default=None, metadata=OMITTED)
    front: tuple[SelectionFrontPoint, ...] | None = field(default=None, metadata=OMITTED)

    @property
    def figures(self) -> Figures:
        """Its time, memory and workspace."""
        return report_from(Figures, self)


@dataclass(frozen=True, kw_only=True)
class PlannedPrimitive:
    """A primitive of the GPU in a plan.

    Attributes
    ----------
    launches : int
        Kernel launches in an inference.
    operator_ns : float
        Time of the operator instead of the primitive.
    """

    layer: str
    primitive: str
    launches: int
    time_ns: float
    operator_ns: float
    known: str
    workspace_bytes: int
    filter_bytes: int


@dataclass(frozen=True, kw_only=True)
class PlanPrimitives:
    """The GPU's primitives in a plan.

    Attributes
    ----------
    device : str
        The GPU, and the source of its times.
    layers : int
        Layers that a primitive can compute.
    latency_operators_ns, latency_gpu_only_operators_ns : float
        Without primitives: latency of the best plan, and of the GPU only.
    saved_ns, saved_gpu_only_ns : float
        By how much primitives shorten these.
    workspace_bytes : int
        Size of the largest workspace.
    filter_bytes : int
        Size of all transformed filters.
    """

    device: str
    layers: int
    choices: tuple[PlannedPrimitive, ...]
    latency_operators_ns: float
    saved_ns: float
    latency_gpu_only_operators_ns: float
    saved_gpu_only_ns: float
    workspace_bytes: int
    filter_bytes: int


def plan_primitives(search_result: SearchResult, operators: SearchResult) -> PlanPrimitives:
    """The GPU's primitives in a plan, for a report.

    Parameters
    ----------
    operators : SearchResult
        Result of the same search without primitives.
    """
    costs, graph, choices = search_result.costs, search_result.graph, []
    for name, primitive in search_result.primitives().items():
        candidate, region = search_result.candidate_by_region[name], graph.region(name)
        cost = Cost.from_candidate(candidate)
        operator = search_result.generator.make(region, OPERATOR_KERNELS, search_result.plan.gpu_channels)
        choices.append(
            PlannedPrimitive(
                layer=name,
                primitive=primitive.name,
                launches=len(candidate.tasks),
                time_ns=cost.latency_ns,
                operator_ns=Cost.from_candidate(operator).latency_ns,
                known=cost.known["gpu"].value,
                workspace_bytes=candidate.footprint.workspace_bytes,
                filter_bytes=candidate.footprint.filter_bytes,
            )
        )
    return PlanPrimitives(
        device=f"{search_result.system.gpu.name}, {costs.profiling.gpu.name}",
        layers=sum(bool(usable_primitives(region)) for region in graph.regions),
        choices=tuple(choices),
        latency_operators_ns=operators.evaluation.latency_ns,
        saved_ns=operators.evaluation.latency_ns - search_result.evaluation.latency_ns,
        latency_gpu_only_operators_ns=operators.baseline.latency_ns,
        saved_gpu_only_ns=operators.baseline.latency_ns - search_result.baseline.latency_ns,
        workspace_bytes=max((choice.workspace_bytes for choice in choices), default=0),
        filter_bytes=sum(choice.filter_bytes for choice in choices),
    )


def primitives_text(report: SelectionReport | PlanPrimitives) -> list[str]:
    """Lines about primitives in the table that ``pimflow compile`` prints."""
    if isinstance(report, PlanPrimitives):
        return [_plan_text(report)]
    line = (
        f"primitives of {len(report.choices)} layers for {report.device}: "
        f"{report.time_ns / 1e6:.3f} ms by themselves, {report.status}"
    )
    return [line, report.network_time.text()] if report.network_time else [line]


def _plan_text(report: PlanPrimitives) -> str:
    families = Counter(PRIMITIVES[choice.primitive].family for choice in report.choices)
    families_text = ", ".join(f"{family} {count}" for family, count in sorted(families.items()))
    return (
        f"primitives of {len(report.choices)} of {report.layers} "
        f"layers{families_text and f' ({families_text})'}: "
        f"{report.saved_ns / 1e3:.2f} us saved against operators alone, "
        f"{report.saved_gpu_only_ns / 1e3:.2f} us of the GPU alone; workspaces up to "
        f"{report.workspace_bytes / 2**20:.2f} MiB, filters {report.filter_bytes / 2**20:.2f} MiB"
    )
