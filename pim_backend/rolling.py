"""Loops out of repetition: a nest of steps becomes few commands, however many steps it has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from pimflow.core.commands import Affine, Loop, Node

Emit = Callable[[int], Iterable[Node]]


def roll(emit: Emit, count: int, *, head: int = 1, tail: int = 1, period: int = 1) -> list[Node]:
    """Commands of steps ``0 .. count-1``, with a loop where they repeat.

    Parameters
    ----------
    emit : callable
        Commands of one step.
    head, tail : int
        Steps at either end that may differ from those between.
    period : int
        Steps between `head` and `tail` repeat after so many, every index moved by the same amount.
    """
    times = (count - head - tail) // period
    if times < 2:
        return [node for step in range(count) for node in emit(step)]

    def steps(begin: int, end: int) -> list[Node]:
        return [node for step in range(begin, end) for node in emit(step)]

    first, second = steps(head, head + period), steps(head + period, head + 2 * period)
    loop = Loop(extent=times, body=_weave(first, second))
    return [*steps(0, head), loop, *steps(head + times * period, count)]


def _weave(first: Sequence[Node], second: Sequence[Node]) -> tuple[Node, ...]:
    """The body of a loop whose first two turns are `first` and `second`."""
    assert len(first) == len(second), "steps that are to repeat differ"
    return tuple(_weave_node(a, b) for a, b in zip(first, second))


def _weave_node(a: Node, b: Node) -> Node:
    assert type(a) is type(b), "steps that are to repeat differ"
    if isinstance(a, Loop):
        assert a.extent == b.extent, "steps that are to repeat differ"
        return Loop(extent=a.extent, body=_weave(a.body, b.body))
    moved = {}
    for name, value in a.__dict__.items():
        other = getattr(b, name)
        if isinstance(value, Affine):
            assert value.coefficients == other.coefficients, "steps that are to repeat differ"
            moved[name] = Affine(value.base, (other.base - value.base, *value.coefficients))
        else:
            assert value == other, "steps that are to repeat differ"
    return dataclasses.replace(a, **moved)


def shifted(node: Node, pixels: int, rows: int, channels: int) -> Node:
    """The same commands for later pixels, rows and output channels."""
    if isinstance(node, Loop):
        body = tuple(shifted(child, pixels, rows, channels) for child in node.body)
        return Loop(extent=node.extent, body=body)
    # A program has tens of thousands of nodes: past `__init__`, a copy takes a third of the time.
    copy = object.__new__(type(node))
    fields = copy.__dict__
    fields.update(node.__dict__)
    for name, by in (("pixel", pixels), ("row", rows), ("channel", channels)):
        if by and name in fields:
            fields[name] = Affine(fields[name].base + by, fields[name].coefficients)
    return copy
