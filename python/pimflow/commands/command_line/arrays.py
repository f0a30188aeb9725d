"""Arrays of a command: read from files, write to files, and describe in a line."""

from __future__ import annotations

import io
from pathlib import Path

import ml_dtypes
import numpy as np

from pimflow.errors import ArtifactError
from pimflow.host.files import replace_file


def read(path: str) -> np.ndarray:
    """Read the array of a ``.npy`` file; raises `ArtifactError` if it has none."""
    try:
        array = np.load(path, allow_pickle=False)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from error
    except MemoryError as error:
        raise ArtifactError(f"{path}: says that it holds more than fits into memory") from error
    except Exception as error:  # whatever archives and headers raise
        raise ArtifactError(f"{path}: not a .npy file") from error
    if not isinstance(array, np.ndarray):
        raise ArtifactError(f"{path}: holds several arrays; give a .npy file")
    return array


def write(path: Path, array: np.ndarray) -> None:
    """Write a ``.npy`` file atomically; bf16, which the format lacks, as fp32."""
    content = io.BytesIO()
    np.save(content, array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array)
    replace_file(path, content.getvalue())


def text(array: np.ndarray) -> str:
    """Dtype, shape and range as text."""
    values = f"{float(array.min()):.6g} .. {float(array.max()):.6g}" if array.size else "no values"
    return f"{array.dtype} {list(array.shape)}, {values}"
