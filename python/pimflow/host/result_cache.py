"""A cache on disk for results of profilers.

It is one SQLite file, which survives a kill, and which several processes may use at the same time. A cache
that cannot be read or written is not used, and `ResultCache.flaw` says why; only time is lost. Every value
has a seal, a digest of its key and itself. It protects against damage, not against forgery: whoever can write
the file can write seals. A value that is damaged, or not a valid result, is computed again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pimflow.errors import ArtifactError, PimflowError
from pimflow.host import native

WAIT_SECONDS = 2.0  # for a lock of another process; writing takes milliseconds
KEYS_AT_ONCE = 500  # every SQLite accepts 999 variables
SEAL_DIGITS = 16  # against damage, not against forgery
# Errors of readers for values that are not valid results.
_DECODE_ERRORS = (
    *(TypeError, ValueError, LookupError, AttributeError),
    *(ArithmeticError, RecursionError, StopIteration, PimflowError),
)
_DATABASE_ERRORS = (sqlite3.Error, UnicodeDecodeError)  # SQLite's message may quote a damaged file
# Packages whose code results depend on, besides their keys.
CODE_PACKAGES = ("weight_types", "core", "hardware", "pim_backend", "simulators", "placement")


def default_path() -> Path:
    """The cache's file: ``PIMFLOW_CACHE``, else one under the user's cache directory."""
    configured = os.environ.get("PIMFLOW_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(configured) if configured else Path(home) / "pimflow" / "profiles.sqlite"


@functools.cache
def sources_digest(parts: tuple[str, ...] = CODE_PACKAGES) -> str:
    """Hash of the Python sources and trained models of packages and modules; equal on every machine."""
    digest = hashlib.sha256()
    for part in parts:
        spec = importlib.util.find_spec(f"pimflow.{part}")
        if spec is None or spec.origin is None:
            raise LookupError(f"pimflow.{part} does not exist, so it has no digest")
        origin = Path(spec.origin)
        for name, path in source_files(origin.parent) if origin.name == "__init__.py" else [(part, origin)]:
            digest.update(f"{name}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def source_files(folder: Path) -> list[tuple[str, Path]]:
    """The Python sources and trained models under `folder`, at any depth, by their paths within it."""
    paths = [path for pattern in ("*.py", "learned/*.xz") for path in folder.rglob(pattern)]
    return sorted((path.relative_to(folder).as_posix(), path) for path in paths)


@functools.cache
def code_digest() -> str:
    """Hash of all code that computes results; it is part of every key."""
    return hashlib.sha256(sources_digest().encode() + native.LIBRARY.read_bytes()).hexdigest()


# Files that stayed locked while this process waited: it does not wait for them a second time.
_locked_files: set[Path] = set()


class ResultCache:
    """Results by the key of what they were computed from; values are JSON, a dataclass as its fields.

    Parameters
    ----------
    path : path
        File of the cache, created if it does not exist.

    Attributes
    ----------
    flaw : str
        Why results cannot be read or stored; empty while they can.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.flaw = ""
        self._connection: sqlite3.Connection | None = None
        self._can_store = True
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            wait_seconds = 0.0 if self.path in _locked_files else WAIT_SECONDS
            self._connection = sqlite3.connect(self.path, timeout=wait_seconds)
            # A killed process loses nothing; damage by a power cut is detected by SQLite.
            self._connection.execute("PRAGMA synchronous=OFF")
            self._connection.text_factory = bytes  # invalid UTF-8 is found by the seal
            self._connection.execute("CREATE TABLE IF NOT EXISTS results (key TEXT PRIMARY KEY, value TEXT)")
            self._connection.commit()
        except (OSError, *_DATABASE_ERRORS) as error:
            self._disable(error)

    def __reduce__(self) -> tuple[type[ResultCache], tuple[Path]]:
        """Another process opens the file itself."""
        return ResultCache, (self.path,)

    def get(
        self,
        keys: Iterable[object],
        code: str | None = None,
        *,
        read: Callable[[Any], Any] = lambda plain: plain,
    ) -> dict[object, Any]:
        """The stored values of `keys`.

        Parameters
        ----------
        read : callable
            Converts a stored value to the result; if it raises, the value is ignored.
        code : str, optional
            Hash of the code that computed them; by default of all code that computes any (`code_digest`).
        """
        keys = list(keys)
        by_digest = {_digest(key, code): key for key in keys}
        digests = list(by_digest)
        results: dict[object, Any] = {}
        for begin in range(0, len(digests), KEYS_AT_ONCE):
            if self._connection is None:
                break
            part = digests[begin : begin + KEYS_AT_ONCE]
            query = f"SELECT key, value FROM results WHERE key IN ({','.join('?' * len(part))})"
            try:
                rows = dict(self._connection.execute(query, part).fetchall())
            except _DATABASE_ERRORS as error:
                self._disable(error)
                break
            for digest in part:
                if digest.encode() not in rows:
                    continue
                try:
                    results[by_digest[digest]] = read(_unseal(digest, rows[digest.encode()]))
                except _DECODE_ERRORS:
                    self.flaw = f"{self.path}: a result is damaged, and is computed again"
        return results

    def put(self, values: Mapping[object, Any], code: str | None = None) -> None:
        """Store all of `values` or none; if it fails, earlier results can still be read."""
        if self._connection is None or not self._can_store or not values:
            return
        digests = {_digest(key, code): json.dumps(value, default=_fields) for key, value in values.items()}
        rows = [(digest, f"{_seal(digest, value)} {value}") for digest, value in digests.items()]
        try:
            with self._connection:
                self._connection.executemany("INSERT OR REPLACE INTO results VALUES (?, ?)", rows)
        except sqlite3.OperationalError as error:  # full, or not to be written
            self._can_store = False
            self._record_flaw(error)
        except _DATABASE_ERRORS as error:
            self._disable(error)

    def clear(self) -> None:
        """Delete all results, and give their space back."""
        if self._connection is None:
            return
        try:
            with self._connection:
                self._connection.execute("DELETE FROM results")
            self._connection.execute("VACUUM")
        except _DATABASE_ERRORS as error:
            self._disable(error)

    def close(self) -> None:
        """Close the file; later calls find and store nothing."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _disable(self, error: Exception) -> None:
        self._record_flaw(error)
        self.close()

    def _record_flaw(self, error: Exception) -> None:
        if "locked" in str(error):
            _locked_files.add(self.path)
        damaged = isinstance(error, UnicodeDecodeError)
        reason = "malformed" if damaged else getattr(error, "strerror", None) or str(error)
        remedy = "; delete it" if any(word in reason for word in ("not a database", "malformed")) else ""
        self.flaw = f"{self.path}: results are not kept: {reason}{remedy}"


@dataclass(frozen=True, kw_only=True)
class CacheSize:
    """The file of a cache, and how much is in it."""

    path: str
    results: int
    bytes: int

    @classmethod
    def measure(cls, path: str | os.PathLike[str]) -> CacheSize:
        """Count the results of a file, which is not created.

        Raises
        ------
        ArtifactError
            If there is a file that is no cache.
        """
        file = Path(path)
        if not file.exists():
            return cls(path=str(file), results=0, bytes=0)
        try:
            with contextlib.closing(sqlite3.connect(file, timeout=WAIT_SECONDS)) as connection:
                (results,) = connection.execute("SELECT COUNT(*) FROM results").fetchone()
            return cls(path=str(file), results=results, bytes=file.stat().st_size)
        except (OSError, *_DATABASE_ERRORS) as error:
            raise ArtifactError(f"{file}: is no cache, or damaged: {error}; delete it") from None

    def to_json(self) -> dict[str, str | int]:
        """The fields."""
        return {"path": self.path, "results": self.results, "bytes": self.bytes}

    def text(self) -> str:
        """The size in a line."""
        return f"{self.path}: {self.results} results, {self.bytes / 1e6:.2f} MB"


def _fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass, not copied as `dataclasses.asdict` does; raises `TypeError` for others."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _seal(digest: str, value: str) -> str:
    """The seal of a value, written as JSON, with the digest of its key."""
    return hashlib.sha256(f"{digest} {value}".encode()).hexdigest()[:SEAL_DIGITS]


def _unseal(digest: str, sealed: object) -> Any:
    """The value of a row; raises `ValueError` if the seal does not match."""
    if not isinstance(sealed, bytes):
        raise ValueError("no text")
    seal, _, value = sealed.decode().partition(" ")
    if seal != _seal(digest, value):
        raise ValueError("another seal")
    return json.loads(value)


def _digest(key: object, code: str | None) -> str:
    code_text = code_digest() if code is None else code
    return hashlib.sha256(f"{code_text} {key!r}".encode()).hexdigest()
