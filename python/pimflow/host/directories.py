"""Directories of results, written whole or not at all, beside what else lies there.

A directory that is not there is written under a scratch name beside its place, and renamed. One that is there
stays the same directory, for shells that work in it and for files of others: the new files are written into
``.MARK.new.TOKEN`` in it, the old ones move to ``.MARK.old.TOKEN``, the new ones to their places, and the old
ones are removed. The mark, the file that names the others, goes first and comes last: what has it is whole.
What a killed move leaves, the next one puts back.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pimflow.errors import ArtifactError, PimflowError, is_utf8
from pimflow.host.files import FORCE, file_sha256, probe_directory

Seals = Mapping[str, str | int | None]

_SCRATCH = re.compile(r"\..*\.(new|old)\.[0-9a-f]{12}")  # see `_scratch_name`
_STEM_CHARACTERS = 40  # of the name of a directory, in such names
_YOUNG_SECONDS = 60.0  # a directory that was just made is not locked yet


@dataclass(frozen=True, kw_only=True)
class DirectoryKind:
    """What a directory of results is.

    Attributes
    ----------
    name : str
        Such as "a compiled network".
    mark : str
        The file that names the others.
    seals : callable
        The files that pimflow wrote to a directory, by their paths in it: a digest (SHA-256) or a size that
        they then have, or None for those that may be written anew, such as reports. Empty where the mark is
        missing or says nothing that can be read; never raises for what files hold.
    guests : tuple of str
        Suffixes of files of others that belong there, such as what a network is run on: they stay.
    """

    name: str
    mark: str
    seals: Callable[[Path], Seals]
    guests: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What lies in a directory, as sorted paths in it.

    Attributes
    ----------
    written : tuple of str
        Files that pimflow wrote, and that nobody changed.
    changed : tuple of str
        Files that pimflow wrote, and that are others now.
    foreign : tuple of str
        The rest but guests; a folder of others is one entry, and so is any link.
    """

    written: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()


def contents(directory: Path, kind: DirectoryKind) -> Contents:
    """Sort what lies in `directory`; raises `OSError` where it cannot be read.

    Names in the mark are compared with what is there, and never followed, so a mark cannot lead elsewhere.
    """
    mark = directory / kind.mark
    seals = kind.seals(directory) if mark.is_file() and not mark.is_symlink() else {}
    folders = {str(folder) for name in seals for folder in Path(name).parents}
    found: dict[str, list[str]] = {"written": [], "changed": [], "foreign": []}

    def sort(folder: Path, prefix: str) -> None:
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            name = prefix + entry.name
            if not prefix and _SCRATCH.fullmatch(name):
                continue
            if entry.is_dir(follow_symlinks=False) and name in folders:
                sort(folder / entry.name, f"{name}/")
            elif entry.is_dir(follow_symlinks=False) and not any(os.scandir(folder / entry.name)):
                continue  # it stays, and nothing in it can be lost: networks without PIM have such a one
            elif entry.is_file(follow_symlinks=False) and name in seals:
                same = _has_seal(folder / entry.name, seals[name])
                found["written" if same else "changed"].append(name)
            elif not entry.is_file(follow_symlinks=False) or not name.endswith(kind.guests or ("\0",)):
                found["foreign"].append(name)

    sort(directory, "")
    return Contents(**{key: tuple(names) for key, names in found.items()})


def check_target(target: str | os.PathLike[str], kind: DirectoryKind, *, force: bool = False) -> None:
    """Raise `ArtifactError` if `new_directory` could not write there: before the work, not after it.

    That is a file, or a directory that holds something else than files of `kind` that pimflow wrote, or a
    place where none can be made. What a killed run left half moved is put back first.

    Parameters
    ----------
    force : bool
        Whether other files may lie there, which stay, and files that were changed, which are replaced.
    """
    if not os.fspath(target):
        raise ArtifactError("'' names no directory; name one")
    path = Path(target)
    place = _place(path)
    if not is_utf8(str(place)):  # TVM and linkers take no such names
        raise ArtifactError(f"{path}: {place} is not UTF-8; rename it, or name another directory")
    try:
        if place.exists() and not place.is_dir():
            raise ArtifactError(f"{path} is a file; name a directory")
        probe_directory(place / kind.mark)
        if place.is_dir():
            _recover(place, kind)
            _require_ours(path, contents(place, kind), kind, force)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be written: {error.strerror or error}") from error


