"""Running simulators that somebody else installed: each failure is one line."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from pimflow.errors import ProfilerError

_SHOWN_CHARACTERS = 120


def run_simulator(
    command: Sequence[str],
    output: Path,
    *,
    who: str,
    timeout_seconds: float,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run `command` in the folder of `output`, the file that takes what it prints.

    Parameters
    ----------
    who : str
        What a failure is said of.
    environment : mapping of str to str, optional
        This process's by default.

    Raises
    ------
    ProfilerError
        If it cannot be run, fails, or takes longer than the timeout.
    """
    try:
        with output.open("wb") as file:
            done = subprocess.run(
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
    if done.returncode:
        raise ProfilerError(f"{who}: failed ({_ending(done.returncode, done.stderr)})")


def _ending(code: int, stderr: bytes) -> str:
    said = stderr.decode("utf-8", "replace").strip().splitlines()
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"{how}: {said[-1][:_SHOWN_CHARACTERS]}" if said else how
