"""The equations of the GPU model, for many kernels (rows) in many tilings (columns) at once.

Execution combines three demands that overlap only in part::

    execution = kernel + (compute**p + l2**p + dram**p)**(1/p)          p = `overlap`

GEMM-like kernels (implicit GEMM per group: M output pixels, N output channels, K reduction) take the
fastest of 13 tile shapes (tm, tn) and split-K factors s up to `split_limit`, in core cycles::

    blocks  = groups * ceil(M/tm) * ceil(N/tn) * s             iterations = ceil(ceil(K/tk) / s)
    busy    = ceil(blocks/SMs) * iterations * tm*tn*tk / (FMA * mma * (1 + tile_half) * x/(x + tile_half))
    latency = ceil(blocks/(SMs*resident)) * (block + iterations * iteration) * (sqrt(tm*tn)/64)**tile_power
    compute = max(busy, latency)                               x = tm*tn/(tm + tn), 1 for the largest
    l2      = max(bytes through L2 / (channels * L2 bandwidth * l2), bytes of an SM / sm_port)
    dram    = (reads + writes/dram_write) / (channels * channel bandwidth * dram)

What every kernel reads and writes once costs DRAM traffic as far as it exceeds the share
`l2_resident` of the L2; an operand larger than the share `l2_reuse` is partly read again by each
column or row of tiles. Split-K adds ``split`` cycles and the traffic of its fp32 partial sums. Every term
grows with K, M, N and bytes and shrinks with channels, for each tile, hence so does the minimum, as long
as the `family`, and with it the constants, stays the same.

Other kernels pass their bytes once and compute on the SIMD units: ``depthwise``, ``stream``, and a GEMM
of one row as the matrix-vector product that it is, if that is faster. Threads of the first and last take
``step_cycles``, if given, for each tap or part of a row, in waves, for they wait for it. A kernel that does
several layers in tiles is a ``stream`` whose blocks are counted: the SM with most of them decides, what
several load is L2 traffic each time and DRAM traffic as an operand of a GEMM would be, and every layer of
every wave takes ``kernel``, for its threads wait for one another. Its dense convolutions run on tensor cores,
by fragments::

    tensor = max(multiplied * 16**3 / (FMA * mma), moved * 512 bytes / SHARED_RATE, steps * iteration * 16/tk)

and take the longest of what they multiply, what they move on chip, and the steps of a warp, one after the
other, each as long as its share of a GEMM's iteration; ``mma`` and ``iteration`` are those of plain matrix
products, 1x1 convolutions of stride 1. Other products, and all on a GPU without tensor cores, read both
operands from shared memory or the L1, so that no more are formed than `PRODUCTS_READ`. No such kernel was
measured.

Source of the form: GPU roofline with tile and wave quantisation; constants are fitted per GPU by
`simulators.gpu.fit` and live in the ``efficiency`` table of `GpuSpec`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from pimflow.core.region import ELEMENT_BYTES, Kernel
from pimflow.errors import SpecError, UsageError
from pimflow.hardware.gpu import GpuSpec

TILES = (
    (256, 128),
    (128, 256),
    (128, 128),
    (256, 64),
    (64, 256),
    (128, 64),
    (64, 128),
    (64, 64),
    (128, 32),
    (32, 128),
    (64, 32),
    (32, 64),
    (32, 32),
)
LARGEST = max(tm * tn / (tm + tn) for tm, tn in TILES)  # operations per element loaded
SPLITS = (1, 2, 4, 8, 16, 32)
ITERATION_K = {"fp16": 32, "fp32": 8}
CHANNEL_ALIGNMENT = {"fp16": 8, "fp32": 1}  # tensor cores read 16 bytes of channels at a time
IMAGE_CHANNELS = 4
ACCUMULATOR_BYTES = 4
ACCUMULATOR_SHARE = 0.5  # of the registers of a thread block; the rest holds operands and addresses
RESIDENT_BLOCKS = 8
# Products of an SM in a cycle, both operands read from shared memory, which has 32 banks of 4 bytes; the type
# does not matter, for each lane of a warp takes a bank (CUDA programming guide, compute capabilities 5 to 9).
PRODUCTS_READ = 32 / 2
SHARED_RATE = 128  # bytes of shared memory or L1 of an SM in a cycle: the same banks
SIMD_THREADS, SIMD_REGISTERS = 256, 72  # of a block of other kernels, and of each of its threads
WARP, ACCESS_BYTES = 32, 16  # threads of a warp, and what each loads at once
FRAGMENT = 16  # rows, columns and depth that tensor cores multiply at once
SIZES = operator.attrgetter(
    *("m", "n", "k", "groups", "window", "macs", "input_bytes", "weight_bytes", "output_bytes"),
    *("layers", "blocks", "again_bytes", "tensor_macs", "fragments", "moved_fragments", "steps"),
)


@dataclasses.dataclass(frozen=True)
class Demand:
    """Demands of kernels (rows) in several tilings (columns), in cycles and bytes."""

    compute: np.ndarray
    l2: np.ndarray
    dram: np.ndarray
    fixed: np.ndarray | float
    dram_bytes: np.ndarray
    l2_bytes: np.ndarray
    blocks: np.ndarray | None = None
    tilings: GemmTilings | None = None


def has_rate(gpu: GpuSpec, dtype: str) -> bool:
    """Whether the model has a rate of `gpu` for `dtype`."""
    return dtype in ITERATION_K and dtype in gpu.fma_per_sm_cycle


def _keys(family: str, arithmetic: str) -> tuple[str, ...]:
    """Ends of names of constants, the most specific first."""
    kind = family.partition("_")[0]
    named = (f"_{family}_{arithmetic}", f"_{family}", f"_{kind}_{arithmetic}", f"_{kind}")
    return (*named, f"_{arithmetic}", "")


def _arithmetic(gpu: GpuSpec, dtype: str) -> str:
    """The type whose kernels compute `dtype`: without tensor cores fp32, on fewer bytes."""
    simd = gpu.simd_fma_per_sm_cycle
    return "fp32" if gpu.fma_per_sm_cycle[dtype] == simd.get(dtype) == simd.get("fp32") else dtype


class RooflineMachine:
    """A GPU at one dtype with some of its channels: rates per core cycle.

    Raises
    ------
    UsageError
        If the GPU has not that many channels.
    SpecError
        If it has no rate for `dtype`, or lacks a constant.
    """

    def __init__(self, gpu: GpuSpec, dtype: str, channels: int | None = None, family: str = "stream"):
        if not has_rate(gpu, dtype):
            raise SpecError(f"gpu '{gpu.name}': field 'fma_per_sm_cycle' has no '{dtype}'")
        channels = gpu.memory_channels if channels is None else channels
        if not 0 < channels <= gpu.memory_channels:
            raise UsageError(f"gpu '{gpu.name}': {channels} channels asked of {gpu.memory_channels}")
        self.gpu, self.dtype = gpu, dtype
        self.arithmetic = arithmetic = _arithmetic(gpu, dtype)
        self.keys = _keys(family, arithmetic)
        self.cycles_per_ns = gpu.clock_mhz / 1e3
        self.fma = gpu.fma_per_sm_cycle[dtype]
        self.simd_fma = gpu.simd_fma_per_sm_cycle.get(dtype, self.fma)
        self.l2_bytes = gpu.l2_bytes_per_channel * channels
        self.l2_rate = gpu.l2_bytes_per_channel_cycle * channels * self["l2"]
        self.dram_rate = gpu.channel_bytes_per_ns * channels / self.cycles_per_ns * self["dram"]
        self.port_rate = self["sm_port_bytes_per_cycle"]

    def __getitem__(self, name: str) -> float:
        """A constant of the model: the most specific of family, kind of family and dtype."""
        return self._constant(name, self.keys)

    def optional(self, name: str) -> float:
        """A constant that is zero where the GPU does not give it."""
        constants = self.gpu.efficiency
        return next((constants[name + key] for key in self.keys if name + key in constants), 0.0)

    def of_products(self, name: str) -> float:
        """A constant of plain matrix products, 1x1 convolutions of stride 1, whatever the family."""
        return self._constant(name, _keys("1x1_s1", self.arithmetic))

    def _constant(self, name: str, keys: Sequence[str]) -> float:
        constants = self.gpu.efficiency
        for key in keys:
            if name + key in constants:
                return constants[name + key]
        raise SpecError(f"gpu '{self.gpu.name}': field 'efficiency' lacks '{name}'")

    def dram_traffic(self, inputs: Any, weights: Any, outputs: Any, rereads: Any = 0.0) -> tuple[Any, Any]:
        """Bytes, and cycles, of DRAM traffic: what exceeds the resident part of the L2, reads first."""
        reads, writes = inputs + weights, outputs * self.gpu.write_factor
        resident = self["l2_resident"] * self.l2_bytes
        cold_reads = np.maximum(reads - resident, 0.0) + rereads
        cold_writes = np.maximum(writes - np.maximum(resident - reads, 0.0), 0.0)
        cycles = (cold_reads + cold_writes / self["dram_write"]) / self.dram_rate
        return cold_reads + cold_writes, cycles


class Batch:
    """Sizes of kernels as columns, one row a kernel; of a kernel whose sizes are arrays, one row for each."""

    def __init__(self, kernels: Sequence[Kernel] | Kernel):
        if isinstance(kernels, Kernel):
            sizes = np.broadcast_arrays(*map(np.atleast_1d, SIZES(kernels)))
            columns = np.array(sizes, dtype=float)[:, None]
        else:
            columns = np.array([[SIZES(kernel)] for kernel in kernels], dtype=float).T
        self.m, self.n, self.k, self.groups, self.window, self.macs = (c.T for c in columns[:6])
        self.inputs, self.weights, self.outputs = (c.T for c in columns[6:9])
        self.layers, self.blocks, self.again = (c.T for c in columns[9:12])
        self.tensor_macs, self.fragments, self.moved_fragments, self.steps = (c.T for c in columns[12:])


class GemmTilings:
    """Tilings of a GEMM as columns: tile (tm, tn) and split-K; or, `by_row`, one tiling for each kernel."""

    def __init__(self, choices: Sequence[tuple[int, int, int]], by_row: bool = False):
        self.choices = tuple(choices)
        sizes = np.array(self.choices, dtype=float).T
        self.tm, self.tn, self.split = sizes[..., None] if by_row else sizes
        self.area = self.tm * self.tn
        self.relative = self.area / (self.tm + self.tn) / LARGEST
        self.side = np.sqrt(self.area) / 64
        self.extra_splits = np.where(self.split > 1, self.split, 0.0)


def tiling(tile: Sequence[int]) -> tuple[int, int, int]:
    """(tm, tn, split-K) of a tile that need not say the last."""
    tm, tn, split = (*tile, 1)[:3]
    return tm, tn, split


@functools.cache
def gemm_tilings(split_limit: float) -> GemmTilings:
    """Every tile with every split-K factor up to a limit."""
    splits = [split for split in SPLITS if split <= split_limit]
    return GemmTilings([(*tile, split) for tile, split in itertools.product(TILES, splits)])


def family(kernel: Kernel) -> str:
    """What decides which constants a kernel has: window and stride, since libraries pick code by them.

    One of ``1x1_s1`` … ``7x7_s2``, ``image`` (a window over 3 channels, which has code of its own),
    ``depthwise_1x1_s1`` … ``depthwise_7x7_s2``, ``stream``.
    """
    if kernel.kind == "stream":
        return kernel.kind
    few = kernel.groups == 1 and kernel.k <= IMAGE_CHANNELS * kernel.window
    if kernel.kind == "gemm" and kernel.window > 1 and few:
        return "image"
    side = next((side for side in (1, 3, 5) if kernel.window <= side * side), 7)
    shape = f"{side}x{side}_s{min(kernel.stride, 2)}"
    return f"depthwise_{shape}" if kernel.kind == "depthwise" else shape


def resident_blocks(gpu: GpuSpec, tilings: GemmTilings, row_bytes: int) -> np.ndarray:
    """Thread blocks that an SM holds at once: two buffers of rows of `row_bytes` for each, and its sums."""
    smem = 2 * (tilings.tm + tilings.tn) * row_bytes
    accumulators = tilings.area * ACCUMULATOR_BYTES / ACCUMULATOR_SHARE
    resident = np.minimum(gpu.shared_memory_bytes // smem, gpu.registers_bytes // accumulators)
    return np.clip(resident, 1, RESIDENT_BLOCKS)


def gemm_demand(batch: Batch, machine: RooflineMachine, tilings: GemmTilings) -> Demand:
    """Demands of implicit GEMMs, one column a tiling."""
    gpu, arithmetic = machine.gpu, machine.arithmetic
    element, tk, align = ELEMENT_BYTES[machine.dtype], ITERATION_K[arithmetic], CHANNEL_ALIGNMENT[arithmetic]
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
    loads = blocks * (tilings.tm + tilings.tn) * (k / tilings.split * element)
    l2_bytes = loads + stores
    tile_stores = np.minimum(tilings.tm, batch.m) * np.minimum(tilings.tn, batch.n) * element
    tile_loads = (tilings.tm + tilings.tn) * (k / tilings.split * element)
    port = blocks_per_sm * (tile_loads + tile_stores)
    l2 = np.maximum(l2_bytes / machine.l2_rate, port / machine.port_rate)

    again = np.minimum(batch.inputs * (columns - 1), batch.weights * (rows - 1))
    # A write-through L2 sends the partial sums on to DRAM.
    outputs = batch.outputs + partials * (gpu.write_factor - 1) / gpu.write_factor
    dram_bytes, dram = machine.dram_traffic(
        batch.inputs, batch.weights, outputs, machine["reread"] * _overflow(batch, machine) * again
    )
    fixed = machine["kernel_cycles"] + np.where(tilings.split > 1, machine["split_cycles"], 0.0)
    return Demand(np.maximum(busy, latency), l2, dram, fixed, dram_bytes, l2_bytes, blocks, tilings)


def simd_demand(batch: Batch, machine: RooflineMachine, share: str) -> Demand:
    """Demands of kernels that pass their bytes once and use `share` of the SIMD peak."""
    sms = machine.gpu.sms
    waves = np.maximum(np.ceil(batch.blocks / sms), 1.0)
    uneven = np.where(batch.blocks > 0, waves * sms / np.maximum(batch.blocks, 1.0), 1.0)
    l2_bytes = batch.inputs + batch.weights + batch.outputs + batch.again
    l2 = l2_bytes / np.minimum(machine.l2_rate, sms * machine.port_rate / uneven)
    rate = machine.simd_fma * machine[share]
    rate = np.where(batch.blocks > 0, np.minimum(rate, PRODUCTS_READ), rate)
    compute = (batch.macs - batch.tensor_macs) / (sms * rate) * uneven
    if step_cycles := machine.optional("step_cycles"):
        compute = np.maximum(compute, step_cycles * _steps(batch, machine, share))
    if batch.fragments.any():
        compute = compute + _fragment_cycles(batch, machine, uneven, waves)
    rereads = 0.0
    if batch.again.any():
        rereads = machine["reread"] * _overflow(batch, machine) * batch.again
    dram_bytes, dram = machine.dram_traffic(batch.inputs, batch.weights, batch.outputs, rereads)
    return Demand(compute, l2, dram, machine["kernel_cycles"] * batch.layers * waves, dram_bytes, l2_bytes)


def _steps(batch: Batch, machine: RooflineMachine, share: str) -> np.ndarray:
    """Steps of a thread, by waves: it waits for what each loads, a tap, or its warp's part of a row."""
    element = ELEMENT_BYTES[machine.dtype]
    resident = machine.gpu.registers_bytes // (SIMD_THREADS * SIMD_REGISTERS * ACCUMULATOR_BYTES)
    if share == "gemv":
        blocks = batch.groups * batch.n / (SIMD_THREADS / WARP)
        steps = np.ceil(batch.k * element / (WARP * ACCESS_BYTES))
    elif share == "depthwise":
        blocks = batch.macs / batch.window * element / (SIMD_THREADS * ACCESS_BYTES)
        steps = batch.window
    else:
        return np.zeros_like(batch.m)
    return np.ceil(blocks / (machine.gpu.sms * resident)) * steps


