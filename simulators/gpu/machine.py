"""Quantities of the GPU model's equations: rates of a GPU, sizes of kernels and tilings, demands."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from pimflow.core.kernel import Kernel
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
MAX_TILE_INTENSITY = max(tm * tn / (tm + tn) for tm, tn in TILES)  # products for each loaded element
SPLITS = (1, 2, 4, 8, 16, 32)
ITERATION_K = {"fp16": 32, "fp32": 8}
CHANNEL_ALIGNMENT = {"fp16": 8, "fp32": 1}  # tensor cores read 16 bytes of channels at a time
IMAGE_CHANNELS = 4
KERNEL_SIZES = operator.attrgetter(
    *("m", "n", "k", "groups", "window", "macs", "input_bytes", "weight_bytes", "output_bytes"),
    *("layers", "blocks", "again_bytes", "tensor_macs", "fragments", "moved_fragments", "steps", "stride"),
    *("operations", "weight_share"),
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
    overlap: float | None = None  # in place of the constant `overlap`
    operations: np.ndarray | float = 0.0  # of threads, at their peak: what all else overlaps with


def has_rate(gpu: GpuSpec, dtype: str) -> bool:
    """Whether the model has a rate of `gpu` for `dtype`."""
    return dtype in ITERATION_K and dtype in gpu.fma_per_sm_cycle


def _constant_suffixes(family: str, arithmetic: str) -> tuple[str, ...]:
    """Suffixes of names of constants, the most specific first."""
    kind = family.partition("_")[0]
    specific = (f"_{family}_{arithmetic}", f"_{family}", f"_{kind}_{arithmetic}", f"_{kind}")
    return (*specific, f"_{arithmetic}", "")


def _arithmetic(gpu: GpuSpec, dtype: str) -> str:
    """Type of the arithmetic for `dtype`: fp32 on GPUs without tensor cores, which then only load less."""
    simd = gpu.simd_fma_per_sm_cycle
    return "fp32" if gpu.fma_per_sm_cycle[dtype] == simd.get(dtype) == simd.get("fp32") else dtype


class RooflineMachine:
    """Rates per core cycle of a GPU at one dtype, with some of its memory channels.

    Raises
    ------
    UsageError
        If the GPU does not have that many channels.
    SpecError
        If it has no rate for `dtype`, or lacks a constant.
    """

    def __init__(self, gpu: GpuSpec, dtype: str, channels: int | None = None, family: str = "stream"):
        if not has_rate(gpu, dtype):
            raise SpecError(f"gpu '{gpu.name}': field 'fma_per_sm_cycle' has no '{dtype}'")
        channels = gpu.memory_channels if channels is None else channels
        if not 0 < channels <= gpu.memory_channels:
            raise UsageError(f"gpu '{gpu.name}': {channels} channels requested of {gpu.memory_channels}")
        self.gpu, self.dtype = gpu, dtype
        self.arithmetic = arithmetic = _arithmetic(gpu, dtype)
        self.suffixes = _constant_suffixes(family, arithmetic)
        self.cycles_per_ns = gpu.clock_mhz / 1e3
        self.fma = gpu.fma_per_sm_cycle[dtype]
        self.simd_fma = gpu.simd_fma_per_sm_cycle.get(dtype, self.fma)
        self.channels = channels
        self.l2_bytes = gpu.l2_bytes_per_channel * channels
        self.l2_rate = gpu.l2_bytes_per_channel_cycle * channels * self["l2"]
        self.dram_rate = gpu.channel_bytes_per_ns * channels / self.cycles_per_ns * self["dram"]
        self.port_rate = self["sm_port_bytes_per_cycle"]
        # models kernels as pimflow emits them (`emitted`)
        self.models_emitted = "step_cycles" in gpu.efficiency

    def __getitem__(self, name: str) -> float:
        """A constant of the model: the most specific of family, kind of family and dtype."""
        return self._constant(name, self.suffixes)

    def product_constant(self, name: str) -> float:
        """A constant of plain matrix products (1x1 convolutions of stride 1), for any family."""
        return self._constant(name, _constant_suffixes("1x1_s1", self.arithmetic))

    def _constant(self, name: str, keys: Sequence[str]) -> float:
        constants = self.gpu.efficiency
        for key in keys:
            if name + key in constants:
                return constants[name + key]
        raise SpecError(f"gpu '{self.gpu.name}': field 'efficiency' lacks '{name}'")

    def dram_traffic(self, inputs: Any, weights: Any, outputs: Any, rereads: Any = 0.0) -> tuple[Any, Any]:
        """Bytes and cycles of DRAM traffic beyond the resident part of the L2, which reads fill first."""
        reads, writes = inputs + weights, outputs * self.gpu.write_factor
        resident = self["l2_resident"] * self.l2_bytes
        cold_reads = np.maximum(reads - resident, 0.0) + rereads
        cold_writes = np.maximum(writes - np.maximum(resident - reads, 0.0), 0.0)
        cycles = (cold_reads + cold_writes / self["dram_write"]) / self.dram_rate
        return cold_reads + cold_writes, cycles


class KernelBatch:
    """Sizes of kernels as columns, one row for each kernel, or for each element of one with array sizes."""

    def __init__(self, kernels: Sequence[Kernel] | Kernel):
        if isinstance(kernels, Kernel):
            sizes = np.broadcast_arrays(*map(np.atleast_1d, KERNEL_SIZES(kernels)))
            columns = np.array(sizes, dtype=float)[:, None]
        else:
            columns = np.array([[KERNEL_SIZES(kernel)] for kernel in kernels], dtype=float).T
        self.m, self.n, self.k, self.groups, self.window, self.macs = (c.T for c in columns[:6])
        self.inputs, self.weights, self.outputs = (c.T for c in columns[6:9])
        self.layers, self.blocks, self.l2_rereads = (c.T for c in columns[9:12])
        self.tensor_macs, self.fragments, self.moved_fragments, self.steps = (c.T for c in columns[12:16])
        self.stride, self.operations, self.weight_share = (c.T for c in columns[16:19])


class GemmTilings:
    """Tilings of a GEMM as columns, tile (tm, tn) and split-K; with `by_row`, one tiling for each row."""

    def __init__(self, choices: Sequence[tuple[int, int, int]], by_row: bool = False):
        self.choices = tuple(choices)
        sizes = np.array(self.choices, dtype=float).T
        self.tm, self.tn, self.split = sizes[..., None] if by_row else sizes
        self.area = self.tm * self.tn
        self.relative = self.area / (self.tm + self.tn) / MAX_TILE_INTENSITY
        self.side = np.sqrt(self.area) / 64
        self.extra_splits = np.where(self.split > 1, self.split, 0.0)


def tiling(tile: Sequence[int]) -> tuple[int, int, int]:
    """(tm, tn, split-K) of a tile, where split-K may be missing."""
    tm, tn, split = (*tile, 1)[:3]
    return tm, tn, split


@functools.cache
def gemm_tilings(split_limit: float) -> GemmTilings:
    """All tiles with all split-K factors up to a limit."""
    splits = [split for split in SPLITS if split <= split_limit]
    return GemmTilings([(*tile, split) for tile, split in itertools.product(TILES, splits)])


def family(kernel: Kernel) -> str:
    """Family of a kernel, which has its own constants: window and stride, by which libraries choose code.

    One of ``1x1_s1`` … ``7x7_s2``, ``image`` (a window over 3 channels, which has code of its own),
    ``depthwise_1x1_s1`` … ``depthwise_7x7_s2``, ``stream``.
    """
    if kernel.kind == "stream":
        return kernel.kind
    is_image = kernel.groups == 1 and kernel.k <= IMAGE_CHANNELS * kernel.window
    if kernel.kind == "gemm" and kernel.window > 1 and is_image:
        return "image"
    side = next((side for side in (1, 3, 5) if kernel.window <= side * side), 7)
    shape = f"{side}x{side}_s{min(kernel.stride, 2)}"
    return f"depthwise_{shape}" if kernel.kind == "depthwise" else shape
