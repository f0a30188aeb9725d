"""Kernels that do several regions in tiles: each block of threads does one, or a band of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pimflow.core.kernel import ELEMENT_BYTES, Kernel
from pimflow.core.region import Region
from pimflow.fusion import Layer
from pimflow.fusion.fragments import ProductTile, is_product
from pimflow.fusion.region_layers import input_tensors

Count = int | np.ndarray  # of one tiling, or of many


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """What blocks of threads load and compute. Counts are arrays for many tilings at once.

    Attributes
    ----------
    tiles : int
        How many tiles a block does one after the other.
    touched : mapping of str to int
        Elements over all tiles: loaded of tensors from outside the group, computed of each region's result.
    waits : int
        How often the threads of a block wait for one another in a tile: after each region, or chunk of its
        channels.
    products : mapping of str to (ProductTile, int)
        By region, its product in a tile, and how often that is done: once for each chunk. It runs on tensor
        cores if that pays.
    """

    blocks: Count
    touched: Mapping[str, Count]
    waits: int
    products: Mapping[str, tuple[ProductTile, int]] = field(default_factory=dict)
    tiles: Count = 1


def group_kernel(regions: Sequence[Region], tiles: Tiles, dtype: str) -> Kernel:
    """The kernel that does `regions` in `tiles`; its fields are arrays if those of `tiles` are.

    Operands, filters and result are moved once from or to DRAM. Further loads of the same data by other
    blocks hit the L2; every tile loads all filters.
    """
    element = ELEMENT_BYTES[dtype]
    macs: Count = 0
    operations: Count = 0
    tensor_macs: Count = 0
    fragments: Count = 0
    moved_fragments: Count = 0
    steps: Count = 0
    for region in regions:
        region_macs = region.geometry.macs if region.geometry else sum(region.input_elements)
        region_work = region_macs * tiles.touched[region.name] // region.output_elements
        macs = macs + region_work
        operations = (
            operations + region.kernel.operations * tiles.touched[region.name] // region.output_elements
        )
        if region.name in tiles.products:
            product, times = tiles.products[region.name]
            tensor_macs = tensor_macs + region_work * product.is_profitable
            fragments = fragments + product.multiplications * product.is_profitable * times
            moved_fragments = moved_fragments + product.fragment_accesses * product.is_profitable * times
            steps = steps + product.turns * product.steps * product.is_profitable * times
    read_elements = {name: tiles.touched[name] for name in operands(regions)}
    sizes = {
        name: size for region in regions for name, size in zip(input_tensors(region), region.input_elements)
    }
    distinct_elements = sum(np.minimum(size, sizes[name]) for name, size in read_elements.items())
    weight_bytes = sum(region.weight_bytes(dtype) for region in regions)
    counts: dict[str, Count] = {
        "macs": macs,
        "operations": operations,
        "input_bytes": distinct_elements * element,
        "weight_bytes": weight_bytes,
        "output_bytes": regions[-1].output_elements * element,
        "again_bytes": (sum(read_elements.values()) - distinct_elements) * element
        + weight_bytes * (tiles.blocks * tiles.tiles - 1),
        "layers": tiles.waits * tiles.tiles,
        "blocks": tiles.blocks,
        "tensor_macs": tensor_macs,
        "fragments": fragments * tiles.blocks * tiles.tiles,
        "moved_fragments": moved_fragments * tiles.blocks * tiles.tiles,
        "steps": steps * tiles.tiles,
    }
    fields: dict[str, Any] = {name: int(n) if np.ndim(n) == 0 else n for name, n in counts.items()}
    return Kernel(kind="stream", **fields)


def operands(regions: Sequence[Region]) -> tuple[str, ...]:
    """Tensors that regions read from outside the group."""
    results = {region.name for region in regions}
    names = dict.fromkeys(name for region in regions for name in input_tensors(region))
    return tuple(name for name in names if name not in results)


def wait_count(layers: Sequence[Layer], chunk: int) -> int:
    """How often the threads of a block wait: after each of `layers`, or after each `chunk` of channels."""
    return len(layers) * (layers[0].maps[0][3].output_extent // chunk if chunk else 1)


def products(
    layers: Sequence[Layer],
    pixels: Mapping[str, Count],
    channels: Mapping[str, int],
    chunk_channels: Mapping[str, int],
) -> dict[str, tuple[ProductTile, int]]:
    """`Tiles.products` of `layers`.

    Parameters
    ----------
    pixels, channels : mapping of str to int
        By tensor, the largest number of pixels that a tile loads or computes, and channels in total.
    chunk_channels : mapping of str to int
        By tensor of which only some channels at a time are on chip, how many.
    """
    by_region = {}
    for layer in filter(is_product, layers):
        name, operand = layer.name, layer.inputs[0]
        part = chunk_channels.get(operand, channels[operand])
        filters = chunk_channels.get(name, channels[name])
        times = max(channels[operand] // part, channels[name] // filters)
        by_region[name] = ProductTile.from_layer(layer, pixels[name], part, filters), times
    return by_region
