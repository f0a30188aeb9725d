"""Common parts of the kernels that pimflow emits for Accel-Sim: grids, operands, instruction text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pimflow.core.kernel import ConvGeometry
from pimflow.simulators.accel_sim.trace import (
    SHARED_BASE,
    STRIDED,
    WARP_LANES,
    HostCopy,
    SassInstruction,
    TraceHeader,
    block_text,
    compress,
)

PC_BYTES = 16
ELEMENT = 2  # bytes: fp16
PARTIAL = 4  # bytes of an fp32 partial sum, which the second launch reads
ZERO = 255  # the register that reads as zero
ACCESS_BYTES = 16  # the most that a lane loads or stores at once
OPERANDS_BASE = 0x7F1000000000
OPERAND_PITCH_BYTES = 1 << 30  # operands begin at multiples of it
# Instructions of a launch by its name, which says all sizes, grid and threads: counting emits the code.
_INSTRUCTIONS: dict[tuple[str, tuple[int, int, int], int], int] = {}
_WIDTHS = {16: ".128", 8: ".64", 4: "", 2: ".U16"}


@dataclass(frozen=True)
class Code:
    """Instructions as text.

    Attributes
    ----------
    count : int
        Instructions.
    lanes : int
        Instructions, counted once for each active lane, as Accel-Sim does.
    text : str
        A line for each instruction.
    """

    count: int = 0
    lanes: int = 0
    text: str = ""

    @classmethod
    def from_instructions(cls, instructions: Iterable[SassInstruction]) -> Code:
        """The code of some instructions."""
        instructions = list(instructions)
        lines = "".join(f"{instruction}\n" for instruction in instructions)
        return cls(len(instructions), sum(entry.lanes for entry in instructions), lines)


def concatenate(parts: Iterable[Code]) -> Code:
    """The concatenation of several codes."""
    parts = list(parts)
    return Code(
        sum(part.count for part in parts),
        sum(part.lanes for part in parts),
        "".join(part.text for part in parts),
    )


class Listing:
    """Instructions in order, each with the next program counter."""

    def __init__(self, first_pc: int = 0, listed: bool = False):
        self.pc, self.listed = first_pc, listed
        self.instructions: list[SassInstruction] = []

    def add(self, opcode: str, destination: int | None = None, *sources: int, **memory: Any) -> None:
        """Append an instruction; all lanes execute it unless `memory` has a mask."""
        destinations = () if destination is None else (destination,)
        self.instructions.append(SassInstruction(self.pc, opcode, destinations, sources, **memory))
        self.pc += PC_BYTES

    def shared(self, opcode: str, destination: int | None, *sources: int, offset: int) -> None:
        """Append an access to shared memory: 16 bytes a lane, lanes side by side."""
        first = SHARED_BASE + offset
        addresses = tuple(range(first, first + WARP_LANES * ACCESS_BYTES, ACCESS_BYTES))
        self.add(opcode, destination, *sources, width_bytes=ACCESS_BYTES, addresses=addresses, mode=STRIDED)

    def load(
        self, destination: int, source: int, addresses: np.ndarray, active: np.ndarray, width_bytes: int
    ) -> None:
        """Append a load from global memory; if no lane is active, only advance the program counter."""
        registers = {"destinations": (destination,), "sources": (source,)}
        self._access("LDG", addresses, active, width_bytes, **registers)

    def store(self, source: int, addresses: np.ndarray, active: np.ndarray, width_bytes: int) -> None:
        """Append a store to global memory; see `load`."""
        self._access("STG", addresses, active, width_bytes, sources=(2, source))

    def _access(
        self, opcode: str, addresses: np.ndarray, active: np.ndarray, width_bytes: int, **registers: Any
    ) -> None:
        """Append an access to global memory by the active lanes."""
        lanes = np.flatnonzero(active).tolist()
        if not lanes:
            self.pc += PC_BYTES
            return
        instruction = SassInstruction(
            self.pc,
            f"{opcode}.E{_WIDTHS[width_bytes]}.SYS",
            mask=sum(1 << lane for lane in lanes),
            width_bytes=width_bytes,
            addresses=tuple(addresses[active].tolist()),
            **registers,
        )
        self.instructions.append(instruction if self.listed else compress(instruction))
        self.pc += PC_BYTES

    def code(self) -> Code:
        """The instructions so far as text."""
        return Code.from_instructions(self.instructions)


def width_bytes(contiguous_bytes: int) -> int:
    """Bytes of the widest access to rows of so many contiguous bytes, one row after the other."""
    return math.gcd(ACCESS_BYTES, contiguous_bytes)


def operand_accesses(
    offset: np.ndarray, active: np.ndarray, output_bytes: int, size_bytes: int, width: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Accesses (offsets, active lanes) to a tensor that belongs to the products at `offset`.

    The tensor is a residual that is added to the products, or their results. If it is as large as all
    products, or a multiple, it is accessed at their offsets; if it is smaller, it is repeated.
    """
    if size_bytes < output_bytes:
        if size_bytes:
            yield offset % max(width, size_bytes // width * width), active
        return
    for first in range(0, size_bytes, output_bytes):
        yield first + offset, active & (first + offset < size_bytes)


@dataclass(frozen=True, kw_only=True)
class ConvolutionOperands:
    """Addresses of a convolution's operands, and sizes of its residual and results.

    Attributes
    ----------
    input_base, weight_base, output_base, residual_base : int
        Addresses.
    residual_bytes : int
        Size of the tensor that is read at the places of the results and added.
    result_bytes : int
        Size of what is stored: that of the products (the default), or a multiple.
    apart : bool
        Whether only the sums are stored, in fp32, for a second launch.
    listed : bool
        Whether addresses are written one by one, as an option of Accel-Sim's own tracer does.
    """

    geometry: ConvGeometry
    input_base: int
    weight_base: int
    output_base: int
    residual_base: int = 0
    residual_bytes: int = 0
    result_bytes: int = 0
    apart: bool = False
    listed: bool = False


@dataclass(frozen=True)
class Operands:
    """Addresses of the operands of a kernel, one operand after the other."""

    sizes_bytes: tuple[int, ...]

    @property
    def bases(self) -> tuple[int, ...]:
        """First address of each operand."""
        bases, first = [], OPERANDS_BASE
        for size in self.sizes_bytes:
            bases.append(first)
            first += -(-max(size, 1) // OPERAND_PITCH_BYTES) * OPERAND_PITCH_BYTES
        return tuple(bases)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A grid launch.

    Attributes
    ----------
    grid : tuple of int
        Thread blocks by (x, y, z).
    threads : int
        Threads of a block.
    shared_memory_bytes, registers : int
        Shared memory of a block, and registers of a thread.
    warps : callable
        From a block's (x, y, z) to the code of each of its warps.
    inputs : tuple of Copy
        Tensors that the host has copied to memory before.
    """

    name: str
    grid: tuple[int, int, int]
    threads: int
    shared_memory_bytes: int = 0
    registers: int
    warps: Callable[[tuple[int, int, int]], Sequence[Code]]
    inputs: tuple[HostCopy, ...] = ()

    def header(self, kernel_id: int) -> TraceHeader:
        """Header of its trace."""
        return TraceHeader(
            name=self.name,
            kernel_id=kernel_id,
            grid=self.grid,
            block=(self.threads, 1, 1),
            shared_memory_bytes=self.shared_memory_bytes,
            registers=self.registers,
        )

    def blocks(self) -> Iterator[tuple[str, int]]:
        """Text and number of instructions (as Accel-Sim counts them) of each thread block, x fastest."""
        for block in self._grid_blocks():
            codes = self.warps(block)
            text = block_text(block, [(code.count, code.text) for code in codes])
            yield text, sum(code.lanes for code in codes)

    def _grid_blocks(self) -> Iterator[tuple[int, int, int]]:
        width, height, depth = self.grid
        return ((x, y, z) for z in range(depth) for y in range(height) for x in range(width))

    def instructions(self) -> int:
        """Number of instructions, as Accel-Sim counts them; counted once per name, grid and threads."""
        key = (self.name, self.grid, self.threads)
        if key not in _INSTRUCTIONS:
            _INSTRUCTIONS[key] = sum(
                code.lanes for block in self._grid_blocks() for code in self.warps(block)
            )
        return _INSTRUCTIONS[key]
