"""Kernels that do several regions in tiles, a block of threads each: what the GPU model is asked about.

One rule prices them, whatever finds the tiles: groups over shared memory (`tilings`) and the runs of a
decomposed network.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pimflow.core.fused_tile import Reach, TiledLayer, gpu_tile, wide_width
from pimflow.core.ranges import RangeMap
from pimflow.core.region import ELEMENT_BYTES, Kernel, Region

Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """What blocks of threads load and compute, one tile a block.

    Attributes
    ----------
    blocks : int
    touched : mapping of str to int
        Elements over all tiles: loaded of what is made outside, computed of each region's result.
    waits : int
        How often the threads of a block finish a region, or a chunk of its channels, before the next.
    """

    blocks: int
    touched: Mapping[str, int]
    waits: int


def tiled_kernel(regions: Sequence[Region], tiles: Tiles, dtype: str) -> Kernel:
    """The kernel that does `regions` in `tiles`.

    Operands, filters and result move once over the pins of the DRAM; what several blocks load comes again
    from the L2, the filters in full.
    """
    element = ELEMENT_BYTES[dtype]
    macs = 0
    for region in regions:
        region_macs = region.geometry.macs if region.geometry else sum(region.input_elements)
        macs += region_macs * int(tiles.touched[region.name]) // region.output_elements
    reads = {name: int(tiles.touched[name]) for name in operands(regions)}
    sizes = {name: size for region in regions for name, size in zip(region.inputs, region.input_elements)}
    once = {name: min(size, sizes[name]) for name, size in reads.items()}
    weights = sum(region.weight_elements for region in regions)
    again = sum(reads.values()) - sum(once.values()) + weights * (tiles.blocks - 1)
    return Kernel(
        kind="stream",
        macs=macs,
        input_bytes=sum(once.values()) * element,
        weight_bytes=weights * element,
        output_bytes=regions[-1].output_elements * element,
        again_bytes=again * element,
        layers=tiles.waits,
        blocks=tiles.blocks,
    )


def operands(regions: Sequence[Region]) -> tuple[str, ...]:
    """Tensors that regions read from outside the group."""
    made = {region.name for region in regions}
    names = dict.fromkeys(name for region in regions for name in region.inputs)
    return tuple(name for name in names if name not in made)


def run_tiles(regions: Sequence[Region], dtype: str) -> Tiles | None:
    """Tiles in which `relay_passes.schedules.schedule_fused_gpu` computes a run; None if it finds none.

    All tiles are full ones: if vectors do not fill a map's width, columns beside it are computed that nothing
    reads. Nothing is loaded from beside the operand.
    """
    steps = _steps(regions, dtype)
    windows = [region.geometry or region.pooling for region in regions]
    first, *_, last = [window for window in windows if window]
    height, width = last.oh, wide_width(last.ow)
    tile = gpu_tile(height, width, steps)
    if tile is None:
        return None
    down, across, channels = _cuts(height, tile.rows), _cuts(width, tile.columns), last.oc
    blocks = last.n * len(down) * len(across)
    touched = {name: size for r in regions for name, size in zip(r.inputs, r.input_elements)}
    for region, window in zip(reversed(regions), reversed(windows)):
        touched[region.name] = last.n * _length(down) * _length(across) * channels
        if window:
            down, across, channels = _read(window.rows, down), _read(window.columns, across), window.c
    loaded = _length(_clipped(down, first.h)) * _length(_clipped(across, first.w))
    touched[regions[0].inputs[0]] = last.n * loaded * channels
    return Tiles(blocks=blocks, touched=touched, waits=len(steps) * (steps[-1].channels // tile.chunk))


def _steps(regions: Sequence[Region], dtype: str) -> list[TiledLayer]:
    """Convolutions have operands in the storage type, also on chip; others are fp32 there."""
    return [
        TiledLayer(
            rows=_reach(window.rows),
            columns=_reach(window.columns),
            channels=window.c,
            dense=region.geometry is not None,
            element_bytes=ELEMENT_BYTES[dtype if region.geometry else "fp32"],
        )
        for region in regions
        if (window := region.geometry or region.pooling)
    ]


def _reach(axis: RangeMap) -> Reach:
    return Reach(axis.stride, 1 + (axis.window - 1) * axis.dilation)


def _cuts(extent: int, size: int) -> list[Span]:
    return list(itertools.pairwise(range(0, extent + 1, size)))


def _read(axis: RangeMap, spans: Sequence[Span]) -> list[Span]:
    """The spans of an operand that tiles read; they may reach beyond the map."""
    extents, reach = [], _reach(axis)
    for begin, end in spans:
        low = begin * axis.stride - axis.pad_before
        extents.append((low, low + reach.extent(end - begin)))
    return extents


def _clipped(spans: Sequence[Span], extent: int) -> list[Span]:
    """The parts of spans that are on the map."""
    inside = [(max(begin, 0), min(end, extent)) for begin, end in spans]
    return [(begin, end) for begin, end in inside if begin < end]


def _length(spans: Sequence[Span]) -> int:
    return sum(end - begin for begin, end in spans)
