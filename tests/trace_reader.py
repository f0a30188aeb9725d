"""A reader of Accel-Sim's traces, whose form `simulators.accel_sim.trace` has: what is written comes back."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pimflow.errors import TraceError
from pimflow.simulators.accel_sim.trace import (
    LISTED,
    STRIDED,
    VERSION,
    HostCopy,
    SassInstruction,
    TraceHeader,
    block_text,
    is_stridable,
)

_INSTRUCTION = re.compile(
    r"([0-9a-f]{1,8}) +([0-9a-f]{1,8}) +(\d) +((?:R\d+ +)*)([A-Z][A-Z0-9_.]*) +(\d) +((?:R\d+ +)*)"
    r"(\d{1,3})(| .*)",
    re.ASCII,
)
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class ThreadBlock:
    """The instructions of one thread block, by warp."""

    index: tuple[int, int, int]
    warps: tuple[tuple[SassInstruction, ...], ...]

    def __str__(self) -> str:
        return block_text(self.index, [(len(warp), "".join(f"{i}\n" for i in warp)) for warp in self.warps])


def read_trace(path: str | os.PathLike) -> tuple[TraceHeader, Iterator[ThreadBlock]]:
    """The header of a ``.traceg``, and its thread blocks, read one at a time.

    Raises
    ------
    TraceError
        With file and line, if it cannot be read, is malformed, ends early, or has another version. The
        iterator raises it too.
    """
    lines = _read_lines(Path(path))
    header = _header(path, lines)
    return header, _blocks(path, header, lines)


def _read_lines(path: Path) -> Iterator[tuple[int, str]]:
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
                raise TraceError(f"{path}:{number}: not '-<field> = <value>', each once: {_excerpt(line)}")
            fields[name] = (number, text)
        elif line:
            raise TraceError(f"{path}:{number}: not a line of a trace's header: {_excerpt(line)}")
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
        raise TraceError(f"{path}:{number}: '-{name}' is no number: {_excerpt(text)}")
    return int(text, 0) if text.startswith("0x") else int(text)


def _triple(path: str | os.PathLike, number: int, text: str) -> tuple[int, int, int]:
    match = re.fullmatch(r"\(?(\d{1,9}),(\d{1,9}),(\d{1,9})\)?", text, re.ASCII)
    if not match:
        raise TraceError(f"{path}:{number}: not three numbers: {_excerpt(text)}")
    return tuple(int(number_text) for number_text in match.groups())


def _blocks(
    path: str | os.PathLike, header: TraceHeader, lines: Iterator[tuple[int, str]]
) -> Iterator[ThreadBlock]:
    lines = ((number, line) for number, line in lines if line.strip())
    count, number = 0, 0
    for number, line in lines:
        if line.strip() != "#BEGIN_TB":
            raise TraceError(f"{path}:{number}: not '#BEGIN_TB': {_excerpt(line)}")
        yield _block(path, header, lines)
        count += 1
    if count != header.blocks:
        raise TraceError(f"{path}: ends after {count} of {header.blocks} thread blocks")


def _block(path, header: TraceHeader, lines: Iterator[tuple[int, str]]) -> ThreadBlock:
    number, text = _value(path, lines, "thread block")
    index = _triple(path, number, text)
    if any(coordinate >= size for coordinate, size in zip(index, header.grid)):
        raise TraceError(f"{path}:{number}: thread block {text} is outside the grid {header.grid}")
    warps = []
    for warp in range(header.warps):
        number, text = _value(path, lines, "warp")
        if text != str(warp):
            raise TraceError(f"{path}:{number}: warp {_excerpt(text)} where warp {warp} is due")
        number, text = _value(path, lines, "insts")
        if not re.fullmatch(r"\d{1,12}", text, re.ASCII):
            raise TraceError(f"{path}:{number}: 'insts' is no number: {_excerpt(text)}")
        warps.append(tuple(parse_instruction(*_next(path, lines), path) for _ in range(int(text))))
    number, line = _next(path, lines)
    if line.strip() != "#END_TB":
        raise TraceError(f"{path}:{number}: not '#END_TB': {_excerpt(line)}")
    return ThreadBlock(index, tuple(warps))


def _next(path: str | os.PathLike, lines: Iterator[tuple[int, str]]) -> tuple[int, str]:
    try:
        return next(lines)
    except StopIteration:
        raise TraceError(f"{path}: ends inside a thread block") from None


def _value(path: str | os.PathLike, lines: Iterator[tuple[int, str]], name: str) -> tuple[int, str]:
    number, line = _next(path, lines)
    if not line.startswith(f"{name} = "):
        raise TraceError(f"{path}:{number}: not '{name} = …': {_excerpt(line)}")
    return number, line.partition(" = ")[2].strip()


def parse_instruction(number: int, line: str, path: str | os.PathLike = "<trace>") -> SassInstruction:
    """The instruction of line `number` of a file."""
    match = _INSTRUCTION.fullmatch(line)
    if not match:
        raise TraceError(f"{path}:{number}: not an instruction: {_excerpt(line)}")
    pc, mask, written, destinations, opcode, read, sources, width, memory = match.groups()
    destinations, sources = (tuple(int(r[1:]) for r in text.split()) for text in (destinations, sources))
    if len(destinations) != int(written) or len(sources) != int(read):
        raise TraceError(f"{path}:{number}: not as many registers as it says: {_excerpt(line)}")
    mode, addresses = LISTED, ()
    try:
        if int(width):
            mode, addresses = _addresses(int(mask, 16), memory.split())
        elif memory.strip():
            raise ValueError("addresses without a width")
    except ValueError as error:
        raise TraceError(f"{path}:{number}: {error}: {_excerpt(line)}") from None
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
        if len(words) != 3 or not is_stridable(mask):
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


def read_kernels_list(path: str | os.PathLike) -> list[HostCopy | str]:
    """Copies, and the file names of traces, of a ``kernelslist.g``, in order.

    Copies back to the host mean nothing to Accel-Sim; they are left out.
    """
    entries: list[HostCopy | str] = []
    for number, line in _read_lines(Path(path)):
        line = line.strip()
        if match := re.fullmatch(r"MemcpyHtoD,(?:0x)?([0-9a-fA-F]{1,16}),(\d{1,18})", line, re.ASCII):
            entries.append(HostCopy(int(match[1], 16), int(match[2])))
        elif re.fullmatch(r"kernel[-\w.]*\.traceg", line, re.ASCII):
            entries.append(line)
        elif line and not line.startswith("MemcpyDtoH"):
            raise TraceError(f"{path}:{number}: neither a copy nor a kernel's trace: {_excerpt(line)}")
    return entries


def _excerpt(text: str) -> str:
    return repr(text[:_SHOWN_CHARACTERS])
