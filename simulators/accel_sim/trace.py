"""Accel-Sim's traces of SASS, version 3: ``kernelslist.g`` and ``.traceg``, read and written.

A ``.traceg`` is a header, then thread blocks, then warps, then a line an instruction::

    PC mask destinations [R…] OPCODE sources [R…] width [mode addresses]

PC and mask are hexadecimal; a width of 0 has no addresses. Mode 0 lists the address of every active lane;
mode 1 has the first and a stride, mode 2 the first and the difference of each from the one before.

Source: accel-sim/accel-sim-framework, ``gpu-simulator/trace-parser/trace_parser.cc``, read 2026-11; traces
that Accel-Sim ran.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pimflow.errors import TraceError

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
_INSTRUCTION = re.compile(
    r"([0-9a-f]{1,8}) +([0-9a-f]{1,8}) +(\d) +((?:R\d+ +)*)([A-Z][A-Z0-9_.]*) +(\d) +((?:R\d+ +)*)"
    r"(\d{1,3})(| .*)",
    re.ASCII,
)
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class SassInstruction:
    """One warp's instruction.

    Attributes
    ----------
    pc : int
        In bytes; a SASS instruction has 16.
    opcode : str
    destinations, sources : tuple of int
        Register numbers; 255 is the one that reads as zero. Accel-Sim takes 1 and 4 at most.
    mask : int
        A bit a lane.
    width_bytes : int
        What a lane accesses; 0 where it is no memory instruction.
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
        """Active lanes."""
        return self.mask.bit_count()

    def __str__(self) -> str:
        """Its line, without the newline."""
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
            if not stridable(self.mask) or len(set(differences)) > 1:
                raise ValueError(f"addresses of '{self.opcode}' have no single stride")
            return f"{first}{differences[0] if differences else 0} "
        return first + "".join(f"{difference} " for difference in differences)


def stridable(mask: int) -> bool:
    """Whether the active lanes are neighbours: Accel-Sim stops a stride at the first idle lane."""
    run = mask >> (mask & -mask).bit_length() - 1 if mask else 0
    return not run & run + 1


def compressed(instruction: SassInstruction) -> SassInstruction:
    """The same with its addresses in the shorter of modes 1 and 2."""
    if not instruction.addresses:
        return instruction
    pairs = zip(instruction.addresses, instruction.addresses[1:])
    single = len({after - before for before, after in pairs}) <= 1 and stridable(instruction.mask)
    return dataclasses.replace(instruction, mode=STRIDED if single else DELTAS)


@dataclass(frozen=True, kw_only=True)
class TraceHeader:
    """The header of a trace: its kernel and its grid.

    Attributes
    ----------
    name : str
        What logs call it.
    kernel_id : int
    grid, block : tuple of int
        Thread blocks, and threads of one, by (x, y, z).
    shared_memory_bytes, registers : int
        Shared memory of a block, and registers of a thread.
    binary_version, stream_id : int
    shared_base, local_base : int
        Addresses of shared and local memory.
    nvbit_version : str
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


@dataclass(frozen=True)
class ThreadBlock:
    """The instructions of one thread block, by warp."""

    index: tuple[int, int, int]
    warps: tuple[tuple[SassInstruction, ...], ...]

    def __str__(self) -> str:
        return block_text(self.index, [(len(warp), "".join(f"{i}\n" for i in warp)) for warp in self.warps])


def block_text(index: tuple[int, int, int], warps: Iterable[tuple[int, str]]) -> str:
    """A thread block from each warp's instructions: how many, and their lines."""
    parts = ["\n#BEGIN_TB\n\nthread block = {},{},{}\n".format(*index)]
    for number, (count, lines) in enumerate(warps):
        parts.append(f"\nwarp = {number}\ninsts = {count}\n{lines}")
    return "".join(parts) + "\n#END_TB\n"


@dataclass(frozen=True)
class Copy:
    """A line ``MemcpyHtoD`` of a kernelslist: bytes that the host has put into the L2's reach."""

    address: int
    size_bytes: int

    def __str__(self) -> str:
        return f"MemcpyHtoD,0x{self.address:016x},{self.size_bytes}"


