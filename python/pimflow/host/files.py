"""Atomic writing of files, and checks of their targets."""

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

FORCE = "--force"  # the option to replace a file that pimflow did not write
_HEAD_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class FileKind:
    """A kind of files of results, recognised by their beginning.

    Attributes
    ----------
    name : str
        Such as "a page of pimflow".
    head : bytes
        Regular expression for the beginning of such files, which few other files match.
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
ATTENTION_TABLE = FileKind(
    name="a table of attention in PIM", head=rb"prefill_chunk,kv_prefill,n_decode,kv_decode,time_us,source\n"
)
SERVING = FileKind(name="a table of attention in PIM", head=rb'\{\n "attn_model": \{')
STEP_TABLE = FileKind(name="a table of steps of pimflow", head=rb'\{"version": "pimflow-step-table/')
PICTURES = {
    ".html": PAGE,
    ".png": FileKind(name="a picture", head=rb"\x89PNG\r\n"),
    ".svg": FileKind(name="a drawing", head=rb'<svg [^>]*class="marks"'),
}


def replace_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` to a scratch file next to `path`, and rename it; write directly to a pipe or device.

    Raises
    ------
    OutputError
        If the file cannot be written; the old file stays.
    """
    path, file = Path(path), _resolve(path)
    scratch = _scratch_path(file)
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
    """Raise `OutputError` if `replace_file` cannot or should not write there; called before the work.

    Parameters
    ----------
    kind : FileKind
        Kind of the new file; only a file of this kind, or an empty one, is replaced.
    """
    path, file = Path(path), _resolve(path)
    try:
        if _is_special(path):
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        elif path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        else:
            scratch = _scratch_path(file)
            scratch.touch()
            scratch.unlink()
            if not force and file.exists():
                with file.open("rb") as stream:
                    head = stream.read(_HEAD_BYTES)
                if head and not re.match(kind.head, head):
                    raise OutputError(f"{path} exists and is not {kind.name}; {FORCE} replaces it")
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from error


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def probe_directory(place: Path) -> None:
    """Raise `OSError` if directory `place`, or a scratch one next to it, cannot be created."""
    ancestor = next(folder for folder in place.parents if folder.exists())
    if not ancestor.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{ancestor} is a file")
    longest = max(len(os.fsencode(part)) for part in place.parts)
    if longest > os.pathconf(ancestor, "PC_NAME_MAX"):
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    os.rmdir(tempfile.mkdtemp(prefix=".pimflow.", dir=ancestor))


def _resolve(path: str | os.PathLike[str]) -> Path:
    """The file of `path` with links resolved, so that a link itself is not replaced."""
    if not Path(path).name:
        raise OutputError(f"{path}: is a directory; name a file")
    file = Path(os.path.realpath(path))
    if os.path.islink(file):
        raise OutputError(f"{path}: is a link that leads to itself; name a file")
    return file


def _is_special(path: Path) -> bool:
    """Whether it is a pipe or device."""
    return path.exists() and not (path.is_file() or path.is_dir())


def _scratch_path(file: Path) -> Path:
    return file.with_name(f".{file.name}.{os.getpid()}")
