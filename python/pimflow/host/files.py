"""Files, written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pimflow.errors import OutputError

FORCE = "--force"  # the option that lets a file be replaced that pimflow did not write
_HEAD_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class FileKind:
    """What a file of results is, told by how it begins.

    Attributes
    ----------
    name : str
        Such as "a page of pimflow".
    head : bytes
        A regular expression that matches the beginning of such files, and of few others.
    """

    name: str
    head: bytes


ARRAY = FileKind(name="a .npy file", head=rb"\x93NUMPY")
CSV = FileKind(name="a table of planned buffers", head=rb"id,lower,upper,size,(?:[a-z]+,)*offset\n")
MODEL = FileKind(name="a model of pimflow", head=rb"(?s).{0,16}\x12\x07pimflow")
PAGE = FileKind(
    name="a page of pimflow", head=rb'(?s)<!doctype html>\n<html lang="en">.*href="data:,">\n<title>'
)
PERFETTO = FileKind(name="a timeline of pimflow", head=rb'\{"displayTimeUnit": "ns", "otherData": ')
PROFILE = FileKind(name="a profile of pimflow", head=rb'\{"version": "pimflow-profile/')
SERVING = FileKind(name="a table of attention in PIM", head=rb'\{\n "attn_model": \{')
PICTURES = {
    ".html": PAGE,
    ".png": FileKind(name="a picture", head=rb"\x89PNG\r\n"),
    ".svg": FileKind(name="a drawing", head=rb'<svg [^>]*class="marks"'),
}


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


def check_file(path: str | os.PathLike[str], kind: FileKind, *, force: bool = False) -> None:
    """Raise `OutputError` if `replace_file` could not write there, or should not: before the work.

    Parameters
    ----------
    kind : FileKind
        What will be written; only such a file, or an empty one, is replaced.
    force : bool
        Whether any file is.
    """
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
            if not force and file.exists():
                with file.open("rb") as stream:
                    head = stream.read(_HEAD_BYTES)
                if head and not re.match(kind.head, head):
                    raise OutputError(f"{path} is there, and not {kind.name}; {FORCE} replaces it")
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from error


def file_sha256(path: Path) -> str:
    """The digest of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


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
