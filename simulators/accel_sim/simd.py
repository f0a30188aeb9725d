"""Kernels without tensor cores as Accel-Sim's instructions: streams, depthwise convolutions, GEMV.

Operands are read once, 16 bytes a lane where the rows allow it. Arithmetic is HFMA2, two fp16 values a lane.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from pimflow.simulators.accel_sim.launch import (
    ACCESS_BYTES,
    ELEMENT,
    PARTIAL,
    ZERO,
    Code,
    ConvolutionOperands,
    Launch,
    Listing,
    operand_accesses,
    width_bytes,
)
from pimflow.simulators.accel_sim.trace import WARP_LANES
from pimflow.simulators.gpu.emitted import ROTATION_BYTES, TAPS
from pimflow.simulators.gpu.emitted import SIMD_REGISTERS as REGISTERS
from pimflow.simulators.gpu.emitted import SIMD_THREADS as THREADS

WARPS = THREADS // WARP_LANES
STREAM_ACCESSES = 4  # of a thread, so that several are in flight at once
ADDRESS_INSTRUCTIONS = 8
A_REGISTER, B_REGISTER, SUM_REGISTER = 20, 24, 64
OPERAND_REGISTERS = 8  # of a tap: its inputs, then its weights
SHUFFLES = 5  # a warp's sum of 32 lanes


def _begin(listed: bool) -> Listing:
    listing = Listing(listed=listed)
    for _ in range(ADDRESS_INSTRUCTIONS):
        listing.add("IMAD.MOV.U32", 1, ZERO, ZERO)
    return listing


def _multiply(listing: Listing, count: int, register_offset: int = 0) -> None:
    """Multiply the operands in the registers at offset `register_offset` from the first."""
    for product in range(count):
        total = SUM_REGISTER + product % 4
        listing.add("HFMA2", total, A_REGISTER + register_offset, B_REGISTER + register_offset, total)


def _launch(
    name: str, grid: tuple[int, int, int], listing: Callable[[tuple[int, int, int], int], Listing]
) -> Launch:
    """A launch whose warps execute `listing`, a function of the block's index and the warp's number."""

    def warps(index: tuple[int, int, int]) -> list[Code]:
        """The code of each warp of a block."""
        listings = [listing(index, warp) for warp in range(WARPS)]
        for warp_listing in listings:
            warp_listing.add("EXIT")
        return [warp_listing.code() for warp_listing in listings]

    return Launch(name=name, grid=grid, threads=THREADS, registers=REGISTERS, warps=warps)


@dataclass(frozen=True, kw_only=True)
class Stream:
    """A kernel that reads bytes once and writes bytes once, in order, with arithmetic in between."""

    read_base: int
    write_base: int
    read_bytes: int
    write_bytes: int
    macs: int = 0
    listed: bool = False


def stream_launch(name: str, stream: Stream) -> Launch:
    """The launch, with as many blocks as the larger of input and output needs (`STREAM_ACCESSES`)."""
    max_bytes = max(stream.read_bytes, stream.write_bytes)
    blocks = max(1, -(-max_bytes // (ACCESS_BYTES * THREADS * STREAM_ACCESSES)))
    products = -(-stream.macs // (2 * THREADS * blocks))

    def listing(index: tuple[int, int, int], warp: int) -> Listing:
        """The instructions of a warp."""
        code = _begin(stream.listed)
        for offsets, active, access in _accesses(stream.read_bytes, index[0], blocks, warp):
            code.load(A_REGISTER + 4 * access, 2, stream.read_base + offsets, active, ACCESS_BYTES)
        _multiply(code, products)
        source = SUM_REGISTER if products else A_REGISTER
        for offsets, active, access in _accesses(stream.write_bytes, index[0], blocks, warp):
            register = source if products else source + 4 * access
            code.store(register, stream.write_base + offsets, active, ACCESS_BYTES)
        return code

    return _launch(name, (blocks, 1, 1), listing)


def _accesses(
    size_bytes: int, block: int, blocks: int, warp: int
) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Offsets, active lanes and number of each access of a warp in the contiguous share of its block."""
    accesses = -(-size_bytes // ACCESS_BYTES)
    first, last = accesses * block // blocks, accesses * (block + 1) // blocks
    for access, begin in enumerate(range(first, last, THREADS)):
        positions = begin + warp * WARP_LANES + np.arange(WARP_LANES)
        yield positions * ACCESS_BYTES, positions < last, access


@dataclass(frozen=True, kw_only=True)
class SimdConvolution(ConvolutionOperands):
    """A depthwise convolution, with filters [kh, kw, oc], or the product of one row with a matrix [oc, c]."""

    def finish(self, listing: Listing, element: np.ndarray, active: np.ndarray, width: int) -> None:
        """Add the residual and store the results at `element`, or store only the sums (`apart`)."""
        if self.apart:
            offsets = self.output_base + element * PARTIAL
            listing.store(SUM_REGISTER, offsets, active, width * PARTIAL // ELEMENT)
            return
        output_bytes = self.geometry.pixels * self.geometry.oc * ELEMENT
        products = (element * ELEMENT, active, output_bytes)
        for offsets, lanes in operand_accesses(*products, self.residual_bytes, width):
            listing.load(A_REGISTER, 2, self.residual_base + offsets, lanes, width)
            listing.add("HADD2", SUM_REGISTER, SUM_REGISTER, A_REGISTER)
        for offsets, lanes in operand_accesses(*products, self.result_bytes or output_bytes, width):
            listing.store(SUM_REGISTER, self.output_base + offsets, lanes, width)


def depthwise_launch(name: str, convolution: SimdConvolution) -> Launch:
    """The launch: a thread computes a pixel of as many channels as a load has; `TAPS` taps at a time."""
    geometry = convolution.geometry
    multiplier = geometry.oc // geometry.c
    width = width_bytes(geometry.c * ELEMENT) if multiplier == 1 else ELEMENT
    vector = width // ELEMENT
    row = geometry.oc // vector
    total = geometry.pixels * row
    pad_top, pad_left, _, _ = geometry.padding

    def listing(index: tuple[int, int, int], warp: int) -> Listing:
        """The instructions of a warp."""
        code = _begin(convolution.listed)
        thread = index[0] * THREADS + warp * WARP_LANES + np.arange(WARP_LANES)
        active = thread < total
        pixels, channel = np.divmod(np.minimum(thread, total - 1), row)
        channel *= vector
        image, pixel_in_image = np.divmod(pixels, geometry.oh * geometry.ow)
        y, x = np.divmod(pixel_in_image, geometry.ow)
        all_taps = range(geometry.kh * geometry.kw)
        for taps in (all_taps[first : first + TAPS] for first in all_taps[::TAPS]):
            for slot, tap in enumerate(taps):
                down, right = divmod(tap, geometry.kw)
                iy = y * geometry.stride[0] + down * geometry.dilation[0] - pad_top
                ix = x * geometry.stride[1] + right * geometry.dilation[1] - pad_left
                inside = active & (iy >= 0) & (iy < geometry.h) & (ix >= 0) & (ix < geometry.w)
                pixel = (image * geometry.h + iy) * geometry.w + ix
                read = (pixel * geometry.c + channel // multiplier) * ELEMENT
                weight = (tap * geometry.oc + channel) * ELEMENT
                register = OPERAND_REGISTERS * slot
                code.load(A_REGISTER + register, 2, convolution.input_base + read, inside, width)
                code.load(B_REGISTER + register, 3, convolution.weight_base + weight, inside, width)
            for slot in range(len(taps)):
                _multiply(code, max(1, vector // 2), OPERAND_REGISTERS * slot)
        convolution.finish(code, pixels * geometry.oc + channel, active, width)
        return code

    return _launch(name, (-(-total // THREADS), 1, 1), listing)


def gemv_launch(name: str, convolution: SimdConvolution) -> Launch:
    """The launch: a warp computes one output; its lanes share the reduction and add up their sums.

    Each block starts its rows one access of a warp later than the block before it, and wraps around.
    """
    geometry = convolution.geometry
    outputs = geometry.oc // geometry.groups
    width = width_bytes(geometry.reduction * ELEMENT)
    vector = width // ELEMENT

    def listing(index: tuple[int, int, int], warp: int) -> Listing:
        """The instructions of a warp."""
        code = _begin(convolution.listed)
        column = index[0] * WARPS + warp
        if column >= outputs:
            return code
        row = index[1] * outputs + column
        begin = index[0] * ROTATION_BYTES // ELEMENT
        for first in range(0, geometry.reduction, WARP_LANES * vector):
            k = first + np.arange(WARP_LANES) * vector
            active = k < geometry.reduction
            k = (begin + k) % geometry.reduction
            weight = convolution.weight_base + (row * geometry.reduction + k) * ELEMENT
            read = convolution.input_base + (index[1] * geometry.reduction + k) * ELEMENT
            code.load(B_REGISTER, 3, weight, active, width)
            code.load(A_REGISTER, 2, read, active, width)
            _multiply(code, max(1, vector // 2))
        for _ in range(SHUFFLES):
            code.add("SHFL.BFLY", 8, SUM_REGISTER)
            code.add("FADD", SUM_REGISTER, SUM_REGISTER, 8)
        convolution.finish(code, np.full(WARP_LANES, row), np.arange(WARP_LANES) == 0, ELEMENT)
        return code

    return _launch(name, (-(-outputs // WARPS), geometry.groups, 1), listing)
