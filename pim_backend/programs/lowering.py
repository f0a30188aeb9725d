"""Lowering of a convolution in matrix-vector form to a PIM program; `schedule` explains the terms."""

from __future__ import annotations

import itertools
from dataclasses import KW_ONLY, dataclass, replace

import numpy as np

from pimflow.core.command_forms import CommandStream
from pimflow.core.kernel import ConvGeometry
from pimflow.core.loop_order import STATIONARY, LoopOrder
from pimflow.core.program import PimProgram, table_row
from pimflow.errors import UnsupportedOpError
from pimflow.hardware import PimSpec
from pimflow.hardware.systems import SCHEDULINGS
from pimflow.host import native
from pimflow.pim_backend.programs.schedule import BankTiling, channel_runs, lockstep_phases, schedules

_lower_streams = native.get("pimflow.pim_backend.lower_streams")
_BLOCK = native.Record("pimflow.pim_backend.block")


@dataclass(frozen=True)
class ProgramRequest:
    """What a PIM program of a layer, or of a part of its output pixels, is asked for.

    Attributes
    ----------
    pixel_begin, pixel_end : int
        Output pixels ``[pixel_begin, pixel_end)`` that it computes; by default all.
    row_begin : int
        First row of every bank that it may use.
    initial : str
        Initial values of the latches (`PimProgram.initial`).
    added_channels : int
        Input channels of `geometry` that come from an added tensor (`PimProgram.added_channels`).
    activation : str
        Activation function of each sum (`PimProgram.activation`); its table lies before `row_begin`.
    """

    region: str
    geometry: ConvGeometry
    schedule: LoopOrder
    _: KW_ONLY
    pixel_begin: int = 0
    pixel_end: int | None = None
    row_begin: int = 0
    initial: str = ""
    added_channels: int = 0
    activation: str = ""

    def require_fit(self, pim: PimSpec, dtype: str) -> None:
        """Raise `UnsupportedOpError` if `pim` cannot run it."""
        schedule = self.schedule
        if self.initial and not pim.can_write_latches:
            raise UnsupportedOpError(
                f"region '{self.region}': the latches of {pim.name} always start from zero"
            )
        if self.activation and not pim.can_activate:
            raise UnsupportedOpError(
                f"region '{self.region}': {pim.name} has no AF, which would apply '{self.activation}'"
            )
        # A part of a layer may have fewer pixels than groups; it then has as many groups as pixels.
        order = replace(schedule, pixel_groups=1) if schedule.pixel_groups > 1 else schedule
        if not any(order in schedules(self.geometry, pim, dtype, level) for level in SCHEDULINGS[::-1]):
            raise UnsupportedOpError(f"region '{self.region}': schedule '{schedule}' does not fit {pim.name}")


@dataclass(frozen=True, kw_only=True)
class LoweringLimits:
    """What of a program is lowered, where not all of it is needed.

    Attributes
    ----------
    only_busiest : bool
        Only one of the channels with the most work, which is enough to compare loop orders by time.
    timing_only : bool
        Omit what does not affect time: channels that take the same time get the same commands, and the blocks
        of a channel the same pixels and output channels. Such a program can be timed, but not run.
    """

    only_busiest: bool = False
    timing_only: bool = False


NO_LIMITS = LoweringLimits()


def lower(
    request: ProgramRequest, pim: PimSpec, *, dtype: str, channels: int, limits: LoweringLimits = NO_LIMITS
) -> PimProgram:
    """The program that computes what `request` says, over `channels` PIM channels.

    Raises
    ------
    UnsupportedOpError
        If the loop order does not fit the layer or the device, or the device cannot set latches or apply
        activation functions although the layer needs it.
    """
    request.require_fit(pim, dtype)
    geometry, schedule = request.geometry, request.schedule
    tiling = BankTiling.from_geometry(geometry, pim, dtype, schedule.gangs, schedule.together)
    end = geometry.pixels if request.pixel_end is None else request.pixel_end
    pixels = end - request.pixel_begin
    place_blocks = _lockstep_blocks if schedule.pixel_groups else _run_blocks
    channel_blocks, rows = place_blocks(pixels, tiling, channels, schedule)
    # In lockstep, time also depends on the other channels, and on which vectors the host writes to all at
    # once.
    limits = NO_LIMITS if schedule.pixel_groups else limits
    if limits.only_busiest:
        channel_blocks = [
            max(channel_blocks, key=lambda blocks: (sum(len(p) * len(t) for p, t, _ in blocks), len(blocks)))
        ]
    shares = pixels == 1 and schedule.accumulators > 1 and not schedule.resumed and schedule.pixel_groups > 0
    fields = {
        **_fields(schedule, tiling, pim, request.activation),
        "initial": bool(request.initial),
        "matrix_stride": geometry.pixels if tiling.matrices > 1 else 0,
        "pixel_begin": request.pixel_begin,
        "row_begin": request.row_begin,
        "one_pixel": pixels == 1,
        "shares_accumulators": shares and len(channel_blocks[0]) > 1,
        "timing_only": limits.timing_only,
    }
    activations = pim.activations if pim.activations != dtype else None
    stored = replace(geometry, weights=pim.weights or None, activations=activations or None)  # None: dtype's
    return PimProgram(
        **{**vars(request), "pixel_end": end, "geometry": stored},
        pim=pim.name,
        pim_digest=pim.custom_digest,
        dtype=dtype,
        banks=pim.banks,
        gangs=pim.gangs,
        columns_per_row=pim.columns_per_row,
        buffers=pim.global_buffers,
        buffer_columns=pim.buffer_columns,
        elements_per_column=pim.elements_per_column(dtype),
        vector_bursts=pim.vector_bursts(dtype),
        result_lanes=pim.result_lanes,
        tile_gangs=schedule.gangs,
        readres_bursts=pim.readres_bursts(dtype),
        rows=rows,
        accumulators=schedule.accumulators,
        matrices=tiling.matrices,
        channels=_streams(fields, channel_blocks),
    )


