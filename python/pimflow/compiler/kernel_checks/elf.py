"""Reads what CUDA kernels need from their machine code: registers and local memory.

A cubin is an ELF file, whose section ``.nv.info`` has attributes of kernels; the numbers are those that
``ptxas -v`` prints (CUDA binary utilities).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace

_SECTION, _SYMBOL = struct.Struct("<IIQQQQIIQQ"), struct.Struct("<IBBHQQ")
_SYMBOL_TABLE = 2  # type of a section
_FRAME_SIZE, _REGISTER_COUNT = 0x11, 0x2F  # attributes: bytes of a thread's stack frame, its registers
_SIZED = 4  # format of an attribute whose value is as long as it says


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """A kernel in machine code.

    Attributes
    ----------
    name : str
    registers : int
        Registers of 32 bits of a thread.
    local_bytes : int
        Local memory of a thread, which lies in DRAM: spilled registers, and arrays with computed indices.
    """

    name: str
    registers: int = 0
    local_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class _Section:
    name: str
    kind: int
    content: bytes
    link: int


def compiled_kernels(cubin: bytes) -> dict[str, CompiledKernel]:
    """The kernels of a cubin by name; raises `ValueError` for another file."""
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("no ELF file of 64 bits")
    sections = _sections(cubin)
    symbols = _symbols(sections)
    kernels: dict[str, CompiledKernel] = {}
    (info,) = (section for section in sections if section.name == ".nv.info")
    for attribute, value in _attributes(info.content):
        if attribute in (_FRAME_SIZE, _REGISTER_COUNT):
            symbol, number = struct.unpack_from("<II", value)
            name, change = symbols[symbol], "registers" if attribute == _REGISTER_COUNT else "local_bytes"
            kernels[name] = replace(kernels.get(name, CompiledKernel(name=name)), **{change: number})
    return kernels


def _sections(elf: bytes) -> list[_Section]:
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [_SECTION.unpack_from(elf, table + index * entry_size) for index in range(count)]
    names = elf[headers[names_index][4] :]
    return [
        _Section(name=_text(names, name), kind=kind, content=_content(elf, offset, size, kind), link=link)
        for name, kind, _, _, offset, size, link, *_ in headers
    ]


def _content(elf: bytes, offset: int, size: int, kind: int) -> bytes:
    """The bytes of a section; those of one without contents in the file (SHT_NOBITS) are zero."""
    return bytes(size) if kind == 8 else elf[offset : offset + size]


def _symbols(sections: list[_Section]) -> list[str]:
    (table,) = (section for section in sections if section.kind == _SYMBOL_TABLE)
    names = sections[table.link].content
    return [_text(names, entry[0]) for entry in _SYMBOL.iter_unpack(table.content)]


def _attributes(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Numbers and values of the attributes of a section."""
    place = 0
    while place + 4 <= len(content):
        form, attribute, size = struct.unpack_from("<BBH", content, place)
        place += 4
        if form == _SIZED:
            yield attribute, content[place : place + size]
            place += size


def _text(table: bytes, begin: int) -> str:
    return table[begin : table.index(b"\0", begin)].decode()
