"""Candidates of every region, with the tasks that they are charged for.

What is charged is the table "What is charged" of docs/architecture.md, in one place: here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pimflow.core.candidate import Candidate, EdgeCost, Known, Port, Rewrite, Task
from pimflow.core.plan import MODES
from pimflow.core.program import PimProgram
from pimflow.core.region import (
    ELEMENT_BYTES,
    GATHERS,
    RESULT_BYTES,
    ConvGeometry,
    Kernel,
    Region,
    RegionGraph,
    convolution_kernel,
)
from pimflow.core.split import WHOLE, Split
from pimflow.errors import PlanError
from pimflow.hardware import System
from pimflow.pim_backend.capability import refusal
from pimflow.pim_backend.schedule import Schedule
from pimflow.placement import splits
from pimflow.placement.costs import Costs, Profiling
from pimflow.placement.pim_runs import PimCost
from pimflow.simulators.energy import pim_energy_pj
from pimflow.simulators.gpu_model import kernel_energy_pj

COST_MODEL = "5"


class Candidates:
    """Makes the candidates of one network on one system.

    Parameters
    ----------
    graph : RegionGraph
    system : System
    costs : Costs, optional
        Made for the system, or for one that differs in launch times only.
    modes : sequence of str
        Those of `core.plan.MODES` that candidates have; no others are timed.

    Raises
    ------
    UsageError
        If no network is compiled in the system's storage type.
    """

    def __init__(
        self,
        graph: RegionGraph,
        system: System,
        costs: Costs | None = None,
        modes: Sequence[str] = MODES,
    ):
        system.require_network_dtype()
        self.graph, self.system, self.modes = graph, system, modes
        self.costs = costs or Costs(system, Profiling())
        self._layers: dict[ConvGeometry, splits.Layer] = {}

    def prepare(self) -> None:
        """Time all that the candidates of the network need, at once."""
        self.costs.time_layers(self.layers())
        with self.costs.together():
            for region in self.graph.regions:
                self.all(region)
                self.make(region, "GPU", gpu_channels=self.system.gpu.memory_channels)
                if not self.refusal(region):
                    self.settle(region), self.absorb(region)

    @property
    def splitting(self) -> str:
        """How splits are found: as the system says, if GPU times take no measuring; else by the grid."""
        return self.system.splits if self.costs.profiling.gpu.computes else "grid"

    def layers(self) -> list[splits.Layer]:
        """What PIM is asked to do."""
        if set(self.modes) <= {"GPU"}:
            return []
        capable = {r.geometry: r for r in self.graph.regions if not self.refusal(r)}
        missing = [region for geometry, region in capable.items() if geometry not in self._layers]
        if self.splitting == "exact":
            with self.costs.together():
                for region in missing:
                    self._asked(region)
        self._layers |= {region.geometry: self._asked(region) for region in missing}
        return [self._layers[geometry] for geometry in capable]

    def _asked(self, region: Region) -> splits.Layer:
        """What is asked about the layer of a region."""
        geometry, name = region.geometry, region.name
        if "SPLIT" not in self.modes:
            return self.costs.layer(geometry, name)
        if self.splitting == "grid":
            return self.costs.layer(geometry, name, splits=tuple(splits.grid(geometry)))
        burst_ns = self.system.pim.column_bytes / self.system.crossbar_bytes_per_ns
        terms = splits.Terms(
            launch_ns=self._submission_ns, burst_ns=burst_ns if self.system.charges("crossbar") else 0.0
        )
        possible = splits.every(geometry, self.system.pim, views=self.system.views)
        besides = tuple(self._beside(region, split) for split in possible)
        return self.costs.layer(geometry, name, besides=besides, terms=terms)

    def _beside(self, region: Region, split: Split) -> splits.Beside:
        """What a split takes but for PIM's part."""
        channels, results = self.system.gpu_channels, split.pim_results(region.geometry)
        gpu = self._gpu_tasks(region, split, channels)
        return splits.Beside(
            split=split,
            gpu_ns=gpu[0].duration_ns,
            crossbar_ns=sum(task.duration_ns for task in gpu[1:]),
            after_ns=sum(task.duration_ns for task in self._last_tasks(region, split, results)),
            pending=self._pending(region, split),
        )

    def all(self, region: Region) -> list[Candidate]:
        """GPU; PIM and SPLIT where PIM can run the region; of these, those of `modes`."""
        found = [self.make(region, "GPU")] if "GPU" in self.modes else []
        if self.refusal(region):
            return found
        if "PIM" in self.modes:
            found.append(self.make(region, "PIM"))
        if "SPLIT" in self.modes:
            found += [self._with_pim(region, split) for split in self.splits(region)]
        return found

    def splits(self, region: Region) -> tuple[Split, ...]:
        """Those of a region that are candidates."""
        if region.geometry not in self._layers:
            self.layers()
        return self.costs.splits(self._layers[region.geometry])

    def refusal(self, region: Region) -> str:
        """Why PIM cannot run `region`; empty if it can."""
        if self.system.pim_channels == 0:
            return "the system has no PIM channels"
        return refusal(region, self.system.pim)

    def unsplittable(self, region: Region, split: Split) -> str:
        """Why `region` cannot be split so; empty if it can."""
        if region.operator == "fc" and split.axis == "rows":
            return "fc has no rows to split"
        if split.axis == "reduction" and not self.system.views:
            return "parts of its input would be copied"
        return split.problem(region.geometry)

    def make(
        self,
        region: Region,
        mode: str,
        gpu_rows: int = 0,
        schedule: str = "",
        *,
        axis: str = "rows",
        gpu_channels: int | None = None,
    ) -> Candidate:
        """One candidate.

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

        Raises
        ------
        PlanError
            If the region cannot be done so.
        """
        channels = self.system.gpu_channels if gpu_channels is None else gpu_channels
        if mode == "GPU":
            kernels = [] if region.view else [gpu_kernel(region, self.system.dtype)]
            port = Port(dtype=self.system.dtype)
            return Candidate(
                name="GPU",
                covers=(region.name,),
                gpu_share=1.0,
                input=replace(port, accepts_pending=not region.view),
                output=port,
                tasks=tuple(self._gpu_task(region.name, kernel, channels) for kernel in kernels),
                rewrite=Rewrite(mode="GPU", gpu_rows=region.output_rows),
            )
        split = Split(axis, gpu_rows) if mode == "SPLIT" else WHOLE
        problem = self.refusal(region) or (self.unsplittable(region, split) if mode == "SPLIT" else "")
        if problem:
            raise PlanError(f"region '{region.name}' cannot be {mode}: {problem}")
        return self._with_pim(region, split, schedule)

    def _with_pim(self, region: Region, split: Split, schedule: str = "") -> Candidate:
        """PIM, or SPLIT where something is left to the GPU."""
        run, channels = self.pim_cost(region, split, schedule), self.system.gpu_channels
        parallel = [self._pim_task(region, run)]
        if self.system.charges("crossbar"):
            transfer = self._transfer(f"{region.name} (to and from PIM)", self._pim_bytes(run))
            # A kernel's traffic over the crossbar is priced with the kernel.
            crossbar_pj = transfer.moved_bytes * self.system.gpu.energy["l2_pj_per_byte"]
            parallel.append(replace(transfer, energies_pj={"crossbar": crossbar_pj}))
        parallel += self._gpu_tasks(region, split, channels)
        layout = self.system.charges("layout")
        tasks = [self._prologue_task(region, channels)] if region.prologue and layout else []
        first = tuple(range(len(tasks)))
        if layout:
            tasks += [replace(task, after=first) for task in self._padding_tasks(region, split, channels)]
        padded = tuple(range(len(tasks)))
        tasks += [replace(t, after=padded if t.resource == "gpu" else first) for t in parallel]
        adds = split.axis == "reduction"
        pending = () if adds else self._pending(region, split) + region.epilogue
        defers = pending and self.defers(region)
        last = self._last_tasks(region, split, run.results)
        if pending and not defers:
            last += filter(None, [self.settle(region).task])
        for task in last:
            tasks.append(replace(task, after=tuple(range(len(tasks)))))
        port = Port(dtype=self.system.dtype)
        whole = split.extent(region.geometry)
        along = "" if split.axis == "rows" else f" {split.axis}"
        return Candidate(
            name=f"SPLIT {split.gpu}/{whole}{along}" if split.gpu else "PIM",
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
            ),
            placed_rows=run.rows,
            placed_bytes=run.rows * row_bytes(self.system) * self.system.pim_channels,
        )

    def _gpu_tasks(self, region: Region, split: Split, channels: int) -> list[Task]:
        """The GPU's part of a split: its kernel, and the traffic that contends with PIM's."""
        if not split.gpu:
            return []
        kernel = gpu_kernel(region, self.system.dtype, split, self.system.symmetric)
        task = self._gpu_task(f"{region.name} (GPU {split.axis})", kernel, channels)
        if not self.system.charges("crossbar"):
            return [task]
        return [task, self._transfer(f"{region.name} (GPU traffic)", task.moved_bytes)]

    def _pending(self, region: Region, split: Split) -> tuple[str, ...]:
        """What a PIM region leaves to others whatever it computes."""
        lanes = ("lanes",) if self.system.pim.result_lanes > 1 else ()
        return lanes + split.pending(region.geometry, views=self.system.views)

    def _last_tasks(self, region: Region, split: Split, results: int) -> list[Task]:
        """What makes whole what the devices left apart: lanes, and the two sums of a split reduction."""
        if not self.system.charges("epilogue"):
            return []
        found = []
        more = (self.system.pim.result_lanes - 1) * results
        if more:
            more_bytes = more * RESULT_BYTES[self.system.dtype]
            kernel = Kernel(kind="stream", macs=more, input_bytes=more_bytes, output_bytes=0)
            task = self._gpu_task(f"{region.name} (lanes)", kernel, self.system.gpu_channels)
            found.append(replace(task, launch_ns=0.0, launched=False))
        if split.axis == "reduction":
            found.append(self._epilogue(region, own=True, sums=2).task)
        return found

    def defers(self, region: Region) -> bool:
        """Whether what PIM leaves undone may wait for the kernel of a consumer.

        It may if the first region that reads the result reads it through its anchor, or is the only
        one, and takes no parts or joins any: `relay_passes.kernel_groups` fuses just that.
        """
        consumers = self.graph.consumers[region.name]
        if region.name in self.graph.outputs or not consumers:
            return False
        first = self.graph.region(consumers[0])
        before = first.prologue if first.geometry else first.operators
        if first.view or not set(GATHERS).isdisjoint(before):
            return False
        return first.inputs[0] == region.name and (first.anchored or len(consumers) == 1)

    def settle(self, region: Region) -> EdgeCost:
        """The kernel that applies what PIM leaves undone, when nobody else's kernel does."""
        return self._epilogue(region, own=True)

    def absorb(self, region: Region) -> EdgeCost:
        """The same inside the kernel of the first consumer: the bytes that this one does not touch anyway.

        They are what a residual adds, and the finished result if others read that too.
        """
        return self._epilogue(region, own=False)

    def _epilogue(self, region: Region, own: bool, sums: int = 1) -> EdgeCost:
        element = ELEMENT_BYTES[self.system.dtype]
        result_bytes = region.output_elements * element
        # What PIM returns is smaller than the result where the epilogue broadcasts it (squeeze and excite).
        returned = sums * region.geometry.pixels * region.geometry.oc
        read_bytes = (returned + sum(region.input_elements[1:])) * element
        shared = len(self.graph.consumers[region.name]) > 1
        kernel = Kernel(
            kind="stream",
            input_bytes=read_bytes - (0 if own else result_bytes),
            output_bytes=result_bytes if own or shared else 0,
        )
        if not self.system.charges("epilogue") or not (kernel.input_bytes or kernel.output_bytes):
            return EdgeCost()
        task = self._gpu_task(f"{region.name} (epilogue)", kernel, self.system.gpu_channels)
        return EdgeCost(task=task if own else replace(task, launch_ns=0.0, launched=False))

    def pim_cost(self, region: Region, split: Split = WHOLE, schedule: str = "") -> PimCost:
        """Of the program for what the GPU leaves, by the given or the fastest loop order."""
        geometry = region.geometry
        if schedule:
            known = [str(s) for s in self.costs.side.schedules(split.pim_part(geometry))]
            if schedule not in known:
                names = ", ".join(repr(name) for name in known)
                raise PlanError(f"region '{region.name}': schedule '{schedule}' is none of {names}")
        return self.costs.pim(geometry, region.name, split, schedule)

    def placed(self, region: Region, candidate: Candidate, row_begin: int) -> PimProgram:
        """The program of a PIM or SPLIT candidate with its weights at `row_begin`."""
        schedule = Schedule.parse(candidate.rewrite.schedule)
        split = Split(candidate.rewrite.axis, candidate.rewrite.gpu_rows)
        part, pixel_begin = split.pim_part(region.geometry), split.pixel_begin(region.geometry)
        return self.costs.side.program(part, schedule, region.name, pixel_begin, row_begin)

    def _gpu_task(self, label: str, kernel: Kernel, channels: int) -> Task:
        cost = self.costs.kernel(kernel, channels)
        return Task(
            label=label,
            resource="gpu",
            launch_ns=self.costs.launch_ns(cost, self.system.gpu),
            execution_ns=cost.execution_ns,
            moved_bytes=round(cost.dram_bytes),
            energies_pj=kernel_energy_pj(kernel, cost, self.system.gpu, dtype=self.system.dtype),
            known=cost.known,
        )

    def _prologue_task(self, region: Region, channels: int) -> Task:
        """The kernel that applies what the GPU would have fused before the convolution."""
        moved = region.input_elements[0] * ELEMENT_BYTES[self.system.dtype]
        kernel = Kernel(kind="stream", input_bytes=moved, output_bytes=moved)
        return self._gpu_task(f"{region.name} ({', '.join(region.prologue)})", kernel, channels)

    def _padding_tasks(self, region: Region, split: Split, channels: int) -> list[Task]:
        """The kernels that put rows of zeros beside the input of the GPU's part, as `SplitMdDp` does."""
        g = region.geometry
        uneven = split.gpu and split.axis == "rows" and self.system.symmetric
        part = g.rows.inputs(0, split.gpu) if uneven else None
        if part is None or part.pad_before == part.pad_after:
            return []
        row = g.w * g.c * ELEMENT_BYTES[self.system.dtype]
        zeros = [rows * row for rows in (part.pad_before, part.pad_after) if rows]
        if not region.padding_copied:
            kernels = [Kernel(kind="stream", input_bytes=0, output_bytes=each) for each in zeros]
            return [self._gpu_task(f"{region.name} (rows of zeros)", each, channels) for each in kernels]
        moved = g.h * row + sum(zeros)
        kernel = Kernel(kind="stream", input_bytes=moved, output_bytes=moved)
        return [self._gpu_task(f"{region.name} (padded input)", kernel, channels)]

    @property
    def _submission_ns(self) -> float:
        return self.system.pim_launch_ns if self.system.charges("pim-launch") else 0.0

    def _pim_task(self, region: Region, run: PimCost) -> Task:
        energy = pim_energy_pj(
            run.commands,
            run.gwrite_bursts,
            run.readres_bursts,
            self.system.pim,
            self.system.dtype,
            banks=run.banks,
        )
        return Task(
            label=f"{region.name} (PIM)",
            resource="pim",
            launch_ns=self._submission_ns,
            execution_ns=run.time_ns,
            energies_pj={f"pim_{part}": pj for part, pj in energy.items()},
            known=Known.SIMULATED,
        )

    def _pim_bytes(self, run: PimCost) -> int:
        """Bytes over the crossbar: what all GWRITEs write and all READRESs return."""
        bursts = run.gwrite_bursts + run.commands["READRES"] * run.readres_bursts
        return bursts * self.system.pim.column_bytes

    def _transfer(self, label: str, moved_bytes: int) -> Task:
        return Task(
            label=label,
            resource="crossbar",
            execution_ns=moved_bytes / self.system.crossbar_bytes_per_ns,
            moved_bytes=moved_bytes,
        )


