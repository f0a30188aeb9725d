"""The ``.pim`` traces of the PIMFlow authors' Ramulator fork.

A line is ``READRES`` or ``0x%08x COMMAND`` with a 29-bit address: bank group [2], bank [2], row [14],
column [5], offset [6], from the top. The form is lossy: COMP and READRES carry no buffer, GWRITE
neither buffer nor gather. ``.pimprog`` (`PimProgram.to_json`) is the form that keeps everything.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pimflow import native
from pimflow.core.program import PimProgram
from pimflow.errors import TraceError, UsageError

_parse = native.get("pimflow.simulators.parse_trace")
_write = native.get("pimflow.simulators.write_trace")

_SHOWN_CHARACTERS = 60


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A parsed ``.pim`` trace: the command stream of one channel.

    Attributes
    ----------
    name : str
        Where it came from, for messages.
    words : ndarray, [commands], uint32
        Kind and address of each command; ``simulators/src/timing.h`` has the layout.
    """

    name: str
    words: np.ndarray = field(repr=False)

    def __len__(self) -> int:
        return len(self.words)

    @classmethod
    def read(cls, path_or_bytes: str | os.PathLike | bytes) -> Trace:
        """Parse a file, or the text itself given as bytes.

        Raises
        ------
        TraceError
            Unreadable file, or ``file:line: problem: 'text'`` of the first malformed line. Blank and
            comment lines are malformed, and so is a last line without newline. An empty trace is not.
        """
        if isinstance(path_or_bytes, bytes):
            name, text = "<bytes>", path_or_bytes
        else:
            name = os.fspath(path_or_bytes)
            try:
                text = Path(name).read_bytes()
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or error
                raise TraceError(f"{name}: cannot be read: {reason}") from error
        words = np.empty(text.count(b"\n"), dtype=np.uint32)
        malformed = _parse(text, words)
        if malformed:
            line, _, problem = malformed.partition(":")
            shown = text.split(b"\n", int(line))[int(line) - 1].decode("utf-8", "replace")
            if len(shown) > _SHOWN_CHARACTERS:
                shown = shown[:_SHOWN_CHARACTERS] + "…"
            raise TraceError(f"{name}:{line}: {problem}: {shown!r}")
        return cls(name=name, words=words)


def expand_to_pim(program: PimProgram, channel: int) -> bytes:
    """The ``.pim`` text of one channel of `program`, one line a command (16 bytes each, mostly).

    Lossy: which buffer a command uses, what a GWRITE gathers and how many bursts it takes are not in
    the text; every GWRITE line has address 0.

    Raises
    ------
    UsageError
        A gang, row or column that has no place in the address.
    """
    try:
        return bytes(_write(program.encoded(channel)))
    except ValueError as error:
        raise UsageError(f"region '{program.region}', channel {channel}: {error}") from error
