"""Constraints of the ``strict`` timing of a DRAM-PIM device."""

from __future__ import annotations

from dataclasses import dataclass

COMMANDS = ("GWRITE", "G_ACT", "COMP", "READRES", "PRE", "REF", "WRITE", "WRBIAS", "AF")
# Commands that a count of commands lists only where there are any.
SELDOM = ("WRITE", "WRBIAS", "AF")
LEVELS = ("channel", "gang", "buffer", "host")
# What a rule may also count from: the begin of a stream, at clock 0.
BEGIN = "BEGIN"

# The rules of a host, as commands before and after: when it goes on after a result; what a GWRITE (or WRBIAS)
# of one group of channels delays that of the next; what it takes a channel that computes to begin with one.
HOST_RULES = (
    (("READRES",), ("GWRITE", "G_ACT", "COMP", "READRES")),
    (("READRES",), ("GWRITE", "G_ACT", "COMP", "READRES", "WRBIAS")),
    (("READRES",), ("GWRITE", "G_ACT", "COMP", "READRES", "WRBIAS", "AF")),
    (("GWRITE",), ("GWRITE",)),
    (("COMP",), ("GWRITE",)),
)


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """Minimum gap between two commands, in command-clock cycles.

    Attributes
    ----------
    level : str
        What the two commands must share for the rule to hold: the ``channel``, a ``gang`` (the banks
        that one G_ACT opens; COMP and AF use every open gang, REF all, WRITE one) or a global ``buffer``. Or
        the ``host`` that issues instructions of all channels, one after the other; see `PimSpec.one_host`.
    before, after : tuple of str
        Commands; every command of `before` delays every later command of `after`. Of the channel,
        `before` may be ``BEGIN``: the begin of the stream.
    latency : str
        Name in `PimSpec.timing`.
    per_burst : str
        Name in `PimSpec.timing` of the cycles added for each 32-byte burst of the earlier command
        after its first, empty for none: a GWRITE of a whole buffer holds the bus for 32 bursts.
    window : int
        The rule binds the `window`-th command of `before` that went by, not just the last.
    queue : int
        Of the host, bursts of a GWRITE that a channel takes at once: `per_burst` counts from there.
    source : str
        Where the rule comes from.
    """

    level: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    latency: str
    per_burst: str = ""
    window: int = 1
    queue: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"level '{self.level}' is none of {', '.join(LEVELS)}")
        if not self.latency:
            raise ValueError("field 'latency' names none")
        for name in ("before", "after"):
            if not getattr(self, name):
                raise ValueError(f"field '{name}' names no command")
        for command in self.before + self.after:
            if command not in COMMANDS and (command not in self.before or command != BEGIN):
                raise ValueError(f"command '{command}' is none of {', '.join(COMMANDS)}")
        if BEGIN in self.before and (self.level != "channel" or len(self.before) > 1):
            raise ValueError(f"'{BEGIN}' stands alone, at level 'channel'")
        if not 1 <= self.window <= 8:
            raise ValueError(f"field 'window': {self.window} is not in 1..8")
        if self.level != "host" and self.queue:
            raise ValueError("field 'queue' is for level 'host'")
        if self.level == "host" and (self.before, self.after) not in HOST_RULES:
            forms = "; ".join(f"{' '.join(a)} to {' '.join(b)}" for a, b in HOST_RULES)
            raise ValueError(f"level 'host' has rules from {forms}")
        if self.queue < 0:
            raise ValueError(f"field 'queue': {self.queue} is below zero")

    @property
    def rule(self) -> tuple[object, ...]:
        """The rule as a key for comparison: without its source, and with commands in no order."""
        latency = (self.latency, self.per_burst, self.window, self.queue)
        return (self.level, frozenset(self.before), frozenset(self.after), *latency)
