"""Files, written whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from pimflow.errors import OutputError


def replace_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` to a scratch file beside `path`, and rename it; a pipe or device is written to.

    Raises
    ------
    OutputError
        The file cannot be written; what was there before stays.
    """
    path = Path(path)
    if not path.name:
        raise OutputError(f"{path}: is a directory; name a file")
    file = Path(os.path.realpath(path))  # a link stays one
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            path.write_bytes(data)
        else:
            scratch.write_bytes(data)
            scratch.replace(file)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink()
