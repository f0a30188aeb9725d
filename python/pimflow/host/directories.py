"""Atomic writing of directories of results; files of others in them stay.

A new directory is written under a scratch name next to its place, and renamed. An existing one stays the same
directory, for shells that work in it and for files of others: the new files are written into
``.MARK.new.TOKEN`` in it, the old ones move to ``.MARK.old.TOKEN``, the new ones to their places, and the old
ones are removed. The mark, the file that lists the others, leaves first and arrives last: a directory that
has it is complete. After a kill, the next run undoes the move.
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
_MIN_STALE_SECONDS = 60.0  # younger ones may not be locked yet


@dataclass(frozen=True, kw_only=True)
class DirectoryKind:
    """A kind of directories of results.

    Attributes
    ----------
    name : str
        Such as "a compiled network".
    mark : str
        The file that lists the others.
    seals : callable
        By path in the directory, for each file that pimflow wrote: its digest (SHA-256) or size, or None for
        a file that may be rewritten, such as a report. Empty if the mark is missing or unreadable; never
        raises because of the contents of files.
    guests : tuple of str
        Suffixes of files of others that may be there, such as inputs of a network: they stay.
    """

    name: str
    mark: str
    seals: Callable[[Path], Seals]
    guests: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Contents of a directory, as sorted paths in it.

    Attributes
    ----------
    foreign : tuple of str
        Everything else but guests; a folder of others is one entry, and so is a link.
    """

    written: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()


def contents(directory: Path, kind: DirectoryKind) -> Contents:
    """Classify the files in `directory`; raises `OSError` if it cannot be read.

    Names in the mark are only compared with existing names, never opened, so a mark cannot lead elsewhere.
    """
    mark = directory / kind.mark
    seals = kind.seals(directory) if mark.is_file() and not mark.is_symlink() else {}
    folders = {str(folder) for name in seals for folder in Path(name).parents}
    names_by_state: dict[str, list[str]] = {"written": [], "changed": [], "foreign": []}

    def sort_entries(folder: Path, prefix: str) -> None:
        """Classify the entries of a folder, whose path in the directory is `prefix`."""
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            name = prefix + entry.name
            if not prefix and _SCRATCH.fullmatch(name):
                continue
            if entry.is_dir(follow_symlinks=False) and name in folders:
                sort_entries(folder / entry.name, f"{name}/")
            elif entry.is_dir(follow_symlinks=False) and not any(os.scandir(folder / entry.name)):
                continue  # an empty folder stays; networks without PIM have one
            elif entry.is_file(follow_symlinks=False) and name in seals:
                same = _has_seal(folder / entry.name, seals[name])
                names_by_state["written" if same else "changed"].append(name)
            elif not entry.is_file(follow_symlinks=False) or not name.endswith(kind.guests or ("\0",)):
                names_by_state["foreign"].append(name)

    sort_entries(directory, "")
    return Contents(**{key: tuple(names) for key, names in names_by_state.items()})


def check_target(target: str | os.PathLike[str], kind: DirectoryKind, *, force: bool = False) -> None:
    """Raise `ArtifactError` if `new_directory` cannot write there; to be called before the work.

    `target` must not be a file, nor a directory with other files than those of `kind` that pimflow wrote, and
    it must be possible to create it. An interrupted move of a killed run is undone first.

    Parameters
    ----------
    force : bool
        Whether to accept other files, which stay, and changed files, which are replaced.
    """
    if not os.fspath(target):
        raise ArtifactError("'' names no directory; name one")
    path = Path(target)
    place = _resolve(path)
    if not is_utf8(str(place)):  # TVM and linkers need UTF-8
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


def _require_ours(path: Path, existing: Contents, kind: DirectoryKind, force: bool) -> None:
    if force:
        if kind.mark in existing.foreign:
            raise ArtifactError(f"{path / kind.mark} is none that pimflow wrote; move it away")
        return
    rest = len(existing.foreign) + len(existing.changed) - 1
    others = f" and {rest} more" if rest > 0 else ""
    if existing.foreign:
        raise ArtifactError(
            f"{path} holds {existing.foreign[0]}{others}, not only {kind.name}; name another directory, or "
            f"{FORCE} writes nevertheless and keeps these files"
        )
    if existing.changed:
        raise ArtifactError(
            f"{path}: {existing.changed[0]}{others} changed since pimflow wrote it; move it away, or {FORCE} "
            "replaces it"
        )


