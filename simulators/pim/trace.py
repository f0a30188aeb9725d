"""The ``.pim`` traces of the PIMFlow authors' Ramulator fork.

A line is ``READRES`` or ``0x%08x COMMAND`` with a 29-bit address: bank group [2], bank [2], row [14],
column [5], offset [6], from the top. The format is lossy: COMP and READRES have no buffer, GWRITE has
neither buffer nor gather. ``.pimprog`` (`PimProgram.to_json`) is the complete format.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from pimflow.core.program import PimProgram
from pimflow.errors import TraceError, UsageError
from pimflow.host import native

_parse = native.get("pimflow.simulators.parse_trace")
_write = native.get("pimflow.simulators.write_trace")

_SHOWN_CHARACTERS = 60
# Text that is read and parsed at once: 4 MiB is some 20 ms of work.
_BLOCK_BYTES = 1 << 22

Progress = Callable[[float], None]


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A parsed ``.pim`` trace: the command stream of one channel.

    Attributes
    ----------
    words : ndarray, [commands], uint32
        Kind and address of each command; ``simulators/src/timing.h`` has the layout.
    """

    name: str
    words: np.ndarray = field(repr=False)

    def __len__(self) -> int:
        return len(self.words)

    @classmethod
    def read(cls, path_or_bytes: str | os.PathLike[str] | bytes) -> Trace:
        """Parse a file, or the text itself as bytes; raises what `blocks` does."""
        words = [block.copy() for block in blocks(path_or_bytes)]
        joined = np.concatenate(words) if words else np.empty(0, dtype=np.uint32)
        return cls(name=trace_name(path_or_bytes), words=joined)


def trace_name(path_or_bytes: str | os.PathLike[str] | bytes) -> str:
    """Name of a trace in messages."""
    return "<bytes>" if isinstance(path_or_bytes, bytes) else os.fspath(path_or_bytes)


def blocks(
    path_or_bytes: str | os.PathLike[str] | bytes, progress: Progress = lambda _: None
) -> Iterator[np.ndarray]:
    """The words of a trace (see `Trace`), in order, in blocks of some megabytes of text.

    A block is overwritten when the next one is requested.

    Parameters
    ----------
    progress : callable
        Called after each block with the share of the file that is done.

    Raises
    ------
    TraceError
        If the file cannot be read, or with ``file:line: problem: 'text'`` for the first malformed line. Blank
        and comment lines are malformed, and so are CRLF line ends and a last line without newline. An empty
        trace is not malformed.
    """
    name = trace_name(path_or_bytes)
    try:
        with io.BytesIO(path_or_bytes) if isinstance(path_or_bytes, bytes) else open(name, "rb") as file:
            yield from _parse_blocks(name, file, progress)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"{name}: cannot be read: {reason}") from error


def _parse_blocks(name: str, file: io.BufferedIOBase, progress: Progress) -> Iterator[np.ndarray]:
    size_bytes = max(1, file.seek(0, os.SEEK_END)) if file.seekable() else 0
    if size_bytes:
        file.seek(0)
    words = np.empty(0, dtype=np.uint32)
    line, rest, done_bytes = 1, b"", 0
    while read := file.read(_BLOCK_BYTES):
        done_bytes += len(read)
        end = read.rfind(b"\n") + 1
        if not end:
            rest += read
            if len(rest) >= 2 * _BLOCK_BYTES:
                _raise_on_malformed(name, line, rest, f"1:a line of more than {_BLOCK_BYTES} bytes")
            continue
        text, rest = rest + read[:end], read[end:]
        lines = text.count(b"\n")
        if lines > len(words):
            words = np.empty(lines, dtype=np.uint32)
        _raise_on_malformed(name, line, text, _parse(text, words))
        line += lines
        yield words[:lines]
        if size_bytes:
            progress(done_bytes / size_bytes)
    _raise_on_malformed(name, line, rest, _parse(rest, words))


def _raise_on_malformed(name: str, first_line: int, text: bytes, malformed: str) -> None:
    """Raise `TraceError` if the parser found `text`, whose first line is line `first_line`, malformed."""
    if not malformed:
        return
    index, _, problem = malformed.partition(":")
    shown = text.split(b"\n", int(index))[int(index) - 1].decode("utf-8", "replace")
    if len(shown) > _SHOWN_CHARACTERS:
        shown = shown[:_SHOWN_CHARACTERS] + "…"
    raise TraceError(f"{name}:{first_line + int(index) - 1}: {problem}: {shown!r}")


def expand_to_pim(program: PimProgram, channel: int) -> bytes:
    """The ``.pim`` text of one channel of `program`, one line a command (16 bytes each, mostly).

    It is lossy: it does not contain the buffer of a command, nor what a GWRITE gathers and its number of
    bursts; every GWRITE line has address 0.

    Raises
    ------
    UsageError
        If a gang, row or column does not fit into the address.
    """
    try:
        return bytes(_write(program.channel_words(channel)))
    except ValueError as error:
        raise UsageError(f"region '{program.region}', channel {channel}: {error}") from error