def row_bytes(system: System) -> int:
    """Bytes of one row across the banks of a PIM channel."""
    pim = system.pim
    return pim.banks * pim.columns_per_row * pim.column_bytes


def gpu_kernel(region: Region, dtype: str, split: Split = WHOLE, symmetric: bool = False) -> Kernel:
    """The kernel that computes `region`, epilogue included, or the GPU's part of a `split`, without.

    If `symmetric`, one that cannot pad both ends of the rows alike reads rows of zeros.
    """
    element = ELEMENT_BYTES[dtype]
    if split.gpu:
        part = split.gpu_part(region.geometry)
        top, left, bottom, right = part.padding
        if symmetric and split.axis == "rows" and top != bottom:
            part = replace(part, h=part.h + top + bottom, padding=(0, left, 0, right))
        return convolution_kernel(part, dtype)
    output_bytes = (region.output_elements + region.kept_elements) * element
    if region.geometry is not None:
        residual_bytes = sum(region.input_elements[1:]) * element
        kernel = convolution_kernel(region.geometry, dtype, residual_bytes)
        return replace(kernel, output_bytes=output_bytes)
    return Kernel(
        kind="stream",
        macs=sum(region.input_elements),
        input_bytes=sum(region.input_elements) * element,
        weight_bytes=region.weight_elements * element,
        output_bytes=output_bytes,
    )
