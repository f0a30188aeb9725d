"""The tiled implicit GEMM that the GPU model assumes, as Accel-Sim's instructions.

A thread block computes (tm, tn) outputs of one group and, with split-K, of one part of the reduction. Per
32 elements of the reduction it loads both tiles into registers, 16 bytes a lane, stores them to shared
memory, waits at a barrier, reads fragments (LDSM) and multiplies them (HMMA, 16x8x8). The loads of the next
32 elements come right after the barrier, so that they are in flight while the block multiplies; they are
stored to shared memory after the products. Convolutions gather: the reduction runs over taps, then channels,
padded to 8; a lane whose tap lies outside the image is idle.

Pixels and channels beyond the last load the last one, and are not stored. All warps read the first fragments
of shared memory: only the banks matter for time, and they are the same. The loop is unrolled. With tiles of
64x64 and 128x64 this is, instruction for instruction, the kernel of
`tests/gpu_model/data/accelsim_rtx2060.csv`, except for stores of rows beyond the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pimflow.simulators.accel_sim.launch import (
    ACCESS_BYTES,
    ELEMENT,
    PARTIAL,
    PC_BYTES,
    ZERO,
    Code,
    ConvolutionOperands,
    Launch,
    Listing,
    concatenate,
    operand_accesses,
    width_bytes,
)
from pimflow.simulators.accel_sim.trace import WARP_LANES
from pimflow.simulators.gpu.emitted import GEMM_REGISTERS, LARGE_THREADS, SMALL_THREADS, SMALL_TILE

TILE_K = 32
CHUNK = ACCESS_BYTES // ELEMENT  # elements of a lane's load
CHUNKS = TILE_K // CHUNK  # per row of a tile
MMA_M, MMA_N = 16, 8
ADDRESS_INSTRUCTIONS = 12
A_REGISTER, B_REGISTER, RESIDUAL_REGISTER, SUM_REGISTER = 20, 36, 60, 64
A_FRAGMENT, B_FRAGMENT = 200, 220
# Of an iteration: addresses [row, chunk], whether each is loaded, and channels.
Addresses = Callable[[int], tuple[np.ndarray, np.ndarray, np.ndarray]]


@dataclass(frozen=True, kw_only=True)
class Gemm(ConvolutionOperands):
    """Sizes and addresses of an implicit GEMM; filters are [oc, kh, kw, c].

    Attributes
    ----------
    tile : tuple of int
        (tm, tn).
    split : int
        Parts of the reduction, each computed by a thread block; with several, `apart` is true.
    """

    tile: tuple[int, int]
    split: int = 1

    @property
    def m(self) -> int:
        """Rows of the product: output pixels."""
        return self.geometry.pixels

    @property
    def n(self) -> int:
        """Columns of the product: output channels of a group."""
        return self.geometry.oc // self.geometry.groups

    @property
    def channels(self) -> int:
        """Input channels of a group."""
        return self.geometry.c // self.geometry.groups

    @property
    def tap_chunks(self) -> int:
        """Chunks of a tap's channels."""
        return -(-self.channels // CHUNK)

    @property
    def chunks(self) -> int:
        """Chunks of the padded reduction."""
        return self.geometry.kh * self.geometry.kw * self.tap_chunks

    @property
    def iterations(self) -> int:
        """Iterations of one part of the reduction."""
        return -(-math.ceil(self.chunks / CHUNKS) // self.split)

    @property
    def warps(self) -> int:
        """Warps of a thread block."""
        is_small = self.tile[0] * self.tile[1] <= SMALL_TILE
        return (SMALL_THREADS if is_small else LARGE_THREADS) // WARP_LANES

    @property
    def warp_tile(self) -> tuple[int, int]:
        """Outputs of a warp (rows, columns): as square as possible, to reuse fragments."""
        tm, tn = self.tile
        shapes = [(tm // rows, tn * rows // self.warps) for rows in (1, 2, 4, 8) if self.warps % rows == 0]
        return min(
            (shape for shape in shapes if shape[0] % MMA_M == shape[1] % ACCESS_BYTES == 0),
            key=lambda shape: (sum(shape), abs(shape[0] * tn - shape[1] * tm)),
        )


def gemm_launch(name: str, gemm: Gemm) -> Launch:
    """The launch, with a grid of x over channels, y over pixels, z over groups and parts of the reduction."""
    tm, tn = gemm.tile
    wm, wn = gemm.warp_tile
    return Launch(
        name=name,
        grid=(-(-gemm.n // tn), -(-gemm.m // tm), gemm.geometry.groups * gemm.split),
        threads=gemm.warps * WARP_LANES,
        shared_memory_bytes=(tm + tn) * TILE_K * ELEMENT,
        registers=GEMM_REGISTERS + wm * wn // WARP_LANES,
        warps=_Emitter(gemm).block,
    )


class _Emitter:
    """Emits thread blocks in the order of the grid; loads that neighbours share are rendered once."""

    def __init__(self, gemm: Gemm):
        self.gemm = gemm
        self.threads = gemm.warps * WARP_LANES
        self.a_loads, self.b_loads = (side * CHUNKS // self.threads for side in gemm.tile)
        self.width = width_bytes(gemm.channels * ELEMENT)
        self.parts = ACCESS_BYTES // self.width
        self.a_rows: tuple[tuple[int, int], list[list[Code]]] | None = None
        self.b_columns: dict[int, list[list[Code]]] = {}
        self.z = 0
        prologue = Listing()
        for _ in range(ADDRESS_INSTRUCTIONS):
            prologue.add("IMAD.MOV.U32", 1, ZERO, ZERO)
        self.prologue, self.load_pc = prologue.code(), prologue.pc
        self.b_offset = gemm.tile[0] * TILE_K * ELEMENT
        self.loads_bytes = (self.a_loads + self.b_loads) * self.parts * PC_BYTES
        first, second = (self._listing_after_loads(turn, False, 0).pc for turn in (0, 1))
        self.second_pc = self.load_pc + self.loads_bytes + first
        self.turn_bytes, self.products_bytes = self.loads_bytes + second, second - first
        self.codes_after_loads: dict[tuple[int, bool], list[Code]] = {}

    def block(self, index: tuple[int, int, int]) -> list[Code]:
        """Code of each warp of a thread block."""
        x, y, z = index
        if z != self.z:
            self.z, self.a_rows, self.b_columns = z, None, {}
        if self.a_rows is None or self.a_rows[0] != (y, z):
            self.a_rows = ((y, z), self._loads(self._pixels(y), self.a_loads, A_REGISTER, 0))
        pixels = self.a_rows[1]
        if x not in self.b_columns:
            pc_offset = self.a_loads * self.parts * PC_BYTES
            self.b_columns[x] = self._loads(self._filters(x), self.b_loads, B_REGISTER, pc_offset)
        turns = list(zip(pixels, self.b_columns[x], self._codes_after_loads(len(pixels))))
        first_pc = self._loads_pc(len(turns)) + (self.products_bytes if turns else 0)
        codes = []
        for warp in range(self.gemm.warps):
            parts = [part[warp] for turn in turns for part in turn]
            codes.append(concatenate([self.prologue, *parts, self._stores(index, warp, first_pc)]))
        return codes

    def _loads_pc(self, turn: int) -> int:
        """Program counter of the first load of an iteration."""
        return self.second_pc + (turn - 1) * self.turn_bytes if turn else self.load_pc

    def _codes_after_loads(self, turns: int) -> list[list[Code]]:
        """By iteration and warp, the code after its loads (`_listing_after_loads`)."""
        for turn in range(turns):
            key = (turn, turn == turns - 1)
            if key not in self.codes_after_loads:
                first_pc = self._loads_pc(turn) + self.loads_bytes
                listings = [
                    self._listing_after_loads(*key, warp, first_pc) for warp in range(self.gemm.warps)
                ]
                self.codes_after_loads[key] = [listing.code() for listing in listings]
        return [self.codes_after_loads[turn, turn == turns - 1] for turn in range(turns)]

    def _iterations(self) -> range:
        """Iterations of this part of the reduction; the last part may have fewer, or none."""
        count, part = self.gemm.iterations, self.z % self.gemm.split
        last = -(-self.gemm.chunks // CHUNKS)
        return range(min(part * count, last), min((part + 1) * count, last))

    def _chunk(self, iteration: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tap and first channel of each chunk of an iteration, and whether it lies within the reduction."""
        chunks = iteration * CHUNKS + np.arange(CHUNKS)
        taps, chunk_in_tap = np.divmod(chunks, self.gemm.tap_chunks)
        return taps, chunk_in_tap * CHUNK, chunks < self.gemm.chunks

    def _pixels(self, y: int) -> Addresses:
        """Addresses of the pixels of a tile, whose row in the grid is `y`."""
        gemm, geometry = self.gemm, self.gemm.geometry
        pixels = np.minimum(y * gemm.tile[0] + np.arange(gemm.tile[0]), gemm.m - 1)
        image, pixel_in_image = np.divmod(pixels, geometry.oh * geometry.ow)
        rows, columns = np.divmod(pixel_in_image, geometry.ow)
        pad_top, pad_left, _, _ = geometry.padding
        rows = rows * geometry.stride[0] - pad_top
        columns = columns * geometry.stride[1] - pad_left
        group = self.z // gemm.split * gemm.channels

        def addresses(iteration: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            """Addresses, whether each is loaded, and channels of one iteration."""
            taps, channel, valid = self._chunk(iteration)
            down, right = np.divmod(taps, geometry.kw)
            iy = rows[:, None] + down * geometry.dilation[0]
            ix = columns[:, None] + right * geometry.dilation[1]
            inside = (iy >= 0) & (iy < geometry.h) & (ix >= 0) & (ix < geometry.w) & valid
            element = ((image[:, None] * geometry.h + iy) * geometry.w + ix) * geometry.c + group + channel
            return gemm.input_base + element * ELEMENT, inside, channel

        return addresses

    def _filters(self, x: int) -> Addresses:
        """Addresses of the filters of a tile, whose column in the grid is `x`."""
        gemm, geometry = self.gemm, self.gemm.geometry
        columns = np.minimum(x * gemm.tile[1] + np.arange(gemm.tile[1]), gemm.n - 1)
        columns += self.z // gemm.split * gemm.n

        def addresses(iteration: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            """Addresses, whether each is loaded, and channels of one iteration."""
            taps, channel, valid = self._chunk(iteration)
            element = columns[:, None] * geometry.reduction + taps * gemm.channels + channel
            return gemm.weight_base + element * ELEMENT, np.broadcast_to(valid, element.shape), channel

        return addresses

    def _loads(self, addresses: Addresses, loads: int, register: int, pc_offset: int) -> list[list[Code]]:
        """By iteration and warp, the loads of a tile; `pc_offset` is their offset in the code, in bytes."""
        codes = []
        for turn, iteration in enumerate(self._iterations()):
            address, active, channel = addresses(iteration)
            first_pc = self._loads_pc(turn) + pc_offset
            listings = [Listing(first_pc, self.gemm.listed) for _ in range(self.gemm.warps)]
            for load in range(loads):
                for part in range(self.parts):
                    active_part = active & (channel + part * self.width // ELEMENT < self.gemm.channels)
                    for warp, listing in enumerate(listings):
                        begin = load * self.threads + warp * WARP_LANES
                        lanes = slice(begin, begin + WARP_LANES)
                        lane_addresses = address.reshape(-1)[lanes] + part * self.width
                        listing.load(
                            register + 4 * load, 2, lane_addresses, active_part.reshape(-1)[lanes], self.width
                        )
            codes.append([listing.code() for listing in listings])
        return codes

    def _listing_after_loads(self, turn: int, last: bool, warp: int, first_pc: int = 0) -> Listing:
        """Products of the previous iteration, stores to shared memory, and at last this one's products."""
        listing = Listing(first_pc)
        if turn:
            self._products(listing)
        sides = ((0, self.a_loads, A_REGISTER), (self.b_offset, self.b_loads, B_REGISTER))
        for first, loads, register in sides:
            for load in range(loads):
                offset = first + (load * self.threads + warp * WARP_LANES) * ACCESS_BYTES
                listing.shared("STS.128", None, 2, register + 4 * load, offset=offset)
        listing.add("BAR.SYNC")
        if turn:
            listing.add("BRA")
        if last:
            self._products(listing)
            listing.add("BRA")
        return listing

    def _products(self, listing: Listing) -> None:
        """Multiply fragments from shared memory, add to the sums, and count the iteration."""
        wm, wn = self.gemm.warp_tile
        fragment_bytes = WARP_LANES * ACCESS_BYTES
        rows, columns = wm // MMA_M, wn // MMA_N
        for _ in range(TILE_K // 16):
            for row in range(rows):
                listing.shared("LDSM.16.M88.4", A_FRAGMENT + row, 3, offset=row * fragment_bytes)
            for pair in range(columns // 2):
                offset = self.b_offset + pair * fragment_bytes
                listing.shared("LDSM.16.M88.4", B_FRAGMENT + pair, 3, offset=offset)
            for _ in range(2):  # an LDSM holds 16 of K, an HMMA takes 8
                for row in range(rows):
                    for column in range(columns):
                        total = SUM_REGISTER + 2 * (row * columns + column)
                        a, b = A_FRAGMENT + row, B_FRAGMENT + column // 2
                        listing.add("HMMA.1688.F32", total, a, b, total)
        listing.add("IADD3", 4, 4, ZERO, ZERO)
        listing.add("ISETP.GE.AND", None, 4, ZERO)

    def _stores(self, index: tuple[int, int, int], warp: int, first_pc: int) -> Code:
        """Store the results of a warp, and end it."""
        gemm, (x, y, z) = self.gemm, index
        wm, wn = gemm.warp_tile
        group, part = divmod(z, gemm.split)
        size = PARTIAL if gemm.apart else ELEMENT
        width = width_bytes(gemm.n * size)
        row_chunks = wn * size // width
        down = gemm.tile[0] // wm
        first_row = y * gemm.tile[0] + warp % down * wm
        first_column = x * gemm.tile[1] + warp // down * wn
        listing = Listing(first_pc, gemm.listed)
        for begin in range(0, wm * row_chunks, WARP_LANES):
            rows, chunks = np.divmod(begin + np.arange(WARP_LANES), row_chunks)
            rows, columns = first_row + rows, first_column + chunks * (width // size)
            active = (rows < gemm.m) & (columns < gemm.n)
            if not active.any():
                continue
            if gemm.apart:
                element = ((group * gemm.split + part) * gemm.m + rows) * gemm.n + columns
                listing.store(SUM_REGISTER, gemm.output_base + element * size, active, width)
                continue
            element = rows * gemm.geometry.oc + group * gemm.n + columns
            output_bytes = gemm.m * gemm.geometry.oc * size
            products = (element * size, active, output_bytes)
            for offsets, lanes in operand_accesses(*products, gemm.residual_bytes, width):
                listing.load(RESIDUAL_REGISTER, 2, gemm.residual_base + offsets, lanes, width)
                listing.add("HADD2", SUM_REGISTER, SUM_REGISTER, RESIDUAL_REGISTER)
            for offsets, lanes in operand_accesses(*products, gemm.result_bytes or output_bytes, width):
                listing.store(SUM_REGISTER, gemm.output_base + offsets, lanes, width)
        listing.add("EXIT")
        return listing.code()