def read_trace(path: str | os.PathLike) -> tuple[TraceHeader, Iterator[ThreadBlock]]:
    """The header of a ``.traceg``, and its thread blocks, read one at a time.

    Raises
    ------
    TraceError
        With file and line, if it cannot be read, is malformed, ends early, or has another version. The
        iterator raises it too.
    """
    lines = _numbered(Path(path))
    header = _header(path, lines)
    return header, _blocks(path, header, lines)


def _numbered(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="ascii", newline="\n") as file:
            yield from ((number, line.rstrip("\r\n")) for number, line in enumerate(file, 1))
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not a text file") from error
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error


def _header(path: str | os.PathLike, lines: Iterator[tuple[int, str]]) -> TraceHeader:
    fields: dict[str, tuple[int, str]] = {}
    number = 0
    for number, line in lines:
        if line.startswith("#"):
            break
        if line.startswith("-"):
            name, equals, text = line[1:].partition(" = ")
            if not equals or name in fields:
                raise TraceError(f"{path}:{number}: not '-<field> = <value>', each once: {_shown(line)}")
            fields[name] = (number, text)
        elif line:
            raise TraceError(f"{path}:{number}: not a line of a trace's header: {_shown(line)}")
    if (version := _number(path, fields, "accelsim tracer version", number)) != VERSION:
        raise TraceError(f"{path}: is of tracer version {version}; version {VERSION} is what pimflow reads")
    numbers = {
        "kernel_id": "kernel id",
        "shared_memory_bytes": "shmem",
        "registers": "nregs",
        "binary_version": "binary version",
        "stream_id": "cuda stream id",
        "shared_base": "shmem base_addr",
        "local_base": "local mem base_addr",
    }
    return TraceHeader(
        **{field: _number(path, fields, name, number) for field, name in numbers.items()},
        name=_field(path, fields, "kernel name", number)[1],
        nvbit_version=_field(path, fields, "nvbit version", number)[1],
        grid=_triple(path, *_field(path, fields, "grid dim", number)),
        block=_triple(path, *_field(path, fields, "block dim", number)),
    )


def _field(path, fields: dict[str, tuple[int, str]], name: str, last: int) -> tuple[int, str]:
    if name not in fields:
        raise TraceError(f"{path}:{last}: the header has no '-{name}'")
    return fields[name]


def _number(path, fields: dict[str, tuple[int, str]], name: str, last: int) -> int:
    number, text = _field(path, fields, name, last)
    if not re.fullmatch(r"0x[0-9a-fA-F]{1,16}|\d{1,18}", text, re.ASCII):
        raise TraceError(f"{path}:{number}: '-{name}' is no number: {_shown(text)}")
    return int(text, 0) if text.startswith("0x") else int(text)


def _triple(path: str | os.PathLike, number: int, text: str) -> tuple[int, int, int]:
    match = re.fullmatch(r"\(?(\d{1,9}),(\d{1,9}),(\d{1,9})\)?", text, re.ASCII)
    if not match:
        raise TraceError(f"{path}:{number}: not three numbers: {_shown(text)}")
    return tuple(int(each) for each in match.groups())


def _blocks(
    path: str | os.PathLike, header: TraceHeader, lines: Iterator[tuple[int, str]]
) -> Iterator[ThreadBlock]:
    lines = ((number, line) for number, line in lines if line.strip())
    count, number = 0, 0
    for number, line in lines:
        if line.strip() != "#BEGIN_TB":
            raise TraceError(f"{path}:{number}: not '#BEGIN_TB': {_shown(line)}")
        yield _block(path, header, lines)
        count += 1
    if count != header.blocks:
        raise TraceError(f"{path}: ends after {count} of {header.blocks} thread blocks")


def _block(path, header: TraceHeader, lines: Iterator[tuple[int, str]]) -> ThreadBlock:
    number, text = _value(path, lines, "thread block")
    index = _triple(path, number, text)
    if any(at >= size for at, size in zip(index, header.grid)):
        raise TraceError(f"{path}:{number}: thread block {text} is outside the grid {header.grid}")
    warps = []
    for warp in range(header.warps):
        number, text = _value(path, lines, "warp")
        if text != str(warp):
            raise TraceError(f"{path}:{number}: warp {_shown(text)} where warp {warp} is due")
        number, text = _value(path, lines, "insts")
        if not re.fullmatch(r"\d{1,12}", text, re.ASCII):
            raise TraceError(f"{path}:{number}: 'insts' is no number: {_shown(text)}")
        warps.append(tuple(parse_instruction(*_next(path, lines), path) for _ in range(int(text))))
    number, line = _next(path, lines)
    if line.strip() != "#END_TB":
        raise TraceError(f"{path}:{number}: not '#END_TB': {_shown(line)}")
    return ThreadBlock(index, tuple(warps))


