"""Standard streams of a command: they may be closed, full, without a reader, or of a narrow encoding."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import TextIO

from pimflow.errors import ArtifactError, escape_controls


def reopen() -> None:
    """Open closed standard streams on the null device, so that no opened file gets their number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115


@contextlib.contextmanager
def buffer_results() -> Iterator[None]:
    """Buffer what a block prints to stdout, and write it when the block ends without an error.

    Text before a call of `deliver` is written, even if the block fails later.

    Raises
    ------
    ArtifactError
        If stdout cannot be written. A closed pipe is no error.
    """
    text = _ResultBuffer(sys.stdout)
    try:
        with contextlib.redirect_stdout(text):
            yield
    except SystemExit:  # --help
        text.deliver()
        raise
    text.deliver()


def deliver() -> None:
    """Write what the command has printed so far; raises as `buffer_results`."""
    if isinstance(sys.stdout, _ResultBuffer):
        sys.stdout.deliver()


def wrap_results() -> None:
    """From now on, wrap lines of results that are wider than the terminal, if stdout is one."""
    if isinstance(sys.stdout, _ResultBuffer):
        sys.stdout.wraps = sys.stdout.stream.isatty()


def wrapped(text: str, width: int) -> str:
    """Wrap the lines of `text` at blanks; what follows stands below the second column of its line."""
    return "\n".join(part for line in text.split("\n") for part in _line_parts(line, width))


def _line_parts(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    label = re.match(r" *\S+ {2,}", line)
    indent = " " * (label.end() if label and label.end() <= width // 2 else 2)
    parts = textwrap.wrap(
        line,
        width,
        subsequent_indent=indent,
        replace_whitespace=False,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return parts or [line]


class _ResultBuffer(io.StringIO):
    """A buffer of text for `stream`, until it is delivered."""

    wraps = False

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.stream = stream

    def deliver(self) -> None:
        """Write the buffer to the stream, and empty it."""
        text = self.getvalue()
        if self.wraps:
            text = wrapped(text, shutil.get_terminal_size().columns)
        with contextlib.redirect_stdout(self.stream):
            _write(text)
        self.seek(0)
        self.truncate()


def _write(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    text = escape_controls(text)  # it may contain names from files of others
    try:
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output(sys.stdout)
    except OSError as error:
        _discard_output(sys.stdout)
        raise ArtifactError(f"standard output cannot be written: {error.strerror or error}") from error


def _discard_output(stream: TextIO) -> None:
    """Redirect `stream` to the null device, since Python reports unwritten text at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class LossyStream(io.TextIOBase):
    """A stream for text that may be lost: errors of writing are ignored."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            _discard_output(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            _discard_output(self._stream)

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # the base class lets it be set
        return self._stream.encoding
