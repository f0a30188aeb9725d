"""Runs simulators that the user installed; reports each failure in one line."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pimflow.errors import ProfilerError

_SHOWN_CHARACTERS = 120
_LIBRARY_PATH = "LD_LIBRARY_PATH"
# What the dynamic linkers of GNU and of musl print when they do not find a library.
_MISSING_LIBRARY = re.compile(
    r"error while loading shared libraries: ([^\s:]+): cannot open shared object file"
    r"|Error loading shared library ([^\s:]+): No such file"
)


@dataclass(frozen=True, kw_only=True)
class InstalledSimulator:
    """A simulator that the user installed.

    Attributes
    ----------
    name : str
        With which error messages begin.
    environment : mapping of str to str
        Environment variables; those of this process by default.
    is_complete : callable
        Whether an output is that of a complete run; such a run has succeeded, whatever its exit status. By
        default only the exit status decides.
    libraries : sequence of path
        Directories in which a missing shared library is searched, for the error message.
    """

    name: str
    timeout_seconds: float
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    is_complete: Callable[[Path], bool] = lambda output: False
    libraries: Sequence[Path] = ()

    def run(self, command: Sequence[str], output: Path) -> None:
        """Run `command` in the folder of the file `output`, which receives its standard output.

        Raises
        ------
        ProfilerError
            If the simulator cannot be run, lacks a shared library, fails, or exceeds the timeout.
        """
        try:
            with output.open("wb") as file:
                process = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.PIPE,
                    cwd=output.parent,
                    env=self.environment,
                    timeout=self.timeout_seconds,
                )
        except subprocess.TimeoutExpired as error:
            raise ProfilerError(f"{self.name}: no end after {self.timeout_seconds:g} s") from error
        except OSError as error:
            raise ProfilerError(f"{self.name}: cannot be run: {error.strerror or error}") from error
        if process.returncode == 0 or self.is_complete(output):
            return
        stderr_text = process.stderr.decode("utf-8", "replace").strip()
        if match := _MISSING_LIBRARY.search(stderr_text):
            path = self.environment.get(_LIBRARY_PATH, "")
            raise ProfilerError(
                f"{self.name}: {_missing_library(match[1] or match[2], path, self.libraries)}"
            )
        message = stderr_text.removeprefix(f"{command[0]}: ")
        raise ProfilerError(f"{self.name}: failed ({_exit_text(process.returncode, message)})")


def _missing_library(name: str, path: str, libraries: Sequence[Path]) -> str:
    """Message that tells how to add a shared library that is not on `path`."""
    library = next((file for place in libraries for file in sorted(place.rglob(name))), None)
    where = f"'{library.parent}'" if library else "the directory that has it"
    current = f"'{path}'" if path else "empty"
    return f"no shared library '{name}': add {where} to {_LIBRARY_PATH}, which is {current}"


def _exit_text(code: int, message: str) -> str:
    status = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"{status}: {message.splitlines()[-1][:_SHOWN_CHARACTERS]}" if message else status
