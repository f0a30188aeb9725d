"""State that one step of a network passes to the next."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class State:
    """A tensor that a network reads, updates in place and returns: the same bytes in every step.

    Attributes
    ----------
    name : str
        Name of the input.
    result : int
        Index of the output that is the updated state.
    grown : int
        By how many positions the output is longer than the model's input: the tokens of a step if each step
        appends them, 0 if there is a position for every token from the start.
    """

    name: str
    result: int
    grown: int = 0