def _require_ours(path: Path, there: Contents, kind: DirectoryKind, force: bool) -> None:
    if force:
        if kind.mark in there.foreign:
            raise ArtifactError(f"{path / kind.mark} is none that pimflow wrote; move it away")
        return
    rest = len(there.foreign) + len(there.changed) - 1
    more = f" and {rest} more" if rest > 0 else ""
    if there.foreign:
        raise ArtifactError(
            f"{path} holds {there.foreign[0]}{more}, not only {kind.name}; name another directory, or "
            f"{FORCE} writes beside what is there"
        )
    if there.changed:
        raise ArtifactError(
            f"{path}: {there.changed[0]}{more} changed since pimflow wrote it; move it away, or {FORCE} "
            "replaces it"
        )


@contextlib.contextmanager
def new_directory(
    target: str | os.PathLike[str], kind: DirectoryKind, *, force: bool = False
) -> Iterator[Path]:
    """An empty directory; once the block has ended without error its files are those of `kind` at `target`.

    Raises
    ------
    ArtifactError
        See `check_target`; or if it cannot be written, or a file of others came where one had to go. Whatever
        is raised, `target` is as it was.
    """
    path = Path(target)
    check_target(path, kind, force=force)
    place = _place(path)
    token = secrets.token_hex(6)
    beside, inside = (place.parent, place.name), (place, kind.mark)
    folder, stem = inside if place.is_dir() else beside
    scratch = folder / _scratch_name(stem, "new", token)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        for parent, name in (beside, inside):
            _clear(parent, name)
        scratch.mkdir(0o700)
        with _locked(scratch):
            yield scratch
            scratch.chmod(0o755)
            if not _take_place(scratch, place):
                _fill(scratch, place, place / _scratch_name(kind.mark, "old", token), kind, force)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be written: {error.strerror or error}") from error
    except PimflowError as error:  # of who writes a file: people know the directory by its name
        error.args = (str(error).replace(str(scratch), str(path)), *error.args[1:])
        raise
    finally:
        if not (place / _scratch_name(kind.mark, "old", token)).exists():  # else the next run needs both
            _remove(scratch)


def replace_unsealed(
    target: str | os.PathLike[str], kind: DirectoryKind, name: str, data: bytes, *, mark: bytes
) -> None:
    """Replace a file of a directory that may be written anew, whole or not at all.

    Parameters
    ----------
    mark : bytes
        The contents of the directory's mark as the caller knows it.

    Raises
    ------
    ArtifactError
        If the mark is another: what is there now is somebody else's; or if the file cannot be written.
    """
    path = Path(target)
    place = _place(path)
    scratch = place / _scratch_name(kind.mark, "new", secrets.token_hex(6))
    try:
        scratch.mkdir(0o700)
        with _locked(scratch), _locked(place, wait=True):
            if (place / kind.mark).read_bytes() != mark:
                raise ArtifactError(f"{path}: was written anew meanwhile; its {name} is not replaced")
            (scratch / name).write_bytes(data)
            (scratch / name).replace(place / name)
    except OSError as error:
        raise ArtifactError(f"{path}: {name} cannot be written: {error.strerror or error}") from error
    finally:
        _remove(scratch)


@contextlib.contextmanager
def _locked(directory: Path, *, wait: bool = False) -> Iterator[bool]:
    """Hold a directory, for as long as this process lives; whether nobody else holds it."""
    number = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError:  # held, or a file system without locks
            yield False
        else:
            yield True
    finally:
        os.close(number)


def _clear(folder: Path, stem: str) -> None:
    """Remove the scratch directories for `stem` in `folder` of runs that were killed while they wrote."""
    start = _scratch_name(stem, "new", "")
    with contextlib.suppress(OSError):  # a folder that is not there, or not to be listed
        for entry in folder.iterdir():
            if not entry.name.startswith(start) or not _SCRATCH.fullmatch(entry.name):
                continue
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


def _scratch_name(stem: str, role: str, token: str) -> str:
    """Known before the directory exists, so it can always be removed."""
    return f".{stem[:_STEM_CHARACTERS]}.{role}.{token}"


def _remove(directory: Path) -> None:
    """Remove a directory, if need be in spite of an interrupt."""
    try:
        shutil.rmtree(directory, ignore_errors=True)
    except KeyboardInterrupt:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _take_place(scratch: Path, place: Path) -> bool:
    """Rename `scratch` to `place` where nothing is; whether that could be."""
    if place.is_dir():
        return False
    try:
        scratch.rename(place)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False  # another run has made it meanwhile
    return True


