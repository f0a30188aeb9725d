"""Analytic GPU model: time, traffic and energy of a kernel launch.

A kernel takes ``launch_ns + execution_ns``. The launch is a constant of the GPU; execution is a roofline
quantised to tiles and waves, `simulators.gpu.roofline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from pimflow.core.candidate import Provenance
from pimflow.core.kernel import Kernel
from pimflow.errors import SpecError, UsageError
from pimflow.hardware.gpu import GpuSpec
from pimflow.simulators.gpu.machine import Demand, GemmTilings, KernelBatch, RooflineMachine, family, tiling
from pimflow.simulators.gpu.roofline import demands, execution_cycles

# Sizes of a kernel that files of measured kernels have.
SIZES = ("m", "n", "k", "window", "stride", "groups", "macs", "input_bytes", "weight_bytes", "output_bytes")
KERNELS_AT_ONCE = 256  # so that their demands in all tilings fit into a CPU's cache


@dataclass(frozen=True, kw_only=True)
class KernelCost:
    """The cost of a kernel.

    Attributes
    ----------
    execution_ns : float
        Time without the launch.
    compute_ns, l2_ns, dram_ns : float
        The demands that execution combines.
    dram_bytes : float
        DRAM traffic in both directions.
    l2_bytes : float
        Traffic between the SMs and the L2.
    tile : tuple of int, optional
        (tm, tn, split-K) of the fastest GEMM; None if no tile is used.
    blocks : int
        Thread blocks; zero if no tile is used.
    device : str
        Device that it was measured on, with its clocks; empty if it was not measured.
    energies_pj : dict of str to float, optional
        Its dynamic energy by part, if the profiler gives it; else it is computed from `GpuSpec.energy`.
    """

    launch_ns: float
    execution_ns: float
    compute_ns: float
    l2_ns: float
    dram_ns: float
    dram_bytes: float
    l2_bytes: float
    tile: tuple[int, int, int] | None
    blocks: int
    provenance: Provenance = Provenance.ANALYTIC
    device: str = ""
    energies_pj: dict[str, float] | None = None

    @property
    def total_ns(self) -> float:
        """Time with the launch."""
        return self.launch_ns + self.execution_ns


@dataclass(frozen=True)
class KernelRequest:
    """A kernel to be timed.

    Attributes
    ----------
    channels : int
        Memory channels that serve the GPU while it runs.
    """

    kernel: Kernel
    channels: int


def require_wide_weights(requests: Sequence[KernelRequest], profiler: str) -> None:
    """Raise `UsageError` for narrow weights, if a profiler's kernels read those of the storage type only."""
    if any(request.kernel.weight_share != 1 for request in requests):
        raise UsageError(
            f"profiler gpu={profiler} has kernels with weights of the storage type only, and this model has "
            "narrow ones; leave out the profiler, or --weight-type"
        )


def kernel_cost(
    kernel: Kernel,
    gpu: GpuSpec,
    *,
    dtype: str,
    channels: int | None = None,
    tile: tuple[int, ...] | None = None,
) -> KernelCost:
    """Latency and traffic of one kernel.

    Parameters
    ----------
    dtype : str
        Storage type, ``"fp16"`` or ``"fp32"``; accumulation is in fp32.
    channels : int, optional
        Memory channels that serve the GPU: DRAM bandwidth, L2 capacity and L2 bandwidth scale with
        them. All by default.
    tile : tuple of int, optional
        (tm, tn), or (tm, tn, split) with split-K, of a GEMM that uses this tile; by default the tile of the
        kernel if it has one, else the fastest.

    Raises
    ------
    UsageError
        If the GPU does not have that many channels.
    SpecError
        If it has no rate for `dtype`, or lacks a constant of the model.
    """
    if tile is not None:  # the model itself also takes a split
        kernel = replace(kernel, tile=cast(tuple[int, int], tile))
    return kernel_costs(
        [KernelRequest(kernel, gpu.memory_channels if channels is None else channels)], gpu, dtype
    )[0]


