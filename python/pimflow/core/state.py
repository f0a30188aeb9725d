"""What one step of a network leaves for the next."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class State:
    """A tensor that a network takes, writes to and gives back: the same bytes, step after step.

    Attributes
    ----------
    name : str
        The input that it is.
    result : int
        Which of the outputs it is afterwards.
    grown : int
        How many places the network's own input has fewer: as many as the tokens of a step if each step
        lengthens it, 0 if it has a place for every token from the start.
    """

    name: str
    result: int
    grown: int = 0