def _next(path: str | os.PathLike, lines: Iterator[tuple[int, str]]) -> tuple[int, str]:
    try:
        return next(lines)
    except StopIteration:
        raise TraceError(f"{path}: ends inside a thread block") from None


def _value(path: str | os.PathLike, lines: Iterator[tuple[int, str]], name: str) -> tuple[int, str]:
    number, line = _next(path, lines)
    if not line.startswith(f"{name} = "):
        raise TraceError(f"{path}:{number}: not '{name} = …': {_shown(line)}")
    return number, line.partition(" = ")[2].strip()


def parse_instruction(number: int, line: str, path: str | os.PathLike = "<trace>") -> SassInstruction:
    """The instruction of line `number` of a file."""
    match = _INSTRUCTION.fullmatch(line)
    if not match:
        raise TraceError(f"{path}:{number}: not an instruction: {_shown(line)}")
    pc, mask, written, destinations, opcode, read, sources, width, memory = match.groups()
    destinations, sources = (tuple(int(r[1:]) for r in text.split()) for text in (destinations, sources))
    if len(destinations) != int(written) or len(sources) != int(read):
        raise TraceError(f"{path}:{number}: not as many registers as it says: {_shown(line)}")
    mode, addresses = LISTED, ()
    try:
        if int(width):
            mode, addresses = _addresses(int(mask, 16), memory.split())
        elif memory.strip():
            raise ValueError("addresses without a width")
    except ValueError as error:
        raise TraceError(f"{path}:{number}: {error}: {_shown(line)}") from None
    return SassInstruction(
        int(pc, 16), opcode, destinations, sources, int(mask, 16), int(width), addresses, mode
    )


def _addresses(mask: int, words: list[str]) -> tuple[int, tuple[int, ...]]:
    if not words or words[0] not in ("0", "1", "2"):
        raise ValueError("no address mode 0, 1 or 2")
    mode, lanes = int(words[0]), mask.bit_count()
    if mode == LISTED:
        addresses = tuple(int(word, 16) for word in words[1:])
    elif len(words) < 2:
        addresses = ()
    elif mode == STRIDED:
        if len(words) != 3 or not stridable(mask):
            raise ValueError("not a first address and a stride of neighbouring lanes")
        first, stride = int(words[1], 16), int(words[2])
        addresses = tuple(first + stride * lane for lane in range(lanes))
    else:
        addresses = (int(words[1], 16),)
        for word in words[2:]:
            addresses += (addresses[-1] + int(word),)
    if len(addresses) != lanes:
        raise ValueError(f"{len(addresses)} addresses for {lanes} active lanes")
    return mode, addresses


def read_kernels_list(path: str | os.PathLike) -> list[Copy | str]:
    """Copies, and the file names of traces, of a ``kernelslist.g``, in order.

    Copies back to the host mean nothing to Accel-Sim; they are left out.
    """
    entries: list[Copy | str] = []
    for number, line in _numbered(Path(path)):
        line = line.strip()
        if match := re.fullmatch(r"MemcpyHtoD,(?:0x)?([0-9a-fA-F]{1,16}),(\d{1,18})", line, re.ASCII):
            entries.append(Copy(int(match[1], 16), int(match[2])))
        elif re.fullmatch(r"kernel[-\w.]*\.traceg", line, re.ASCII):
            entries.append(line)
        elif line and not line.startswith("MemcpyDtoH"):
            raise TraceError(f"{path}:{number}: neither a copy nor a kernel's trace: {_shown(line)}")
    return entries


def write_kernels_list(path: str | os.PathLike, entries: Iterable[Copy | str]) -> None:
    """Write a ``kernelslist.g``."""
    Path(path).write_text("".join(f"{entry}\n" for entry in entries), encoding="ascii")


def _shown(text: str) -> str:
    return repr(text[:_SHOWN_CHARACTERS])
