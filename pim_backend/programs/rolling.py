"""Rolls repeated commands into loops, so that a program stays short whatever number of steps it has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pimflow.core.commands import Affine, Comp, GAct, Gwrite, Loop, Node, Readres, Wrbias, operands


def _weave(first: Sequence[Node], second: Sequence[Node]) -> tuple[Node, ...]:
    """The body of a loop whose first two iterations are `first` and `second`."""
    assert len(first) == len(second), "steps that are to repeat differ"
    return tuple(_weave_node(a, b) for a, b in zip(first, second))


def _weave_node(a: Node, b: Node) -> Node:
    assert type(a) is type(b), "steps that are to repeat differ"
    if isinstance(a, Loop):
        assert a.extent == b.extent, "steps that are to repeat differ"
        return Loop(extent=a.extent, body=_weave(a.body, b.body))
    moved = {}
    values = operands[type(a)]
    for name, value, other in zip(type(a).__slots__, values(a), values(b)):
        if type(value) is Affine:
            assert value.coefficients == other.coefficients, "steps that are to repeat differ"
            value = Affine(value.base, (other.base - value.base, *value.coefficients))
        else:
            assert value == other, "steps that are to repeat differ"
        moved[name] = value
    return type(a)(**moved)


def shifted(node: Node, pixels: int, rows: int, channels: int, first_row: int = 0) -> Node:
    """The same commands with offsets added to pixels, rows and output channels; `node` itself if it has none.

    Rows before `first_row`, which hold tables, stay.
    """
    # A program has tens of thousands of nodes: unchanged ones are shared, and fields are not read by name.
    kind = type(node)
    if kind is Gwrite and pixels:
        return Gwrite(
            buffer=node.buffer,
            pixel=_later(node.pixel, pixels),
            pixels=node.pixels,
            k=node.k,
            columns=node.columns,
        )
    if kind is GAct and rows and not 0 <= node.row.base < first_row:
        return GAct(gang=node.gang, row=_later(node.row, rows))
    if kind is Comp and rows:
        return Comp(buffer=node.buffer, row=_later(node.row, rows), column=node.column, count=node.count)
    if kind is Readres and (pixels or channels):
        pixel, channel = _later(node.pixel, pixels), _later(node.channel, channels)
        return Readres(buffer=node.buffer, pixel=pixel, channel=channel)
    if kind is Wrbias and (pixels or channels):
        pixel, channel = _later(node.pixel, pixels), _later(node.channel, channels)
        return Wrbias(buffer=node.buffer, pixel=pixel, channel=channel, resumed=node.resumed)
    if kind is Loop:
        body = tuple(shifted(child, pixels, rows, channels, first_row) for child in node.body)
        alike = all(new is old for new, old in zip(body, node.body))
        return node if alike else Loop(extent=node.extent, body=body)
    return node


def _later(affine: Affine, by: int) -> Affine:
    return Affine(affine.base + by, affine.coefficients) if by else affine


LONGEST_PERIOD = 1024  # nodes
_TRIED = 8  # periods that are tried at a node


def compact(nodes: Sequence[Node]) -> list[Node]:
    """The same commands, with a loop wherever a run of them repeats with a constant step in its affines."""
    fixed, moving = _signatures(nodes)
    followers: dict[int, list[int]] = {}
    for index, kind in enumerate(fixed.tolist()):
        followers.setdefault(kind, []).append(index)
    order = {index: at for places in followers.values() for at, index in enumerate(places)}
    found: list[Node] = []
    begin = 0
    while begin < len(nodes):
        places = followers[int(fixed[begin])]
        at = order[begin]
        best, period = 1, 1
        for later in places[at + 1 : at + 1 + _TRIED]:
            if later - begin > LONGEST_PERIOD:
                break
            times = _repeats(fixed, moving, begin, later - begin)
            if (times - 1) * (later - begin) > (best - 1) * period:
                best, period = times, later - begin
        if best < 3:
            found.append(nodes[begin])
            begin += 1
            continue
        body = _weave(nodes[begin : begin + period], nodes[begin + period : begin + 2 * period])
        found.append(Loop(extent=best, body=body))
        begin += best * period
    return found


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


def _repeats(fixed: np.ndarray, moving: np.ndarray, begin: int, period: int) -> int:
    """How often the `period` nodes from `begin` on repeat with a constant step in their affines."""
    first, second = slice(begin, begin + period), slice(begin + period, begin + 2 * period)
    if second.stop > len(fixed) or (fixed[first] != fixed[second]).any():
        return 1
    step = moving[second] - moving[first]
    most = (len(fixed) - begin) // period
    times, reach = 2, 4
    while times < most:
        reach = min(2 * reach, most)
        turns = slice(begin, begin + reach * period)
        kinds = fixed[turns].reshape(reach, period)
        places = moving[turns].reshape(reach, period, -1)
        same = (kinds == kinds[0]).all(axis=1)
        same[1:] &= (np.diff(places, axis=0) == step).all(axis=(1, 2))
        times = reach if same.all() else int(same.argmin())
        if times < reach:
            break
    return times