# Pixels and tiles of a block, and the row in which tile 0 would lie.
_PlacedBlock = tuple[range, range, int]


def _run_blocks(
    pixels: int, tiling: BankTiling, channels: int, schedule: LoopOrder
) -> tuple[list[list[_PlacedBlock]], int]:
    """The blocks of each channel, whose units are one run, and the largest number of rows of a channel."""
    channel_blocks, rows = [], 0
    for blocks, touched in channel_runs(pixels, tiling.tiles, channels, schedule.pixel_major_groups):
        tile_rows = tiling.rows(touched)
        channel_blocks.append([(*block, -tile_rows.start) for block in blocks])
        rows = max(rows, len(tile_rows))
    return channel_blocks, rows


def _lockstep_blocks(
    pixels: int, tiling: BankTiling, channels: int, schedule: LoopOrder
) -> tuple[list[list[_PlacedBlock]], int]:
    """The blocks of each channel, one for each phase in which it takes part, and the rows of all phases."""
    channel_blocks: list[list[_PlacedBlock]] = [[] for _ in range(channels)]
    rows = 0
    for phase in lockstep_phases(pixels, tiling.tiles, channels, schedule.pixel_groups):
        for channel in range(phase.channels):
            block = phase.block(channel)
            tile_rows = tiling.rows(block[1])
            channel_blocks[channel].append((*block, rows - tile_rows.start))
        rows += len(tile_rows)
    return channel_blocks, rows


def _fields(schedule: LoopOrder, tiling: BankTiling, pim: PimSpec, activation: str) -> dict[str, int]:
    """Loop order, tiling and device as fields for ``lowering.cc``, in cycles and columns."""
    n = pim.timing
    return {
        "stationary": STATIONARY.index(schedule.stationary),
        "buffers": schedule.buffers,
        "pixels": schedule.pixels,
        "gangs": schedule.gangs or pim.gangs,
        "accumulators": schedule.accumulators,
        "staggered": schedule.staggered,
        "overlap": schedule.overlap,
        "resumed": schedule.resumed,
        "loops": True,
        "chunks": tiling.chunks,
        "columns": tiling.columns,
        "chunks_per_row": tiling.chunks_per_row,
        "elements_per_column": tiling.elements_per_column,
        "outputs": tiling.outputs,
        "tiles": tiling.tiles,
        "matrices": tiling.matrices,
        "buffer_columns": pim.buffer_columns,
        "activation_gap": max(n.get("nFAW", 1), n.get("nRRD", 1)),
        "precharge": n.get("nRP", 1),
        "opening": n.get("nRCDR", 1),
        "burst": n.get("nBL", 1),
        "turn_columns": -(-n.get("nTURN", 1) // max(1, n.get("nCCDS", 1))),
        "table_row": table_row(activation),
    }


def _streams(fields: dict[str, int], channel_blocks: list[list[_PlacedBlock]]) -> tuple[CommandStream, ...]:
    """The command stream of every channel; channels with equal commands share one."""
    import tvm_ffi

    blocks = [
        (channel, pixels.start, len(pixels), tiles.start, len(tiles), row)
        for channel, placed_blocks in enumerate(channel_blocks)
        for pixels, tiles, row in placed_blocks
    ]
    names = ("channel", "pixel", "pixels", "tile", "tiles", "row")
    table = tvm_ffi.from_dlpack(_BLOCK.table(names, blocks))
    words, begins, kinds = map(np.from_dlpack, _lower_streams(fields, table, len(channel_blocks)))
    streams = [CommandStream(words[begin:end]) for begin, end in itertools.pairwise(begins.tolist())]
    return tuple(streams[kind] for kind in kinds.tolist())
