"""Generate the candidates of every region, with the tasks that they are charged (`candidates.tasks`)."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from pimflow.core.candidate import Candidate, EdgeCost, Footprint
from pimflow.core.kernel import ELEMENT_BYTES, ConvGeometry
from pimflow.core.liveness import Moment
from pimflow.core.loop_order import LoopOrder
from pimflow.core.program import PimProgram
from pimflow.core.region import GATHERS, Region
from pimflow.core.region_graph import RegionGraph
from pimflow.core.rewrite import (
    MODES,
    OPERATOR_KERNELS,
    GpuRewrite,
    LayerRewrite,
    Mode,
    PimRewrite,
    SplitRewrite,
)
from pimflow.core.split import Split
from pimflow.errors import PlanError, UsageError
from pimflow.fusion.tilings import TilingSearch
from pimflow.hardware import System
from pimflow.pim_backend.programs.capability import unsupported_reason
from pimflow.pim_backend.programs.lowering import ProgramRequest
from pimflow.placement.candidates import pim_epilogue
from pimflow.placement.candidates.tasks import TaskBuilder, TaskList
from pimflow.placement.costs import splits
from pimflow.placement.costs.costs import Costs, Profiling
from pimflow.placement.costs.pim_runs import LayerPimCost
from pimflow.primitives import get_primitive
from pimflow.primitives.launches import region_launches, unsupported_primitive_reason, usable_primitives
from pimflow.simulators.gpu.region_kernels import gpu_kernels
from pimflow.simulators.profiler import GpuProfiler

COST_MODEL = "9"


class CandidateGenerator:
    """Generates the candidates of one network on one system.

    Parameters
    ----------
    costs : Costs, optional
        Costs on the system, or on one that differs only in launch times.
    modes : sequence of str
        Modes of the candidates, of `core.rewrite.MODES`; other modes are not timed.
    primitives : bool
        Whether the GPU may compute regions by convolution primitives.
    pins : mapping of str to str, optional
        How regions are done (`pins.pinned_candidates`): `best_plan.profile` keeps only such candidates.

    Raises
    ------
    UsageError
        If networks cannot be compiled in the system's storage type, or primitives do not compute in it, or
        the GPU profiler cannot time primitives.
    """

    def __init__(  # what is placed where, and three bounds on the candidates
        self,
        graph: RegionGraph,
        system: System,
        costs: Costs | None = None,
        modes: Sequence[str] = MODES,
        primitives: bool = False,
        pins: Mapping[str, str] | None = None,
    ):
        system.require_network_dtype()
        self.graph, self.system, self.modes, self.primitives = graph, system, modes, primitives
        self.costs = costs or Costs(system, Profiling())
        if primitives:
            require_primitives(system, self.costs.profiling.gpu)
        self.task_builder = TaskBuilder(system, self.costs)
        # By geometry and by `l2_rereads`: splits depend on both.
        self._layers: dict[tuple[ConvGeometry, float], splits.SplitLayer] = {}
        self._candidates: dict[str, list[Candidate]] = {}
        self._min_l2_rereads: Mapping[str, float] = {}
        self.pins = pins or {}
        self._l2_rereads: dict[str, float] = {}

    def with_graph(
        self, graph: RegionGraph, min_l2_rereads: Mapping[str, float] | None = None
    ) -> CandidateGenerator:
        """The generator of another network on the same system. Layers of both networks are timed once.

        `min_l2_rereads` has lower bounds, by region, that `l2_rereads` is raised to.
        """
        generator = CandidateGenerator(graph, self.system, self.costs, self.modes, self.primitives)
        generator._layers, generator._min_l2_rereads = self._layers, min_l2_rereads or {}
        return generator

    @functools.cached_property
    def tilings(self) -> TilingSearch:
        """The groups of regions that one GPU kernel can do in tiles, with their tilings."""
        return TilingSearch(self.graph, self.system, self.costs.tiling_cache)

    def prepare(self) -> None:
        """Time all kernels and PIM programs that the network's candidates need, in one batch."""
        self.costs.time_layers([*self.layers(), *self._residual_layers()])
        self._candidates = self.costs.batch_kernels(self._generate_all)

    def _generate_all(self) -> dict[str, list[Candidate]]:
        """Generate the candidates of each region, and request all other kernels that the search needs."""
        by_region = {}
        for region in self.graph.regions:
            by_region[region.name] = self._generate(region)
            self.gpu_candidates(region, self.system.gpu.memory_channels)
            if not self.unsupported_reason(region):
                self.epilogue_cost(region), self.fused_epilogue_cost(region)
        return by_region

    @property
    def split_policy(self) -> str:
        """Which splits are candidates: `System.splits` if GPU times are computed, else ``grid``."""
        return self.system.splits if self.costs.profiling.gpu.computes else "grid"

    def layers(self) -> list[splits.SplitLayer]:
        """Layers that PIM can run, with the splits to time."""
        if set(self.modes) <= {Mode.GPU}:
            return []
        capable = {self._key(region): region for region in self._capable_regions}
        missing = {key: region for key, region in capable.items() if key not in self._layers}
        self._layers |= self.costs.batch_kernels(
            lambda: {key: self._split_layer(region) for key, region in missing.items()}
        )
        return [self._layers[key] for key in capable]

    @property
    def _capable_regions(self) -> list[Region]:
        return [region for region in self.graph.regions if not self.unsupported_reason(region)]

    def _residual_layers(self) -> list[splits.SplitLayer]:
        """Layers whose product on PIM can add the residual too (`PimProgram.added_channels`)."""
        return [
            self.costs.layer(region.layer.with_added_channels, region.name)
            for region in (self._capable_regions if Mode.PIM in self.modes else ())
            for rewrite in pim_epilogue.profitable_epilogues(region, self.system)
            if rewrite.accumulates_residual
        ]

    def _key(self, region: Region) -> tuple[ConvGeometry, float]:
        return region.layer, self.l2_rereads(region)

    def _split_layer(self, region: Region) -> splits.SplitLayer:
        """The layer of a region, with the splits to time."""
        geometry, name = region.layer, region.name
        if Mode.SPLIT not in self.modes or not self.system.gpu_channels:
            return self.costs.layer(geometry, name)
        if self.split_policy == "grid":
            return self.costs.layer(geometry, name, splits=tuple(splits.grid(geometry)))
        burst_ns = self.system.pim.column_bytes / self.system.crossbar_bytes_per_ns
        terms = splits.SplitCharges(
            launch_ns=0.0 if self.system.overlaps_launches else self.task_builder.submission_ns,
            burst_ns=burst_ns if self.system.charges("crossbar") else 0.0,
        )
        return self.costs.layer(geometry, name, besides=self._all_non_pim_times(region), terms=terms)

    def _all_non_pim_times(self, region: Region) -> tuple[splits.NonPimTimes, ...]:
        """`_non_pim_times` of all splits of a region; independent of the PIM launch time."""
        key = (self.gpu_identity, *self._key(region))
        if key not in self.costs.non_pim_times:
            possible = splits.all_splits(region.layer, self.system.pim)
            self.task_builder.time_parts(region, possible)
            self.costs.non_pim_times[key] = tuple(self._non_pim_times(region, split) for split in possible)
        return self.costs.non_pim_times[key]

    def _non_pim_times(self, region: Region, split: Split) -> splits.NonPimTimes:
        """Times of all parts of a split but PIM's."""
        builder, results = self.task_builder, split.pim_output_elements(region.layer)
        gpu, rereads = builder.gpu_part_tasks(region, split), self.l2_rereads(region)
        sum_tasks = builder.partial_sum_tasks(region, split, results, rereads)
        return splits.NonPimTimes(
            split=split,
            gpu_ns=builder.standalone_ns(gpu[:1]),
            crossbar_ns=sum(task.duration_ns for task in gpu[1:]),
            after_ns=sum(task.duration_ns for task in sum_tasks),
            deferred_epilogue=self.deferred_epilogue(region, split),
        )

    def candidates(self, region: Region) -> list[Candidate]:
        """Candidates of one region in `modes`: GPU and, if PIM can run the region, PIM and SPLIT."""
        return list(self._candidates.get(region.name) or self._generate(region))

    def _generate(self, region: Region) -> list[Candidate]:
        channels = self.task_builder.kernel_channels
        candidates = self.gpu_candidates(region, channels) if Mode.GPU in self.modes else []
        if self.unsupported_reason(region):
            return candidates
        if Mode.PIM in self.modes:
            rewrites = (PimRewrite(), *pim_epilogue.profitable_epilogues(region, self.system))
            candidates += [self._pim_candidate(region, rewrite) for rewrite in rewrites]
        if Mode.SPLIT in self.modes and self.system.gpu_channels:
            candidates += [
                self._pim_candidate(region, SplitRewrite.from_split(split, region.layer))
                for split in self.splits(region)
            ]
        return candidates

    def gpu_candidates(self, region: Region, channels: int) -> list[Candidate]:
        """GPU candidates with `channels` memory channels: the operator's kernels, and primitives.

        A primitive is left out if another candidate is as good in time, energy and memory.
        """
        primitives = usable_primitives(region) if self.primitives else ()
        rewrites = [GpuRewrite(primitive=primitive.name) for primitive in primitives]
        primitive_candidates = [self.make(region, rewrite, channels) for rewrite in rewrites]
        kernels = self.make(region, OPERATOR_KERNELS, channels)
        return undominated(primitive_candidates, _figures, [kernels])

    def splits(self, region: Region) -> tuple[Split, ...]:
        """The splits of a region that are candidates."""
        if self._key(region) not in self._layers:
            self.layers()
        return self.costs.splits(self._layers[self._key(region)])

    def unsupported_reason(self, region: Region) -> str:
        """Why PIM cannot run `region`; empty if it can."""
        if self.system.pim_channels == 0:
            return "the system has no PIM channels"
        geometry = region.geometry
        integers = geometry is not None and self.costs.pim_target.program_dtype(geometry) == "int8"
        return unsupported_reason(region, self.system.scheduling, multiplies_integers=integers)

    def unsupported_split_reason(self, region: Region, split: Split) -> str:
        """Why `region` cannot have this split; empty if it can."""
        if not self.system.gpu_channels:
            return "PIM in all channels leaves the GPU none meanwhile"
        if region.operator == "fc" and split.axis == "rows":
            return "fc has no rows to split"
        return split.obstacle(region.layer)

    def make(
        self, region: Region, rewrite: GpuRewrite | LayerRewrite, gpu_channels: int | None = None
    ) -> Candidate:
        """The candidate of a region that `rewrite` describes; by default in the fastest loop order.

        `gpu_channels` are the memory channels of the GPU's kernels; by default those of a mixed plan.

        Raises
        ------
        PlanError
            If there is no such candidate of the region.
        UnknownNameError
            If there is no such primitive.
        """
        if isinstance(rewrite, GpuRewrite):
            channels = gpu_channels or self.task_builder.kernel_channels
            # made once for all searches that share the costs
            return self.costs.region_result(
                region,
                (self.gpu_identity, channels, rewrite),
                lambda: self._gpu_candidate(region, channels, rewrite),
            )
        reason = self.unsupported_reason(region)
        if not reason and isinstance(rewrite, SplitRewrite):
            reason = self.unsupported_split_reason(region, rewrite.split(region.layer))
        if reason:
            raise PlanError(f"region '{region.name}' cannot be {rewrite.mode}: {reason}")
        return self._pim_candidate(region, pim_epilogue.with_device_epilogue(region, rewrite, self.system))

    @functools.cached_property
    def gpu_identity(self) -> str:
        """What GPU candidates depend on of the system: not on the time of PIM's launches."""
        return self.system.with_launches(gpu_ns=self.system.gpu.launch_ns, pim_ns=0.0).identity

    def _gpu_candidate(self, region: Region, channels: int, rewrite: GpuRewrite) -> Candidate:
        """The operators' kernels, or those of a primitive, in sequence."""
        primitive = get_primitive(rewrite.primitive) if rewrite.primitive else None
        if not primitive:
            kernels = gpu_kernels(region, self.system.dtype)
            parts = [part.operator for part in region.kernel.parts]
        elif reason := (
            _unsupported_dtype_reason(self.system) or unsupported_primitive_reason(primitive, region)
        ):
            raise PlanError(
                f"region '{region.name}' cannot be computed by primitive '{primitive.name}': {reason}"
            )
        else:
            kernels = region_launches(primitive, region)
            parts = [primitive.name] * len(kernels)
        return Candidate(
            name=f"GPU {rewrite.primitive}".rstrip(),
            covers=(region.name,),
            rewrite=rewrite,
            tasks=self.task_builder.gpu_sequence(region.name, parts, kernels, channels),
            fuses_epilogue=not region.is_view,
            footprint=Footprint(
                workspace_bytes=primitive.workspace_bytes(region.layer) if primitive else 0,
                filter_bytes=region.weight_bytes(
                    self.system.dtype, primitive.filter_bytes(region.layer) if primitive else None
                ),
            ),
        )

    def _pim_candidate(self, region: Region, rewrite: LayerRewrite) -> Candidate:
        """The candidate that computes a layer, or a part of it, on PIM."""
        split, pim_cost = rewrite.split(region.layer), self.pim_cost(region, rewrite)
        tasks = self._parallel_tasks(region, rewrite, pim_cost)
        schedule, operators = str(pim_cost.schedule), self.deferred_epilogue(region, split)
        if isinstance(rewrite, SplitRewrite):
            rewrite = SplitRewrite.from_split(split, region.layer, schedule)
            axis = "" if split.axis == "rows" else f" {split.axis}"
            name = f"SPLIT {split.gpu}/{split.extent(region.layer)}{axis}"
        else:
            rewrite = replace(rewrite, schedule=schedule)
            name = f"PIM {'+'.join(rewrite.device_epilogue)}".rstrip()
            name += ", joined" * rewrite.accumulates_residual
        if isinstance(rewrite, PimRewrite) and rewrite.device_epilogue:
            operators = ()
        else:
            operators += region.epilogue.arithmetic
        l2_rereads = self.l2_rereads(region) if operators and self.defers_epilogue(region) else 0.0
        for task in self.task_builder.partial_sum_tasks(region, split, pim_cost.results, l2_rereads):
            tasks.append_after([task], tasks.positions)
        deferred_epilogue, dtype = self.append_epilogue(tasks, region, operators), self.system.dtype
        gpu_part = split.gpu_part(region.layer) if split.gpu else None
        return Candidate(
            name=name,
            covers=(region.name,),
            rewrite=rewrite,
            tasks=tuple(tasks),
            deferred_epilogue=deferred_epilogue,
            footprint=Footprint(
                bank_rows=pim_cost.rows,
                filter_bytes=region.weight_bytes(dtype, gpu_part.filter_bytes(dtype) if gpu_part else 0),
                moments=self._moments(region, split),
            ),
        )

    def _parallel_tasks(self, region: Region, rewrite: LayerRewrite, pim_cost: LayerPimCost) -> TaskList:
        """The tasks of both parts of a layer, after those that prepare their operands."""
        builder, split, tasks = self.task_builder, rewrite.split(region.layer), TaskList()
        tasks.extend(builder.prologue_tasks(region))
        prologue_tasks = tasks.positions
        tasks.append_after(builder.padding_tasks(region, split), prologue_tasks)
        padded_tasks = tasks.positions
        adds_residual = isinstance(rewrite, PimRewrite) and "add" in rewrite.device_epilogue
        read_elements = split.pim_input_elements(region.layer) + pim_cost.results * adds_residual
        tasks.append_after(builder.pim_tasks(region.name, pim_cost, read_elements), prologue_tasks)
        for task in builder.gpu_part_tasks(region, split):
            tasks.append_after([task], padded_tasks if task.resource == "gpu" else prologue_tasks)
        return tasks

    def _moments(self, region: Region, split: Split) -> tuple[Moment, ...]:
        """Memory beside input and result: while both devices do their parts, then while these are combined.

        A concatenation that copies parts is counted here, although a consumer's kernel may do it later. All
        other deferred epilogues work in place.
        """
        element, layer = ELEMENT_BYTES[self.system.dtype], region.layer
        input_bytes = layer.input_elements * element if region.has_prologue_kernels else 0
        input_bytes += self.task_builder.padding_bytes(region, split)
        parts_bytes = layer.pixels * layer.oc * element
        if split.axis == "reduction":
            return (Moment(own_bytes=input_bytes + parts_bytes),)
        moments = [Moment(own_bytes=input_bytes)] if input_bytes else []
        if self.deferred_epilogue(region, split)[-1:] == ("concat",):
            added = bool(region.inputs[region.operands :])
            moments = [Moment(own_bytes=input_bytes), Moment(own_bytes=parts_bytes, reads=added)]
        return tuple(moments)

    def deferred_epilogue(self, region: Region, split: Split) -> tuple[str, ...]:
        """What a kernel has to do to the result of PIM, whatever the region's own epilogue is."""
        lanes: tuple[str, ...] = ("lanes",) if self.system.pim.result_lanes > 1 else ()
        return lanes + split.deferred_epilogue(region.layer, views=self.system.uses_views)

    def defers_epilogue(self, region: Region) -> bool:
        """Whether the epilogue of a PIM region may be deferred to the kernel of a consumer.

        It may if the first region that reads the result fuses it (`relay_passes.regions.kernel_groups`), is
        no view, and gathers no parts.
        """
        graph, consumers = self.graph, self.graph.consumers[region.name]
        if not consumers:
            return False
        first = graph.region(consumers[0])
        leading_operators = first.prologue if first.geometry else first.operators
        if first.is_view or not set(GATHERS).isdisjoint(leading_operators):
            return False
        fused_inputs = {
            first.inputs[position]
            for position in {*first.kernel.fusible_inputs}.difference(first.extra_inputs)
        }
        return region.name in fused_inputs and (first.kernel.has_anchor or not graph.is_shared(region.name))

    def append_epilogue(self, tasks: TaskList, region: Region, operators: tuple[str, ...]) -> tuple[str, ...]:
        """Append a kernel for the epilogue `operators` of a PIM region, or return them as deferred."""
        if operators and self.defers_epilogue(region):
            return operators
        if operators and (task := self.epilogue_cost(region).task):
            tasks.append_after([task], tasks.positions)
        return ()

    def epilogue_cost(self, region: Region) -> EdgeCost:
        """The cost of a deferred epilogue in a kernel of its own."""
        return self.task_builder.epilogue_cost(region)

    def fused_epilogue_cost(self, region: Region) -> EdgeCost:
        """The cost of a deferred epilogue inside the kernel of the first consumer.

        Only bytes that this kernel does not touch anyway count: a residual, and the finished result if other
        consumers need it too.
        """
        shared = self.graph.is_shared(region.name)
        return self.task_builder.fused_epilogue_cost(region, self.l2_rereads(region), is_shared=shared)

    def l2_rereads(self, region: Region) -> float:
        """How many more times than once the first consumer reads the result from the L2, if it fuses."""
        name = region.name
        if name not in self._l2_rereads:
            rereads = 0.0
            if self.defers_epilogue(region):
                consumer = self.graph.region(self.graph.consumers[name][0])
                rereads = max(self._min_l2_rereads.get(name, 0.0), self.task_builder.l2_rereads(consumer))
            self._l2_rereads[name] = rereads
        return self._l2_rereads[name]

    def pim_cost(self, region: Region, rewrite: LayerRewrite) -> LayerPimCost:
        """The cost of PIM's part of a region, by the loop order of `rewrite`, or by the fastest."""
        geometry, split = pim_epilogue.pim_layer(region, rewrite), rewrite.split(region.layer)
        order, uses = None, pim_epilogue.latch_use(region, rewrite)
        if rewrite.schedule:
            part = split.pim_part(geometry)
            order = self.costs.pim_target.parse_schedule(rewrite.schedule, part, region.name)
        return self.costs.pim_cost(geometry, region.name, split, order, uses)

    def pim_program(self, region: Region, rewrite: LayerRewrite, row_begin: int) -> PimProgram:
        """The PIM program of a PIM or SPLIT candidate, its weights from row `row_begin` on."""
        geometry, split = pim_epilogue.pim_layer(region, rewrite), rewrite.split(region.layer)
        request = ProgramRequest(
            region.name,
            split.pim_part(geometry),
            LoopOrder.parse(rewrite.schedule),
            pixel_begin=split.pixel_begin(geometry),
            row_begin=row_begin,
            added_channels=geometry.c - region.layer.c,
            **vars(pim_epilogue.latch_use(region, rewrite)),
        )
        return self.costs.pim_target.program(request)


