"""The tasks that candidates are charged: kernels, PIM programs, crossbar transfers, and epilogues.

The rules are the table of docs/charging.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence

from pimflow.core.candidate import EdgeCost, Provenance, Task, in_sequence, makespan_ns, with_fields
from pimflow.core.kernel import ELEMENT_BYTES, EMPTY_KERNEL, RESULT_BYTES, Kernel
from pimflow.core.region import Region
from pimflow.core.split import Split
from pimflow.hardware import System
from pimflow.placement.costs.costs import Costs
from pimflow.placement.costs.pim_runs import PimCost
from pimflow.placement.solvers.launches import charged_tasks
from pimflow.simulators.gpu.machine import RooflineMachine
from pimflow.simulators.gpu.model import KernelRequest, kernel_energy_pj
from pimflow.simulators.gpu.region_kernels import gpu_kernel, gpu_kernels, prologue_elements
from pimflow.simulators.pim.energy import CommandCounts, pim_energy_pj


class TaskList(list[Task]):
    """The tasks of a candidate in the order in which they are issued."""

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions of all tasks so far."""
        return tuple(range(len(self)))

    def append_after(self, tasks: Iterable[Task], waits: tuple[int, ...]) -> tuple[int, ...]:
        """Append tasks that wait for those at the positions `waits`; returns their own positions."""
        begin = len(self)
        self.extend(task.with_dependencies(waits) for task in tasks)
        return self.positions[begin:]

    def append_sequence(self, tasks: Iterable[Task], waits: tuple[int, ...]) -> tuple[int, ...]:
        """Append tasks of which the first waits for `waits`, and each other for the one before.

        Returns what the next task of the sequence would wait for.
        """
        for task in tasks:
            waits = self.append_after([task], waits)
        return waits


