"""Candidates that do a group of consecutive regions on the GPU: as one kernel, or by a substitution.

One kernel stores nothing that lies between the regions. `TilingSearch` finds its tiles: for runs of a
decomposed network (`RegionGraph.runs`), and for other neighbouring regions (`RegionGraph.fusible`).
"""

from __future__ import annotations

from collections.abc import Sequence

from pimflow.core.candidate import Candidate, Footprint
from pimflow.core.rewrite import FusedGroupRewrite
from pimflow.fusion import GroupTiling
from pimflow.placement.candidates import substitutions
from pimflow.placement.candidates.candidates import CandidateGenerator


def make(
    generator: CandidateGenerator, covers: Sequence[str], gpu_channels: int, tiling: GroupTiling
) -> Candidate:
    """The candidate that does `covers` as one kernel, with `gpu_channels` memory channels.

    It fuses no deferred epilogue of PIM.
    """
    regions = [generator.graph.region(name) for name in covers]
    return Candidate(
        name=f"FUSED {len(covers)} {tiling}",
        covers=tuple(covers),
        rewrite=FusedGroupRewrite(tiling=str(tiling)),
        tasks=(
            generator.task_builder.gpu_task(
                " + ".join(covers), generator.tilings.kernel(covers, tiling), gpu_channels
            ),
        ),
        footprint=Footprint(
            filter_bytes=sum(region.weight_bytes(generator.system.dtype) for region in regions)
        ),
    )


def candidates(generator: CandidateGenerator) -> dict[str, list[Candidate]]:
    """By first region, all candidates that do several regions together on the GPU."""

    def generate() -> dict[str, list[Candidate]]:
        """Generate them, and request all kernels that they need."""
        # the search of plans without PIM needs these
        group_candidates(generator, generator.system.gpu.memory_channels)
        by_region: dict[str, list[Candidate]] = {}
        for candidate in group_candidates(generator, generator.task_builder.kernel_channels):
            by_region.setdefault(candidate.covers[0], []).append(candidate)
        return by_region

    return generator.costs.batch_kernels(generate)


def group_candidates(generator: CandidateGenerator, channels: int) -> list[Candidate]:
    """All candidates that do several regions together, with `channels` memory channels.

    The groups are the same for any number of channels, so that a bound on memory that can be met with one
    number can be met with all.
    """
    groups = dict.fromkeys(
        group for count in channel_counts(generator) for group in generator.tilings.best(count)
    )
    return [
        *(make(generator, group.covers, channels, group.tiling) for group in groups),
        *substitutions.candidates(generator, channels),
    ]


def channel_counts(generator: CandidateGenerator) -> list[int]:
    """How many memory channels the GPU has: in a mixed plan, and in a plan without PIM."""
    return sorted({generator.system.gpu_channels, generator.system.gpu.memory_channels} - {0})


def gpu_candidates(generator: CandidateGenerator, channels: int) -> dict[str, tuple[Candidate, ...]]:
    """By first region, all GPU candidates with `channels` memory channels."""
    by_region = {
        region.name: list(generator.gpu_candidates(region, channels)) for region in generator.graph.regions
    }
    for candidate in group_candidates(generator, channels):
        by_region[candidate.covers[0]].append(candidate)
    return {name: tuple(candidates) for name, candidates in by_region.items()}
