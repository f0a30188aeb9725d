"""Rolls repeated commands into loops, so that a program stays short whatever number of steps it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pimflow.core.command_forms import operands
from pimflow.core.commands import Affine, Comp, GAct, Gwrite, Loop, Node, Readres, Wrbias


def _loop_body(first: Sequence[Node], second: Sequence[Node]) -> tuple[Node, ...]:
    """The body of a loop whose first two iterations are `first` and `second`."""
    assert len(first) == len(second), "steps that are to repeat differ"
    return tuple(_loop_node(a, b) for a, b in zip(first, second))


def _loop_node(a: Node, b: Node) -> Node:
    assert type(a) is type(b), "steps that are to repeat differ"
    if isinstance(a, Loop) and isinstance(b, Loop):
        assert a.extent == b.extent, "steps that are to repeat differ"
        return Loop(extent=a.extent, body=_loop_body(a.body, b.body))
    moved: dict[str, Any] = {}
    values = operands[type(a)]
    for name, value, later_value in zip(type(a).__slots__, values(a), values(b)):
        if type(value) is Affine:
            assert value.coefficients == later_value.coefficients, "steps that are to repeat differ"
            value = Affine(value.base, (later_value.base - value.base, *value.coefficients))
        else:
            assert value == later_value, "steps that are to repeat differ"
        moved[name] = value
    return type(a)(**moved)


def shift(node: Node, pixels: int, rows: int, channels: int, first_row: int = 0) -> Node:
    """The same commands with offsets added to pixels, rows and output channels; `node` itself if it has none.

    Rows before `first_row`, which hold tables, stay.
    """
    # A program has tens of thousands of nodes: unchanged ones are shared, and fields are not read by name.
    if isinstance(node, Gwrite) and pixels:
        return Gwrite(
            buffer=node.buffer,
            pixel=_add_offset(node.pixel, pixels),
            pixels=node.pixels,
            k=node.k,
            columns=node.columns,
        )
    if isinstance(node, GAct) and rows and not 0 <= node.row.base < first_row:
        return GAct(gang=node.gang, row=_add_offset(node.row, rows))
    if isinstance(node, Comp) and rows:
        return Comp(buffer=node.buffer, row=_add_offset(node.row, rows), column=node.column, count=node.count)
    if isinstance(node, Readres) and (pixels or channels):
        pixel, channel = _add_offset(node.pixel, pixels), _add_offset(node.channel, channels)
        return Readres(buffer=node.buffer, pixel=pixel, channel=channel)
    if isinstance(node, Wrbias) and (pixels or channels):
        pixel, channel = _add_offset(node.pixel, pixels), _add_offset(node.channel, channels)
        return Wrbias(buffer=node.buffer, pixel=pixel, channel=channel, resumed=node.resumed)
    if isinstance(node, Loop):
        body = tuple(shift(child, pixels, rows, channels, first_row) for child in node.body)
        is_unchanged = all(new is old for new, old in zip(body, node.body))
        return node if is_unchanged else Loop(extent=node.extent, body=body)
    return node


def _add_offset(affine: Affine, offset: int) -> Affine:
    return Affine(affine.base + offset, affine.coefficients) if offset else affine


MAX_PERIOD = 1024  # nodes
_MAX_PERIODS = 8  # periods that are tried at a node


def roll_loops(nodes: Sequence[Node]) -> list[Node]:
    """The same commands, with a loop wherever a run of them repeats with a constant step in its affines."""
    fixed, moving = _signatures(nodes)
    followers: dict[int, list[int]] = {}
    for index, kind in enumerate(fixed.tolist()):
        followers.setdefault(kind, []).append(index)
    ranks = {index: rank for places in followers.values() for rank, index in enumerate(places)}
    rolled: list[Node] = []
    begin = 0
    while begin < len(nodes):
        places = followers[int(fixed[begin])]
        rank = ranks[begin]
        best, period = 1, 1
        for later in places[rank + 1 : rank + 1 + _MAX_PERIODS]:
            if later - begin > MAX_PERIOD:
                break
            times = _repeat_count(fixed, moving, begin, later - begin)
            if (times - 1) * (later - begin) > (best - 1) * period:
                best, period = times, later - begin
        if best < 3:
            rolled.append(nodes[begin])
            begin += 1
            continue
        body = _loop_body(nodes[begin : begin + period], nodes[begin + period : begin + 2 * period])
        rolled.append(Loop(extent=best, body=body))
        begin += best * period
    return rolled


def _signatures(nodes: Sequence[Node]) -> tuple[np.ndarray, np.ndarray]:
    """For each node, a number that is equal for nodes that differ only in affines, and their bases."""
    numbers: dict[tuple[object, ...], int] = {}
    fixed, moving = np.empty(len(nodes), np.int64), np.zeros((len(nodes), 4), np.int64)
    for index, node in enumerate(nodes):
        values = [getattr(node, name) for name in type(node).__slots__]
        bases = [value.base for value in values if isinstance(value, Affine)]
        rest = (type(node), *(value for value in values if not isinstance(value, Affine)))
        fixed[index] = numbers.setdefault(rest, len(numbers))
        moving[index, : len(bases)] = bases
    return fixed, moving


def _repeat_count(fixed: np.ndarray, moving: np.ndarray, begin: int, period: int) -> int:
    """How often the `period` nodes from `begin` on repeat with a constant step in their affines."""
    first, second = slice(begin, begin + period), slice(begin + period, begin + 2 * period)
    if second.stop > len(fixed) or (fixed[first] != fixed[second]).any():
        return 1
    step = moving[second] - moving[first]
    max_times = (len(fixed) - begin) // period
    times, reach = 2, 4
    while times < max_times:
        reach = min(2 * reach, max_times)
        turns = slice(begin, begin + reach * period)
        kinds = fixed[turns].reshape(reach, period)
        places = moving[turns].reshape(reach, period, -1)
        is_equal = (kinds == kinds[0]).all(axis=1)
        is_equal[1:] &= (np.diff(places, axis=0) == step).all(axis=(1, 2))
        times = reach if is_equal.all() else int(is_equal.argmin())
        if times < reach:
            break
    return times