@contextlib.contextmanager
def new_directory(
    target: str | os.PathLike[str], kind: DirectoryKind, *, force: bool = False
) -> Iterator[Path]:
    """An empty directory; if the block ends without error, its files become those of `target`.

    Raises
    ------
    ArtifactError
        See `check_target`; also if it cannot be written, or if a file of others appeared in the place of a
        new file. After any error, `target` is unchanged.
    """
    path = Path(target)
    check_target(path, kind, force=force)
    place = _resolve(path)
    token = secrets.token_hex(6)
    next_to_place, inside_place = (place.parent, place.name), (place, kind.mark)
    folder, stem = inside_place if place.is_dir() else next_to_place
    scratch = folder / _scratch_name(stem, "new", token)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        for parent, name in (next_to_place, inside_place):
            _remove_stale(parent, name)
        scratch.mkdir(0o700)
        with _lock(scratch):
            yield scratch
            scratch.chmod(0o755)
            if not _rename_into_place(scratch, place):
                _replace_files(scratch, place, place / _scratch_name(kind.mark, "old", token), kind, force)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be written: {error.strerror or error}") from error
    except PimflowError as error:  # of a writer in the block: name the target, not the scratch
        error.args = (str(error).replace(str(scratch), str(path)), *error.args[1:])
        raise
    finally:
        if not (place / _scratch_name(kind.mark, "old", token)).exists():  # else the next run needs both
            _remove(scratch)


def replace_unsealed(
    target: str | os.PathLike[str], kind: DirectoryKind, name: str, data: bytes, *, mark: bytes
) -> None:
    """Atomically replace a file of a directory that may be rewritten (its seal is None).

    Parameters
    ----------
    mark : bytes
        The contents of the directory's mark as the caller knows it.

    Raises
    ------
    ArtifactError
        If the mark differs, because another run has replaced the directory; or if the file cannot be written.
    """
    path = Path(target)
    place = _resolve(path)
    scratch = place / _scratch_name(kind.mark, "new", secrets.token_hex(6))
    try:
        scratch.mkdir(0o700)
        with _lock(scratch), _lock(place, wait=True):
            if (place / kind.mark).read_bytes() != mark:
                raise ArtifactError(f"{path}: was written anew meanwhile; its {name} is not replaced")
            (scratch / name).write_bytes(data)
            (scratch / name).replace(place / name)
    except OSError as error:
        raise ArtifactError(f"{path}: {name} cannot be written: {error.strerror or error}") from error
    finally:
        _remove(scratch)


@contextlib.contextmanager
def _lock(directory: Path, *, wait: bool = False) -> Iterator[bool]:
    """Lock a directory in the block, at most while this process lives; gives whether that worked."""
    number = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError:  # locked by others, or a file system without locks
            yield False
        else:
            yield True
    finally:
        os.close(number)


def _remove_stale(folder: Path, stem: str) -> None:
    """Remove scratch directories for `stem` in `folder` that killed runs left."""
    start = _scratch_name(stem, "new", "")
    with contextlib.suppress(OSError):  # the folder is missing or cannot be listed
        for entry in folder.iterdir():
            if not entry.name.startswith(start) or not _SCRATCH.fullmatch(entry.name):
                continue
            with contextlib.suppress(OSError):  # another user's, or gone
                if time.time() - entry.stat().st_ctime > _MIN_STALE_SECONDS:
                    with _lock(entry) as is_unlocked:
                        if is_unlocked:
                            _remove(entry)


def _resolve(path: Path) -> Path:
    """The directory of `path` with links resolved, so that a link itself is not replaced."""
    place = Path(os.path.realpath(path))
    if os.path.islink(place):
        raise ArtifactError(f"{path}: is a link that leads to itself; name a directory")
    return place


def _scratch_name(stem: str, role: str, token: str) -> str:
    """Name of a scratch directory; known before it exists, so that it can always be removed."""
    return f".{stem[:_STEM_CHARACTERS]}.{role}.{token}"


def _remove(directory: Path) -> None:
    """Remove a directory; an interrupt is raised only after that."""
    try:
        shutil.rmtree(directory, ignore_errors=True)
    except KeyboardInterrupt:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _rename_into_place(scratch: Path, place: Path) -> bool:
    """Rename `scratch` to `place` if that does not exist; returns whether it was renamed."""
    if place.is_dir():
        return False
    try:
        scratch.rename(place)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False  # another run has created it meanwhile
    return True


