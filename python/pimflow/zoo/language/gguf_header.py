"""Reads the tables at the begin of a GGUF file, and never beyond the bounds of the file.

Every count and length is compared with the remaining bytes before anything is read or allocated: the
library's own reader loops over as many elements as a file claims to have.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pimflow.errors import ModelError

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT_BYTES = 32  # default
_MAX_DIMENSIONS = 4  # of a tensor in GGML
# Formats of `struct` by the number of a kind of value in a file.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_TEXT_BYTES, _PAIR_BYTES, _TENSOR_BYTES = 8, 13, 32  # minimum bytes of each in a file


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """Type, shape and place of a tensor in a file.

    Attributes
    ----------
    shape : tuple of int
        The fastest axis first.
    stored_shape : tuple of int
        Shape of the stored elements of `dtype`, the slowest axis first.
    """

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    stored_shape: tuple[int, ...]
    dtype: np.dtype
    offset_bytes: int

    def values(self, path: str, begin: int = 0, rows: int | None = None) -> np.ndarray:
        """Read the values and convert them to fp32, the slowest axis first; raises `ModelError`.

        Of several rows of the slowest axis, those from `begin` on.
        """
        from gguf import quants

        shape = self.stored_shape if rows is None else (rows, *self.stored_shape[1:])
        count = math.prod(shape)
        offset = self.offset_bytes + begin * math.prod(self.stored_shape[1:]) * self.dtype.itemsize
        try:
            stored = np.fromfile(path, self.dtype, count, offset=offset)
        except OSError as error:
            raise ModelError(f"'{path}': cannot be read: {error.strerror or error}") from None
        if stored.size != count:
            raise ModelError(f"'{path}': is damaged: it ends within a tensor")
        return np.asarray(quants.dequantize(stored.reshape(shape), self.kind), np.float32)


def read_header(path: str) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Read the metadata and the tensors' places of a file, by their names.

    Raises
    ------
    ValueError
        If it is no GGUF file, ends early, claims more than it has, or has an array of arrays or a name twice.
    OSError
        If it cannot be read.
    """
    size_bytes = os.stat(path).st_size
    if not size_bytes:  # an empty file cannot be mapped
        raise ValueError("it is empty")
    cursor = _Cursor(np.memmap(path, np.uint8, "r"))
    if cursor.take(len(_MAGIC)) != _MAGIC:
        raise ValueError("it does not begin as one")
    cursor.find_byte_order()
    if (version := cursor.scalar("I")) not in _VERSIONS:
        raise ValueError(f"version {version} is not supported")
    tensor_count, pair_count = cursor.count(_TENSOR_BYTES), cursor.count(_PAIR_BYTES)
    fields: dict[str, Any] = {}
    for _ in range(pair_count):
        name = cursor.text()
        if name in fields:
            raise ValueError(f"it has '{name[:80]}' twice")
        fields[name] = cursor.value(name, cursor.scalar("I"))
    rows: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(tensor_count):
        name = cursor.text()
        if name in rows:
            raise ValueError(f"it has tensor '{name[:80]}' twice")
        if (dimensions := cursor.scalar("I")) > _MAX_DIMENSIONS:
            raise ValueError(f"tensor '{name[:80]}' has {dimensions} dimensions")
        shape = tuple(cursor.scalar("Q") for _ in range(dimensions))
        rows[name] = (shape, cursor.scalar("I"), cursor.scalar("Q"))
    alignment = fields.get("general.alignment", _ALIGNMENT_BYTES)
    if type(alignment) is not int or not 0 < alignment < 1 << 32 or alignment & (alignment - 1):
        raise ValueError("general.alignment is no power of two")
    begin = -(-cursor.position // alignment) * alignment
    tensors = {name: _tensor(name, row, begin, size_bytes, cursor.order) for name, row in rows.items()}
    return fields, tensors


def _tensor(
    name: str, row: tuple[tuple[int, ...], int, int], begin: int, size_bytes: int, order: str
) -> GgufTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    shape, number, offset = row
    kind = GGMLQuantizationType(number)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if shape and shape[0] % block:
        raise ValueError(f"tensor '{name[:80]}' has rows of {shape[0]} elements, no whole blocks of {block}")
    if offset + math.prod(shape) // block * block_bytes > size_bytes - begin:
        raise ValueError(f"tensor '{name[:80]}' ends beyond the file")
    plain = {"F16": "f2", "F32": "f4", "F64": "f8", "I8": "i1", "I16": "i2", "I32": "i4", "I64": "i8"}
    stored = shape[::-1]
    if kind.name not in plain:
        stored = (*stored[:-1], stored[-1] // block * block_bytes) if stored else (block_bytes,)
    return GgufTensor(
        shape=shape,
        kind=kind,
        stored_shape=stored,
        dtype=np.dtype(f"{order}{plain.get(kind.name, 'u1')}"),
        offset_bytes=begin + offset,
    )


class _Cursor:
    """Reads values of a file one after another, from a position that moves."""

    def __init__(self, data: np.ndarray) -> None:
        self.position, self.order = 0, "<"
        self._data = data

    def take(self, size: int) -> bytes:
        """The next bytes; raises `ValueError` if there are fewer."""
        if size > len(self._data) - self.position:
            raise ValueError(f"it ends early: {size} bytes are due at byte {self.position}")
        begin, self.position = self.position, self.position + size
        return self._data[begin : self.position].tobytes()

    def find_byte_order(self) -> None:
        """Find the byte order from the version, a small number: in the wrong order its low bytes are zero."""
        position = self.position
        if not self.scalar("I") & 0xFFFF:
            self.order = ">"
        self.position = position

    def scalar(self, kind: str) -> Any:
        """Read the next value, by a format of `struct`."""
        (value,) = struct.unpack(self.order + kind, self.take(struct.calcsize(f"={kind}")))
        return value

    def count(self, item_bytes: int) -> int:
        """Read a number of items of at least `item_bytes`; raises `ValueError` if they do not fit."""
        claimed: int = self.scalar("Q")
        if claimed * item_bytes > len(self._data) - self.position:
            raise ValueError(f"it claims {claimed} items at byte {self.position}, and ends before")
        return claimed

    def text(self) -> str:
        """Read the next text: its length, then its bytes."""
        return self.take(self.count(1)).decode()

    def value(self, name: str, kind: int) -> Any:
        """Read the next value of a kind; an array becomes a list."""
        if kind == _TEXT:
            return self.text()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise ValueError(f"'{name[:80]}' is of kind {kind}, which is none")
        item = self.scalar("I")
        if item == _TEXT:
            return [self.text() for _ in range(self.count(_TEXT_BYTES))]
        if item not in _SCALARS:
            raise ValueError(f"'{name[:80]}' is an array of arrays, or of values of kind {item}")
        dtype = np.dtype(self.order + _SCALARS[item])
        return np.frombuffer(self.take(self.count(dtype.itemsize) * dtype.itemsize), dtype).tolist()
