"""Generate the candidates of every region, with the tasks that they are charged (`candidates.tasks`)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pimflow.core.candidate import Candidate, EdgeCost, Port, Rewrite
from pimflow.core.liveness import Moment
from pimflow.core.plan import MODES
from pimflow.core.program import PimProgram
from pimflow.core.region import ELEMENT_BYTES, GATHERS, ConvGeometry, Region, RegionGraph
from pimflow.core.split import WHOLE, Split
from pimflow.errors import PlanError, UsageError
from pimflow.hardware import System
from pimflow.pim_backend.programs.capability import refusal
from pimflow.pim_backend.programs.schedule import Schedule
from pimflow.placement.candidates import finished
from pimflow.placement.candidates.tasks import Tasks, gpu_kernels, weight_bytes
from pimflow.placement.candidates.tilings import Tilings
from pimflow.placement.costs import splits
from pimflow.placement.costs.costs import Costs, Profiling
from pimflow.placement.costs.pim_runs import PimCost
from pimflow.placement.solvers.capacity import row_bytes
from pimflow.primitives import named
from pimflow.primitives.launches import problem, region_launches, usable
from pimflow.simulators.profiler import GpuProfiler

COST_MODEL = "9"


class Candidates:
    """Generates the candidates of one network on one system.

    Parameters
    ----------
    graph : RegionGraph
    system : System
    costs : Costs, optional
        Costs on the system, or on one that differs only in launch times.
    modes : sequence of str
        Modes of the candidates, of `core.plan.MODES`; other modes are not timed.
    primitives : bool
        Whether the GPU may compute regions by convolution primitives.
    again : dict of str to float, optional
        By region, a lower bound that `reads_again` is raised to.

    Raises
    ------
    UsageError
        If networks cannot be compiled in the system's storage type, or primitives do not compute in it, or
        the GPU profiler cannot time primitives.
    """

    def __init__(
        self,
        graph: RegionGraph,
        system: System,
        costs: Costs | None = None,
        modes: Sequence[str] = MODES,
        primitives: bool = False,
        again: Mapping[str, float] | None = None,
    ):
        system.require_network_dtype()
        self.graph, self.system, self.modes, self.primitives = graph, system, modes, primitives
        self.costs = costs or Costs(system, Profiling())
        if primitives:
            require_primitives(system, self.costs.profiling.gpu)
        self.tasks = Tasks(system, self.costs)
        # By geometry and by `reads_again`: splits depend on both.
        self._layers: dict[tuple[ConvGeometry, float], splits.SplitLayer] = {}
        self._found: dict[str, list[Candidate]] = {}
        self._least_again = again or {}
        self._reads_again: dict[str, float] = {}

    def of(self, graph: RegionGraph, again: Mapping[str, float] | None = None) -> Candidates:
        """The generator of another network on the same system. Layers of both networks are timed once."""
        candidates = Candidates(graph, self.system, self.costs, self.modes, self.primitives, again)
        candidates._layers = self._layers
        return candidates

    @functools.cached_property
    def tilings(self) -> Tilings:
        """The groups of regions that one GPU kernel can do in tiles, with their tilings."""
        return Tilings(self.graph, self.system, self.costs.tilings)

    def prepare(self) -> None:
        """Time all kernels and PIM programs that the network's candidates need, in one batch."""
        self.costs.time_layers([*self.layers(), *self._joined_layers()])
        self._found = self.costs.together(self._everything)

    def _everything(self) -> dict[str, list[Candidate]]:
        """Generate the candidates of each region, and request all other kernels that the search needs."""
        by_region = {}
        for region in self.graph.regions:
            by_region[region.name] = self._all(region)
            self.on_gpu(region, self.system.gpu.memory_channels)
            if not self.refusal(region):
                self.settle(region), self.absorb(region)
        return by_region

    @property
    def splitting(self) -> str:
        """Which splits are candidates: `System.splits` if GPU times are computed, else ``grid``."""
        return self.system.splits if self.costs.profiling.gpu.computes else "grid"

    def layers(self) -> list[splits.SplitLayer]:
        """Layers that PIM can run, with the splits to time."""
        if set(self.modes) <= {"GPU"}:
            return []
        capable = {self._key(r): r for r in self.graph.regions if not self.refusal(r)}
        missing = {key: region for key, region in capable.items() if key not in self._layers}
        self._layers |= self.costs.together(lambda: {key: self._asked(r) for key, r in missing.items()})
        return [self._layers[key] for key in capable]

    def _key(self, region: Region) -> tuple[ConvGeometry, float]:
        return region.layer, self.reads_again(region)

    def _joined_layers(self) -> list[splits.SplitLayer]:
        """Layers whose product on PIM can add the residual too (`PimProgram.added_channels`)."""
        if "PIM" not in self.modes:
            return []
        return [
            self.costs.layer(way.layer(region.layer), region.name)
            for region in self.graph.regions
            if not self.refusal(region)
            for way in finished.worth_trying(region, self.system)
            if way.joins
        ]

    def _asked(self, region: Region) -> splits.SplitLayer:
        """The layer of a region, with the splits to time."""
        geometry, name = region.layer, region.name
        if "SPLIT" not in self.modes or not self.system.gpu_channels:
            return self.costs.layer(geometry, name)
        if self.splitting == "grid":
            return self.costs.layer(geometry, name, splits=tuple(splits.grid(geometry)))
        burst_ns = self.system.pim.column_bytes / self.system.crossbar_bytes_per_ns
        terms = splits.Terms(
            launch_ns=0.0 if self.system.launched_ahead else self.tasks.submission_ns,
            burst_ns=burst_ns if self.system.charges("crossbar") else 0.0,
        )
        return self.costs.layer(geometry, name, besides=self._besides(region), terms=terms)

    def _besides(self, region: Region) -> tuple[splits.Beside, ...]:
        """`_beside` of all splits of a region; independent of the PIM launch time."""
        key = (self._identity_but_for_pim_launch, *self._key(region))
        if key not in self.costs.besides:
            possible = splits.every(region.layer, self.system.pim)
            self.tasks.time_parts(region, possible)
            self.costs.besides[key] = tuple(self._beside(region, split) for split in possible)
        return self.costs.besides[key]

    @functools.cached_property
    def _identity_but_for_pim_launch(self) -> str:
        return self.system.with_launches(gpu_ns=self.system.gpu.launch_ns, pim_ns=0.0).identity

    def _beside(self, region: Region, split: Split) -> splits.Beside:
        """Times of all parts of a split but PIM's."""
        results, gpu = split.pim_results(region.layer), self.tasks.gpu_part(region, split)
        return splits.Beside(
            split=split,
            gpu_ns=self.tasks.alone_ns(gpu[:1]),
            crossbar_ns=sum(task.duration_ns for task in gpu[1:]),
            after_ns=sum(
                task.duration_ns for task in self.tasks.last(region, split, results, self.reads_again(region))
            ),
            pending=self.pending(region, split),
        )

    def all(self, region: Region) -> list[Candidate]:
        """Candidates of one region in `modes`: GPU and, if PIM can run the region, PIM and SPLIT."""
        return list(self._found.get(region.name) or self._all(region))

    def _all(self, region: Region) -> list[Candidate]:
        channels = self.system.gpu_channels or self.system.gpu.memory_channels
        candidates = self.on_gpu(region, channels) if "GPU" in self.modes else []
        if self.refusal(region):
            return candidates
        if "PIM" in self.modes:
            candidates.append(self.make(region, "PIM"))
            candidates += [
                self.make(region, "PIM", finishes=region.epilogue, joins=way.joins)
                for way in finished.worth_trying(region, self.system)
            ]
        if "SPLIT" in self.modes and self.system.gpu_channels:
            candidates += [self._with_pim(region, split) for split in self.splits(region)]
        return candidates

    def on_gpu(self, region: Region, channels: int) -> list[Candidate]:
        """GPU candidates with `channels` memory channels: the operator's kernels, and primitives.

        A primitive is left out if another candidate is as good in time, energy and memory.
        """
        candidates = [self.make(region, "GPU", gpu_channels=channels)]
        made = [
            self.make(region, "GPU", primitive=each.name, gpu_channels=channels)
            for each in (usable(region) if self.primitives else ())
        ]
        for candidate in sorted(made, key=_figures):
            if not any(_as_good(other, candidate) for other in candidates):
                candidates.append(candidate)
        return candidates

    def splits(self, region: Region) -> tuple[Split, ...]:
        """The splits of a region that are candidates."""
        if self._key(region) not in self._layers:
            self.layers()
        return self.costs.splits(self._layers[self._key(region)])

    def refusal(self, region: Region) -> str:
        """Why PIM cannot run `region`; empty if it can."""
        if self.system.pim_channels == 0:
            return "the system has no PIM channels"
        return refusal(region, self.system.scheduling)

    def unfinished(self, region: Region) -> str:
        """Why PIM cannot do the epilogue of `region`; empty if it can, or there is none."""
        return finished.unfinished(region, self.system)

    def unsplittable(self, region: Region, split: Split) -> str:
        """Why `region` cannot have this split; empty if it can."""
        if not self.system.gpu_channels:
            return "PIM in all channels leaves the GPU none meanwhile"
        if region.operator == "fc" and split.axis == "rows":
            return "fc has no rows to split"
        return split.obstacle(region.layer)

    def make(
        self,
        region: Region,
        mode: str,
        gpu_rows: int = 0,
        schedule: str = "",
        *,
        axis: str = "rows",
        gpu_channels: int | None = None,
        primitive: str = "",
        finishes: tuple[str, ...] = (),
        joins: bool = False,
    ) -> Candidate:
        """Make one candidate of a region.

        Parameters
        ----------
        region : Region
        mode : str
            ``GPU``, ``PIM`` or ``SPLIT``.
        gpu_rows : int
            For ``SPLIT``, output rows on the GPU, or its part of another axis.
        schedule : str
            Loop order of the PIM program; the fastest if empty.
        axis : str
            For ``SPLIT``: one of `core.split.AXES`.
        gpu_channels : int, optional
            Memory channels of the GPU; those of a mixed plan by default.
        primitive : str
            For ``GPU``: by which convolution primitive; by the operator if empty.
        finishes : tuple of str
            For ``PIM``: the operators of the epilogue that PIM does: all, or none.
        joins : bool
            Whether the product itself adds the residual. If only the product can, it does in any case.

        Raises
        ------
        PlanError
            If there is no such candidate of the region.
        UnknownNameError
            If there is no such primitive.
        """
        if mode == "GPU":
            beside = self.system.gpu_channels or self.system.gpu.memory_channels
            channels = beside if gpu_channels is None else gpu_channels
            return self._by_gpu(region, channels, primitive)
        split = Split(axis, gpu_rows) if mode == "SPLIT" else WHOLE
        problem = self.refusal(region) or (self.unsplittable(region, split) if mode == "SPLIT" else "")
        if problem:
            raise PlanError(f"region '{region.name}' cannot be {mode}: {problem}")
        if problem := finished.misfit(region, mode, finishes, self.system):
            raise PlanError(f"region '{region.name}' cannot be finished on PIM: {problem}")
        every = finished.ways(region, self.system) if finishes else (finished.LEFT_UNDONE,)
        way = next((each for each in every if each.joins == joins), every[0])
        return self._with_pim(region, split, schedule, finishes, way)

    def _by_gpu(self, region: Region, channels: int, name: str) -> Candidate:
        """The GPU candidate: the operator's kernels, or those of the primitive `name`, in sequence."""
        system, primitive = self.system, named(name) if name else None
        why = primitive and (_wrong_dtype(system) or problem(primitive, region))
        if why:
            raise PlanError(f"region '{region.name}' cannot be computed by primitive '{name}': {why}")
        if primitive:
            kernels = region_launches(primitive, region)
        else:
            kernels = gpu_kernels(region, system.dtype)
        count = len(kernels)
        what = [primitive.name] * count if primitive else [each.operator for each in region.parts]
        tasks = [
            self.tasks.gpu(
                region.name + (f" ({what[n]}, {n + 1} of {count})" if what else ""), kernel, channels
            )
            for n, kernel in enumerate(kernels)
        ]
        port = Port(dtype=system.dtype)
        return Candidate(
            name=f"GPU {name}".rstrip(),
            covers=(region.name,),
            gpu_share=1.0,
            input=replace(port, accepts_pending=not region.view),
            output=port,
            tasks=tuple(task.waiting_for((n - 1,) if n else ()) for n, task in enumerate(tasks)),
            rewrite=Rewrite(mode="GPU", gpu_rows=region.output_rows, primitive=name),
            workspace_bytes=primitive.workspace_bytes(region.layer) if primitive else 0,
            filter_bytes=weight_bytes(
                region, system.dtype, primitive.filter_bytes(region.layer) if primitive else None
            ),
        )

    def _with_pim(
        self,
        region: Region,
        split: Split,
        schedule: str = "",
        finishes: tuple[str, ...] = (),
        way: finished.Way = finished.LEFT_UNDONE,
    ) -> Candidate:
        """The PIM candidate or, if the split has a GPU part, the SPLIT candidate."""
        run = self.pim_cost(region, split, schedule, way)
        read = split.pim_operands(region.layer) + (run.results if way.adds_tensor else 0)
        parallel = self.tasks.pim(region.name, run, read) + self.tasks.gpu_part(region, split)
        layout = self.system.charges("layout")
        tasks = self.tasks.prologue(region) if region.made_before and layout else []
        first = tuple(range(len(tasks)))
        if layout:
            tasks += [task.waiting_for(first) for task in self.tasks.padding(region, split)]
        padded = tuple(range(len(tasks)))
        tasks += [t.waiting_for(padded if t.resource == "gpu" else first) for t in parallel]
        pending = () if finishes else self.pending(region, split) + region.made_behind
        defers = pending and self.defers(region)
        last = self.tasks.last(region, split, run.results, self.reads_again(region) if defers else 0.0)
        if pending and not defers:
            last += filter(None, [self.settle(region).task])
        for task in last:
            tasks.append(task.waiting_for(tuple(range(len(tasks)))))
        port = Port(dtype=self.system.dtype)
        whole = split.extent(region.layer)
        along = "" if split.axis == "rows" else f" {split.axis}"
        return Candidate(
            name=f"SPLIT {split.gpu}/{whole}{along}" if split.gpu else way.name(finishes),
            covers=(region.name,),
            gpu_share=split.gpu / whole,
            input=port,
            output=replace(port, pending=pending if defers else ()),
            tasks=tuple(tasks),
            rewrite=Rewrite(
                mode="SPLIT" if split.gpu else "PIM",
                gpu_rows=split.gpu,
                schedule=run.schedule,
                axis=split.axis,
                finishes=finishes,
                joins=way.joins,
            ),
            placed_rows=run.rows,
            placed_bytes=run.rows * row_bytes(self.system) * self.system.pim_channels,
            filter_bytes=weight_bytes(region, self.system.dtype, self._left_bytes(region, split)),
            moments=self._moments(region, split),
        )

    def _moments(self, region: Region, split: Split) -> tuple[Moment, ...]:
        """Memory beside input and result: while both devices do their parts, then while these are combined.

        A concatenation that copies parts is counted here, although a consumer's kernel may do it later. All
        other deferred epilogues work in place.
        """
        element, layer = ELEMENT_BYTES[self.system.dtype], region.layer
        before = layer.n * layer.h * layer.w * layer.c * element if region.made_before else 0
        before += self.tasks.padding_bytes(region, split)
        parts_bytes = layer.pixels * layer.oc * element
        if split.axis == "reduction":
            return (Moment(own_bytes=before + parts_bytes),)
        moments = [Moment(own_bytes=before)] if before else []
        if self.pending(region, split)[-1:] == ("concat",):
            added = bool(region.inputs[region.operands :])
            moments = [Moment(own_bytes=before), Moment(own_bytes=parts_bytes, reads=added)]
        return tuple(moments)

    def _left_bytes(self, region: Region, split: Split) -> int:
        """Filter bytes that the GPU's part of a split reads."""
        part = split.gpu_part(region.layer) if split.gpu else None
        return part.oc * part.reduction * ELEMENT_BYTES[self.system.dtype] if part else 0

    def pending(self, region: Region, split: Split) -> tuple[str, ...]:
        """What a kernel has to do to the result of PIM, whatever the region's own epilogue is."""
        lanes: tuple[str, ...] = ("lanes",) if self.system.pim.result_lanes > 1 else ()
        return lanes + split.pending(region.layer, views=self.system.views)

    def defers(self, region: Region) -> bool:
        """Whether the epilogue of a PIM region may be deferred to the kernel of a consumer.

        It may if the first region that reads the result fuses it (`relay_passes.regions.kernel_groups`), is
        no view, and gathers no parts.
        """
        graph, consumers = self.graph, self.graph.consumers[region.name]
        if not consumers:
            return False
        first = graph.region(consumers[0])
        before = first.prologue if first.geometry else first.operators
        if first.view or not set(GATHERS).isdisjoint(before):
            return False
        taken = {first.inputs[position] for position in {*first.taken_inputs}.difference(first.kept_inputs)}
        return region.name in taken and (first.anchored or not graph.shares(region.name))

    def settle(self, region: Region) -> EdgeCost:
        """The cost of a deferred epilogue in a kernel of its own, if no consumer fuses it."""
        return self.tasks.epilogue(region)

    def absorb(self, region: Region) -> EdgeCost:
        """The cost of a deferred epilogue inside the kernel of the first consumer.

        Only bytes that this kernel does not touch anyway count: a residual, and the finished result if other
        consumers need it too.
        """
        shared = self.graph.shares(region.name)
        return self.tasks.absorbed_epilogue(region, self.reads_again(region), shared=shared)

    def reads_again(self, region: Region) -> float:
        """How many more times than once the first consumer reads the result from the L2, if it fuses."""
        name = region.name
        if name not in self._reads_again:
            consumers = self.graph.consumers[name] if self.defers(region) else ()
            first = [self.tasks.reads_again(self.graph.region(each)) for each in consumers[:1]]
            self._reads_again[name] = max(self._least_again.get(name, 0.0), *first) if first else 0.0
        return self._reads_again[name]

    def pim_cost(
        self,
        region: Region,
        split: Split = WHOLE,
        schedule: str = "",
        way: finished.Way = finished.LEFT_UNDONE,
    ) -> PimCost:
        """The cost of PIM's part of a region, with `way` as its epilogue.

        The loop order is `schedule`, or the fastest if that is empty.
        """
        geometry = way.layer(region.layer)
        if schedule:
            self.costs.side.require_schedule(schedule, split.pim_part(geometry), region.name)
        return self.costs.pim(geometry, region.name, split, schedule, way.initial, way.activation)

    def placed(self, region: Region, candidate: Candidate, row_begin: int) -> PimProgram:
        """The PIM program of a PIM or SPLIT candidate, its weights from row `row_begin` on."""
        rewrite, layer = candidate.rewrite, region.layer
        split = Split(rewrite.axis, rewrite.gpu_rows)
        way = finished.way(region, rewrite.finishes, rewrite.joins)
        return self.costs.side.program(
            split.pim_part(way.layer(layer)),
            Schedule.parse(rewrite.schedule),
            region.name,
            split.pixel_begin(layer),
            row_begin,
            initial=way.initial,
            added_channels=way.added_channels(layer),
            activation=way.activation,
        )


def _wrong_dtype(system: System) -> str:
    return "" if system.dtype == "fp32" else f"primitives for GPUs compute in fp32, not in {system.dtype}"


def require_primitives(system: System, gpu: GpuProfiler) -> None:
    """Raise `UsageError` unless `system` can run primitives and `gpu` can time them."""
    if why := _wrong_dtype(system):
        raise UsageError(f"--device cuda: {why}; give --dtype fp32")
    if not gpu.primitives:
        raise UsageError(
            f"--device cuda: gpu={gpu.name} has no times of primitives; use gpu=analytic, or gpu=cuda"
        )


def _figures(candidate: Candidate) -> tuple[float, float, int, int]:
    """Time, energy, workspace and filter bytes of a candidate whose tasks run in sequence on the GPU."""
    return (
        sum(task.duration_ns for task in candidate.tasks),
        sum(task.energy_pj for task in candidate.tasks),
        candidate.workspace_bytes,
        candidate.filter_bytes,
    )


def _as_good(one: Candidate, other: Candidate) -> bool:
    return all(a <= b for a, b in zip(_figures(one), _figures(other)))
