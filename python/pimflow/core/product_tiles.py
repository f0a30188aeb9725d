"""Tiles of matrix products on tensor cores: what a block computes, and which tile is the fastest.

A thread block multiplies its tile step by step: it loads a slice of both operands while it multiplies the
slice before, through shared memory, with barriers. So the time of a product is, per multiprocessor::

    time    = waves * (steps / (stages - 1) + 2) * step + blocks * steps * shared / rate
    steps   = depth of the product / split-K / depth of the tile
    waves   = blocks of the busiest multiprocessor / blocks that it holds, at least 1
    shared  = bytes that a step stores to shared memory and loads from it, which each row and column of
              warps does again

Split-K lets several blocks add up parts of one tile's sums, and a second launch adds these up in a fixed
order, which takes a launch, two steps, and the traffic of the parts. ``step`` is `KernelLimits.step_ns`, the
latency of the loads, and ``stages - 1`` slices are loaded at once: two stages were measured, that more divide
the latency is assumed. ``rate`` is that of 32 banks of 4 bytes.
`scripts/validate_product_tiles.py` compares this with measured kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import ceil, prod

from pimflow.core.blocks import WARP_THREADS, KernelLimits
from pimflow.core.kernel import Kernel

FRAGMENT = 16  # rows, columns and depth that a tensor core multiplies at once
ROW_END = 8  # unused halves behind a row in shared memory, against bank conflicts
STAGES = (2, 3, 4)  # slices of each operand in shared memory; with 3 or more, copies are asynchronous
HALF_BYTES, SUM_BYTES, REGISTER_BYTES = 2, 4, 4
OTHER_REGISTERS = 40  # of a thread, besides sums and loads: operands, addresses (nvcc 13.0, sm_75 and sm_90)
MAX_REGISTERS = 128  # of a thread by this estimate: tiles that need more spill (nvcc 13.0)
MAX_RESIDENT = 32  # blocks of a multiprocessor (CUDA C++ programming guide, compute capabilities 5 to 9)
RESIDENT_THREADS = 1024  # of a multiprocessor: sm_75; later ones have more
EXTRA_STEPS = 2  # the first loads, and the results
SIDES = (16, 32, 64, 128)
DEPTHS = (16, 32, 48, 64)
SPLITS = (1, 2, 4, 8, 16, 32)
PART = 32  # contiguous elements of a part of split-K: 64 bytes, what HBM reads at once
MIN_RESIDENT = 2  # blocks of a multiprocessor: one multiplies while the other waits


@dataclass(frozen=True, kw_only=True)
class ProductShape:
    """Products of `rows` x `depth` by `depth` x `columns`, `batch` of them.

    `run` is the part of the depth that split-K may divide: the channels of a convolution, of which each tap
    of its window has all.
    """

    batch: int
    rows: int
    columns: int
    depth: int
    run: int


@dataclass(frozen=True, kw_only=True)
class BlockTile:
    """What a block computes: a tile of the result, in steps of `depth`; `split` blocks share a tile.

    Of `stages` slices of each operand in shared memory, one is multiplied while the others are loaded.
    """

    rows: int
    columns: int
    depth: int
    split: int = 1
    stages: int = STAGES[0]

    @classmethod
    def from_text(cls, text: str) -> BlockTile:
        """The tile that `to_text` describes; the number of stages may be absent."""
        rows, columns, depth, split, *stages = map(int, text.split("x"))
        return cls(rows=rows, columns=columns, depth=depth, split=split, stages=stages[0] if stages else 2)

    def to_text(self) -> str:
        """Rows, columns, depth, blocks that share a tile, and stages: ``64x32x32x1x2``."""
        return f"{self.rows}x{self.columns}x{self.depth}x{self.split}x{self.stages}"

    @property
    def warps(self) -> tuple[int, int]:
        """Rows and columns of a block's warps, four at most."""
        across = min(4 // min(2, self.rows // FRAGMENT), self.columns // FRAGMENT)
        return min(4 // across, self.rows // FRAGMENT), across

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return WARP_THREADS * prod(self.warps)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: slices of both operands, which the result replaces later."""
        ti, tj, tk = self.rows, self.columns, self.depth
        operands = ti * (tk + ROW_END) + tj * tk + max(tj, tk) * ROW_END
        return max(self.stages * HALF_BYTES * operands, SUM_BYTES * ti * self.result_row)

    @property
    def result_row(self) -> int:
        """Length of a row of the result in shared memory.

        It is longer than bank conflicts require: TVM's StorageRewrite would reuse an operand's buffer of at
        least this size for the result, and then reject its element type.
        """
        ti, tj, tk = self.rows, self.columns, self.depth
        operand = max(ti, tj) * tk + max(ti, tj, tk) * ROW_END
        return max(tj, operand * self.stages // 2 // ti) // 16 * 16 + 20

    @property
    def registers(self) -> int:
        """Registers of a thread, by estimate: its sums, and what it loads in a step if it waits for it."""
        loads = (self.rows + self.columns) * self.depth * HALF_BYTES // REGISTER_BYTES
        loads = loads if self.stages == STAGES[0] else 0
        return OTHER_REGISTERS + (self.rows * self.columns + loads) // self.threads

    @property
    def step_bytes(self) -> int:
        """Bytes that a step moves to and from shared memory."""
        down, across = self.warps
        loaded = self.rows * across + self.columns * down
        return HALF_BYTES * self.depth * (loaded + self.rows + self.columns)

    def blocks(self, shape: ProductShape) -> int:
        """Blocks of a product in such tiles."""
        tiles_of_one = ceil(shape.rows / self.rows) * ceil(shape.columns / self.columns)
        return shape.batch * tiles_of_one * self.split

    def steps(self, shape: ProductShape) -> int:
        """Steps of a block."""
        return ceil(shape.depth / self.split / self.depth)

    def fits(self, limits: KernelLimits) -> bool:
        """Whether a block is within `limits`, and a multiprocessor holds `MIN_RESIDENT` of them."""
        shared_bytes = min(limits.shared_bytes, limits.multiprocessor_shared_bytes // MIN_RESIDENT)
        return (
            self.threads <= limits.threads
            and self.shared_bytes <= shared_bytes
            and self.registers <= MAX_REGISTERS
            and MIN_RESIDENT * self.threads * self.registers * REGISTER_BYTES <= limits.register_bytes
        )

    def resident(self, limits: KernelLimits) -> int:
        """Blocks that a multiprocessor holds."""
        return min(
            MAX_RESIDENT,
            limits.multiprocessor_shared_bytes // self.shared_bytes,
            limits.register_bytes // (self.threads * self.registers * REGISTER_BYTES),
            RESIDENT_THREADS // self.threads,
        )


@functools.cache
def _fitting_tiles(limits: KernelLimits, stages: tuple[int, ...]) -> tuple[BlockTile, ...]:
    """The tiles that a block within `limits` can have, of any product."""
    choices = product(SIDES, SIDES, DEPTHS, SPLITS, stages)
    every_tile = (
        BlockTile(rows=rows, columns=columns, depth=depth, split=split, stages=slices)
        for rows, columns, depth, split, slices in choices
    )
    return tuple(tile for tile in every_tile if tile.fits(limits))


def tiles(shape: ProductShape, limits: KernelLimits, stages: tuple[int, ...]) -> Iterator[BlockTile]:
    """The tiles that a block can have, with any of these numbers of stages.

    A part of split-K has `PART` elements of `ProductShape.run`, or a multiple. Steps do not end within a tap
    of a window, if its channels can be divided so: then taps follow from indices by divisions, which take
    longer than loads.
    """
    for tile in _fitting_tiles(limits, stages):
        if tile.split > 1 and shape.run % (tile.split * PART):
            continue
        run = shape.run // tile.split
        is_even = run % FRAGMENT or run % tile.depth == 0 or tile.depth % run == 0
        if shape.run == shape.depth or is_even:
            yield tile


def product_ns(shape: ProductShape, tile: BlockTile, limits: KernelLimits) -> float:
    """Time of a product in tiles, without its first launch; see the top of this file."""
    of_one, steps = ceil(tile.blocks(shape) / limits.multiprocessors), tile.steps(shape)
    waves = max(1.0, of_one / max(1, tile.resident(limits)))
    ns = waves * (steps / (tile.stages - 1) + EXTRA_STEPS) * limits.step_ns
    ns += of_one * steps * tile.step_bytes / limits.shared_bytes_per_ns
    return ns if tile.split == 1 else ns + _sum_ns(shape, tile.split, limits)


def _sum_ns(shape: ProductShape, split: int, limits: KernelLimits) -> float:
    """Time of the launch that adds up the parts of split-K: a thread a result, whose loads do not wait."""
    results = shape.batch * shape.rows * shape.columns
    waves = max(1.0, ceil(results / limits.multiprocessors) / RESIDENT_THREADS)
    moved = 2 * SUM_BYTES * split * ceil(results / limits.multiprocessors) / limits.l2_bytes_per_ns
    return limits.launch_ns + waves * EXTRA_STEPS * limits.step_ns + moved


@functools.cache
def fastest_tile(
    shape: ProductShape, limits: KernelLimits, stages: tuple[int, ...] = STAGES[:1]
) -> BlockTile | None:
    """The fastest tile that a block can have; None if there is none."""
    return min(tiles(shape, limits, stages), key=lambda tile: product_ns(shape, tile, limits), default=None)


def split_workspace_bytes(kernel: Kernel, dtype: str, limits: KernelLimits) -> int:
    """Bytes of the workspace where blocks of a GPU kernel store their parts of sums; 0 without split-K.

    Schedules have the same tile: `relay_passes.schedules.schedule_tensor_cores`. Products of one row have
    other schedules.
    """
    if kernel.kind != "gemm" or kernel.m * kernel.groups == 1 or dtype != "fp16" or not limits.tensor_cores:
        return 0
    run = kernel.geometry.c // kernel.geometry.groups if kernel.geometry else kernel.k
    shape = ProductShape(batch=kernel.groups, rows=kernel.m, columns=kernel.n, depth=kernel.k, run=run)
    tile = fastest_tile(shape, limits)
    if tile is None or tile.split == 1:
        return 0
    return SUM_BYTES * tile.split * kernel.groups * kernel.m * kernel.n
