"""Files, written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from pathlib import Path

from pimflow.errors import OutputError


def replace_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` to a scratch file beside `path`, and rename it; a pipe or device is written to.

    Raises
    ------
    OutputError
        The file cannot be written; what was there before stays.
    """
    path, file = Path(path), _place(path)
    scratch = _scratch(file)
    try:
        if _is_special(path):
            path.write_bytes(data)
        else:
            scratch.write_bytes(data)
            scratch.replace(file)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink()


def check_file(path: str | os.PathLike[str]) -> None:
    """Raise `OutputError` if `replace_file` could not write there: before the work, not after it."""
    path, file = Path(path), _place(path)
    try:
        if _is_special(path):
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        elif path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        else:
            scratch = _scratch(file)
            scratch.touch()
            scratch.unlink()
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from error


def probe_directory(place: Path) -> None:
    """Raise `OSError` if no directory `place` can be made, or none beside it; leaves nothing behind."""
    above = next(folder for folder in place.parents if folder.exists())
    if not above.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{above} is a file")
    longest = max(len(os.fsencode(part)) for part in place.parts)
    if longest > os.pathconf(above, "PC_NAME_MAX"):
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    os.rmdir(tempfile.mkdtemp(prefix=".pimflow.", dir=above))


def _place(path: str | os.PathLike[str]) -> Path:
    """The file that `path` names, links followed: a link stays one."""
    if not Path(path).name:
        raise OutputError(f"{path}: is a directory; name a file")
    file = Path(os.path.realpath(path))
    if os.path.islink(file):
        raise OutputError(f"{path}: is a link that leads to itself; name a file")
    return file


def _is_special(path: Path) -> bool:
    """Whether it is a pipe or device."""
    return path.exists() and not (path.is_file() or path.is_dir())


def _scratch(file: Path) -> Path:
    return file.with_name(f".{file.name}.{os.getpid()}")
