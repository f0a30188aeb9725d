"""Demands of kernels as pimflow emits them for Accel-Sim, for GPUs whose file has ``step_cycles``.

All kernels consist of the same few instructions, so one set of constants holds for all. A thread waits for
its loads::

    latency  = waves * (steps + 2) * step + exposed * products of an SM       2: first loads, and results
    steps    = iterations of a GEMM, `TAPS` of a depthwise convolution, parts of a row; and one for each
    access
               by which a thread adds a residual, since it waits for that before the next
    waves    = blocks of the busiest SM / blocks that its registers and shared memory hold, at least 1
    products = multiply-accumulates / FMA of tensor cores; loads hide all but the share `exposed`
    port     = bytes that the busiest SM loads and stores / sm_port, where all taps but the first find the
               input in the L1; at least what issuing its loads takes, of which narrow ones need several
    slices   = bytes / (slices of the L2 in use * bytes of a slice in a cycle)
    dram     = (reads / share of the slices in use + writes/dram_write) / (channels * channel bandwidth)

Addresses are interleaved over the channels, 256 bytes each, in two slices of the L2. Blocks read the same
part of the reduction of each row at the same time. So rows whose pitch shares a power of two with the
channels collide in few slices; since some blocks run ahead, these are ``channel_spread`` times as many as
otherwise. Hence time does not always grow with K, nor does it always shrink with one channel more. In the
product of a row with a matrix, each block begins its rows at a different place, and uses all slices. Its
warps wait for no barrier, so that one warp computes while others load: its demands combine with
``overlap_row`` in place of ``overlap``. Split-K has a second launch, which costs a launch and ``kernel``. A
product that scales a map (squeeze and excitation) has a second launch too, a stream over the map.

Source: the instructions of `simulators.accel_sim`, and the address mapping, slices and interconnect of
Accel-Sim's SM75_RTX2060. The constants are fitted by `scripts/calibration/gpu_fit.py`.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from pimflow.core.kernel import ELEMENT_BYTES, Kernel
from pimflow.simulators.gpu.machine import (
    CHANNEL_ALIGNMENT,
    ITERATION_K,
    Demand,
    GemmTilings,
    KernelBatch,
    RooflineMachine,
)

GEMM_REGISTERS = 96  # of a thread of a GEMM, besides its sums
# outputs of the largest tile of so many threads
SMALL_TILE, SMALL_THREADS, LARGE_THREADS = 128 * 64, 128, 256
SIMD_THREADS, SIMD_REGISTERS = 256, 72  # of a block of other kernels, and of each of its threads
TAPS = 5  # of a depthwise convolution that a thread loads before it multiplies: its registers hold no more
WARP, ACCESS_BYTES, REGISTER_BYTES = 32, 16, 4  # threads of a warp, bytes of a load, bytes of a register
ROTATION_BYTES = WARP * ACCESS_BYTES  # by which a block starts later in its rows than the one before
EXTRA_STEPS = 2  # steps of a wave besides those of its loop: the first loads, and the results
# contiguous bytes in a channel, and in a slice of its L2: dramid@8, two slices
CHANNEL_BYTES, LINE_BYTES = 256, 128
L1_RATE = 128  # bytes of issued loads in a cycle; narrow loads count with all 16 bytes
SECTOR_BYTES = 32  # smallest write of the L2
PARTIAL_BYTES = 4  # of a partial sum of split-K


def _waves(blocks: np.ndarray, resident: np.ndarray | int, sms: int) -> np.ndarray:
    """How often the busiest SM is filled with blocks; a block begins when another has ended."""
    return np.maximum(np.ceil(blocks / sms) / resident, 1.0)


def _slice_share(
    machine: RooflineMachine,
    pitch: np.ndarray,
    rows: np.ndarray,
    part_pitch: np.ndarray | int = 0,
    lines: int = 1,
) -> np.ndarray:
    """Share of the L2's slices used at a time by rows of a pitch, and parts at distance `part_pitch`,
    in bytes.
    """
    period = CHANNEL_BYTES * machine.channels
    step = np.gcd(np.gcd(np.asarray(pitch, np.int64), np.asarray(part_pitch, np.int64)), period)
    slices_met = np.minimum(period // np.maximum(step, LINE_BYTES), np.maximum(rows, 1)) * lines
    share: np.ndarray = np.minimum(machine["channel_spread"] * slices_met * LINE_BYTES / period, 1.0)
    return share


def has_map_scaling(batch: KernelBatch, element: int) -> np.ndarray:
    """Whether products scale a map that is read and written, and is several times as large as they."""
    products = batch.m * batch.n * batch.groups * element
    extra_inputs = batch.inputs - batch.m * batch.k * batch.groups * element
    repeated = (batch.outputs > products) & (batch.outputs % np.maximum(products, 1.0) == 0)
    scales: np.ndarray = repeated & (extra_inputs >= batch.outputs) & (batch.window == 1) & (products > 0)
    return scales


def split_map_scaling(batch: KernelBatch, machine: RooflineMachine) -> tuple[KernelBatch, KernelBatch] | None:
    """The products, and streams that scale maps, which may be empty; None if no kernel scales a map."""
    element = ELEMENT_BYTES[machine.dtype]
    scales = has_map_scaling(batch, element)
    if not scales.any():
        return None
    products = batch.m * batch.n * batch.groups
    products_batch = copy.copy(batch)
    products_batch.inputs = np.where(scales, batch.m * batch.k * batch.groups * element, batch.inputs)
    products_batch.outputs = np.where(scales, products * element, batch.outputs)
    read = np.where(scales, batch.inputs - products_batch.inputs + products * PARTIAL_BYTES, 0.0)
    written = np.where(scales, batch.outputs, 0.0)
    # `KernelBatch` takes arrays as sizes of one kernel.
    sizes: dict[str, Any] = {"input_bytes": read[:, 0], "output_bytes": written[:, 0]}
    sizes["macs"] = written[:, 0] / element
    return products_batch, KernelBatch(Kernel(kind="stream", **sizes))


def gemm_demand(batch: KernelBatch, machine: RooflineMachine, tilings: GemmTilings) -> Demand:
    """Demands of implicit GEMMs, one column for each tiling."""
    gpu, element, p = machine.gpu, ELEMENT_BYTES[machine.dtype], machine["overlap"]
    tk, align = ITERATION_K[machine.arithmetic], CHANNEL_ALIGNMENT[machine.arithmetic]
    k = batch.window * np.ceil(batch.k / batch.window / align) * align
    rows, columns = np.ceil(batch.m / tilings.tm), np.ceil(batch.n / tilings.tn)
    iterations = np.ceil(np.ceil(k / tk) / tilings.split)
    blocks = batch.groups * rows * columns * tilings.split
    per_sm = np.ceil(blocks / gpu.sms)
    threads = np.where(tilings.area <= SMALL_TILE, SMALL_THREADS, LARGE_THREADS)
    registers = (threads * GEMM_REGISTERS + tilings.area) * REGISTER_BYTES
    shared = (tilings.tm + tilings.tn) * tk * element
    resident = np.minimum(gpu.registers_bytes // registers, gpu.shared_memory_bytes // shared)

    products = batch.m * batch.n * batch.groups
    steps = iterations + _residual_steps(batch, tilings.area / threads, element)
    busy = per_sm * iterations * tilings.area * tk / machine.fma
    latency = (
        _waves(blocks, np.maximum(resident, 1), gpu.sms) * (steps + EXTRA_STEPS) * machine["step_cycles"]
    )

    partials = products * PARTIAL_BYTES * np.where(tilings.split > 1, tilings.split, 0.0)
    size = np.where(tilings.split > 1, PARTIAL_BYTES, element)
    of_tile = iterations * tk * element * (tilings.tm / batch.window + tilings.tn)
    of_tile += np.minimum(tilings.tm, batch.m) * np.minimum(tilings.tn, batch.n) * size
    channels = np.maximum(batch.k / batch.window, 1.0)
    issued = iterations * tk * element * (tilings.tm + tilings.tn) * _accesses(channels, element, align)
    port = per_sm * np.maximum(of_tile / machine.port_rate, issued / L1_RATE)
    part_pitch = np.where(tilings.split > 1, iterations * tk * element, 0)
    pitch = channels * batch.groups * batch.stride * element
    of_input = _slice_share(machine, pitch, batch.m * tilings.split, part_pitch)
    of_weights = _slice_share(machine, batch.k * element, batch.n * tilings.split, part_pitch)
    loads = batch.groups * tilings.split * iterations * tk * element
    inputs, weights = loads * columns * batch.m / batch.window, loads * rows * batch.n * batch.weight_share
    stores = batch.outputs + 2 * partials
    slices = (inputs / of_input + weights / of_weights + stores) / machine.l2_rate

    writes = gpu.write_factor * (batch.outputs + partials)
    reads = batch.inputs / of_input + batch.weights / of_weights
    dram = (reads + writes / machine["dram_write"]) / machine.dram_rate
    launch_cycles = machine["kernel_cycles"] + gpu.launch_ns * machine.cycles_per_ns
    return Demand(
        compute=latency + machine["exposed"] * busy,
        l2=(port**p + slices**p) ** (1 / p),
        dram=dram,
        fixed=machine["kernel_cycles"] + np.where(tilings.split > 1, launch_cycles, 0.0),
        dram_bytes=batch.inputs + batch.weights + writes,
        l2_bytes=inputs + weights + stores,
        blocks=blocks,
        tilings=tilings,
    )


def _residual_steps(batch: KernelBatch, thread_outputs: np.ndarray, element: int) -> np.ndarray:
    """Steps by which a thread adds the residual to its outputs, since it waits for each access."""
    residual = np.where(batch.window == 1, batch.inputs - batch.m * batch.k * batch.groups * element, 0.0)
    accesses = np.ceil(thread_outputs * element / ACCESS_BYTES)
    steps: np.ndarray = accesses * np.maximum(residual, 0.0) / (batch.m * batch.n * batch.groups * element)
    return steps


def _accesses(channels: np.ndarray, element: int, align: int) -> np.ndarray:
    """Accesses for 16 bytes of a window's input, of which narrow ones need several."""
    width = np.gcd(ACCESS_BYTES, (channels * element).astype(np.int64))
    return np.maximum(channels * element / width / np.ceil(channels / align), 1.0)


