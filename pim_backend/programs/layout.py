"""Layout of a region's filters in the banks: channels, rows, columns."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from pimflow.core.program import MemoryImage, PimProgram
from pimflow.errors import UsageError
from pimflow.pim_backend.programs.schedule import BankTiling, channel_tiles
from pimflow.weight_types import INTEGERS, WEIGHT_TYPES

BAND_ELEMENTS = 64  # elements
NUMPY_DTYPE = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp32": np.float32, "int8": np.int8}


def memory_image(program: PimProgram, weights: np.ndarray) -> MemoryImage:
    """The bank contents that `program` runs on.

    Place ``tile*chunks + chunk`` of bank ``b`` holds elements ``[chunk*columns, (chunk+1)*columns)`` (in
    columns) of filter ``outputs*tile + b``, once for every slot of a buffer; a row has as many places as
    buffers fit into it. The rest of a place, and filters beyond the last, are zero. A grouped convolution has
    the tiles of one matrix after the other, with zeros between channels of different groups: with 16 groups
    of one channel in a matrix, 15 of 16 weights are zero. Where the product adds a tensor
    (`PimProgram.added_channels`), the filters are those of `with_identity`.

    Parameters
    ----------
    program : PimProgram
        It carries the organisation of its device, so that code generation needs no device file.
    weights : ndarray, [oc, K], float or int8
        Filters in (kh, kw, c) order; they are rounded to the program's storage type. Of a program of
        integers they may also be the values for which these stand, each times the scale of its output. For
        a grouped convolution, c counts the channels of a group. Channels of an added tensor have no weights
        here.

    Raises
    ------
    UsageError
        If the program is of int8 and `weights` are neither that nor values of a type of integers.
    """
    scales = None
    if program.dtype == "int8" and weights.dtype != np.int8:
        if program.geometry.weights not in INTEGERS:
            raise UsageError(f"region '{program.region}' takes weights of int8, got {weights.dtype}")
        weights, scales = WEIGHT_TYPES[program.geometry.weights].integers(weights)
    tiling = BankTiling.from_program(program)
    if program.geometry.groups > 1:
        weights = _block_diagonal(program, weights, tiling)
    if program.added_channels:
        weights = with_identity(weights)
    pages = len(tiling.rows(range(tiling.tiles)))
    row = program.columns_per_row * program.elements_per_column
    lanes = np.zeros((pages, row, program.banks), NUMPY_DTYPE[program.dtype])
    _fill(lanes, weights, tiling)

    table = np.full((len(program.channels), program.rows), -1, np.int32)
    for channel in range(len(program.channels)):
        channel_pages = [
            row for tiles in channel_tiles(program, tiling, channel) for row in tiling.rows(tiles)
        ]
        table[channel, : len(channel_pages)] = channel_pages
    return MemoryImage(row_begin=program.row_begin, pages=lanes.swapaxes(1, 2), table=table, scales=scales)


def with_identity(weights: np.ndarray) -> np.ndarray:
    """``[W I]``, [oc, K + oc]: filters [oc, K] that also add one further input channel to each result."""
    return np.hstack([weights, np.eye(len(weights), dtype=weights.dtype)])


def _block_diagonal(program: PimProgram, weights: np.ndarray, tiling: BankTiling) -> np.ndarray:
    """The matrices of a grouped convolution, one below the other, each padded to whole tiles."""
    g, matrices = program.geometry, program.matrices
    groups_per_matrix, outputs, channels = g.groups // matrices, g.oc // g.groups, g.c // g.groups
    groups = weights.reshape(matrices, groups_per_matrix, outputs, g.kh * g.kw, channels)
    filters = tiling.tiles_of_matrix * tiling.outputs
    padded = np.zeros((matrices, filters, g.kh * g.kw, groups_per_matrix, channels), weights.dtype)
    for group in range(groups_per_matrix):
        padded[:, group * outputs : (group + 1) * outputs, :, group] = groups[:, group]
    return padded.reshape(matrices * filters, -1)


def _fill(lanes: np.ndarray, weights: np.ndarray, tiling: BankTiling) -> None:
    """Write ``weights[oc, K]`` into ``lanes[page, element, bank]``: banks side by side, as they are read.

    It works in bands of a few elements of all filters, which stay in the CPU's cache while they are rounded
    and then distributed to the banks.
    """
    oc, reduction = weights.shape
    banks, width = tiling.outputs, tiling.columns * tiling.elements_per_column
    places = lanes.reshape(len(lanes) * tiling.chunks_per_row, -1, lanes.shape[-1])
    places = places[: tiling.tiles * tiling.chunks, : tiling.slots * width]
    rows = places.reshape(tiling.tiles, tiling.chunks, tiling.slots, width, lanes.shape[-1])
    full_tiles, rest = divmod(oc, banks)
    for chunk in range(tiling.chunks):
        for begin in range(chunk * width, min((chunk + 1) * width, reduction), BAND_ELEMENTS):
            end = min(begin + BAND_ELEMENTS, (chunk + 1) * width, reduction)
            with np.errstate(over="ignore"):  # becomes infinity, which verification finds
                band = np.array(weights[:, begin:end].T, lanes.dtype, order="C")
            target = rows[:, chunk, :, begin - chunk * width : end - chunk * width]
            tiles = band[:, : full_tiles * banks].reshape(end - begin, full_tiles, banks)
            target[:full_tiles, ..., :banks] = tiles.swapaxes(0, 1)[:, None]
            if rest:
                target[full_tiles, ..., :rest] = band[:, full_tiles * banks :]