def _fragment_cycles(
    batch: Batch, machine: RooflineMachine, uneven: np.ndarray, waves: np.ndarray
) -> np.ndarray:
    """Cycles of what runs on tensor cores in kernels that compute several layers in tiles."""
    each = uneven / machine.gpu.sms
    multiplied = batch.fragments * FRAGMENT**3 / (machine.fma * machine.of_products("mma")) * each
    moved = batch.moved_fragments * FRAGMENT**2 * ELEMENT_BYTES["fp16"] / SHARED_RATE * each
    step = machine.of_products("iteration_cycles") * FRAGMENT / ITERATION_K["fp16"]
    return np.maximum(np.maximum(multiplied, moved), batch.steps * waves * step)


def _overflow(batch: Batch, machine: RooflineMachine) -> np.ndarray:
    """Share of the smaller operand that the L2 does not hold until it is read again."""
    smaller = np.maximum(np.minimum(batch.inputs, batch.weights), 1.0)
    return np.maximum(1 - machine["l2_reuse"] * machine.l2_bytes / smaller, 0.0)


def demands(
    kind: str, batch: Batch, machine: RooflineMachine, tilings: GemmTilings | None = None
) -> list[Demand]:
    """Demands of kernels of one kind: in the given tilings, or in all that the kind has.

    A GEMM that is known to run as a matrix-vector product is of kind ``row``.
    """
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
    p = machine["overlap"]
    return (demand.compute**p + demand.l2**p + demand.dram**p) ** (1 / p) + demand.fixed
