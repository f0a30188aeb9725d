"""Arrays from ``.npy`` and ``.npz`` files of users."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pimflow.errors import ArtifactError, PimflowError

if TYPE_CHECKING:
    import numpy as np


def read_array(path: str | os.PathLike[str], error_type: type[PimflowError] = ArtifactError) -> np.ndarray:
    """The array of a ``.npy`` file; raises `error_type`, in one line, if the file has none."""
    content = _read(path, error_type, "a .npy file")
    if isinstance(content, dict):
        raise error_type(f"{os.fspath(path)}: holds several arrays; give a .npy file")
    return content


def read_arrays(
    path: str | os.PathLike[str], error_type: type[PimflowError] = ArtifactError
) -> dict[str, np.ndarray]:
    """The arrays of an ``.npz`` file by name; raises `error_type`, in one line, if the file has none."""
    content = _read(path, error_type, "an .npz file of plain arrays, or damaged")
    if not isinstance(content, dict):
        raise error_type(f"{os.fspath(path)}: holds one array without a name; give an .npz file")
    return content


def _read(
    path: str | os.PathLike[str], error_type: type[PimflowError], kind: str
) -> np.ndarray | dict[str, np.ndarray]:
    """The content of a file; nothing in it is unpickled."""
    import numpy as np  # slow: a command that reads no arrays does without

    where = os.fspath(path)
    try:
        content = np.load(path, allow_pickle=False)
        if isinstance(content, np.ndarray):
            return content
        with content as archive:
            return {name: archive[name] for name in archive.files}
    except OSError as error:
        raise error_type(f"{where}: cannot be read: {error.strerror or error}") from error
    except MemoryError as error:
        raise error_type(f"{where}: says that it holds more than fits into memory") from error
    except Exception as error:  # whatever archives and headers raise
        raise error_type(f"{where}: not {kind}") from error
