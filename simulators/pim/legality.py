"""Whether the commands that an engine issued are legal, by the independent checker."""

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

# Commands of a trace among which the first violations are looked for: some seconds of work.
LOOKED_THROUGH = 200_000


def program_violations(program: PimProgram, pim: PimSpec) -> int:
    """Illegal commands over the issued clocks of all channels, as the independent checker counts them."""
    return program_violations_by_rule(program, pim).total()


def program_violations_by_rule(program: PimProgram, pim: PimSpec) -> Counter[str]:
    """The same by rule, with every rule that was judged."""
    counts: Counter[str] = Counter()
    for channel, channels_alike in distinct_channels(program, pim).items():
        found = violations_by_rule(issued(program, pim, channel), pim, program, channel)
        counts.update({rule: channels_alike * count for rule, count in found.items()})
    return counts


def first_violations(program: PimProgram, pim: PimSpec, limit: int) -> list[str]:
    """At most `limit` of what `program_violations` counts: channel, command, clock and rule of each."""
    found = (
        f"channel {channel}: {each}"
        for channel in distinct_channels(program, pim)
        for each in violations(issued(program, pim, channel), pim, program, channel, limit)
    )
    return list(islice(found, limit))


def trace_violations(path: str | os.PathLike[str], pim: PimSpec, limit: int) -> list[str]:
    """At most `limit` of the violations in the first `LOOKED_THROUGH` commands of a ``.pim`` trace."""
    words = Trace.read(path).words[:LOOKED_THROUGH]
    return violations(issued_of_trace(words, pim), pim, limit=limit)[:limit]
