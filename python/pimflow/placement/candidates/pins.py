"""Layers that are pinned to a device: restrictions of the candidates that a search chooses from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from pimflow.core.candidate import Candidate
from pimflow.core.rewrite import SplitRewrite
from pimflow.core.split import AXES
from pimflow.errors import PlanError, UnknownNameError
from pimflow.placement.candidates.candidates import CandidateGenerator


def pinned_candidates(
    generator: CandidateGenerator, candidates: Mapping[str, Iterable[Candidate]]
) -> dict[str, tuple[Candidate, ...]]:
    """By region, the candidates that do each of their regions as it is pinned (`GoalOptions.pins`).

    Splits with a share that is pinned are added.

    Raises
    ------
    UnknownNameError
        If a pinned layer is none of the network.
    PlanError
        If no candidate does a layer so.
    """
    pins = generator.pins
    region_names = [region.name for region in generator.graph.regions]
    for name in pins:
        if name not in region_names:
            raise UnknownNameError("layer", name, region_names)
    remaining = {
        name: tuple(
            candidate
            for candidate in (*region_candidates, *_pin_splits(generator, name))
            if all(_does_as_pinned(generator, candidate, region) for region in candidate.covers)
        )
        for name, region_candidates in candidates.items()
    }
    covered = {
        region for kept_candidates in remaining.values() for c in kept_candidates for region in c.covers
    }
    for name, how in pins.items():
        if name not in covered:
            raise PlanError(f"layer '{name}' cannot be {how}: {_obstacle(generator, name)}")
    return remaining


def _pin_splits(generator: CandidateGenerator, name: str) -> Iterator[Candidate]:
    """The splits of a region with the share that is pinned, along every axis that has such a split."""
    mode, _, share = generator.pins.get(name, "").partition(":")
    region = generator.graph.region(name)
    if mode != "split" or not share or generator.unsupported_reason(region):
        return
    for axis in AXES:
        rewrite = SplitRewrite(axis=axis, gpu_share=float(share))
        split = rewrite.split(region.layer)
        if split not in generator.splits(region) and not generator.unsupported_split_reason(region, split):
            yield generator.make(region, rewrite)


def _does_as_pinned(generator: CandidateGenerator, candidate: Candidate, name: str) -> bool:
    """Whether a candidate does one of its regions as it is pinned."""
    mode, _, share = generator.pins.get(name, "").partition(":")
    rewrite = candidate.rewrite
    if not mode:
        return True
    if mode == "gpu":
        return name not in candidate.pim_regions
    if mode == "pim":
        return name in candidate.pim_regions and not isinstance(rewrite, SplitRewrite)
    if not isinstance(rewrite, SplitRewrite):
        return False
    layer = generator.graph.region(name).layer
    pinned_split = SplitRewrite(axis=rewrite.axis, gpu_share=float(share or 0)).split(layer)
    return not share or rewrite.split(layer) == pinned_split


def _obstacle(generator: CandidateGenerator, name: str) -> str:
    """Why no candidate does a region as it is pinned."""
    mode, _, share = generator.pins[name].partition(":")
    region = generator.graph.region(name)
    if reason := generator.unsupported_reason(region):
        return reason
    if mode == "split" and share:
        split = SplitRewrite(axis=AXES[0], gpu_share=float(share)).split(region.layer)
        return generator.unsupported_split_reason(region, split) or "other pins leave no such split"
    return f"no candidate is, in the modes {', '.join(generator.modes).lower()}"
