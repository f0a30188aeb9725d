"""Runs simulators that the user installed; reports each failure in one line."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pimflow.errors import ProfilerError

_SHOWN_CHARACTERS = 120
_LIBRARY_PATH = "LD_LIBRARY_PATH"
# What the dynamic linkers of GNU and of musl print when they do not find a library.
_MISSING_LIBRARY = re.compile(
    r"error while loading shared libraries: ([^\s:]+): cannot open shared object file"
    r"|Error loading shared library ([^\s:]+): No such file"
)


def run_simulator(
    command: Sequence[str],
    output: Path,
    *,
    who: str,
    timeout_seconds: float,
    environment: Mapping[str, str] | None = None,
    is_complete: Callable[[Path], bool] | None = None,
    libraries: Sequence[Path] = (),
) -> None:
    """Run `command` in the folder of the file `output`, which receives its standard output.

    Parameters
    ----------
    who : str
        Name of the simulator, with which error messages begin.
    environment : mapping of str to str, optional
        Environment variables; those of this process by default.
    is_complete : callable, optional
        Whether an output is that of a complete run; such a run has succeeded, whatever its exit status. By
        default only the exit status decides.
    libraries : sequence of path
        Directories in which a missing shared library is searched, for the error message.

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
                env=environment,
                timeout=timeout_seconds,
            )
    except subprocess.TimeoutExpired as error:
        raise ProfilerError(f"{who}: no end after {timeout_seconds:g} s") from error
    except OSError as error:
        raise ProfilerError(f"{who}: cannot be run: {error.strerror or error}") from error
    if process.returncode == 0 or (is_complete is not None and is_complete(output)):
        return
    stderr_text = process.stderr.decode("utf-8", "replace").strip()
    if match := _MISSING_LIBRARY.search(stderr_text):
        path = (os.environ if environment is None else environment).get(_LIBRARY_PATH, "")
        raise ProfilerError(f"{who}: {_missing_library(match[1] or match[2], path, libraries)}")
    raise ProfilerError(
        f"{who}: failed ({_exit_text(process.returncode, stderr_text.removeprefix(f'{command[0]}: '))})"
    )


def _missing_library(name: str, path: str, libraries: Sequence[Path]) -> str:
    """Message that tells how to add a shared library that is not on `path`."""
    library = next((file for place in libraries for file in sorted(place.rglob(name))), None)
    where = f"'{library.parent}'" if library else "the directory that has it"
    current = f"'{path}'" if path else "empty"
    return f"no shared library '{name}': add {where} to {_LIBRARY_PATH}, which is {current}"


def _exit_text(code: int, message: str) -> str:
    status = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"{status}: {message.splitlines()[-1][:_SHOWN_CHARACTERS]}" if message else status
