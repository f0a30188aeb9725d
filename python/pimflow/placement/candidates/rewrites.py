"""The candidate of a rewrite, of any kind."""

from __future__ import annotations

from collections.abc import Sequence

from pimflow.core.candidate import Candidate
from pimflow.core.rewrite import (
    AttentionRewrite,
    FusedGroupRewrite,
    PipelineRewrite,
    Rewrite,
    SubstitutionRewrite,
)
from pimflow.placement.candidates import fused_groups, pim_attention, pipelines
from pimflow.placement.candidates.candidates import CandidateGenerator


def make(
    generator: CandidateGenerator,
    covers: Sequence[str],
    rewrite: Rewrite,
    gpu_channels: int | None = None,
) -> Candidate:
    """The candidate that does the regions `covers` as `rewrite` says, wherever tensors may lie.

    Parameters
    ----------
    gpu_channels : int, optional
        Memory channels of the GPU's kernels, if PIM has no part; those of a mixed plan by default.

    Raises
    ------
    PlanError
        If there is no such candidate.
    """
    channels = gpu_channels or generator.task_builder.kernel_channels
    match rewrite:
        case PipelineRewrite():
            return pipelines.make(generator, pipelines.to_pipeline(tuple(covers), rewrite), rewrite.schedules)
        case AttentionRewrite():
            return pim_attention.make(generator, covers, rewrite.schedule)
        case FusedGroupRewrite() | SubstitutionRewrite():
            return fused_groups.make(generator, covers, channels, rewrite)
    return generator.make(generator.graph.region(covers[0]), rewrite, channels)
