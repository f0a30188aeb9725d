"""Options of `plan_memory` beside those of its network."""

from __future__ import annotations

from dataclasses import dataclass

from pimflow.core.options import OptionSet, option
from pimflow.memory import TIME_LIMIT_SECONDS


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(OptionSet, group="memory"):
    """How the buffers of a network or a table are placed; see `plan_memory`."""

    policy: str = option(
        "exact",
        "--policy NAME",
        "how buffers are placed: best, exact, ortools, first-fit, best-fit, longer-first, bigger-first "
        "(default: %(default)s)",
    )
    capacity_bytes: int | None = option(None, "--capacity BYTES", "largest pool of a memory region")
    alignment_bytes: int | None = option(
        None, "--alignment BYTES", "alignment of buffers (default: 64 for networks, 1 for tables)"
    )
    in_place: bool = option(True, "--no-in-place", "let no result take over a dead operand")
    seconds: float = option(
        TIME_LIMIT_SECONDS, "--time-limit SECONDS", "longest search (default: %(default)g)"
    )