class TaskBuilder:
    """Makes tasks and prices them on one system.

    Parameters
    ----------
    costs : Costs
        Costs on the system, or on one that differs only in launch times.
    """

    def __init__(self, system: System, costs: Costs):
        self.system, self.costs = system, costs

    @property
    def kernel_channels(self) -> int:
        """Memory channels of the GPU's kernels in a mixed plan: all where PIM leaves it none of its own."""
        return self.system.gpu_channels or self.system.gpu.memory_channels

    @property
    def submission_ns(self) -> float:
        """Time to launch a program on PIM."""
        return self.system.pim_launch_ns if self.system.charges("pim-launch") else 0.0

    @property
    def switch_ns(self) -> float:
        """Time to switch the channels that have PIM between plain memory and PIM."""
        charged = self.system.is_time_shared and self.system.charges("channel-modes")
        return self.system.channel_mode_switch_ns if charged else 0.0

    @functools.cached_property
    def switch_tasks(self) -> tuple[Task, ...]:
        """The switch of the channels that have PIM between plain memory and PIM, if that is charged."""
        if not self.switch_ns or not self.system.pim_channels:
            return ()
        label = "channels switched"
        return (Task(label=label, resource="pim", execution_ns=self.switch_ns, readies_channels=True),)

    def staging_tasks(self, label: str, read_bytes: float) -> list[Task]:
        """The read of operands into the L2 by PIM's channels as plain memory, and their switch to PIM."""
        return [self._memory_task(f"{label} (operands to the L2)", read_bytes), *self.switch_tasks]

    def writeback_tasks(self, label: str, result_bytes: int) -> list[Task]:
        """The switch of PIM's channels to plain memory, and the write of their share of a result."""
        system = self.system
        machine = RooflineMachine(system.gpu, system.dtype)
        share = system.pim_channels / system.gpu.memory_channels
        written_bytes = result_bytes * share * system.gpu.write_factor
        cost_factor = 1 / machine["dram_write"]
        return [*self.switch_tasks, self._memory_task(f"{label} (results)", written_bytes, cost_factor)]

    def _memory_task(self, label: str, moved_bytes: float, cost_factor: float = 1.0) -> Task:
        """A transfer of PIM's channels as plain memory: a byte takes as long as `cost_factor` bytes read."""
        system = self.system
        machine = RooflineMachine(system.gpu, system.dtype, system.pim_channels)
        dram_pj = moved_bytes * 8 * system.gpu.energy["dram_pj_per_bit"]
        return Task(
            label=label,
            resource="pim",
            readies_channels=True,
            execution_ns=moved_bytes * cost_factor / machine.dram_rate / machine.cycles_per_ns,
            moved_bytes=round(moved_bytes),
            # If the crossbar is charged, the program's transfer has the energy of operands and results.
            energies_pj={} if system.charges("crossbar") else {"gpu_dram": dram_pj},
        )

    def standalone_ns(self, tasks: Sequence[Task]) -> float:
        """Estimated time of a candidate's tasks by themselves: splits and stages are chosen by it.

        Launches that are issued ahead are assumed to be over when the candidate begins.
        """
        if self.system.overlaps_launches:
            tasks = charged_tasks(tasks, True, lambda _: math.inf)
        return makespan_ns(tuple(tasks))

    def gpu_task(self, label: str, kernel: Kernel, channels: int | None = None) -> Task:
        """The task of a kernel on `channels` memory channels; by default the GPU's in a mixed plan.

        If a mixed plan leaves the GPU no channels, the kernel has all of them between PIM programs.
        """
        if channels is None and not self.system.gpu_channels:
            return with_fields(self.gpu_task(label, kernel, self.system.gpu.memory_channels), also=("pim",))
        cost = self.costs.kernel_cost(kernel, self.system.gpu_channels if channels is None else channels)
        return Task(
            label=label,
            resource="gpu",
            launch_ns=self.costs.launch_ns(cost, self.system.gpu),
            execution_ns=cost.execution_ns,
            moved_bytes=round(cost.dram_bytes),
            energies_pj=kernel_energy_pj(kernel, cost, self.system.gpu, dtype=self.system.dtype),
            known=cost.provenance,
        )

    def gpu_sequence(
        self, name: str, parts: Sequence[str], kernels: Sequence[Kernel], channels: int | None
    ) -> tuple[Task, ...]:
        """The tasks of kernels in sequence, which are `parts` of what `name` is, if it has several."""
        numbers = range(1, len(kernels) + 1)
        labels = [f"{name} ({part}, {number} of {len(kernels)})" for part, number in zip(parts, numbers)]
        labels = labels or [name] * len(kernels)
        return in_sequence(self.gpu_task(label, kernel, channels) for label, kernel in zip(labels, kernels))

    def time_parts(self, region: Region, splits: Iterable[Split]) -> None:
        """Time the kernels of the GPU's parts of many splits in one batch, for `gpu_part_tasks`."""
        kernels = (
            gpu_kernel(region, self.system.dtype, split, self.system.has_symmetric_padding)
            for split in splits
            if split.gpu
        )
        self.time_kernels(kernels)

    def time_kernels(self, kernels: Iterable[Kernel]) -> None:
        """Time kernels that run while PIM works, in one batch."""
        self.costs.time_kernels(KernelRequest(kernel, self.kernel_channels) for kernel in kernels)

    def gpu_tasks_with_traffic(self, label: str, name: str, kernel: Kernel) -> list[Task]:
        """The tasks of a kernel that runs while PIM does part of `name`: the kernel, and its traffic.

        The traffic over the crossbar contends with PIM's.
        """
        task = self.gpu_task(label, kernel)
        if not self.system.charges("crossbar"):
            return [task]
        return [task, self._crossbar_task(f"{name} (GPU traffic)", task.moved_bytes)]

    def gpu_part_tasks(self, region: Region, split: Split) -> list[Task]:
        """The tasks of the GPU's part of a split; none if it has no part."""
        if not split.gpu:
            return []
        kernel = gpu_kernel(region, self.system.dtype, split, self.system.has_symmetric_padding)
        return self.gpu_tasks_with_traffic(f"{region.name} (GPU {split.axis})", region.name, kernel)

    def pim_tasks(self, name: str, run: PimCost, read_elements: int, sums: int = 1) -> list[Task]:
        """The tasks of a PIM program: refreshes before it, the program, and its traffic over the crossbar.

        Parameters
        ----------
        read_elements : int
            Distinct elements that it reads: DRAM is read once for each.
        sums : int
            Partial sums that it returns for each result.
        """
        system = self.system
        counts = CommandCounts(
            commands=run.commands,
            gwrite_bursts=run.gwrite_bursts,
            write_bursts=run.write_bursts,
            readres_bursts=run.readres_bursts,
            banks=run.banks,
        )
        pim = system.pim.with_weights(run.weights, run.activations or system.dtype)
        energy = pim_energy_pj(counts, pim, system.dtype)
        refreshes = Task(
            label=f"{name} (refreshes ahead)",
            resource="pim",
            readies_channels=True,
            launched=False,
            execution_ns=run.ahead_ns,
            known=Provenance.SIMULATED,
        )
        program = Task(
            label=f"{name} (PIM)",
            resource="pim",
            launch_ns=self.submission_ns,
            execution_ns=run.time_ns,
            energies_pj={f"pim_{part}": pj for part, pj in energy.items()},
            known=Provenance.SIMULATED,
        )
        tasks = [refreshes, program] if run.ahead_ns else [program]
        if not system.charges("crossbar"):
            return tasks
        transfer = self._crossbar_task(
            f"{name} (to and from PIM)", run.traffic_bursts * system.pim.column_bytes
        )
        # A kernel's traffic over the crossbar is priced with the kernel.
        crossbar_pj = transfer.moved_bytes * system.gpu.energy["l2_pj_per_byte"]
        written_elements = run.results * run.result_lanes * sums if run.commands["READRES"] else 0
        dram_pj = self.dram_pj(read_elements, written_elements)
        return [*tasks, with_fields(transfer, energies_pj={"crossbar": crossbar_pj, "gpu_dram": dram_pj})]

    def dram_pj(self, read_elements: int, written_elements: int) -> float:
        """DRAM energy of PIM's operands and results, counted as for the GPU's kernels."""
        element, gpu = ELEMENT_BYTES[self.system.dtype], self.system.gpu
        machine = RooflineMachine(gpu, self.system.dtype, self.kernel_channels)
        moved_bytes, _ = machine.dram_traffic(read_elements * element, 0, written_elements * element)
        return float(moved_bytes) * 8 * gpu.energy["dram_pj_per_bit"]

    def _crossbar_task(self, label: str, moved_bytes: int) -> Task:
        return Task(
            label=label,
            resource="crossbar",
            execution_ns=moved_bytes / self.system.crossbar_bytes_per_ns,
            moved_bytes=moved_bytes,
        )

    def prologue_tasks(self, region: Region) -> Sequence[Task]:
        """The kernels, in sequence, of the prologue that the GPU would fuse before the convolution."""
        if not (region.has_prologue_kernels and self.system.charges("layout")):
            return []
        element = ELEMENT_BYTES[self.system.dtype]
        written_bytes = region.layer.input_elements * element
        read_bytes = [written_bytes] * region.pim.prologue_kernels
        read_bytes[0] = prologue_elements(region) * element
        kernels = [Kernel(kind="stream", input_bytes=read, output_bytes=written_bytes) for read in read_bytes]
        return self.gpu_sequence(f"{region.name} ({', '.join(region.prologue)})", (), kernels, None)

    def padding_tasks(self, region: Region, split: Split) -> list[Task]:
        """The kernels that add rows of zeros to the input of the GPU's part, as `SplitMdDp` does."""
        zeros = self._zero_row_bytes(region, split) if self.system.charges("layout") else []
        if not zeros or not region.pim.padding_copy_reason:
            kernels = [Kernel(kind="stream", input_bytes=0, output_bytes=zero_bytes) for zero_bytes in zeros]
            return [self.gpu_task(f"{region.name} (rows of zeros)", zero_bytes) for zero_bytes in kernels]
        moved_bytes = self.padding_bytes(region, split)
        kernel = Kernel(kind="stream", input_bytes=moved_bytes, output_bytes=moved_bytes)
        return [self.gpu_task(f"{region.name} (padded input)", kernel)]

    def padding_bytes(self, region: Region, split: Split) -> int:
        """Bytes of the rows of zeros of `padding_tasks`, and of the input if it is copied between them."""
        zeros, g = sum(self._zero_row_bytes(region, split)), region.layer
        copied = g.input_elements * ELEMENT_BYTES[self.system.dtype]
        return zeros + (copied if zeros and region.pim.padding_copy_reason else 0)

    def _zero_row_bytes(self, region: Region, split: Split) -> list[int]:
        """Bytes of the rows of zeros at each end that has any."""
        if not (split.gpu and split.axis == "rows" and self.system.has_symmetric_padding):
            return []
        part = region.layer.rows.inputs(0, split.gpu)
        if part.pad_before == part.pad_after:
            return []
        row = region.layer.w * region.layer.c * ELEMENT_BYTES[self.system.dtype]
        return [rows * row for rows in (part.pad_before, part.pad_after) if rows]

    def partial_sum_tasks(
        self, region: Region, split: Split, results: int, l2_rereads: float = 0.0
    ) -> list[Task]:
        """The extra work of the kernel that adds up partial results, beyond the first of each result."""
        if not self.system.charges("epilogue"):
            return []
        halves = results if split.axis == "reduction" else 0
        additions = (
            ("lanes", (self.system.pim.result_lanes - 1) * results, RESULT_BYTES),
            ("sum of both parts", halves, ELEMENT_BYTES),
        )
        return [
            self._incremental_task(
                f"{region.name} ({name})", count * sizes[self.system.dtype], 0, l2_rereads, count
            )
            for name, count, sizes in additions
            if count
        ]

    def _incremental_task(
        self, label: str, read_bytes: int, written_bytes: int, l2_rereads: float, macs: int = 0
    ) -> Task:
        """Extra work inside a kernel that runs anyway: the time beyond that of an empty kernel.

        The kernel reads the bytes `l2_rereads` more times from the L2: for each tile of columns, and each
        tap.
        """
        kernel = Kernel(
            kind="stream",
            macs=macs,
            input_bytes=read_bytes,
            again_bytes=round(read_bytes * l2_rereads),
            output_bytes=written_bytes,
        )
        task = self.gpu_task(label, kernel)
        added_ns = task.execution_ns - self.gpu_task(label, EMPTY_KERNEL).execution_ns
        return with_fields(task, launch_ns=0.0, launched=False, execution_ns=max(added_ns, 0.0))

    def l2_rereads(self, region: Region) -> float:
        """How many more times than once the kernel of `region` reads its first operand from the L2."""
        (kernel, *_) = gpu_kernels(region, self.system.dtype)
        if kernel.geometry is None or kernel.kind != "gemm":
            return 0.0
        tile = self.costs.analytic_tile(kernel, self.kernel_channels)
        if tile is None:  # a product of one row
            return 0.0
        g = kernel.geometry
        loads = kernel.groups * kernel.m * kernel.k * -(-kernel.n // tile[1])
        return max(loads / (g.n * g.h * g.w * g.c) - 1, 0.0)

    def epilogue_cost(self, region: Region) -> EdgeCost:
        """The cost of the epilogue of a PIM region in a kernel of its own."""
        if not self.system.charges("epilogue"):
            return EdgeCost()
        read_bytes, written_bytes = self._epilogue_bytes(region), self._result_bytes(region)
        kernel = Kernel(kind="stream", input_bytes=read_bytes, output_bytes=written_bytes)
        return EdgeCost(task=self.gpu_task(f"{region.name} (epilogue)", kernel))

    def fused_epilogue_cost(self, region: Region, l2_rereads: float, *, is_shared: bool) -> EdgeCost:
        """The cost of that epilogue inside a kernel that reads the result `l2_rereads` more times from the
        L2.

        If the result is `is_shared`, the kernel also stores it for other consumers.
        """
        result_bytes = self._result_bytes(region)
        # What PIM returns may be smaller than the result, which the kernel reads otherwise.
        read_bytes = max(self._epilogue_bytes(region) - result_bytes, 0)
        written_bytes = result_bytes if is_shared else 0
        if not self.system.charges("epilogue") or not (read_bytes or written_bytes):
            return EdgeCost()
        return EdgeCost(
            task=self._incremental_task(f"{region.name} (epilogue)", read_bytes, written_bytes, l2_rereads)
        )

    def _result_bytes(self, region: Region) -> int:
        return region.output_elements * ELEMENT_BYTES[self.system.dtype]

    def _epilogue_bytes(self, region: Region) -> int:
        # What PIM returns is smaller than the result where the epilogue broadcasts it (squeeze and excite).
        returned = region.layer.pixels * region.layer.oc
        added = sum(region.input_elements[region.operands :])
        return (returned + added) * ELEMENT_BYTES[self.system.dtype]
