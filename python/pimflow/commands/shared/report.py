"""The report of a compilation, as a tree: the contents of ``report.json``.

Times are in ns, energies in pJ, shares in [0, 1]. `pimflow.commands.shared.report_text` prints it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pimflow.commands.shared.channel_report import ChannelCount
from pimflow.commands.shared.front import ParetoPoint
from pimflow.commands.shared.layer_details import CandidateReport, LayerSize, ProgramReport
from pimflow.commands.shared.memory_report import MemoryReport
from pimflow.commands.shared.plan_report import ConventionsReport, PlanReport
from pimflow.commands.shared.streaming_report import CopyDistance
from pimflow.compiler.artifact import REPORT_VERSION
from pimflow.compiler.c_report import CReport
from pimflow.core.candidate import Provenance
from pimflow.core.frames import Tabular
from pimflow.core.json_form import FLAT, OMITTED, JsonTree, named, report_from
from pimflow.core.output_error import OutputCheck, max_error_check
from pimflow.core.rewrite import Mode
from pimflow.core.split import Axis
from pimflow.decomposition.report import DecompositionReport, SkipsReport
from pimflow.memory.reorder import OrderSummary
from pimflow.placement import SearchResult
from pimflow.placement.solvers.evaluate import savings_pj
from pimflow.primitive_selection.report import PlanPrimitives, SelectionReport

if TYPE_CHECKING:
    from pimflow.hardware import System
    from pimflow.pim_backend.runtime.cuda_binary import CudaKernels


@dataclass(frozen=True, kw_only=True)
class RegionReport:
    """The plan's choice for a region, with its times and energies.

    Attributes
    ----------
    reads : tuple of str
        Regions whose results it reads.
    covers : tuple of str
        All regions of its candidate; their common times and energy stand at the first.
    gpu_share : float or None
        The GPU's share of the work; None for a pipeline.
    axis : Axis or empty text
        The axis of a split; empty for other modes.
    latency_gpu_only_ns, latency_ns : float
        By how much it prolongs the network on the GPU alone, and the plan: both add up to the total, since
        time in which layers before it run too counts only there.
    busy_gpu_only_ns, idle_gpu_only_ns : float
        On the GPU alone, the time of its kernels, and the time in which the GPU waits for it: together they
        add up to the total.
    busy_ns, idle_ns : dict of str to float
        The same in the plan, by resource (`RegionTimes`): of each, they add up to the plan's latency.
    known : dict of str to Provenance
        By resource, how its time is known.
    schedule : str
        Loop orders of its PIM programs.
    reason : str
        Why it stays on the GPU, if it does.
    energy_gpu_only_pj, energy_pj : float
        Energy of its tasks, without constant power.
    candidates : tuple of CandidateReport
        All its candidates, the fastest first.
    programs : tuple of ProgramReport
        Its PIM programs.
    """

    name: str
    reads: tuple[str, ...]
    covers: tuple[str, ...]
    mode: Mode
    gpu_share: float | None
    axis: Axis | Literal[""]
    latency_gpu_only_ns: float
    busy_gpu_only_ns: float
    idle_gpu_only_ns: float
    latency_ns: float
    busy_ns: dict[str, float]
    idle_ns: dict[str, float]
    known: dict[str, Provenance]
    schedule: str
    primitive: str
    on_pim: bool
    pim_capable: bool
    reason: str
    size: LayerSize = field(metadata=FLAT)
    energy_gpu_only_pj: float
    energy_pj: float
    candidates: tuple[CandidateReport, ...]
    programs: tuple[ProgramReport, ...]


@dataclass(frozen=True, kw_only=True)
class GpuPart:
    """The GPU kernels of a plan: modelled time, and measured time if there is a device.

    Attributes
    ----------
    target : str
        Target of the build.
    measured_ns : float or None
        Time of the kernels of one inference, launched back to back, on the device `measured_on`.
    compiler, flaw : str
        The compiler of the CUDA kernels, or why they are not compiled.
    checked_kernels : int
        Kernels that were checked thread by thread, and hold; 0 if that was not requested.
    """

    target: str
    kernels: int
    modelled_ns: float
    modelled_on: str
    measured_ns: float | None
    measured_on: str
    compiler: str
    flaw: str
    checked_kernels: int = 0

    @classmethod
    def from_search(
        cls,
        search_result: SearchResult,
        target: str,
        kernels: CudaKernels,
        measured_ns: float | None,
        measured_on: str,
    ) -> GpuPart:
        """From a search result, and the compiled kernels."""
        timeline = search_result.evaluation.timeline
        return cls(
            target=target,
            kernels=sum(event.launched for event in timeline.events if event.resource == "gpu"),
            modelled_ns=timeline.busy_ps("gpu") / 1e3,
            modelled_on=search_result.system.gpu.name,
            measured_ns=measured_ns,
            measured_on=measured_on,
            compiler=kernels.compiler,
            flaw=kernels.problem,
        )


@dataclass(frozen=True, kw_only=True)
class OrderReport(OrderSummary):
    """Memory that another order of layers saves, and the latency in the original and in this order."""

    latency_given_ns: float
    latency_ns: float


@dataclass(frozen=True, kw_only=True)
class ExtraReports:
    """Reports of what was requested beside a plan; None where it was not.

    Attributes
    ----------
    order, decomposition, skips
        About the order of layers, decomposed layers, and skip connections.
    primitives : SelectionReport or PlanPrimitives, optional
        About convolution primitives that were selected for a CPU, or that are candidates of the plan.
    c_part : CReport, optional
        About the C code.
    front : tuple of ParetoPoint, optional
        The Pareto front of plans.
    channel_counts : tuple of ChannelCount, optional
        Figures for each number of PIM channels.
    copy_distances : tuple of CopyDistance, optional
        Figures for each distance of copies of weights.
    part : str, optional
        Of a decoder, of which part of it figures are, and what its cache takes.
    input_range : str, optional
        In which range inputs were drawn, and why, if the graph does not tell it (`ReferenceRun`).
    """

    order: OrderReport | None = None
    decomposition: DecompositionReport | None = None
    skips: SkipsReport | None = None
    primitives: SelectionReport | PlanPrimitives | None = None
    c_part: CReport | None = None
    front: tuple[ParetoPoint, ...] | None = field(default=None, metadata=OMITTED)
    channel_counts: tuple[ChannelCount, ...] | None = field(default=None, metadata=OMITTED)
    copy_distances: tuple[CopyDistance, ...] | None = field(default=None, metadata=OMITTED)
    part: str | None = field(default=None, metadata=OMITTED)
    input_range: str | None = field(default=None, metadata=OMITTED)


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """What bounds a device: its peak rate, and the bandwidth of what its multipliers read.

    Attributes
    ----------
    macs_per_ns : float
        Multiply-accumulates in the storage type, of all its units.
    bytes_per_ns : float
        Of a GPU, the bandwidth of all memory channels; of PIM, what all banks give to their multipliers.
    """

    macs_per_ns: float
    bytes_per_ns: float

    @classmethod
    def from_system(cls, system: System) -> dict[str, Roofline]:
        """Of the GPU with all memory channels, and of all channels with PIM."""
        gpu, pim, dtype = system.gpu, system.pim, system.dtype
        gpu_macs = gpu.sms * gpu.clock_mhz * 1e-3 * gpu.fma_per_sm_cycle[dtype]
        pim_macs = system.pim_channels * pim.macs_per_s(dtype) * 1e-9
        column_ns = pim.timing["nCCDS"] * pim.tCK_ps * 1e-3
        pim_bytes = system.pim_channels * pim.banks * pim.column_bytes / column_ns
        return {
            "gpu": cls(macs_per_ns=gpu_macs, bytes_per_ns=gpu.memory_channels * gpu.channel_bytes_per_ns),
            "pim": cls(macs_per_ns=pim_macs, bytes_per_ns=pim_bytes),
        }


@dataclass(frozen=True, kw_only=True)
class SystemReport:
    """The system of a plan, how it is charged, and the sources of times.

    Attributes
    ----------
    timing, gpu_profiler : str
        Sources of the times of PIM and of the GPU.
    gpu_known : dict of str to int
        Number of GPU kernels that the search used, by how their times are known.
    rooflines : dict of str to Roofline
        Of ``gpu`` and ``pim``.
    assumed : list of str
        Every value without a public source.
    """

    name: str = field(metadata=named("system"))
    gpu: str
    pim: str
    gpu_channels: int
    pim_channels: int
    dtype: str
    accounting: str
    timing: str
    gpu_profiler: str
    gpu_known: dict[str, int]
    scheduling: str
    copies: str
    padding: str
    splits: str
    channel_sharing: str
    launches: str
    weights: str
    copy_ahead: int
    rooflines: dict[str, Roofline]
    assumed: list[str]

    @classmethod
    def from_search(cls, search_result: SearchResult, gpu_known: dict[str, int]) -> SystemReport:
        """From a search result."""
        system, costs = search_result.system, search_result.costs
        return report_from(
            cls,
            system,
            gpu=system.gpu.name,
            pim=system.pim.name,
            gpu_channels=search_result.plan.gpu_channels,
            timing=costs.pim_target.profiler.name,
            gpu_profiler=costs.profiling.gpu.name,
            gpu_known=gpu_known,
            splits=search_result.generator.split_policy,
            rooflines=Roofline.from_system(system),
            assumed=system.assumptions(),
        )


@dataclass(frozen=True, kw_only=True)
class EnergyReport:
    """The energy of a plan, and on the GPU alone; `energies…` and `savings_pj` are by consumer."""

    energy_gpu_only_pj: float
    energy_pj: float
    energies_gpu_only_pj: dict[str, float]
    energies_pj: dict[str, float]
    savings_pj: dict[str, float]

    @classmethod
    def from_search(cls, search_result: SearchResult) -> EnergyReport:
        """From a search result."""
        baseline, evaluation = search_result.baseline, search_result.evaluation
        return cls(
            energy_gpu_only_pj=baseline.energy_pj,
            energy_pj=evaluation.energy_pj,
            energies_gpu_only_pj=baseline.energies_pj,
            energies_pj=evaluation.energies_pj,
            savings_pj=savings_pj(evaluation, baseline),
        )


@dataclass(frozen=True, kw_only=True)
class VerificationReport:
    """The results of verification.

    Attributes
    ----------
    max_relative_error, tolerance, reference_deviation
        Of the output whose error is nearest to its bound: the error, its bound, and the error of runs of the
        reference with random rounding.
    samples : int
        Samples of inputs that the build was run on; errors are of the one with the largest.
    timing_violations : int, optional
        Commands that were issued illegally; None where they were not checked.
    timing_violations_of : str, optional
        The timing whose clocks were checked.
    violations_by_rule : dict of str to int, optional
        Number of violations of each rule that was checked.
    """

    verified: bool
    max_relative_error: float
    tolerance: float
    reference_deviation: float | None
    outputs: tuple[OutputCheck, ...]
    samples: int
    regions_verified: int
    timing_violations: int | None
    timing_violations_of: str | None
    violations_by_rule: dict[str, int] | None

    @property
    def worst(self) -> OutputCheck:
        """The output whose error is nearest to its bound."""
        return max_error_check(self.outputs)


@dataclass(frozen=True, kw_only=True)
class Report(JsonTree, Tabular, rows="regions"):
    """A compiled network: its plan, times, energies and memory, and the results of verification.

    In JSON the fields of all sections are in one object. Their names are unique.

    Attributes
    ----------
    schema_version : str
        Version of the JSON form.
    regions : tuple of RegionReport
        What the plan does with each region.
    gpu_part : GpuPart
        The GPU kernels of the plan.
    search_seconds, wall_seconds : float
        Duration of the search, and of the compilation with all searches.
    """

    schema_version: str = REPORT_VERSION
    model: str
    system: SystemReport = field(metadata=FLAT)
    plan: PlanReport = field(metadata=FLAT)
    conventions: ConventionsReport = field(metadata=FLAT)
    energy: EnergyReport = field(metadata=FLAT)
    verification: VerificationReport = field(metadata=FLAT)
    memory: MemoryReport = field(metadata=FLAT)
    regions: tuple[RegionReport, ...]
    gpu_part: GpuPart
    extras: ExtraReports = field(metadata=FLAT)
    search_seconds: float
    wall_seconds: float

    def __repr__(self) -> str:
        """One line; `to_json` has the whole report."""
        before_ns, after_ns = self.plan.latency_gpu_only_ns, self.plan.latency_ns
        return (
            f"Report({self.model} on {self.system.name}, {self.system.accounting}: {before_ns / 1e6:.4f} "
            f"→ {after_ns / 1e6:.4f} ms, {'verified' if self.verification.verified else 'NOT VERIFIED'})"
        )
