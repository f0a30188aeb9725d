"""Legality of the commands that a timing engine issues, by the independent checker."""

from __future__ import annotations

import os
from collections import Counter
from itertools import islice

from pimflow.core.program import PimProgram
from pimflow.hardware import PimSpec
from pimflow.simulators.pim.checker import violations, violations_by_rule
from pimflow.simulators.pim.streams import distinct_channels
from pimflow.simulators.pim.timing import issued, issued_of_trace
from pimflow.simulators.pim.trace import Trace

# Commands at the start of a trace that are checked for violations: some seconds of work.
LOOKED_THROUGH = 200_000


def program_violations(program: PimProgram, pim: PimSpec) -> int:
    """Number of violations by the issued commands of all channels, by the independent checker."""
    return program_violations_by_rule(program, pim).total()


def program_violations_by_rule(program: PimProgram, pim: PimSpec) -> Counter[str]:
    """Number of violations by rule, for every rule that was checked."""
    counts: Counter[str] = Counter()
    for channel, channels_alike in distinct_channels(program, pim).items():
        found = violations_by_rule(issued(program, pim, channel), pim, program, channel)
        counts.update({rule: channels_alike * count for rule, count in found.items()})
    return counts


def first_violations(program: PimProgram, pim: PimSpec, limit: int) -> list[str]:
    """At most `limit` messages for violations of a program: channel, command, clock and rule of each."""
    found = (
        f"channel {channel}: {each}"
        for channel in distinct_channels(program, pim)
        for each in violations(issued(program, pim, channel), pim, program, channel, limit)
    )
    return list(islice(found, limit))


def trace_violations(path: str | os.PathLike[str], pim: PimSpec, limit: int) -> list[str]:
    """At most `limit` messages for violations in the first `LOOKED_THROUGH` commands of a ``.pim`` trace."""
    words = Trace.read(path).words[:LOOKED_THROUGH]
    return violations(issued_of_trace(words, pim), pim, limit=limit)[:limit]
