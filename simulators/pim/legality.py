"""Legality of the commands that a timing engine issues, by the independent checker."""

from __future__ import annotations

import os
from collections import Counter
from itertools import islice

from pimflow.core.program import PimProgram
from pimflow.hardware import PimSpec
from pimflow.simulators.pim.checker import violations, violations_by_rule
from pimflow.simulators.pim.streams import distinct_channels
from pimflow.simulators.pim.timing import issue_program, issue_trace
from pimflow.simulators.pim.trace import Trace

# Commands at the start of a trace that are checked for violations: some seconds of work.
MAX_TRACE_COMMANDS = 200_000


def program_violations(program: PimProgram, pim: PimSpec) -> int:
    """Number of violations by the issued commands of all channels, by the independent checker."""
    return program_violations_by_rule(program, pim).total()


def program_violations_by_rule(program: PimProgram, pim: PimSpec) -> Counter[str]:
    """Number of violations by rule, for every rule that was checked."""
    counts: Counter[str] = Counter()
    pim = pim.with_weights_of(program)
    for channel, equal_channels in distinct_channels(program, pim).items():
        channel_counts = violations_by_rule(issue_program(program, pim, channel), pim, program, channel)
        counts.update({rule: equal_channels * count for rule, count in channel_counts.items()})
    return counts


def first_violations(program: PimProgram, pim: PimSpec, limit: int) -> list[str]:
    """At most `limit` messages for violations of a program: channel, command, clock and rule of each."""
    pim = pim.with_weights_of(program)
    messages = (
        f"channel {channel}: {message}"
        for channel in distinct_channels(program, pim)
        for message in violations(issue_program(program, pim, channel), pim, program, channel, limit)
    )
    return list(islice(messages, limit))


def trace_violations(path: str | os.PathLike[str], pim: PimSpec, limit: int) -> list[str]:
    """At most `limit` messages for violations in the first `MAX_TRACE_COMMANDS` commands of a ``.pim``
    trace.
    """
    words = Trace.read(path).words[:MAX_TRACE_COMMANDS]
    return violations(issue_trace(words, pim), pim, limit=limit)[:limit]
