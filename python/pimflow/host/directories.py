"""Directories, written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from pimflow.errors import ArtifactError
from pimflow.host.files import probe_directory

_SCRATCH = re.compile(r"\..*\.(new|old)\.[0-9a-f]{12}")  # see `_sibling`
_STEM_CHARACTERS = 40  # of the name of a directory, in such names
_YOUNG_SECONDS = 60.0  # a directory that was just made is not locked yet


@contextlib.contextmanager
def new_directory(target: str | os.PathLike[str], mark: str, kind: str = "") -> Iterator[Path]:
    """An empty directory that takes the place of `target` once the block has ended without error.

    Parameters
    ----------
    mark : str
        The file that tells what may be replaced: a directory of the same kind.
    kind : str
        What such a directory is called; "what has a MARK" by default.

    Raises
    ------
    ArtifactError
        See `check_target`; or if it cannot be written.
    """
    path = Path(target)
    check_target(path, mark, kind)
    place = _place(path)
    stays = _stays(place)
    scratch = _sibling(place / mark if stays else place, "new")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _clear(scratch)
        scratch.mkdir(0o700)
        with _locked(scratch):
            yield scratch
            scratch.chmod(0o755)
            if stays:
                _fill(scratch, place, mark)
            else:
                _take_place(scratch, place)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        _remove(scratch)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Hold a directory, for as long as this process lives; whether nobody else holds it."""
    number = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # held, or a file system without locks
            yield False
        else:
            yield True
    finally:
        os.close(number)


def _clear(scratch: Path) -> None:
    """Remove the scratch directories beside `scratch` of runs for the same place that were killed."""
    stem = scratch.name.rpartition(".")[0]
    for entry in scratch.parent.iterdir():
        if entry.name.startswith(f"{stem}.") and _SCRATCH.fullmatch(entry.name):
            with contextlib.suppress(OSError):  # somebody else's, or gone
                if time.time() - entry.stat().st_ctime > _YOUNG_SECONDS:
                    with _locked(entry) as nobody_holds_it:
                        if nobody_holds_it:
                            _remove(entry)


def _place(path: Path) -> Path:
    """The directory that `path` names, links followed: a link stays one."""
    place = Path(os.path.realpath(path))
    if os.path.islink(place):
        raise ArtifactError(f"{path}: is a link that leads to itself; name a directory")
    return place


def _stays(place: Path) -> bool:
    """Whether a directory cannot give its place to another: a shell works in it, or it is a mount point."""
    if not place.is_dir():
        return False
    with contextlib.suppress(FileNotFoundError):  # a shell may work in what is not there any more
        return os.path.ismount(place) or place.samefile(Path.cwd())
    return False


def _sibling(path: Path, role: str) -> Path:
    """An unused name beside `path`. It is known before the file exists, so the file can always be removed."""
    return path.parent / f".{path.name[:_STEM_CHARACTERS]}.{role}.{secrets.token_hex(6)}"


def _entries(directory: Path) -> list[Path]:
    """The files of a directory without those that a killed or running process made for itself."""
    return [entry for entry in directory.iterdir() if not _SCRATCH.fullmatch(entry.name)]


def _remove(directory: Path) -> None:
    """Remove a directory, if need be in spite of an interrupt."""
    try:
        shutil.rmtree(directory, ignore_errors=True)
    except KeyboardInterrupt:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _take_place(scratch: Path, path: Path) -> None:
    """Move `scratch` to `path`, whatever another run puts there meanwhile."""
    for _ in range(100):
        old = _sibling(path, "old")
        try:
            if path.exists():
                old.mkdir(0o700)
                with contextlib.suppress(FileNotFoundError):  # another run moved it away
                    path.rename(old / path.name)
            scratch.rename(path)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        finally:
            if not path.exists() and (old / path.name).exists():
                (old / path.name).rename(path)  # interrupted: nothing is lost
            _remove(old)
    raise OSError(errno.EBUSY, "other runs keep writing there")


def _fill(scratch: Path, place: Path, mark: str) -> None:
    """Move what `scratch` holds into `place`, and what was there away; all of it or, interrupted, nothing.

    The mark goes first and comes last: what has it is whole.
    """
    old = _sibling(place / mark, "old")
    moves = [(entry, old / entry.name) for entry in sorted(_entries(place), key=lambda e: e.name != mark)]
    moves += [
        (entry, place / entry.name) for entry in sorted(scratch.iterdir(), key=lambda e: e.name == mark)
    ]
    try:
        old.mkdir(0o700)
        for source, target in moves:
            source.rename(target)
    except BaseException:
        for source, target in reversed(moves):
            if target.exists() and not source.exists():
                target.rename(source)
        raise
    finally:
        _remove(old)


def check_target(target: str | os.PathLike[str], mark: str, kind: str = "") -> None:
    """Raise `ArtifactError` if `new_directory` could not write there: before the work, not after it.

    That is a file, or a directory that holds something, but no `mark`, or a place where none can be made.
    """
    if not os.fspath(target):
        raise ArtifactError("'' names no directory; name one")
    path = Path(target)
    place = _place(path)
    try:
        if place.exists() and not place.is_dir():
            raise ArtifactError(f"{path} is a file; name a directory")
        if place.is_dir() and _entries(place) and not (place / mark).exists():
            kind = kind or f"what has a {mark}"
            raise ArtifactError(f"{path} holds something else than {kind}; name another directory")
        probe_directory(place / mark if _stays(place) else place)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be written: {error.strerror or error}") from error
