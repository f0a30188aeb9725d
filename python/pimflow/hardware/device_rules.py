"""Rules of DRAM standards that the file of a PIM device keeps to: a lint, by the terms of JEDEC.

The checker of issued commands (`simulators.pim.checker`) knows the same rules by itself; this says before
anything is issued that a file cannot be right: it leaves out a rule, its rules contradict one another, or a
value is in another unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from pimflow.hardware.constraints import Constraint


class RuledDevice(Protocol):
    """What the rules read of a device; its fields are those of `PimSpec`."""

    @property
    def tCK_ps(self) -> float: ...

    @property
    def tCK_ns(self) -> float: ...

    @property
    def gangs(self) -> int: ...

    @property
    def banks(self) -> int: ...

    @property
    def banks_per_gang(self) -> int: ...

    @property
    def faw_banks(self) -> int: ...

    @property
    def timing(self) -> dict[str, int]: ...

    @property
    def constraints(self) -> tuple[Constraint, ...]: ...

    @property
    def can_write(self) -> bool: ...

    @property
    def can_write_latches(self) -> bool: ...

    @property
    def can_activate(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class DeviceRule:
    """A rule of DRAM standards.

    Attributes
    ----------
    term : str
        The term of JEDEC, such as ``tFAW``.
    fault : callable
        Takes a device; returns why the device breaks the rule, empty if it does not.
    """

    term: str
    text: str
    fault: Callable[[RuledDevice], str]


# Plausible times in ns: those of JEDEC's DRAMs, with room of about ten times on both sides.
_TIMES_NS = {"tRC": ("nRC", 4.0, 500.0), "tREFI": ("nREFI", 200.0, 80_000.0), "tRFC": ("nRFC", 10.0, 5_000.0)}
_PERIOD_PS = (50.0, 20_000.0)
# By term: the commands between which the latency holds, whether only within a gang, the latency, and that of
# each further burst.
_GAPS: tuple[tuple[str, str, str, bool, str, str], ...] = (
    ("tRRD", "G_ACT", "G_ACT", False, "nRRD", ""),
    ("tRCD", "G_ACT", "COMP", True, "nRCDR", ""),
    ("tRAS", "G_ACT", "PRE", True, "nRAS", ""),
    ("tRC", "G_ACT", "G_ACT", True, "nRC", ""),
    ("tRP", "PRE", "G_ACT", True, "nRP", ""),
    ("tRP", "PRE", "REF", True, "nRP", ""),
    ("tRTP", "COMP", "PRE", True, "nRTP", ""),
    ("tCCD", "COMP", "COMP", False, "nCCDS", ""),
    ("BL", "GWRITE", "GWRITE", False, "nBL", "nBL"),
    ("BL", "READRES", "READRES", False, "nBL", "nBL"),
    ("tRTW", "READRES", "GWRITE", False, "nTURN", "nBL"),
    ("tWTR", "GWRITE", "READRES", False, "nTURN", "nBL"),
)
_WRITE_GAPS: tuple[tuple[str, str, str, bool, str, str], ...] = (
    ("tRCD", "G_ACT", "WRITE", True, "nRCDW", ""),
    ("tWR", "WRITE", "PRE", True, "nWRP", "nBL"),
    ("tWTR", "WRITE", "COMP", True, "nWTC", "nBL"),
)


def device_rules(spec: RuledDevice) -> tuple[DeviceRule, ...]:
    """The rules for a device, in the order in which they are checked."""
    gaps = (*_GAPS, *(_WRITE_GAPS if spec.can_write else ()))
    return (
        DeviceRule(term="tCK", text="the period of the command clock is in picoseconds", fault=_period_fault),
        *(_time_rule(term, *entry) for term, entry in _TIMES_NS.items()),
        DeviceRule(
            term="tFAW",
            text="a G_ACT opens at most the banks that may be opened within tFAW (four, or 'faw_banks')",
            fault=_gang_fault,
        ),
        DeviceRule(term="tFAW", text="no more banks are opened within a window of nFAW", fault=_window_fault),
        DeviceRule(
            term="tRC", text="a cycle of a row lasts at least as long as it is open", fault=_cycle_fault
        ),
        DeviceRule(term="tFAW", text="the window is at least as long as nRRD", fault=_short_window_fault),
        DeviceRule(term="BL", text="a turnaround is at least as long as a burst", fault=_turnaround_fault),
        *(_gap_rule(*gap) for gap in gaps),
        DeviceRule(term="tRFC", text="every command waits nRFC after a REF", fault=_refresh_fault),
    )


def rule_faults(spec: RuledDevice) -> Iterator[str]:
    """Why a device breaks each rule that it breaks, with the rule's term first."""
    for rule in device_rules(spec):
        if fault := rule.fault(spec):
            yield f"{rule.term}: {fault}"


def _period_fault(spec: RuledDevice) -> str:
    low, high = _PERIOD_PS
    if low <= spec.tCK_ps <= high:
        return ""
    return (
        f"field 'tCK_ps': {spec.tCK_ps:g} ps is no period of a DRAM ({low:g} to {high:g} ps): another unit?"
    )


