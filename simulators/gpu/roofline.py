"""The equations of the GPU model, for many kernels (rows) in many tilings (columns) at once.

Execution combines three demands that overlap partly::

    execution = kernel + (compute**p + l2**p + dram**p)**(1/p)          p = `overlap`

GEMM-like kernels (implicit GEMM per group: M output pixels, N output channels, K reduction) take the
fastest of 13 tile shapes (tm, tn) and split-K factors s up to `split_limit`, in core cycles::

    blocks  = groups * ceil(M/tm) * ceil(N/tn) * s             iterations = ceil(ceil(K/tk) / s)
    busy    = ceil(blocks/SMs) * iterations * tm*tn*tk / (FMA * mma * (1 + tile_half) * x/(x + tile_half))
    latency = ceil(blocks/(SMs*resident)) * (block + iterations * iteration) * (sqrt(tm*tn)/64)**tile_power
    compute = max(busy, latency)                               x = tm*tn/(tm + tn), 1 for the largest
    l2      = max(bytes through L2 / (channels * L2 bandwidth * l2), bytes of an SM / sm_port)
    dram    = (reads + writes/dram_write) / (channels * channel bandwidth * dram)

The bytes that a kernel reads and writes once are DRAM traffic where they exceed the share `l2_resident` of
the L2; an operand larger than the share `l2_reuse` is partly read again by each column or row of tiles.
Split-K adds ``split`` cycles and the traffic of its fp32 partial sums. For each tile, every term grows with
K, M, N and bytes, and shrinks with channels. Hence so does the minimum, as long as the `family`, and with it
the constants, stays the same.

Other kernels read and write their bytes once and compute on the SIMD units: ``depthwise``, ``stream``, and a
GEMM of one row as a matrix-vector product, if that is faster. For a GPU with ``step_cycles``, `emitted`
models all but streams. A kernel that computes several layers in tiles is a ``stream`` with a number of
blocks: the SM with the most blocks decides. Bytes that several blocks load are L2 traffic each time, and DRAM
traffic like an operand of a GEMM. Every layer of every wave takes ``kernel``, because its threads wait for
each other. Its dense convolutions run on tensor cores, by fragments::

    tensor = max(multiplied * 16**3 / (FMA * mma), moved * 512 bytes / SHARED_RATE, steps * iteration * 16/tk)

They take the longest of their multiplications, their on-chip traffic, and the steps of a warp, one after the
other, each as long as its share of a GEMM's iteration; ``mma`` and ``iteration`` are those of plain matrix
products, 1x1 convolutions of stride 1. Other products, and all products on a GPU without tensor cores, read
both operands from shared memory or the L1, which limits their rate to `PRODUCTS_READ`. No such kernel was
measured.

No kernel ends before its threads have executed their ``operations``, which are those beside its
multiply-accumulates, one in each cycle of a lane::

    execution = kernel + max((compute**p + l2**p + dram**p)**(1/p), operations / (SMs * SIMD FMA))

Source of the model: GPU roofline with tile and wave quantisation; constants are fitted per GPU by
`scripts/calibration/gpu_fit.py` and live in the ``efficiency`` table of `GpuSpec`.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from pimflow.core.kernel import ELEMENT_BYTES
from pimflow.hardware.gpu import GpuSpec
from pimflow.simulators.gpu import emitted
from pimflow.simulators.gpu.machine import (
    CHANNEL_ALIGNMENT,
    ITERATION_K,
    Demand,
    GemmTilings,
    KernelBatch,
    RooflineMachine,
    gemm_tilings,
)

ACCUMULATOR_BYTES = 4
ACCUMULATOR_SHARE = 0.5  # of the registers of a thread block; the rest holds operands and addresses
RESIDENT_BLOCKS = 8
# Products of an SM in a cycle if both operands are read from shared memory, which has 32 banks of 4 bytes;
# the type does not matter, since each lane of a warp uses a bank (CUDA programming guide, compute
# capabilities 5 to 9).
PRODUCTS_READ = 32 / 2
SHARED_RATE = 128  # bytes of shared memory or L1 of an SM in a cycle: the same banks
FRAGMENT = 16  # rows, columns and depth that tensor cores multiply at once


def resident_blocks(gpu: GpuSpec, tilings: GemmTilings, row_bytes: int) -> np.ndarray:
    """Thread blocks that an SM holds at once, each with two buffers of rows of `row_bytes`, and its sums."""
    smem = 2 * (tilings.tm + tilings.tn) * row_bytes
    accumulators = tilings.area * ACCUMULATOR_BYTES / ACCUMULATOR_SHARE
    resident = np.minimum(gpu.shared_memory_bytes // smem, gpu.registers_bytes // accumulators)
    blocks: np.ndarray = np.clip(resident, 1, RESIDENT_BLOCKS)
    return blocks


def gemm_demand(batch: KernelBatch, machine: RooflineMachine, tilings: GemmTilings) -> Demand:
    """Demands of implicit GEMMs, one column for each tiling."""
    gpu, arithmetic = machine.gpu, machine.arithmetic
    element, tk, align = ELEMENT_BYTES[machine.dtype], ITERATION_K[arithmetic], CHANNEL_ALIGNMENT[arithmetic]
    if machine.models_emitted:
        return emitted.gemm_demand(batch, machine, tilings)
    k = batch.window * np.ceil(batch.k / batch.window / align) * align
    rows, columns = np.ceil(batch.m / tilings.tm), np.ceil(batch.n / tilings.tn)
    iterations = np.ceil(np.ceil(k / tk) / tilings.split)
    blocks = batch.groups * rows * columns * tilings.split
    blocks_per_sm = np.ceil(blocks / gpu.sms)

    waves = np.ceil(blocks / (gpu.sms * resident_blocks(gpu, tilings, tk * element)))

    half = machine["tile_half"]
    share = machine["mma"] * tilings.relative / (tilings.relative + half) * (1 + half)
    rate = machine.fma * share
    busy = blocks_per_sm * iterations * (tilings.area * tk / rate)
    latency = machine["block_cycles"] + iterations * machine["iteration_cycles"]
    latency = waves * latency * tilings.side ** machine["tile_power"]

    partials = batch.groups * batch.m * batch.n * (2 * ACCUMULATOR_BYTES) * tilings.extra_splits
    stores = batch.outputs + partials
    loads = blocks * (tilings.tm + tilings.tn * batch.weight_share) * (k / tilings.split * element)
    l2_bytes = loads + stores
    tile_stores = np.minimum(tilings.tm, batch.m) * np.minimum(tilings.tn, batch.n) * element
    tile_loads = (tilings.tm + tilings.tn * batch.weight_share) * (k / tilings.split * element)
    port = blocks_per_sm * (tile_loads + tile_stores)
    l2 = np.maximum(l2_bytes / machine.l2_rate, port / machine.port_rate)

    rereads = np.minimum(batch.inputs * (columns - 1), batch.weights * (rows - 1))
    # A write-through L2 sends the partial sums on to DRAM.
    outputs = batch.outputs + partials * (gpu.write_factor - 1) / gpu.write_factor
    dram_bytes, dram = machine.dram_traffic(
        batch.inputs, batch.weights, outputs, machine["reread"] * _overflow(batch, machine) * rereads
    )
    fixed = machine["kernel_cycles"] + np.where(tilings.split > 1, machine["split_cycles"], 0.0)
    return Demand(np.maximum(busy, latency), l2, dram, fixed, dram_bytes, l2_bytes, blocks, tilings)


def simd_demand(batch: KernelBatch, machine: RooflineMachine, share: str) -> Demand:
    """Demands of kernels that move their bytes once; constant `share` is their share of the SIMD peak."""
    sms = machine.gpu.sms
    waves = np.maximum(np.ceil(batch.blocks / sms), 1.0)
    uneven = np.where(batch.blocks > 0, waves * sms / np.maximum(batch.blocks, 1.0), 1.0)
    l2_bytes = batch.inputs + batch.weights + batch.outputs + batch.l2_rereads
    l2 = l2_bytes / np.minimum(machine.l2_rate, sms * machine.port_rate / uneven)
    peak = machine.simd_fma * machine[share]
    rate = np.where(batch.blocks > 0, np.minimum(peak, PRODUCTS_READ), peak)
    compute = (batch.macs - batch.tensor_macs) / (sms * rate) * uneven
    if batch.fragments.any():
        compute = compute + _fragment_cycles(batch, machine, uneven, waves)
    rereads = 0.0
    if batch.l2_rereads.any():
        rereads = machine["reread"] * _overflow(batch, machine) * batch.l2_rereads
    dram_bytes, dram = machine.dram_traffic(batch.inputs, batch.weights, batch.outputs, rereads)
    return Demand(compute, l2, dram, machine["kernel_cycles"] * batch.layers * waves, dram_bytes, l2_bytes)


def _fragment_cycles(
    batch: KernelBatch, machine: RooflineMachine, uneven: np.ndarray, waves: np.ndarray
) -> np.ndarray:
    """Cycles on tensor cores of kernels that compute several layers in tiles."""
    share_of_sm = uneven / machine.gpu.sms
    multiplied = batch.fragments * FRAGMENT**3 / (machine.fma * machine.product_constant("mma")) * share_of_sm
    moved = batch.moved_fragments * FRAGMENT**2 * ELEMENT_BYTES["fp16"] / SHARED_RATE * share_of_sm
    step = machine.product_constant("iteration_cycles") * FRAGMENT / ITERATION_K["fp16"]
    cycles: np.ndarray = np.maximum(np.maximum(multiplied, moved), batch.steps * waves * step)
    return cycles


def _overflow(batch: KernelBatch, machine: RooflineMachine) -> np.ndarray:
    """Share of the smaller operand that is evicted from the L2 before it is read again."""
    smaller = np.maximum(np.minimum(batch.inputs, batch.weights), 1.0)
    share: np.ndarray = np.maximum(1 - machine["l2_reuse"] * machine.l2_bytes / smaller, 0.0)
    return share


def _with_maps(demand: Demand, maps: KernelBatch, machine: RooflineMachine) -> Demand:
    """`demand` of products, with a second launch that scales a map; split-K has this launch anyway."""
    stream = RooflineMachine(machine.gpu, machine.dtype, machine.channels, "stream")
    second, launch = simd_demand(maps, stream, "stream"), machine.gpu.launch_ns * machine.cycles_per_ns
    cycles = execution_cycles(second, stream) + launch
    if demand.tilings is not None:
        cycles = cycles - np.where(demand.tilings.split > 1, launch + machine["kernel_cycles"], 0.0)
    return dataclasses.replace(
        demand,
        fixed=demand.fixed + np.where(maps.outputs > 0, cycles, 0.0),
        dram_bytes=demand.dram_bytes + second.dram_bytes,
        l2_bytes=demand.l2_bytes + second.l2_bytes,
    )


def demands(
    kind: str, batch: KernelBatch, machine: RooflineMachine, tilings: GemmTilings | None = None
) -> list[Demand]:
    """Demands of kernels of one kind, in the given tilings or in all tilings of the kind.

    A GEMM that is known to run as a matrix-vector product has kind ``row``.
    """
    operations = batch.operations / (machine.gpu.sms * machine.simd_fma)
    kind_demands = _kind_demands(kind, batch, machine, tilings)
    return [dataclasses.replace(demand, operations=operations) for demand in kind_demands]


def _kind_demands(
    kind: str, batch: KernelBatch, machine: RooflineMachine, tilings: GemmTilings | None
) -> list[Demand]:
    """`demands` without the operations beside multiply-accumulates."""
    if (
        machine.models_emitted
        and kind in ("row", "gemm")
        and (parts := emitted.split_map_scaling(batch, machine))
    ):
        products, maps = parts
        return [_with_maps(demand, maps, machine) for demand in demands(kind, products, machine, tilings)]
    if machine.models_emitted and kind in ("row", "depthwise"):
        return [emitted.simd_demand(batch, machine, row=kind == "row")]
    if kind == "row":
        return [simd_demand(batch, machine, "gemv")]
    if kind == "gemm":
        if tilings is not None:
            return [gemm_demand(batch, machine, tilings)]
        tiled = gemm_demand(batch, machine, gemm_tilings(machine["split_limit"]))
        vector = (batch.m == 1) & (batch.window == 1)
        if not vector.any():
            return [tiled]
        (streamed,) = demands("row", batch, machine)
        return [tiled, dataclasses.replace(streamed, fixed=np.where(vector, streamed.fixed, np.inf))]
    if kind in ("depthwise", "stream"):
        return [simd_demand(batch, machine, kind)]
    raise ValueError(f"kernel kind '{kind}' is none of gemm, depthwise, stream")


def execution_cycles(demand: Demand, machine: RooflineMachine) -> np.ndarray:
    """Cycles of kernels (rows) in several tilings (columns)."""
    p = machine["overlap"] if demand.overlap is None else demand.overlap
    overlapped = (demand.compute**p + demand.l2**p + demand.dram**p) ** (1 / p)
    return np.maximum(overlapped, demand.operations) + demand.fixed
