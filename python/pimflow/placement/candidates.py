"""Candidates of every region, with the tasks that they are charged for.

What is charged is the table "What is charged" of docs/architecture.md, in one place: here.
"""

from __future__ import annotations

from dataclasses import replace

from pimflow.core.candidate import Candidate, EdgeCost, Known, Port, Rewrite, Task
from pimflow.core.liveness import apart
from pimflow.core.program import PimProgram
from pimflow.core.region import (
    ELEMENT_BYTES,
    RESULT_BYTES,
    STORED_BYTES,
    ConvGeometry,
    Kernel,
    Region,
    RegionGraph,
    convolution_kernel,
)
from pimflow.errors import PlanError
from pimflow.hardware import System
from pimflow.pim_backend.capability import refusal
from pimflow.pim_backend.schedule import Schedule
from pimflow.placement.costs import Costs, Profiling
from pimflow.placement.pim_runs import PimCost
from pimflow.simulators.energy import pim_energy_pj
from pimflow.simulators.gpu_model import kernel_energy_pj

SHARES = tuple(tenth / 10 for tenth in range(1, 10))
COST_MODEL = "5"
# They read finished tensors, whatever kernel they are in.
GATHERS = frozenset({"concat", "strided_slice"})


class Candidates:
    """Makes the candidates of one network on one system.

    Parameters
    ----------
    graph : RegionGraph
    system : System
    costs : Costs, optional
        Made for the system, or for one that differs in launch times only.

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
    ):
        system.require_network_dtype()
        self.graph, self.system = graph, system
        self.costs = costs or Costs(system, Profiling())

    def prepare(self) -> None:
        """Time all that the candidates of the network need, at once."""
        self.costs.time_layers(self.layers())
        with self.costs.together():
            for region in self.graph.regions:
                self.all(region)
                self.make(region, "GPU", gpu_channels=self.system.gpu.memory_channels)
                if not self.refusal(region):
                    self.settle(region), self.absorb(region)

    def layers(self) -> list[tuple[ConvGeometry, str, tuple[int, ...]]]:
        """What PIM is asked to do: layers, a region that has each, and output rows that the GPU may take."""
        capable = [region for region in self.graph.regions if not self.refusal(region)]
        return [(region.geometry, region.name, self.splits(region)) for region in capable]

    def all(self, region: Region) -> list[Candidate]:
        """GPU; PIM; SPLIT in steps of a tenth of the rows, where PIM can run the region."""
        found = [self.make(region, "GPU")]
        if self.refusal(region):
            return found
        found.append(self.make(region, "PIM"))
        return found + [self.make(region, "SPLIT", gpu_rows) for gpu_rows in self.splits(region)]

    def splits(self, region: Region) -> tuple[int, ...]:
        """Output rows that the GPU may compute of a region on both."""
        rows = region.output_rows
        tried = sorted({round(share * rows) for share in SHARES} - {0, rows})
        return tuple(gpu_rows for gpu_rows in tried if not self.unsplittable(region, gpu_rows))

    def refusal(self, region: Region) -> str:
        """Why PIM cannot run `region`; empty if it can."""
        if self.system.pim_channels == 0:
            return "the system has no PIM channels"
        return refusal(region, self.system.pim)

    def unsplittable(self, region: Region, gpu_rows: int) -> str:
        """Why `region` cannot be split after `gpu_rows` rows; empty if it can."""
        if region.operator != "conv2d":
            return f"{region.operator} has no rows to split"
        if region.geometry.n > 1:
            return "rows of a batch are not contiguous"
        return region.geometry.rows.unsplittable(gpu_rows)

    def make(
        self,
        region: Region,
        mode: str,
        gpu_rows: int = 0,
        schedule: str = "",
        *,
        gpu_channels: int | None = None,
    ) -> Candidate:
        """One candidate.

        Parameters
        ----------
        region : Region
        mode : str
            ``GPU``, ``PIM`` or ``SPLIT``.
        gpu_rows : int
            For ``SPLIT``, output rows on the GPU.
        schedule : str
            Loop order of the PIM program; the fastest if empty.
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
        problem = self.refusal(region) or (self.unsplittable(region, gpu_rows) if mode == "SPLIT" else "")
        if problem:
            raise PlanError(f"region '{region.name}' cannot be {mode}: {problem}")
        return self._with_pim(region, mode, gpu_rows if mode == "SPLIT" else 0, schedule, channels)

    def _with_pim(self, region: Region, mode: str, gpu_rows: int, schedule: str, channels: int) -> Candidate:
        run = self.pim_cost(region, gpu_rows, schedule)
        full = self.system.accounting == "full"
        parallel = [self._pim_task(region, run)]
        if full:
            transfer = self._transfer(f"{region.name} (to and from PIM)", self._pim_bytes(run))
            # A kernel's traffic over the crossbar is priced with the kernel.
            crossbar_pj = transfer.moved_bytes * self.system.gpu.energy["l2_pj_per_byte"]
            parallel.append(replace(transfer, energies_pj={"crossbar": crossbar_pj}))
        if gpu_rows:
            kernel = gpu_kernel(region, self.system.dtype, gpu_rows)
            parallel.append(self._gpu_task(f"{region.name} (GPU rows)", kernel, channels))
            if full:
                moved_bytes = parallel[-1].moved_bytes
                parallel.append(self._transfer(f"{region.name} (GPU traffic)", moved_bytes))
        tasks = [self._prologue_task(region, channels)] if region.prologue and full else []
        first = tuple(range(len(tasks)))
        tasks += [replace(task, after=first) for task in parallel]
        if full and self.system.pim.result_lanes > 1:
            after = tuple(range(len(tasks)))
            tasks.append(replace(self._lanes_task(region, run, channels), after=after))
        pending = self._undone(region, gpu_rows) + region.epilogue
        defers = pending and self.defers(region)
        if pending and not defers:
            settle = self.settle(region).task
            if settle:
                tasks.append(replace(settle, after=tuple(range(len(tasks)))))
        port = Port(dtype=self.system.dtype)
        return Candidate(
            name="PIM" if mode == "PIM" else f"SPLIT {gpu_rows}/{region.output_rows}",
            covers=(region.name,),
            gpu_share=gpu_rows / region.output_rows,
            input=port,
            output=replace(port, pending=pending if defers else ()),
            tasks=tuple(tasks),
            rewrite=Rewrite(mode=mode, gpu_rows=gpu_rows, schedule=run.schedule),
            placed_rows=run.rows,
            placed_bytes=run.rows * row_bytes(self.system) * self.system.pim_channels,
        )

    def _undone(self, region: Region, gpu_rows: int) -> tuple[str, ...]:
        """What a PIM region leaves to others whatever it computes."""
        lanes = ("lanes",) if self.system.pim.result_lanes > 1 else ()
        g = region.geometry
        copied = not self.system.views or apart((g.n, g.oh, g.ow, g.oc), 1, gpu_rows, STORED_BYTES)
        return lanes + (("concat",) if gpu_rows and copied else ())

    def _lanes_task(self, region: Region, run: PimCost, channels: int) -> Task:
        """What it adds to a kernel that each result is a sum of several, which the device left apart."""
        more = (run.result_lanes - 1) * run.results
        more_bytes = more * RESULT_BYTES[self.system.dtype]
        kernel = Kernel(kind="stream", macs=more, input_bytes=more_bytes, output_bytes=0)
        task = self._gpu_task(f"{region.name} (lanes)", kernel, channels)
        return replace(task, launch_ns=0.0, launched=False)

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
        if first.view or GATHERS.intersection(before):
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

    def _epilogue(self, region: Region, own: bool) -> EdgeCost:
        element = ELEMENT_BYTES[self.system.dtype]
        result_bytes = region.output_elements * element
        # What PIM returns is smaller than the result where the epilogue broadcasts it (squeeze and excite).
        returned = region.geometry.pixels * region.geometry.oc
        read_bytes = (returned + sum(region.input_elements[1:])) * element
        shared = len(self.graph.consumers[region.name]) > 1
        kernel = Kernel(
            kind="stream",
            input_bytes=read_bytes - (0 if own else result_bytes),
            output_bytes=result_bytes if own or shared else 0,
        )
        if self.system.accounting == "paper" or not (kernel.input_bytes or kernel.output_bytes):
            return EdgeCost()
        task = self._gpu_task(f"{region.name} (epilogue)", kernel, self.system.gpu_channels)
        return EdgeCost(task=task if own else replace(task, launch_ns=0.0, launched=False))

    def pim_cost(self, region: Region, gpu_rows: int, schedule: str = "") -> PimCost:
        """Of the program for the rows that the GPU leaves, by the given or the fastest loop order."""
        geometry = region.geometry
        if schedule:
            known = [str(s) for s in self.costs.side.schedules(geometry)]
            if schedule not in known:
                names = ", ".join(repr(name) for name in known)
                raise PlanError(f"region '{region.name}': schedule '{schedule}' is none of {names}")
        return self.costs.pim(geometry, region.name, gpu_rows, schedule)

    def placed(self, region: Region, candidate: Candidate, row_begin: int) -> PimProgram:
        """The program of a PIM or SPLIT candidate with its weights at `row_begin`."""
        schedule = Schedule.parse(candidate.rewrite.schedule)
        pixel_begin = candidate.rewrite.gpu_rows * region.geometry.ow
        return self.costs.side.program(region.geometry, schedule, region.name, pixel_begin, row_begin)

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

    def _pim_task(self, region: Region, run: PimCost) -> Task:
        full = self.system.accounting == "full"
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
            launch_ns=self.system.pim_launch_ns if full else 0.0,
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


def gpu_kernel(region: Region, dtype: str, gpu_rows: int = 0) -> Kernel:
    """The kernel that computes `region`, epilogue included, or its first `gpu_rows` rows, without."""
    element = ELEMENT_BYTES[dtype]
    if gpu_rows:
        return convolution_kernel(region.geometry.first_rows(gpu_rows), dtype)
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
