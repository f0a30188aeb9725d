"""Ramulator 2 load/store traces of the memory traffic of a convolution on the GPU.

A line is ``LD <address>`` or ``ST <address>``: one transaction, with its address in bytes.

The kernel is the implicit GEMM that `simulators.gpu.roofline` costs: tiles of `TILE` output pixels by `TILE`
output channels, pixels in the outer loop. A tile loads the input elements under its windows, then its
filters, then stores its results, each in ascending order. Assumptions: the L2 holds everything that was read,
so that each transaction goes to memory once, when a tile first needs it. Operands lie one after the other,
each from a multiple of `ALIGNMENT_BYTES` on: input NHWC, filters [oc, kh, kw, c], output NHWC.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator

import numpy as np

from pimflow.core.kernel import ELEMENT_BYTES, ConvGeometry
from pimflow.errors import TraceError

TRANSACTION_BYTES = 64
ALIGNMENT_BYTES = 256  # minimum alignment of memory from cudaMalloc
TILE = 128
_PAIRS = 1 << 20  # pairs of pixel and window tap that are processed at once


def export(geometry: ConvGeometry, dtype: str) -> Iterator[tuple[bytes, int]]:
    """The trace of the whole convolution, in chunks, each with the number of output pixels that it completes.

    Memory use is a byte for each transaction, and one tile.
    """
    element = ELEMENT_BYTES[dtype]
    regions = _Regions(
        geometry.n * geometry.h * geometry.w * geometry.c * element,
        geometry.oc * geometry.reduction * element,
        geometry.pixels * geometry.oc * element,
    )
    for first in range(0, geometry.pixels, TILE):
        pixels = np.arange(first, min(first + TILE, geometry.pixels))
        for begin in range(0, geometry.oc, TILE):
            end = min(begin + TILE, geometry.oc)
            if begin == 0:
                start = _input_pixels(geometry, pixels) * geometry.c * element
                yield regions.touch(0, start, start + geometry.c * element), 0
            if first == 0:
                row = geometry.reduction * element
                yield regions.touch(1, np.array([begin * row]), np.array([end * row])), 0
            start = (pixels * geometry.oc + begin) * element
            yield regions.touch(2, start, start + (end - begin) * element), 0
        yield b"", len(pixels)


class _Regions:
    """Operands in memory, and the transactions of each that were already made."""

    def __init__(self, *sizes_bytes: int):
        self.first, self.seen = [], []
        begin = 0
        for size in sizes_bytes:
            self.first.append(begin)
            self.seen.append(np.zeros(-(-size // TRANSACTION_BYTES), dtype=bool))
            begin += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def touch(self, operand: int, begin: np.ndarray, end: np.ndarray) -> bytes:
        """Lines for bytes ``[begin, end)`` of an operand, without transactions that were made before."""
        seen = self.seen[operand]
        first = begin // TRANSACTION_BYTES
        counts = (end - 1) // TRANSACTION_BYTES - first + 1
        # All of first[i] .. first[i] + counts[i] - 1, without a Python loop.
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        transactions = np.unique(np.repeat(first, counts) + offsets)
        fresh = transactions[~seen[transactions]]
        seen[fresh] = True
        word = "ST" if operand == 2 else "LD"
        addresses = (fresh * TRANSACTION_BYTES + self.first[operand]).tolist()
        return "".join(f"{word} {address:#x}\n" for address in addresses).encode()


def _input_pixels(geometry: ConvGeometry, pixels: np.ndarray) -> np.ndarray:
    """Input pixels (row-major over n, h, w) under the windows of output `pixels`, ascending."""
    n, pixel_in_image = np.divmod(pixels, geometry.oh * geometry.ow)
    y, x = np.divmod(pixel_in_image, geometry.ow)
    pad_top, pad_left, _, _ = geometry.padding
    taps = np.arange(geometry.kh * geometry.kw)
    under_windows = np.empty(0, dtype=np.int64)
    for part in np.array_split(taps, -(-len(pixels) * len(taps) // _PAIRS)):
        dy, dx = np.divmod(part, geometry.kw)
        iy = y[:, None] * geometry.stride[0] + dy * geometry.dilation[0] - pad_top
        ix = x[:, None] * geometry.stride[1] + dx * geometry.dilation[1] - pad_left
        inside = (iy >= 0) & (iy < geometry.h) & (ix >= 0) & (ix < geometry.w)
        ids = (n[:, None] * geometry.h + iy) * geometry.w + ix
        under_windows = np.union1d(under_windows, ids[inside])
    return under_windows


def counts(path: str | os.PathLike[str]) -> Counter[str]:
    """Loads (LD) and stores (ST) of a file; `TraceError` with file and line for anything else."""
    totals: Counter[str] = Counter(LD=0, ST=0)
    try:
        with open(path, encoding="ascii", newline="\n") as file:
            for line, text in enumerate(file, 1):
                match = re.fullmatch(r"(LD|ST) (0[xX][0-9a-fA-F]{1,16}|[0-9]{1,19})\n?", text)
                if not match:
                    raise TraceError(f"{path}:{line}: not 'LD <address>' or 'ST <address>': {text[:60]!r}")
                totals[match[1]] += 1
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not a text file") from error
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error
    return totals
