"""Candidates that do a group of consecutive regions as one GPU kernel, without storing what lies between.

`Tilings` finds the tiles: for runs of a decomposed network (`RegionGraph.runs`), and for other neighbouring
regions (`RegionGraph.fusible`).
"""

from __future__ import annotations

from collections.abc import Sequence

from pimflow.core.candidate import Candidate, Port, Rewrite
from pimflow.fusion import GroupTiling
from pimflow.placement.candidates.candidates import Candidates
from pimflow.placement.candidates.tasks import weight_bytes


def make(
    maker: Candidates, covers: Sequence[str], gpu_channels: int | None, tiling: GroupTiling
) -> Candidate:
    """The candidate that does `covers` as one kernel. It fuses no deferred epilogue of PIM.

    Parameters
    ----------
    gpu_channels : int, optional
        Memory channels of the GPU; those of a mixed plan if None.
    """
    system = maker.system
    beside = system.gpu_channels or system.gpu.memory_channels
    channels = beside if gpu_channels is None else gpu_channels
    regions = [maker.graph.region(name) for name in covers]
    return Candidate(
        name=f"FUSED {len(covers)} {tiling}",
        covers=tuple(covers),
        gpu_share=1.0,
        input=Port(dtype=system.dtype, accepts_pending=False),
        output=Port(dtype=system.dtype),
        tasks=(maker.tasks.gpu(" + ".join(covers), maker.tilings.kernel(covers, tiling), channels),),
        rewrite=Rewrite(mode="GPU", gpu_rows=regions[-1].output_rows, schedule=str(tiling)),
        filter_bytes=sum(weight_bytes(region, system.dtype) for region in regions),
    )


def on_channels(maker: Candidates, candidate: Candidate, gpu_channels: int) -> Candidate:
    """The GPU candidate `candidate` with `gpu_channels` memory channels."""
    rewrite = candidate.rewrite
    if len(candidate.covers) == 1 and not rewrite.schedule:
        region = maker.graph.region(candidate.covers[0])
        return maker.make(region, "GPU", gpu_channels=gpu_channels, primitive=rewrite.primitive)
    return make(maker, candidate.covers, gpu_channels, GroupTiling.parse(rewrite.schedule))


def candidates(maker: Candidates) -> dict[str, list[Candidate]]:
    """By first region, all candidates that do several regions as one kernel."""

    def each() -> dict[str, list[Candidate]]:
        """Generate them, and request all kernels that they need."""
        several(maker, maker.system.gpu.memory_channels)  # the search of plans without PIM needs these
        by_region: dict[str, list[Candidate]] = {}
        system = maker.system
        for candidate in several(maker, system.gpu_channels or system.gpu.memory_channels):
            by_region.setdefault(candidate.covers[0], []).append(candidate)
        return by_region

    return maker.costs.together(each)


def several(maker: Candidates, channels: int) -> list[Candidate]:
    """All candidates that do several regions as one kernel, with `channels` memory channels.

    The groups are the same for any number of channels, so that a bound on memory that can be met with one
    number can be met with all.
    """
    groups = dict.fromkeys(each for count in channel_counts(maker) for each in maker.tilings.best(count))
    return [make(maker, each.covers, channels, each.tiling) for each in groups]


def runs(maker: Candidates, channels: int) -> list[Candidate]:
    """The candidates of `several` that do a run of a decomposed network."""
    return [each for each in several(maker, channels) if each.covers in maker.graph.runs]


def channel_counts(maker: Candidates) -> list[int]:
    """How many memory channels the GPU has: in a mixed plan, and in a plan without PIM."""
    return sorted({maker.system.gpu_channels, maker.system.gpu.memory_channels} - {0})


def every_on_gpu(maker: Candidates, channels: int) -> dict[str, tuple[Candidate, ...]]:
    """By first region, all GPU candidates with `channels` memory channels."""
    by_region = {region.name: list(maker.on_gpu(region, channels)) for region in maker.graph.regions}
    for candidate in several(maker, channels):
        by_region[candidate.covers[0]].append(candidate)
    return {name: tuple(candidates) for name, candidates in by_region.items()}
