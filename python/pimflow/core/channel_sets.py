"""The sets of memory channels in which the tensors of a plan lie."""

from __future__ import annotations

from collections.abc import Iterable

from pimflow.core.candidate import Candidate
from pimflow.core.tensor_placement import ChannelSet


def result_channel_sets(candidate: Candidate) -> dict[str, ChannelSet]:
    """By region that a candidate covers, the set of channels of its result.

    Tensors between two regions of one candidate lie in the GPU channels. A tensor whose rows lie partly over
    all channels is one buffer, in the region of all channels: only this region reaches all of its bytes.
    """
    sets = dict.fromkeys(candidate.covers, ChannelSet.GPU)
    return sets | {candidate.covers[-1]: candidate.output.channels}


def channel_sets(candidates: Iterable[Candidate]) -> dict[str, ChannelSet]:
    """By region of a plan, the set of channels of its result; empty if all are in the GPU channels.

    A plan without PIM has one set: nothing takes channels from the GPU.
    """
    plan_candidates = tuple(candidates)
    if not any(candidate.uses_pim for candidate in plan_candidates):
        return {}
    sets: dict[str, ChannelSet] = {}
    for candidate in plan_candidates:
        sets |= result_channel_sets(candidate)
    return sets if set(sets.values()) - {ChannelSet.GPU} else {}