def simd_demand(batch: KernelBatch, machine: RooflineMachine, row: bool) -> Demand:
    """Demands of depthwise convolutions, or (`row`) of products of one row with a matrix."""
    gpu, element = machine.gpu, ELEMENT_BYTES[machine.dtype]
    resident = max(1, gpu.registers_bytes // (SIMD_THREADS * SIMD_REGISTERS * REGISTER_BYTES))
    reads, writes = batch.inputs + batch.weights, gpu.write_factor * batch.outputs
    if row:  # each warp computes one output, and stores it by itself
        blocks = batch.groups * np.ceil(batch.n / (SIMD_THREADS / WARP))
        residual = np.maximum(batch.inputs - batch.k * batch.groups * element, 0.0)
        steps = np.ceil(batch.k * element * batch.weight_share / (WARP * ACCESS_BYTES)) + EXTRA_STEPS
        steps = steps + residual / (batch.n * batch.groups * element)
        lines = WARP * ACCESS_BYTES // LINE_BYTES
        of_weights = _slice_share(machine, batch.k * element, batch.n, ROTATION_BYTES, lines)
        cold = batch.inputs + batch.weights / of_weights
        writes = writes + batch.outputs * (SECTOR_BYTES / element - 1)
    else:
        blocks = np.ceil(batch.macs / batch.window * element / (SIMD_THREADS * ACCESS_BYTES))
        steps, cold = np.ceil(batch.window / TAPS) + EXTRA_STEPS, reads
    latency = _waves(blocks, resident, gpu.sms) * steps * machine["step_cycles"]
    moved, p = reads + batch.outputs, machine["overlap"]
    issued = 0.0 if row else 2 * batch.macs * element / L1_RATE  # inputs and weights of all taps
    busiest = np.ceil(blocks / gpu.sms) / np.maximum(blocks, 1.0)
    port = busiest * np.maximum(moved / machine.port_rate, issued)
    l2 = (port**p + (moved / machine.l2_rate) ** p) ** (1 / p)
    dram = (cold + writes / machine["dram_write"]) / machine.dram_rate
    fixed = machine["kernel_cycles"] + 0.0 * latency
    overlap = machine["overlap_row"] if row else None
    return Demand(latency, l2, dram, fixed, reads + writes, moved, overlap=overlap)
