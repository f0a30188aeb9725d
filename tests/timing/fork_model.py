"""The published timing, tick by tick: a slow oracle that shares nothing with the engine.

Written from the rules of the authors' Ramulator fork: in order, one command a tick, refreshes pending from
every multiple of nREFI on and served only from the tick after a READRES or once the queue has drained.
"""

from collections.abc import Sequence

from pimflow.hardware.pim import PimSpec

GWRITE, G_ACT0, G_ACT1, G_ACT2, G_ACT3, COMP, READRES = range(7)
ACTIVATIONS = (G_ACT0, G_ACT1, G_ACT2, G_ACT3)
PREA, REF = "PREA", "REF"


def gaps(spec: PimSpec, hiding: bool) -> dict[tuple, int]:
    """Least distance of a later command from an earlier one."""
    n = spec.timing
    write_gap = 1 if hiding else 64
    table = {(GWRITE, later): write_gap for later in (GWRITE, *ACTIVATIONS)}
    table |= {(GWRITE, COMP): n["nRC"] + 16, (COMP, COMP): n["nCCDS"], (COMP, READRES): 1}
    table |= {(READRES, GWRITE): 6}
    table |= {(G_ACT0, G_ACT1): n["nFAW"], (G_ACT1, G_ACT2): n["nFAW"], (G_ACT2, G_ACT3): n["nFAW"]}
    table |= {(activation, COMP): n["nRCDR"] for activation in ACTIVATIONS}
    table |= {(PREA, G_ACT0): n["nRP"], (PREA, REF): n["nRP"]}
    return table | {(REF, G_ACT0): n["nRFC"], (REF, REF): n["nRFC"]}


def fork_cycles(stream: Sequence[int], spec: PimSpec, hiding: bool = True) -> int | None:
    """The cycles that the fork prints; None where it aborts, more than 32 refreshes being pending."""
    n, table = spec.timing, gaps(spec, hiding)
    earliest = dict.fromkeys((*range(7), PREA, REF), 0)
    tick = pending = done = departed = 0
    after_read = is_open = False

    def issue(command) -> None:
        for (before, after), gap in table.items():
            if before == command:
                earliest[after] = max(earliest[after], tick + gap)

    while True:
        tick += 1
        pending += tick % n["nREFI"] == 0
        if pending > 32:
            return None
        drained = done == len(stream)
        if pending and (drained or after_read):
            if is_open:
                issue(PREA)
                is_open = False
            elif tick >= earliest[REF]:
                issue(REF)
                pending -= 1
        elif not drained:
            after_read = False
            command = stream[done]
            if tick >= earliest[command]:
                issue(command)
                done += 1
                is_open = is_open or command in ACTIVATIONS
                if command == READRES:
                    after_read = True
                    departed = tick + n["nCL"] + n["nBL"]
        if done == len(stream) and not pending and tick >= max(done + 1, departed):
            return tick
