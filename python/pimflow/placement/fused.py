"""Candidates that do a run of regions as one GPU kernel, which never holds the tensors between them.

Runs of a decomposed network (`RegionGraph.runs`) have a kernel of their own form; any other regions that
stand side by side (`RegionGraph.fusible`) are done in the tiles that `Tilings` finds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pimflow.core.candidate import Candidate, Port, Rewrite
from pimflow.core.fused_tile import GPU_TILE, recomputed
from pimflow.core.region import ELEMENT_BYTES, Kernel, Region
from pimflow.deep_fusion import Tiling
from pimflow.placement.candidates import Candidates
from pimflow.placement.tasks import weight_bytes


def kernel(regions: Sequence[Region], dtype: str) -> Kernel:
    """The kernel of a run: it moves the operand of its first region and the result of its last.

    Tiles that read the same pixels through a window each compute them: that is arithmetic, not traffic.
    """
    element, first, last = ELEMENT_BYTES[dtype], regions[0], regions[-1]
    macs, times = 0.0, 1.0
    for region in reversed(regions):
        own = region.geometry.macs if region.geometry else region.input_elements[0]
        macs += own * times
        if region.pooling is not None:
            times *= recomputed(region.pooling, GPU_TILE, GPU_TILE)
    others = sum(math.prod(shape) for region in regions for shape in region.input_shapes[1:])
    return Kernel(
        kind="stream",
        macs=round(macs),
        input_bytes=(math.prod(first.input_shapes[0]) + others) * element,
        weight_bytes=sum(region.weight_elements for region in regions) * element,
        output_bytes=last.output_elements * element,
    )


def make(
    maker: Candidates,
    covers: Sequence[str],
    gpu_channels: int | None = None,
    tiling: Tiling | None = None,
) -> Candidate:
    """The candidate that does `covers` as one kernel.

    Parameters
    ----------
    gpu_channels : int, optional
        Memory channels of the GPU; those of a mixed plan by default.
    tiling : Tiling, optional
        Of a group of `Tilings`. Its kernel takes in nothing that PIM left undone.
    """
    system, regions = maker.system, [maker.graph.region(name) for name in covers]
    channels = system.gpu_channels if gpu_channels is None else gpu_channels
    work = kernel(regions, system.dtype) if tiling is None else maker.tilings.kernel(covers, tiling)
    schedule = "" if tiling is None else str(tiling)
    return Candidate(
        name=f"FUSED {len(covers)}" + (f" {schedule}" if schedule else ""),
        covers=tuple(covers),
        gpu_share=1.0,
        input=Port(dtype=system.dtype, accepts_pending=tiling is None),
        output=Port(dtype=system.dtype),
        tasks=(maker.tasks.gpu(" + ".join(covers), work, channels),),
        rewrite=Rewrite(mode="GPU", gpu_rows=regions[-1].output_rows, schedule=schedule),
        filter_bytes=sum(weight_bytes(region, system.dtype) for region in regions),
    )


def candidates(maker: Candidates) -> dict[str, list[Candidate]]:
    """By first region, all that do several regions as one kernel."""

    def each() -> dict[str, list[Candidate]]:
        _every(maker, maker.system.gpu.memory_channels)  # which `on_gpu` will ask for
        found: dict[str, list[Candidate]] = {}
        for candidate in _every(maker, maker.system.gpu_channels):
            found.setdefault(candidate.covers[0], []).append(candidate)
        return found

    return maker.costs.together(each)


def _every(maker: Candidates, channels: int) -> list[Candidate]:
    runs = [make(maker, covers, channels) for covers in maker.graph.runs]
    return runs + [make(maker, each.covers, channels, each.tiling) for each in maker.tilings.best(channels)]


def every_on_gpu(maker: Candidates, channels: int) -> dict[str, tuple[Candidate, ...]]:
    """By first region, all that the GPU may do while so many memory channels serve it."""
    several: dict[str, list[Candidate]] = {}
    for candidate in _every(maker, channels):
        several.setdefault(candidate.covers[0], []).append(candidate)
    return {r.name: (*maker.on_gpu(r, channels), *several.get(r.name, ())) for r in maker.graph.regions}


def on_gpu(maker: Candidates, channels: int) -> tuple[Candidate, ...]:
    """The whole network on the GPU, by primitives and several regions as one kernel where that is faster.

    The best way up to each region: kernels run one after the other.
    """
    every, regions = every_on_gpu(maker, channels), maker.graph.regions
    ways: list[tuple[float, tuple[Candidate, ...]] | None] = [(0.0, ())] + [None] * len(regions)
    for begin, region in enumerate(regions):
        if ways[begin] is None:
            continue
        before_ns, chosen = ways[begin]
        for candidate in every[region.name]:
            behind = begin + len(candidate.covers)
            total_ns = before_ns + sum(task.duration_ns for task in candidate.tasks)
            if ways[behind] is None or total_ns < ways[behind][0]:
                ways[behind] = (total_ns, (*chosen, candidate))
    return ways[-1][1]
