"""The sets of memory channels in which tensors lie; each set has its own region in a network's pool."""

from __future__ import annotations

from collections.abc import Iterable

from pimflow.core.candidate import IN_ALL_CHANNELS, IN_PIM_CHANNELS, Candidate
from pimflow.core.plan import CHANNEL_SETS

GPU_CHANNELS, ALL_CHANNELS, PIM_CHANNELS = CHANNEL_SETS


def channel_set(layout: str) -> str:
    """The set of channels of a layout: one of `core.plan.CHANNEL_SETS`.

    A tensor whose rows lie partly over all channels, partly in the GPU channels, is one buffer. It lies in
    the region of all channels, because only this region reaches all of its bytes.
    """
    if layout.startswith(IN_ALL_CHANNELS):
        return ALL_CHANNELS
    return PIM_CHANNELS if layout == IN_PIM_CHANNELS else GPU_CHANNELS


def result_channel_sets(candidate: Candidate) -> dict[str, str]:
    """By region that a candidate covers, the set of channels of its result.

    Tensors between two regions of one candidate lie in the GPU channels.
    """
    sets = dict.fromkeys(candidate.covers, GPU_CHANNELS)
    return sets | {candidate.covers[-1]: channel_set(candidate.output.layout)}


def channel_sets(candidates: Iterable[Candidate]) -> dict[str, str]:
    """By region of a plan, the set of channels of its result; empty if all are in the GPU channels.

    A plan without PIM has one set: nothing takes channels from the GPU.
    """
    plan_candidates = tuple(candidates)
    if all(candidate.rewrite.mode == "GPU" for candidate in plan_candidates):
        return {}
    sets: dict[str, str] = {}
    for candidate in plan_candidates:
        sets |= result_channel_sets(candidate)
    return sets if set(sets.values()) - {GPU_CHANNELS} else {}
