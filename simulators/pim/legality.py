"""Whether the commands that an engine issued are legal, by the independent checker."""

from __future__ import annotations

from pimflow.core.program import PimProgram
from pimflow.hardware import PimSpec
from pimflow.simulators.pim.checker import count_violations
from pimflow.simulators.pim.streams import distinct_channels
from pimflow.simulators.pim.timing import issued


def program_violations(program: PimProgram, pim: PimSpec) -> int:
    """Illegal commands over the issued clocks of all channels, as the independent checker counts them."""
    return sum(
        channels_alike * count_violations(issued(program, pim, channel), pim, program, channel)
        for channel, channels_alike in distinct_channels(program, pim).items()
    )
