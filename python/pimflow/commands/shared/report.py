"""The report of a compilation, as a tree: the contents of ``report.json``.

Times are in ns, energies in pJ, shares in [0, 1]. `pimflow.commands.shared.report_text` prints it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pimflow.commands.shared.channel_report import ChannelCount
from pimflow.commands.shared.front import ParetoPoint
from pimflow.commands.shared.layer_details import CandidateReport, LayerSize, ProgramReport
from pimflow.commands.shared.streaming_report import StreamingReport
from pimflow.compiler.artifact import REPORT_VERSION
from pimflow.compiler.c_report import CReport
from pimflow.core.candidate import Provenance
from pimflow.core.frames import data_frame
from pimflow.core.json_form import FLAT, OMITTED, JsonTree, named, report_from
from pimflow.core.output_error import OutputCheck, max_error_check
from pimflow.decomposition.report import DecompositionReport, SkipsReport
from pimflow.hardware import System
from pimflow.memory import MemoryPlan
from pimflow.memory.reorder import OrderSummary
from pimflow.placement import Evaluation, SearchResult
from pimflow.placement.solvers.capacity import loaded_weight_bytes
from pimflow.placement.solvers.evaluate import overlap_ns, savings_pj
from pimflow.placement.solvers.plan_memory import PlanMemory
from pimflow.primitive_selection.report import PlanPrimitives, SelectionReport

if TYPE_CHECKING:
    from pandas import DataFrame

    from pimflow.compiler.build import Build
    from pimflow.compiler.plan_pools import PoolChoice
    from pimflow.relay_passes.regions.kernel_groups import TensorCopy

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
        mixture = (
            None if search_result.mixture is None else GpuOnlyCost.from_evaluation(search_result.mixture)
        )
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
    objective, solver : str
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
        return cls(
            objective=search_result.goal.objective,
            modes=tuple(mode.lower() for mode in search_result.goal.modes),
            pins=search_result.goal.how_by_layer,
            solver=search_result.goal.solver,
            gap=search_result.gap,
            lower_bound_ns=search_result.plan.lower_bound_ns,
            bounds=search_result.goal.bounds,
            overlapped_ns=overlap_ns(search_result.graph, search_result.candidates, search_result.table),
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
    axis : str
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
    size : LayerSize
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
    mode: str
    gpu_share: float | None
    axis: str
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
        compiler: str,
        flaw: str,
        measured_ns: float | None,
        measured_on: str,
    ) -> GpuPart:
        """From a search result, and what is known of the compiled kernels."""
        timeline = search_result.evaluation.timeline
        return cls(
            target=target,
            kernels=sum(event.launched for event in timeline.events if event.resource == "gpu"),
            modelled_ns=timeline.busy_ps("gpu") / 1e3,
            modelled_on=search_result.system.gpu.name,
            measured_ns=measured_ns,
            measured_on=measured_on,
            compiler=compiler,
            flaw=flaw,
        )


@dataclass(frozen=True, kw_only=True)
class PlacedTensor:
    """A tensor in the pool, live in the steps ``[begin, end)``; a step is a kernel or a PIM program.

    `name` consists of its number and the layer that computes it.
    """

    name: str
    begin: int
    end: int
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class PoolRegion:
    """A range of the pool, for tensors in one set of memory channels.

    `channels` is ``left`` (those that serve the GPU while PIM works), ``all``, or ``pim`` (those with PIM).
    """

    channels: str
    begin_bytes: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class PoolReport:
    """The memory pool of the executable for `target`: places of tensors, and parts of them that are copied.

    Sizes are those of the type that the target stores; a stand-in CPU stores fp32. Weights (`weight_bytes`,
    in fp32) are not in the pool, unless they are streamed. `regions` is empty unless tensors lie in several
    sets of memory channels; then each set has a range of the pool. If the goal is about memory, `choice` says
    how the plan was found, and `switched_on` lists options that were switched on for it.
    """

    target: str
    pool_bytes: int
    lower_bound_bytes: int
    optimal: bool
    tensors: int
    weight_bytes: int
    copies: tuple[TensorCopy, ...]
    choice: PoolChoice | None = None
    switched_on: tuple[str, ...] = ()
    regions: tuple[PoolRegion, ...] = ()
    placed: tuple[PlacedTensor, ...] = ()

    @classmethod
    def from_build(
        cls, build: Build, choice: PoolChoice | None = None, switched_on: tuple[str, ...] = ()
    ) -> PoolReport:
        """From the build of a target."""
        return cls(
            target=build.target,
            pool_bytes=build.memory.pool_bytes,
            lower_bound_bytes=build.memory.lower_bound_bytes,
            optimal=build.memory.optimal,
            tensors=len(build.memory.offsets_bytes),
            weight_bytes=build.weight_bytes,
            copies=build.copies,
            choice=choice,
            switched_on=switched_on,
            regions=_regions(build.memory),
            placed=tuple(
                report_from(PlacedTensor, life, offset_bytes=build.memory.offsets_bytes[life.name])
                for life in build.memory.lifetimes
            ),
        )


def _regions(memory: MemoryPlan) -> tuple[PoolRegion, ...]:
    """Ranges of the pool by set of channels, if there are several."""
    if len(memory.pools) < 2:
        return ()
    return tuple(
        PoolRegion(channels=pool.memory, begin_bytes=pool.begin_bytes, size_bytes=pool.pool_bytes)
        for pool in memory.pools
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
    """

    order: OrderReport | None = None
    decomposition: DecompositionReport | None = None
    skips: SkipsReport | None = None
    primitives: SelectionReport | PlanPrimitives | None = None
    c_part: CReport | None = None
    front: tuple[ParetoPoint, ...] | None = field(default=None, metadata=OMITTED)
    channel_counts: tuple[ChannelCount, ...] | None = field(default=None, metadata=OMITTED)


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
    regions_verified: int
    timing_violations: int | None
    timing_violations_of: str | None
    violations_by_rule: dict[str, int] | None

    @property
    def worst(self) -> OutputCheck:
        """The output whose error is nearest to its bound."""
        return max_error_check(self.outputs)


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """The memory of a plan.

    Attributes
    ----------
    weight_load_ns, weight_bytes
        Time to load the weights of the PIM channels, and their size.
    peak_activation_bytes : int
        Largest size of the tensors that live at once, in the system's storage type.
    streaming : StreamingReport, optional
        Latencies with copies of weights, if they are streamed.
    """

    weight_load_ns: float
    weight_bytes: int
    peak_activation_bytes: int
    pool: PoolReport = field(metadata=named("memory"))
    streaming: StreamingReport | None = None

    @classmethod
    def from_search(cls, search_result: SearchResult, pool: PoolReport) -> MemoryReport:
        """From a search result, and the pool that is built for it."""
        system = search_result.system
        placed_bytes = loaded_weight_bytes(system, search_result.candidates)
        plan_memory = PlanMemory(search_result.graph, system.dtype)
        return cls(
            weight_load_ns=weight_load_ns(system, placed_bytes),
            weight_bytes=placed_bytes,
            peak_activation_bytes=plan_memory.pool_bytes(search_result.candidates),
            pool=pool,
            streaming=StreamingReport.from_search(search_result),
        )


def weight_load_ns(system: System, placed_bytes: int) -> float:
    """Time to write weights into all PIM channels in parallel, each at the rate of its bus."""
    if not placed_bytes:
        return 0.0
    bytes_per_ns = system.pim.column_bytes / (system.pim.timing["nBL"] * system.pim.tCK_ns)
    return placed_bytes / (bytes_per_ns * system.pim_channels)


@dataclass(frozen=True, kw_only=True)
class Report(JsonTree):
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

    def to_pandas(self) -> DataFrame:
        """A row for each region; raises `UsageError` if pandas is not installed."""
        return data_frame(self.regions)
