"""Sets of memory channels that tensors lie in: each has a region of its own in the pool of a network."""

from __future__ import annotations

from collections.abc import Iterable

from pimflow.core.candidate import IN_PIM, OVER_ALL, Candidate
from pimflow.core.plan import PLACES

IN_LEFT, IN_ALL, IN_THOSE_WITH_PIM = PLACES


def channel_set(layout: str) -> str:
    """The set of channels, one of `core.plan.PLACES`, in whose region a tensor of that layout lies.

    One that lies over all channels from a row on, and above it in those left, is one buffer. It lies in the
    region of all channels, which is the only one that reaches all of its bytes.
    """
    if layout.startswith(OVER_ALL):
        return IN_ALL
    return IN_THOSE_WITH_PIM if layout == IN_PIM else IN_LEFT


def lying(candidate: Candidate) -> dict[str, str]:
    """By region that a candidate covers, the set of channels that its result lies in.

    What a candidate of several regions passes from one to the next lies in the channels left.
    """
    sets = dict.fromkeys(candidate.covers, IN_LEFT)
    return sets | {candidate.covers[-1]: channel_set(candidate.output.layout)}


def channel_sets(candidates: Iterable[Candidate]) -> dict[str, str]:
    """By region of a plan, the set of channels that its result lies in; empty if there is but one set.

    A plan without PIM has one set: nothing takes channels from the GPU.
    """
    chosen = tuple(candidates)
    if all(candidate.rewrite.mode == "GPU" for candidate in chosen):
        return {}
    found: dict[str, str] = {}
    for candidate in chosen:
        found |= lying(candidate)
    return found if set(found.values()) - {IN_LEFT} else {}
