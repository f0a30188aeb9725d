"""Candidates that do a run of regions as one GPU kernel, which never holds the tensors between them.

Runs of a decomposed network (`RegionGraph.runs`) have a kernel of their own form; any other regions that
stand side by side (`RegionGraph.fusible`) are done in the tiles that `Tilings` finds.
"""

from __future__ import annotations

from collections.abc import Sequence

from pimflow.core.candidate import Candidate, Port, Rewrite
from pimflow.core.region import Kernel
from pimflow.fusion import GroupTiling
from pimflow.placement.candidates.candidates import Candidates
from pimflow.placement.candidates.tasks import weight_bytes
from pimflow.placement.candidates.tiled_kernels import run_tiles, tiled_kernel


def kernel(maker: Candidates, covers: Sequence[str], tiling: GroupTiling | None = None) -> Kernel | None:
    """The kernel of a group in the tiles of `tiling`, or of a run in its own; None if these fit no block."""
    if tiling is not None:
        return maker.tilings.kernel(covers, tiling)
    regions = [maker.graph.region(name) for name in covers]
    tiles = run_tiles(regions, maker.system.dtype)
    return tiled_kernel(regions, tiles, maker.system.dtype) if tiles else None


def make(
    maker: Candidates,
    covers: Sequence[str],
    gpu_channels: int | None = None,
    tiling: GroupTiling | None = None,
) -> Candidate:
    """The candidate that does `covers` as one kernel.

    Parameters
    ----------
    gpu_channels : int, optional
        Memory channels of the GPU; those of a mixed plan by default.
    tiling : GroupTiling, optional
        The tiling of a group of `Tilings`. Its kernel does nothing that PIM left undone.
    """
    system = maker.system
    channels = system.gpu_channels if gpu_channels is None else gpu_channels
    schedule = "" if tiling is None else str(tiling)
    regions = [maker.graph.region(name) for name in covers]
    return Candidate(
        name=f"FUSED {len(covers)}" + (f" {schedule}" if schedule else ""),
        covers=tuple(covers),
        gpu_share=1.0,
        input=Port(dtype=system.dtype, accepts_pending=tiling is None),
        output=Port(dtype=system.dtype),
        tasks=(maker.tasks.gpu(" + ".join(covers), kernel(maker, covers, tiling), channels),),
        rewrite=Rewrite(mode="GPU", gpu_rows=regions[-1].output_rows, schedule=schedule),
        filter_bytes=sum(weight_bytes(region, system.dtype) for region in regions),
    )


def on_channels(maker: Candidates, candidate: Candidate, gpu_channels: int) -> Candidate:
    """What `candidate` does on the GPU, while so many memory channels serve it."""
    rewrite = candidate.rewrite
    if len(candidate.covers) == 1 and not rewrite.schedule:
        region = maker.graph.region(candidate.covers[0])
        return maker.make(region, "GPU", gpu_channels=gpu_channels, primitive=rewrite.primitive)
    tiling = GroupTiling.parse(rewrite.schedule) if rewrite.schedule else None
    return make(maker, candidate.covers, gpu_channels, tiling)


def candidates(maker: Candidates) -> dict[str, list[Candidate]]:
    """By first region, all candidates that do several regions as one kernel."""

    def each() -> dict[str, list[Candidate]]:
        several(maker, maker.system.gpu.memory_channels)  # which `on_gpu` will ask for
        by_region: dict[str, list[Candidate]] = {}
        for candidate in several(maker, maker.system.gpu_channels):
            by_region.setdefault(candidate.covers[0], []).append(candidate)
        return by_region

    return maker.costs.together(each)


def several(maker: Candidates, channels: int) -> list[Candidate]:
    """All candidates that do several regions as one kernel while `channels` memory channels serve the GPU.

    The same groups whatever the channels: what keeps to a bound on memory does so on all of them.
    """
    groups = dict.fromkeys(each for count in channel_counts(maker) for each in maker.tilings.best(count))
    return runs(maker, channels) + [make(maker, each.covers, channels, each.tiling) for each in groups]


def channel_counts(maker: Candidates) -> list[int]:
    """How many memory channels serve the GPU: in a mixed plan, and alone."""
    return sorted({maker.system.gpu_channels, maker.system.gpu.memory_channels})


def runs(maker: Candidates, channels: int) -> list[Candidate]:
    """The runs of a decomposed network, each as one kernel."""
    return [make(maker, covers, channels) for covers in maker.graph.runs if kernel(maker, covers)]


def every_on_gpu(maker: Candidates, channels: int) -> dict[str, tuple[Candidate, ...]]:
    """By first region, all candidates on the GPU while `channels` memory channels serve it."""
    by_region = {region.name: list(maker.on_gpu(region, channels)) for region in maker.graph.regions}
    for candidate in several(maker, channels):
        by_region[candidate.covers[0]].append(candidate)
    return {name: tuple(candidates) for name, candidates in by_region.items()}


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