def kernel_costs(requests: Sequence[KernelRequest], gpu: GpuSpec, dtype: str) -> list[KernelCost]:
    """`kernel_cost` of many kernels; those with the same constants are evaluated together."""
    groups: dict[tuple[int, str, str, tuple[int, int] | None, bool, bool], list[int]] = {}
    for position, request in enumerate(requests):
        kernel = request.kernel
        key = kernel.kind, family(kernel), kernel.tile, bool(kernel.fragments), bool(kernel.again_bytes)
        groups.setdefault((request.channels, *key), []).append(position)
    costs: dict[int, KernelCost] = {}
    for (channels, kind, family_name, tile, *_), positions in groups.items():
        machine = RooflineMachine(gpu, dtype, channels, family_name)
        tilings = None if tile is None else GemmTilings([tiling(tile)])
        for begin in range(0, len(positions), KERNELS_AT_ONCE):
            part = positions[begin : begin + KERNELS_AT_ONCE]
            batch = KernelBatch([requests[position].kernel for position in part])
            costs |= zip(part, _fastest_costs(demands(kind, batch, machine, tilings), machine))
    return [costs[position] for position in range(len(requests))]


def _fastest_costs(alternatives: Sequence[Demand], machine: RooflineMachine) -> list[KernelCost]:
    """Costs of kernels; each takes the fastest of the `alternatives`, the first of equally fast ones."""
    cycles = [execution_cycles(demand, machine) for demand in alternatives]
    best_tilings = [cycle_table.argmin(axis=1) for cycle_table in cycles]
    min_cycles = np.array([cycle_table.min(axis=1) for cycle_table in cycles])
    fastest = min_cycles.argmin(axis=0).tolist()
    columns = [_columns(demand, tilings) for demand, tilings in zip(alternatives, best_tilings)]
    costs = []
    for row, choice in enumerate(fastest):
        compute, l2, dram, dram_bytes, l2_bytes, blocks = (column[row] for column in columns[choice])
        tilings = alternatives[choice].tilings
        costs.append(
            KernelCost(
                launch_ns=machine.gpu.launch_ns,
                execution_ns=float(min_cycles[choice, row]) / machine.cycles_per_ns,
                compute_ns=compute / machine.cycles_per_ns,
                l2_ns=l2 / machine.cycles_per_ns,
                dram_ns=dram / machine.cycles_per_ns,
                dram_bytes=dram_bytes,
                l2_bytes=l2_bytes,
                tile=None if tilings is None else tilings.choices[best_tilings[choice][row]],
                blocks=int(blocks),
            )
        )
    return costs


def _columns(demand: Demand, tilings: np.ndarray) -> list[list[float]]:
    """Demands and traffic of kernels, each in its tiling; one list over the kernels for each quantity."""
    rows = np.arange(len(tilings))
    blocks = demand.dram_bytes * 0 if demand.blocks is None or demand.tilings is None else demand.blocks
    parts = (demand.compute, demand.l2, demand.dram, demand.dram_bytes, demand.l2_bytes, blocks)
    return [part[rows, np.minimum(tilings, part.shape[1] - 1)].tolist() for part in parts]


def kernels_ns(kernels: Kernel, gpu: GpuSpec, *, dtype: str, channels: int | None = None) -> np.ndarray:
    """Execution of many kernels of kind ``stream``, given as one with arrays as sizes; see `kernel_cost`."""
    machine = RooflineMachine(gpu, dtype, channels, "stream")
    (demand,) = demands("stream", KernelBatch(kernels), machine)
    return execution_cycles(demand, machine)[:, 0] / machine.cycles_per_ns


def kernel_energy_pj(kernel: Kernel, cost: KernelCost, gpu: GpuSpec, dtype: str) -> dict[str, float]:
    """Dynamic energy of a kernel by part: arithmetic, L2 and DRAM traffic, or the parts of the profiler.

    It does not include constant power times latency, which the plan adds.
    """
    if cost.energies_pj is not None:
        return cost.energies_pj
    energy = gpu.energy
    try:
        return {
            "gpu_arithmetic": (kernel.macs + kernel.multiplications) * energy[f"fma_{dtype}_pj"],
            "gpu_l2": cost.l2_bytes * energy["l2_pj_per_byte"],
            "gpu_dram": cost.dram_bytes * 8 * energy["dram_pj_per_bit"],
        }
    except KeyError as error:
        raise SpecError(f"gpu '{gpu.name}': field 'energy' lacks {error}") from None