def _time_rule(term: str, latency: str, low_ns: float, high_ns: float) -> DeviceRule:
    def fault(spec: RuledDevice) -> str:
        """What is wrong with the time; empty if nothing is."""
        time_ns = spec.timing[latency] * spec.tCK_ns
        if low_ns <= time_ns <= high_ns:
            return ""
        return (
            f"field 'timing.{latency}': {spec.timing[latency]} cycles are {time_ns:g} ns, no {term} of a "
            f"DRAM ({low_ns:g} to {high_ns:g} ns): nanoseconds in place of cycles?"
        )

    return DeviceRule(term=term, text=f"{latency} is in cycles: {low_ns:g} to {high_ns:g} ns", fault=fault)


def _gang_fault(spec: RuledDevice) -> str:
    if spec.banks_per_gang <= spec.faw_banks:
        return ""
    return (
        f"field 'banks_per_gang': a G_ACT opens {spec.banks_per_gang} banks, and nFAW lets {spec.faw_banks} "
        "be opened; if this device may open more, say so by 'faw_banks', with a source"
    )


def _window_fault(spec: RuledDevice) -> str:
    gangs_in_window = spec.faw_banks // spec.banks_per_gang
    if not gangs_in_window or spec.banks <= spec.faw_banks:
        return ""
    cycles = max(
        gap_cycles(spec, "G_ACT", "G_ACT", window=gangs_in_window),
        gangs_in_window * gap_cycles(spec, "G_ACT", "G_ACT"),
    )
    if cycles >= spec.timing["nFAW"]:
        return ""
    return (
        f"no constraint keeps a G_ACT nFAW ({spec.timing['nFAW']} cycles) behind the {gangs_in_window}. "
        f"before it: latency = \"nFAW\", window = {gangs_in_window}, at level 'channel'"
    )


def _cycle_fault(spec: RuledDevice) -> str:
    row, cycle = spec.timing["nRAS"], spec.timing["nRC"]
    return "" if cycle >= row else f"field 'timing.nRC': {cycle} is below nRAS, {row}"


def _short_window_fault(spec: RuledDevice) -> str:
    gap, window = spec.timing["nRRD"], spec.timing["nFAW"]
    return "" if window >= gap else f"field 'timing.nFAW': {window} is below nRRD, {gap}"


def _turnaround_fault(spec: RuledDevice) -> str:
    burst, turnaround = spec.timing["nBL"], spec.timing["nTURN"]
    if turnaround >= burst:
        return ""
    return f"field 'timing.nTURN': {turnaround} is below nBL, {burst}: two bursts would share the bus"


def _gap_rule(
    term: str, before: str, after: str, same_gang: bool, latency: str, per_burst: str
) -> DeviceRule:
    def fault(spec: RuledDevice) -> str:
        """What is wrong with the gap; empty if nothing is."""
        if latency not in spec.timing:
            return f"[timing] needs '{latency}', from a {before} to a {after}"
        needed = spec.timing[latency]
        rules = [rule for rule in spec.constraints if _applies(spec, rule.level, same_gang)]
        pairs = [rule for rule in rules if before in rule.before and after in rule.after]
        bursts = max((spec.timing[rule.per_burst] for rule in pairs if rule.per_burst), default=0)
        cycles = gap_cycles(spec, before, after, same_gang=same_gang)
        if cycles < needed:
            return (
                f"the constraints let a {after} come {cycles} cycles after a {before}: {latency} is {needed}"
            )
        if per_burst and bursts < spec.timing[per_burst]:
            return f"no constraint counts {per_burst} for each burst of a {before} before a {after}"
        return ""

    text = f"{after} comes {latency} after {before}" + (" of its gang" if same_gang else "")
    return DeviceRule(term=term, text=text, fault=fault)


def _refresh_fault(spec: RuledDevice) -> str:
    optional = {"WRITE": spec.can_write, "WRBIAS": spec.can_write_latches, "AF": spec.can_activate}
    for command in ("GWRITE", "G_ACT", "COMP", "READRES", "REF", *(c for c, has in optional.items() if has)):
        cycles = gap_cycles(spec, "REF", command)
        if cycles < spec.timing["nRFC"]:
            return f"the constraints let a {command} come {cycles} cycles after a REF, before nRFC"
    return ""


def _applies(spec: RuledDevice, level: str, same_gang: bool) -> bool:
    """Whether rules of a level hold between any two commands of a channel, or of a gang."""
    return level == "channel" or (level == "gang" and (same_gang or spec.gangs == 1))


def gap_cycles(
    spec: RuledDevice, before: str, after: str, *, same_gang: bool = False, window: int = 1
) -> int:
    """Least cycles that the constraints of a device leave between two commands.

    Parameters
    ----------
    same_gang : bool
        Whether they are of the same gang, so that rules of that level hold too; of the same gang, a PRE comes
        between two G_ACTs.
    window : int
        How many commands before counts; a rule of fewer holds too.
    """
    same_gang = same_gang or spec.gangs == 1
    cycles = max(
        (
            spec.timing[rule.latency]
            for rule in spec.constraints
            if before in rule.before
            and after in rule.after
            and rule.window <= window
            and _applies(spec, rule.level, same_gang)
        ),
        default=0,
    )
    if same_gang and (before, after) == ("G_ACT", "G_ACT"):
        by_precharge = sum(
            gap_cycles(spec, *pair, same_gang=True) for pair in (("G_ACT", "PRE"), ("PRE", "G_ACT"))
        )
        return max(cycles, by_precharge)
    return cycles
