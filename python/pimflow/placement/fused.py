"""Candidates that do a run of regions as one GPU kernel, which never holds the tensors between them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pimflow.core.candidate import Candidate, Port, Rewrite
from pimflow.core.fused_tile import GPU_TILE, recomputed
from pimflow.core.region import ELEMENT_BYTES, Kernel, Region
from pimflow.placement.candidates import Candidates


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


def make(maker: Candidates, covers: Sequence[str], gpu_channels: int | None = None) -> Candidate:
    """The candidate that does `covers` as one kernel.

    Parameters
    ----------
    gpu_channels : int, optional
        Memory channels of the GPU; those of a mixed plan by default.
    """
    system, regions = maker.system, [maker.graph.region(name) for name in covers]
    channels = system.gpu_channels if gpu_channels is None else gpu_channels
    port = Port(dtype=system.dtype)
    return Candidate(
        name=f"FUSED {len(covers)}",
        covers=tuple(covers),
        gpu_share=1.0,
        input=Port(dtype=system.dtype, accepts_pending=True),
        output=port,
        tasks=(maker.tasks.gpu(" + ".join(covers), kernel(regions, system.dtype), channels),),
        rewrite=Rewrite(mode="GPU", gpu_rows=regions[-1].output_rows),
    )


def candidates(maker: Candidates) -> dict[str, list[Candidate]]:
    """By first region, the runs of `RegionGraph.runs`."""

    def each() -> dict[str, list[Candidate]]:
        for covers in maker.graph.runs:  # which `on_gpu` will ask for
            make(maker, covers, maker.system.gpu.memory_channels)
        return {covers[0]: [make(maker, covers)] for covers in maker.graph.runs}

    return maker.costs.together(each)


def on_gpu(maker: Candidates, channels: int) -> tuple[Candidate, ...]:
    """The whole network on the GPU, runs as one kernel where that is faster."""
    alone = {r.name: maker.make(r, "GPU", gpu_channels=channels) for r in maker.graph.regions}
    found, inside = [], set[str]()
    runs = {covers[0]: covers for covers in maker.graph.runs}
    for name, candidate in alone.items():
        if name in inside:
            continue
        covers = runs.get(name, ())
        together = make(maker, covers, channels) if covers else candidate
        if _duration_ns(together) < sum(_duration_ns(alone[each]) for each in covers):
            found.append(together)
            inside.update(covers)
        else:
            found.append(candidate)
    return tuple(found)


def _duration_ns(candidate: Candidate) -> float:
    return sum(task.duration_ns for task in candidate.tasks)
