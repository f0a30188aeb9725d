"""Kernels that do several regions in tiles, a block of threads each: what the GPU model is asked about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pimflow.core.region import ELEMENT_BYTES, Kernel, Region
from pimflow.fusion import Layer


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


def waits(layers: Sequence[Layer], chunk: int) -> int:
    """How often a block finishes one of `layers`, or `chunk` of its channels, before the next."""
    return len(layers) * (layers[0].maps[0][3].output_extent // chunk if chunk else 1)
