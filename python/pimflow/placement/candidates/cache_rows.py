"""Rows of the banks for the caches of all attention that PIM may do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pimflow.core.candidate import Candidate
from pimflow.errors import InfeasibleError
from pimflow.hardware import System
from pimflow.placement.candidates.candidates import Candidates
from pimflow.placement.candidates.tasks import row_bytes

Made = Mapping[str, tuple[Candidate, ...]]


def within(system: System, made: Made) -> dict[str, tuple[Candidate, ...]]:
    """`made` without layouts of so many rows that the caches might not fit together, whichever are chosen.

    The search counts no rows. Of those that there are, each run may take a share as large as that of its
    fewest rows in the fewest of all.
    """
    room, least = _room(system), {name: _fewest(each) for name, each in made.items()}
    total = sum(least.values())
    return {
        name: tuple(each for each in candidates if each.placed_rows * total <= room * least[name])
        for name, candidates in made.items()
    }


def no_room(maker: Candidates, made: Made) -> str:
    """Why all caches together do not fit the banks; empty if they do, by layouts of fewest rows."""
    system, room = maker.system, _room(maker.system)
    rows = sum(map(_fewest, made.values()))
    if rows <= room:
        return ""
    tokens = max(maker.graph.region(each[0].covers[-1]).attends.keys for each in made.values())
    token_bytes = rows * row_bytes(system) * system.pim_channels / tokens
    caches = f"KV caches of {len(made)} layer{'s'[: len(made) > 1]}, {tokens} tokens"
    return str(
        InfeasibleError(
            f"{caches}, {token_bytes:.0f} bytes a token, on {system.pim_channels} channels",
            rows,
            room,
            "rows a bank",
            ("fewer tokens", "a smaller batch", "more PIM channels (--pim-channels)"),
        )
    )


def _room(system: System) -> int:
    """Rows of a bank that may hold something."""
    return system.pim.rows_per_bank - system.pim.row_base


def _fewest(candidates: Sequence[Candidate]) -> int:
    return min(each.placed_rows for each in candidates)
