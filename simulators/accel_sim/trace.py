"""Accel-Sim's traces of SASS, version 3: ``kernelslist.g`` and ``.traceg``.

A ``.traceg`` is a header, then thread blocks, then warps, then a line an instruction::

    PC mask destinations [R…] OPCODE sources [R…] width [mode addresses]

PC and mask are hexadecimal; with a width of 0 there are no addresses. Mode 0 lists the address of every
active lane; mode 1 has the first address and a stride, mode 2 the first and the difference of each to its
predecessor.

Source: accel-sim/accel-sim-framework, ``gpu-simulator/trace-parser/trace_parser.cc``, read 2026-11; traces
that Accel-Sim ran.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

VERSION = 3
WARP_LANES = 32
ALL_LANES = 0xFFFFFFFF
LISTED, STRIDED, DELTAS = range(3)
SHARED_BASE = 0x7F0000000000
LOCAL_BASE = 0x7E0000000000
_COLUMNS = (
    "#traces format = PC mask dest_num [reg_dests] opcode src_num [reg_srcs] "
    "mem_width [adrrescompress?] [mem_addresses]"
)


@dataclass(frozen=True)
class SassInstruction:
    """One warp's instruction.

    Attributes
    ----------
    pc : int
        In bytes; a SASS instruction has 16.
    destinations, sources : tuple of int
        Register numbers; 255 is the one that reads as zero. Accel-Sim accepts at most 1 and 4.
    mask : int
        Active lanes, one bit each.
    width_bytes : int
        Bytes that a lane accesses; 0 if it is no memory instruction.
    addresses : tuple of int
        Addresses of the active lanes, in order.
    mode : int
        How the addresses are written: `LISTED`, `STRIDED` or `DELTAS`.
    """

    pc: int
    opcode: str
    destinations: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()
    mask: int = ALL_LANES
    width_bytes: int = 0
    addresses: tuple[int, ...] = ()
    mode: int = LISTED

    @property
    def lanes(self) -> int:
        """Number of active lanes."""
        return self.mask.bit_count()

    def __str__(self) -> str:
        """Its line in the trace, without the newline."""
        destinations = "".join(f"R{register} " for register in self.destinations)
        sources = "".join(f"R{register} " for register in self.sources)
        return (
            f"{self.pc:04x} {self.mask:08x} {len(self.destinations)} {destinations}"
            f"{self.opcode} {len(self.sources)} {sources}{self.width_bytes} {self._memory()}"
        )

    def _memory(self) -> str:
        if not self.width_bytes:
            return ""
        if not self.addresses:
            return f"{self.mode} "
        first = f"{self.mode} 0x{self.addresses[0]:x} "
        if self.mode == LISTED:
            return "0 " + "".join(f"0x{address:016x} " for address in self.addresses)
        differences = [after - before for before, after in zip(self.addresses, self.addresses[1:])]
        if self.mode == STRIDED:
            if not is_stridable(self.mask) or len(set(differences)) > 1:
                raise ValueError(f"addresses of '{self.opcode}' have no single stride")
            return f"{first}{differences[0] if differences else 0} "
        return first + "".join(f"{difference} " for difference in differences)


def is_stridable(mask: int) -> bool:
    """Whether the active lanes are contiguous; Accel-Sim ends a stride at the first idle lane."""
    run = mask >> (mask & -mask).bit_length() - 1 if mask else 0
    return not run & run + 1


def compress(instruction: SassInstruction) -> SassInstruction:
    """The same instruction with its addresses in mode 1 if they have a stride, else in mode 2."""
    if not instruction.addresses:
        return instruction
    pairs = zip(instruction.addresses, instruction.addresses[1:])
    single = len({after - before for before, after in pairs}) <= 1 and is_stridable(instruction.mask)
    return dataclasses.replace(instruction, mode=STRIDED if single else DELTAS)


@dataclass(frozen=True, kw_only=True)
class TraceHeader:
    """The header of a trace: its kernel and its grid.

    Attributes
    ----------
    name : str
        Name of the kernel in logs.
    grid, block : tuple of int
        Thread blocks, and threads of one, by (x, y, z).
    shared_memory_bytes, registers : int
        Shared memory of a block, and registers of a thread.
    shared_base, local_base : int
        Addresses of shared and local memory.
    """

    name: str
    kernel_id: int = 1
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_memory_bytes: int = 0
    registers: int
    binary_version: int = 75
    stream_id: int = 0
    shared_base: int = SHARED_BASE
    local_base: int = LOCAL_BASE
    nvbit_version: str = "1.5.5"

    @property
    def blocks(self) -> int:
        """Thread blocks of the grid."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return -(-self.block[0] * self.block[1] * self.block[2] // WARP_LANES)

    def __str__(self) -> str:
        """The lines before the first thread block."""
        return "".join(f"-{name} = {text}\n" for name, text in self._fields()) + f"\n{_COLUMNS}\n"

    def _fields(self) -> list[tuple[str, str]]:
        return [
            ("kernel name", self.name),
            ("kernel id", f"{self.kernel_id}"),
            ("grid dim", "({},{},{})".format(*self.grid)),
            ("block dim", "({},{},{})".format(*self.block)),
            ("shmem", f"{self.shared_memory_bytes}"),
            ("nregs", f"{self.registers}"),
            ("binary version", f"{self.binary_version}"),
            ("cuda stream id", f"{self.stream_id}"),
            ("shmem base_addr", f"0x{self.shared_base:016x}"),
            ("local mem base_addr", f"0x{self.local_base:016x}"),
            ("nvbit version", self.nvbit_version),
            ("accelsim tracer version", f"{VERSION}"),
        ]


def block_text(index: tuple[int, int, int], warps: Iterable[tuple[int, str]]) -> str:
    """Text of a thread block, from the number of instructions and the lines of each warp."""
    parts = ["\n#BEGIN_TB\n\nthread block = {},{},{}\n".format(*index)]
    for number, (count, lines) in enumerate(warps):
        parts.append(f"\nwarp = {number}\ninsts = {count}\n{lines}")
    return "".join(parts) + "\n#END_TB\n"


@dataclass(frozen=True)
class HostCopy:
    """A line ``MemcpyHtoD`` of a kernelslist: bytes that the host has copied to the GPU, into its L2."""

    address: int
    size_bytes: int

    def __str__(self) -> str:
        return f"MemcpyHtoD,0x{self.address:016x},{self.size_bytes}"


def write_kernels_list(path: str | os.PathLike[str], entries: Iterable[HostCopy | str]) -> None:
    """Write a ``kernelslist.g``."""
    Path(path).write_text("".join(f"{entry}\n" for entry in entries), encoding="ascii")