def _fill(scratch: Path, place: Path, old: Path, kind: DirectoryKind, force: bool) -> None:
    """Move the files of `scratch` into `place`, and those of ours there away: all, or, interrupted, none."""
    with _locked(place, wait=True):
        there = contents(place, kind)
        ours = _in_order([*there.written, *(there.changed if force else ())], kind.mark)
        new = _in_order(_files(scratch), kind.mark)[::-1]
        for name in new:
            obstacle = _obstacle(place, name, ours)
            if obstacle:
                raise ArtifactError(f"{place / obstacle} is none that pimflow wrote; move it away")
        try:
            old.mkdir(0o700)
            for name in ours:
                _move(place, old, name)
            for name in new:
                _move(scratch, place, name)
        except BaseException:
            _put_back(place, scratch, old, new)
            raise
        finally:
            if not (scratch / new[-1]).exists():  # the last: all is in place
                _remove(old)
        _remove_parents(place, ours)


def _put_back(place: Path, scratch: Path, old: Path, new: Sequence[str]) -> None:
    """Undo a move that was cut short: files of `scratch`, `new`, leave `place`, those in `old` return.

    Nothing is done if it was through: the mark is the last of `new`.
    """
    if not (scratch / new[-1]).exists():
        return
    came = [name for name in new if not (scratch / name).exists() and os.path.lexists(place / name)]
    for name in came:
        _move(place, scratch, name)
    _remove_parents(place, came)
    _return(old, place, new[-1])


def _return(old: Path, place: Path, mark: str) -> None:
    """Move the files of `old` back to where nothing came meanwhile, the mark last."""
    for name in _in_order(_files(old), mark)[::-1]:
        if not os.path.lexists(place / name):
            _move(old, place, name)
    for folder, _, _ in os.walk(old, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def _recover(place: Path, kind: DirectoryKind) -> None:
    """Put back what killed runs had moved away, and remove what they had replaced."""
    start = _scratch_name(kind.mark, "old", "")
    for old in sorted(place.iterdir()):
        if not old.name.startswith(start) or not _SCRATCH.fullmatch(old.name) or old.is_symlink():
            continue
        token = old.name.rpartition(".")[2]
        names = (
            place / _scratch_name(kind.mark, "new", token),
            place.parent / _scratch_name(place.name, "new", token),
        )
        scratch = next((name for name in names if name.is_dir()), None)
        with _locked(scratch or old) as nobody_holds_it, _locked(place, wait=True):
            if not nobody_holds_it or not old.is_dir():
                continue
            if scratch is not None and (scratch / kind.mark).exists():
                new = [name for name, seal in kind.seals(scratch).items() if _has_seal(place / name, seal)]
                _put_back(place, scratch, old, [*new, kind.mark])
            if (place / kind.mark).exists():  # what is there is whole
                for name in contents(old, kind).written:
                    (old / name).unlink()
            _return(old, place, kind.mark)
            if scratch is not None and not old.exists():
                _remove(scratch)


def _in_order(names: Sequence[str], mark: str) -> list[str]:
    """`names`, the mark first."""
    return sorted(names, key=lambda name: (name != mark, name))


def _files(directory: Path) -> list[str]:
    """What is no folder in a directory, links not followed, as paths in it."""
    return [
        os.path.relpath(os.path.join(folder, name), directory)
        for folder, folders, names in os.walk(directory)
        for name in (*names, *(each for each in folders if os.path.islink(os.path.join(folder, each))))
    ]


def _move(source: Path, target: Path, name: str) -> None:
    """Move a file from one directory to the same path in another."""
    (target / name).parent.mkdir(parents=True, exist_ok=True)
    (source / name).rename(target / name)


def _obstacle(place: Path, name: str, ours: Sequence[str]) -> str:
    """What lies where file `name` has to go, and is no file of `ours`; empty if nothing does."""
    for folder in reversed(Path(name).parents[:-1]):
        path = place / folder
        if os.path.lexists(path) and (path.is_symlink() or not path.is_dir()):
            return "" if str(folder) in ours else str(folder)
    return name if os.path.lexists(place / name) and name not in ours else ""


def _remove_parents(directory: Path, names: Sequence[str]) -> None:
    """Remove the folders in a directory that had files `names`, where they are empty now."""
    folders = {str(folder) for name in names for folder in Path(name).parents} - {"."}
    for folder in sorted(folders, key=len, reverse=True):
        with contextlib.suppress(OSError):
            (directory / folder).rmdir()


def _has_seal(path: Path, seal: str | int | None) -> bool:
    """Whether a file, and no link, is what was written."""
    if path.is_symlink() or not path.is_file():
        return False
    if isinstance(seal, int):
        return path.stat().st_size == seal
    return seal is None or file_sha256(path) == seal
