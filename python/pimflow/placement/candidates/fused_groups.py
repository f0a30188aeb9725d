"""Candidates that do a group of consecutive regions on the GPU: as one kernel, or by a substitution.

One kernel stores nothing that lies between the regions. `TilingSearch` finds its tiles: for runs of a
decomposed network (`RegionGraph.runs`), and for other neighbouring regions (`RegionGraph.fusible`).
"""

from __future__ import annotations

from collections.abc import Sequence

from pimflow.core.candidate import Candidate, Footprint
from pimflow.core.rewrite import FusedGroupRewrite, GroupRewrite, SubstitutionRewrite
from pimflow.fusion import GroupTiling
from pimflow.placement.candidates.candidates import CandidateGenerator
from pimflow.placement.candidates.substitutions import SUBSTITUTIONS


def make(
    generator: CandidateGenerator, covers: Sequence[str], gpu_channels: int | None, rewrite: GroupRewrite
) -> Candidate:
    """The candidate that does `covers` as `rewrite` says, with `gpu_channels` memory channels.

    It fuses no deferred epilogue of PIM.
    """
    regions = [generator.graph.region(region) for region in covers]
    if isinstance(rewrite, FusedGroupRewrite):
        name, parts = f"FUSED {len(covers)} {rewrite.tiling}", list[str]()
        kernels = [generator.tilings.kernel(covers, GroupTiling.parse(rewrite.tiling))]
    else:
        name = f"SUBSTITUTED {rewrite.substitution}"
        kernels = list(SUBSTITUTIONS[rewrite.substitution].kernels(regions, generator.system.dtype))
        parts = [rewrite.substitution] * len(kernels)
    return Candidate(
        name=name,
        covers=tuple(covers),
        rewrite=rewrite,
        tasks=generator.task_builder.gpu_sequence(" + ".join(covers), parts, kernels, gpu_channels),
        footprint=Footprint(
            workspace_bytes=sum(kernel.output_bytes for kernel in kernels[:-1]),
            filter_bytes=sum(region.weight_bytes(generator.system.dtype) for region in regions),
        ),
    )


def group_candidates(generator: CandidateGenerator, channels: int) -> list[Candidate]:
    """All candidates that do several regions together on the GPU, with `channels` memory channels.

    The groups are the same for any number of channels, so that a bound on memory that can be met with one
    number can be met with all.
    """
    counts = channel_counts(generator)
    tiled_groups = dict.fromkeys(group for count in counts for group in generator.tilings.best(count))
    rewrites: list[tuple[tuple[str, ...], GroupRewrite]] = [
        (group.covers, FusedGroupRewrite(tiling=str(group.tiling))) for group in tiled_groups
    ]
    for name, substitution in SUBSTITUTIONS.items():
        matches = substitution.matches(generator.graph)
        rewrites += [(covers, SubstitutionRewrite(substitution=name)) for covers in matches]
    return [make(generator, covers, channels, rewrite) for covers, rewrite in rewrites]


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