def _replace_files(scratch: Path, place: Path, old: Path, kind: DirectoryKind, force: bool) -> None:
    """Replace our files in `place` by those of `scratch`: all of them or, after an interrupt, none."""
    with _lock(place, wait=True):
        existing = contents(place, kind)
        ours = _sort_names([*existing.written, *(existing.changed if force else ())], kind.mark)
        new = _sort_names(_list_files(scratch), kind.mark)[::-1]
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
            _undo_move(place, scratch, old, new)
            raise
        finally:
            if not (scratch / new[-1]).exists():  # the mark has moved, so the move is complete
                _remove(old)
        _remove_empty_folders(place, ours)


def _undo_move(place: Path, scratch: Path, old: Path, new: Sequence[str]) -> None:
    """Undo an interrupted move: files `new` return from `place` to `scratch`, those in `old` to `place`.

    Does nothing if the move was complete: the last of `new` is the mark.
    """
    if not (scratch / new[-1]).exists():
        return
    moved = [name for name in new if not (scratch / name).exists() and os.path.lexists(place / name)]
    for name in moved:
        _move(place, scratch, name)
    _remove_empty_folders(place, moved)
    _restore_files(old, place, new[-1])


def _restore_files(old: Path, place: Path, mark: str) -> None:
    """Move the files of `old` back, the mark last, except to places that are in use now."""
    for name in _sort_names(_list_files(old), mark)[::-1]:
        if not os.path.lexists(place / name):
            _move(old, place, name)
    for folder, _, _ in os.walk(old, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def _recover(place: Path, kind: DirectoryKind) -> None:
    """Undo interrupted moves of killed runs, and remove files that complete moves had replaced."""
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
        with _lock(scratch or old) as is_unlocked, _lock(place, wait=True):
            if not is_unlocked or not old.is_dir():
                continue
            if scratch is not None and (scratch / kind.mark).exists():
                new = [name for name, seal in kind.seals(scratch).items() if _has_seal(place / name, seal)]
                _undo_move(place, scratch, old, [*new, kind.mark])
            if (place / kind.mark).exists():  # the directory is complete
                for name in contents(old, kind).written:
                    (old / name).unlink()
            _restore_files(old, place, kind.mark)
            if scratch is not None and not old.exists():
                _remove(scratch)


def _sort_names(names: Sequence[str], mark: str) -> list[str]:
    """`names` in sorted order, but the mark first."""
    return sorted(names, key=lambda name: (name != mark, name))


def _list_files(directory: Path) -> list[str]:
    """All files and links at any depth of a directory, as paths in it; links are not followed."""
    return [
        os.path.relpath(os.path.join(folder, name), directory)
        for folder, folders, names in os.walk(directory)
        for name in (
            *names,
            *(subfolder for subfolder in folders if os.path.islink(os.path.join(folder, subfolder))),
        )
    ]


def _move(source: Path, target: Path, name: str) -> None:
    """Move a file from one directory to the same path in another."""
    (target / name).parent.mkdir(parents=True, exist_ok=True)
    (source / name).rename(target / name)


def _obstacle(place: Path, name: str, ours: Sequence[str]) -> str:
    """The path in `place` that prevents writing file `name` and is not one of `ours`; empty if none."""
    for folder in reversed(Path(name).parents[:-1]):
        path = place / folder
        if os.path.lexists(path) and (path.is_symlink() or not path.is_dir()):
            return "" if str(folder) in ours else str(folder)
    return name if os.path.lexists(place / name) and name not in ours else ""


def _remove_empty_folders(directory: Path, names: Sequence[str]) -> None:
    """Remove those folders of files `names` in a directory that are empty now."""
    folders = {str(folder) for name in names for folder in Path(name).parents} - {"."}
    for folder in sorted(folders, key=len, reverse=True):
        with contextlib.suppress(OSError):
            (directory / folder).rmdir()


def _has_seal(path: Path, seal: str | int | None) -> bool:
    """Whether `path` is a file, no link, and has the seal."""
    if path.is_symlink() or not path.is_file():
        return False
    if isinstance(seal, int):
        return path.stat().st_size == seal
    return seal is None or file_sha256(path) == seal
