"""Where the filters of a region lie in the banks: channels, rows, columns."""

from __future__ import annotations

import numpy as np

from pimflow.core.program import MemoryImage, PimProgram
from pimflow.hardware import PimSpec
from pimflow.pim_backend.schedule import Tiling, tiles_of_channel

NUMPY_DTYPE = {"fp16": np.float16, "fp32": np.float32}


def memory_image(program: PimProgram, weights: np.ndarray, pim: PimSpec) -> MemoryImage:
    """The bank contents that `program` runs on.

    Row ``(tile - first tile of the channel) * chunks + chunk`` of bank ``b`` holds elements
    ``[chunk*columns, (chunk+1)*columns)`` (in columns) of filter ``16*tile + b``, once for every slot
    of a buffer; what is left of a row, and the filters beyond the last, are zero.

    Parameters
    ----------
    program : PimProgram
    weights : ndarray, [oc, K], float
        Filters in (kh, kw, c) order; rounded to the program's storage type.
    pim : PimSpec
        The device that `program` was lowered for.
    """
    tiling = Tiling.of(program.geometry, pim, program.dtype)
    width = tiling.columns * program.elements_per_column
    oc, reduction = weights.shape
    padded = np.zeros((tiling.tiles * program.banks, tiling.chunks * width), NUMPY_DTYPE[program.dtype])
    padded[:oc, :reduction] = weights
    chunks = padded.reshape(tiling.tiles, program.banks, tiling.chunks, width).swapaxes(1, 2)
    pages = np.zeros(
        (tiling.tiles * tiling.chunks, program.banks, pim.elements_per_row(program.dtype)), padded.dtype
    )
    slotted = pages[:, :, : tiling.slots * width].reshape(*pages.shape[:2], tiling.slots, width)
    slotted[...] = chunks.reshape(-1, program.banks, 1, width)
    pages[:, :, : tiling.slots * width] = slotted.reshape(*pages.shape[:2], -1)

    table = np.full((len(program.channels), program.rows), -1, np.int32)
    for channel in range(len(program.channels)):
        tiles = tiles_of_channel(program, tiling, channel)
        rows = np.arange(tiles.start * tiling.chunks, tiles.stop * tiling.chunks, dtype=np.int32)
        table[channel, : len(rows)] = rows
    return MemoryImage(row_begin=program.row_begin, pages=pages, table=table)
