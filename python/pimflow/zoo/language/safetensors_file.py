"""Tensors in files of the format safetensors: a table in JSON, then values, which are mapped."""

from __future__ import annotations

import functools
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from pimflow.errors import ModelError, one_line

_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_DTYPES |= {"I32": np.int32}  # words of several small integers
_LENGTH_BYTES = 8
_MAX_TABLE_BYTES = 100_000_000  # the format's own bound


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Place, type and shape of a tensor in a file.

    Attributes
    ----------
    dtype : str
        As the format names it.
    begin : int
        Offset of its first byte in the file.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int

    def values(self) -> np.ndarray:
        """The values, mapped from the file, in their own type; raises `ModelError`."""
        if self.dtype not in _DTYPES:
            raise ModelError(f"'{self.path}': has a tensor of type {self.dtype[:20]}, which is not supported")
        try:
            return np.memmap(self.path, _DTYPES[self.dtype], "r", self.begin, self.shape)
        except OSError as error:
            raise ModelError(f"'{self.path}': cannot be read: {error.strerror or error}") from None


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of the ``.safetensors`` files in a folder, by name.

    Raises
    ------
    ModelError
        If there is none, one is damaged, or two have a tensor of the same name.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in _table(path, path.stat().st_mtime_ns).items():
            if name in tensors:
                raise ModelError(f"'{folder}': two files have a tensor '{one_line(name)[:80]}'")
            tensors[name] = tensor
    if not tensors:
        raise ModelError(f"'{folder}': has no .safetensors file with weights")
    return tensors


@functools.lru_cache(maxsize=64)
def _table(path: Path, _: int) -> dict[str, StoredTensor]:
    """The tensors of one file; every place is within the file."""
    size = os.stat(path).st_size
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > min(size - _LENGTH_BYTES, _MAX_TABLE_BYTES):
                raise ValueError("its table is longer than the file")
            table = json.loads(file.read(length))
        begin, result = _LENGTH_BYTES + length, {}
        for name, entry in table.items():
            if name == "__metadata__":
                continue
            shape, (first, last) = tuple(entry["shape"]), entry["data_offsets"]
            if any(type(number) is not int or number < 0 for number in (*shape, first, last)):
                raise ValueError("a size is no number")
            dtype = str(entry["dtype"])
            if last > size - begin or first > last:
                raise ValueError("a tensor ends beyond the file")
            if dtype in _DTYPES and math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize != last - first:
                raise ValueError("a tensor has another size than its shape says")
            result[name] = StoredTensor(path=path, dtype=dtype, shape=shape, begin=begin + first)
        return result
    except OSError as error:
        raise ModelError(f"'{path}': cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = one_line(str(error))[:100]
        raise ModelError(f"'{path}': is not a safetensors file, or is damaged: {reason}") from None