def _unsupported_dtype_reason(system: System) -> str:
    return "" if system.dtype == "fp32" else f"primitives for GPUs compute in fp32, not in {system.dtype}"


def require_primitives(system: System, gpu: GpuProfiler) -> None:
    """Raise `UsageError` unless `system` can run primitives and `gpu` can time them."""
    if reason := _unsupported_dtype_reason(system):
        raise UsageError(f"--device cuda: {reason}; give --dtype fp32")
    if not gpu.primitives:
        raise UsageError(
            f"--device cuda: gpu={gpu.name} has no times of primitives; use gpu=analytic, or gpu=cuda"
        )


def _figures(candidate: Candidate) -> tuple[float, float, int, int]:
    """Time, energy, workspace and filter bytes of a candidate whose tasks run in sequence on the GPU."""
    return (
        sum(task.duration_ns for task in candidate.tasks),
        sum(task.energy_pj for task in candidate.tasks),
        candidate.footprint.workspace_bytes,
        candidate.footprint.filter_bytes,
    )


def undominated(
    candidates: Iterable[Candidate],
    figures: Callable[[Candidate], tuple[float, ...]],
    front: Iterable[Candidate] = (),
) -> list[Candidate]:
    """`front`, and those of `candidates` than which no other is as good in all `figures`, the least first."""
    kept = [(figures(candidate), candidate) for candidate in front]
    by_figures = [(figures(candidate), candidate) for candidate in candidates]
    for values, candidate in sorted(by_figures, key=lambda pair: pair[0]):
        if not any(all(map(operator.le, kept_values, values)) for kept_values, _ in kept):
            kept.append((values, candidate))
    return [candidate for _, candidate in kept]
