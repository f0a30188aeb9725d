"""Substitutions: other operators that do neighbouring regions on the GPU, open to registration.

A substitution names the regions that it replaces and the kernels that run instead. These are timed as all
kernels are, so that the search takes a substitution where it pays; its pass then writes it into the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from pimflow.core.kernel import Kernel
from pimflow.core.region import Region
from pimflow.core.region_graph import RegionGraph
from pimflow.core.rewrite import TILES
from pimflow.errors import UsageError


class Substitution(Protocol):
    """Other operators with the same result for neighbouring regions.

    Attributes
    ----------
    name : str
        In plans, it is the `schedule` of the regions.
    """

    name: str

    def matches(self, graph: RegionGraph) -> Iterable[tuple[str, ...]]:
        """The runs of two or more regions that it can replace, by their names, in order.

        No region outside a run reads a result of the run but the last one.
        """

    def kernels(self, regions: Sequence[Region], dtype: str) -> Sequence[Kernel]:
        """The kernels that run in place of those of `regions`, in sequence."""

    def lowering(self, groups: Sequence[tuple[str, ...]]) -> Callable[[Any], Any]:
        """The pass that writes it for some of its matches into a canonical module of Relax."""


SUBSTITUTIONS: dict[str, Substitution] = {}


def register(substitution: Substitution) -> None:
    """Let searches use `substitution` from now on, and plans name it.

    Raises
    ------
    UsageError
        If its name is taken, or can be that of a tiling.
    """
    name = substitution.name
    if name in SUBSTITUTIONS or not name or name.startswith(TILES):
        raise UsageError(f"a substitution cannot be named '{name}': the name is taken, empty, or a tiling's")
    SUBSTITUTIONS[name] = substitution
