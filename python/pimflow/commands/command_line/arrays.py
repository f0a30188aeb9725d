"""Arrays of a command: write to files, and describe in a line."""

from __future__ import annotations

import io
from pathlib import Path

import ml_dtypes
import numpy as np

from pimflow.host.files import replace_file


def write(path: Path, array: np.ndarray) -> None:
    """Write a ``.npy`` file atomically; bf16, which the format lacks, as fp32."""
    content = io.BytesIO()
    np.save(content, array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array)
    replace_file(path, content.getvalue())


def text(array: np.ndarray) -> str:
    """Dtype, shape and range as text."""
    values = f"{float(array.min()):.6g} .. {float(array.max()):.6g}" if array.size else "no values"
    return f"{array.dtype} {list(array.shape)}, {values}"
