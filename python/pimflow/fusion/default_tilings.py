"""Tilings of groups without a planned tiling: for a CPU's cores, and for blocks of a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from pimflow.core.kernel import ELEMENT_BYTES
from pimflow.fusion.channels import SUM_BYTES, single_run
from pimflow.fusion.growing import GrowingGroup
from pimflow.fusion.layers import LayerGraph
from pimflow.fusion.tiling import GroupTiling
from pimflow.fusion.tiling_candidates import TilingCandidates

CHUNKS = (8, 16, 32, 64)  # channels that are computed at a time
CHUNK_OVERHEAD_TERMS = 256  # of a layer, for each tile and chunk: as many terms take as long (assumed)


@dataclass(frozen=True, kw_only=True)
class TileMemory:
    """The memory for tiles; by default, that of a CPU core.

    Attributes
    ----------
    near_bytes : int
        Size that tiles may take without extra cost: a quarter of a second-level cache of 256 KiB (assumed),
        which leaves space for weights and operands.
    """

    near_bytes: int = 64 * 1024
    max_bytes: int = 1 << 62
    cores: int = 8
    element_bytes: int = ELEMENT_BYTES["fp32"]

    @classmethod
    def gpu_block(cls, dtype: str, shared_bytes: int) -> TileMemory:
        """The memory of a block of GPU threads, which has `shared_bytes` of shared memory."""
        return cls(
            near_bytes=max(shared_bytes, 1),
            max_bytes=shared_bytes,
            cores=64,
            element_bytes=ELEMENT_BYTES[dtype],
        )


def default_tilings(graph: LayerGraph, terms: Mapping[str, int], memory: TileMemory) -> Iterator[GroupTiling]:
    """Tilings of all layers of `graph` as one group, by ascending cost.

    Parameters
    ----------
    terms : mapping of str to int
        By layer, number of products or other terms of one element of its result.
    """
    growing = GrowingGroup(graph, TilingCandidates.from_graph(graph, "recompute"), "lifetime")
    for position in reversed(range(len(graph.layers))):
        growing.grow(position)
    tiles = growing.candidates.tiles
    work = sum(growing.tiles[layer.name].touched * terms[layer.name] for layer in graph.layers)
    costed = []
    for chunk in (0, *CHUNKS):
        run = single_run(graph.layers, chunk) if chunk else None
        if chunk and run is None:
            continue
        chunks = graph.layers[0].maps[0][3].output_extent // chunk if chunk else 1
        cost = work + len(graph.layers) * tiles * chunks * CHUNK_OVERHEAD_TERMS
        if run and run.sums:  # sums are read and written for every chunk
            cost = cost + 2 * chunks * growing.tiles[graph.layers[-1].name].touched
        sums = max(1, SUM_BYTES // memory.element_bytes)
        tile_bytes = growing.tile_elements(run, sums) * memory.element_bytes
        imbalance = -(-tiles // memory.cores) * memory.cores / tiles
        cost = cost * np.maximum(1.0, tile_bytes / memory.near_bytes) * imbalance
        feasible = np.flatnonzero(growing.allowed & (tile_bytes <= memory.max_bytes))
        costed += [(float(cost[index]), chunk, int(index)) for index in feasible]
    for _, chunk, index in sorted(costed):
        yield replace(growing.candidates.tiling(index), chunk=chunk)
