"""Constraints of the ``strict`` timing of a DRAM-PIM device."""

from __future__ import annotations

from dataclasses import dataclass

COMMANDS = ("GWRITE", "G_ACT", "COMP", "READRES", "PRE", "REF", "WRITE", "WRBIAS", "AF")
# Commands that counts of commands omit if there are none.
OPTIONAL_COMMANDS = ("WRITE", "WRBIAS", "AF")
LEVELS = ("channel", "gang", "buffer", "host")
# Pseudo-command of rules: the begin of a stream, at clock 0.
BEGIN = "BEGIN"

# The rules of a host, as commands before and after: delay after a result; delay of a GWRITE (or WRBIAS) of
# one group of channels by that of another; delay of a GWRITE by products in its channel.
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
        What the two commands must share so that the rule applies: the ``channel``, a ``gang`` (the banks that
        one G_ACT opens; COMP and AF use every open gang, REF all, WRITE one), a global ``buffer``, or the
        ``host``, which issues instructions of all channels one after the other (`PimSpec.has_single_host`).
    before, after : tuple of str
        Commands; every command of `before` delays every later command of `after`. At level ``channel``,
        `before` may be ``BEGIN``: the begin of the stream.
    latency : str
        Name in `PimSpec.timing`.
    per_burst : str
        Name in `PimSpec.timing` of the cycles added for each 32-byte burst of the earlier command after the
        first one; empty for none. A GWRITE of a whole buffer occupies the bus for 32 bursts.
    window : int
        The rule counts from the `window`-th last command of `before`; 1 is the last one.
    queue : int
        At level ``host``, bursts of a GWRITE that a channel queues: `per_burst` counts from there.
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
            raise ValueError(f"'{BEGIN}' is the only command of its rule, at level 'channel'")
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
        """A key for comparison: without the source, and independent of the order of commands."""
        latency = (self.latency, self.per_burst, self.window, self.queue)
        return (self.level, frozenset(self.before), frozenset(self.after), *latency)
