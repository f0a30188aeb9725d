"""The sets of memory channels in which tensors lie; each set has its own region in a network's pool."""

from __future__ import annotations

from collections.abc import Iterable

from pimflow.core.candidate import IN_PIM, OVER_ALL, Candidate
from pimflow.core.plan import PLACES

IN_LEFT, IN_ALL, IN_THOSE_WITH_PIM = PLACES


def channel_set(layout: str) -> str:
    """The set of channels of a layout: one of `core.plan.PLACES`.

    A tensor whose rows lie partly over all channels, partly in the GPU channels, is one buffer. It lies in
    the region of all channels, because only this region reaches all of its bytes.
    """
    if layout.startswith(OVER_ALL):
        return IN_ALL
    return IN_THOSE_WITH_PIM if layout == IN_PIM else IN_LEFT


def lying(candidate: Candidate) -> dict[str, str]:
    """By region that a candidate covers, the set of channels of its result.

    Tensors between two regions of one candidate lie in the GPU channels.
    """
    sets = dict.fromkeys(candidate.covers, IN_LEFT)
    return sets | {candidate.covers[-1]: channel_set(candidate.output.layout)}


def channel_sets(candidates: Iterable[Candidate]) -> dict[str, str]:
    """By region of a plan, the set of channels of its result; empty if all are in the GPU channels.

    A plan without PIM has one set: nothing takes channels from the GPU.
    """
    chosen = tuple(candidates)
    if all(candidate.rewrite.mode == "GPU" for candidate in chosen):
        return {}
    found: dict[str, str] = {}
    for candidate in chosen:
        found |= lying(candidate)
    return found if set(found.values()) - {IN_LEFT} else {}
