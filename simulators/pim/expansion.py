"""Expands programs in pieces of bounded length, so that their whole text is never in memory."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pimflow.core.commands import (
    Af,
    Affine,
    Comp,
    GAct,
    Gwrite,
    Loop,
    Node,
    Readres,
    Wrbias,
    Write,
    command_leaves,
)
from pimflow.core.program import PimProgram
from pimflow.simulators.pim.trace import expand_to_pim

NAMES = {
    Gwrite: "GWRITE",
    GAct: "G_ACT",
    Comp: "COMP",
    Readres: "READRES",
    Write: "WRITE",
    Wrbias: "WRBIAS",
    Af: "AF",
}
PIECE_COMMANDS = 1 << 16
# Gangs and columns that a .pim address can express.
PIM_GANGS, PIM_COLUMNS = 4, 32


def command_counts(program: PimProgram) -> Counter[str]:
    """Commands of all channels by name, and ``gwrite_bursts``, counted without expanding a loop."""
    counts: Counter[str] = Counter()
    for nodes in program.channels:
        for node, extents in command_leaves(nodes, ()):
            times = 1
            for extent in extents:
                times *= extent
            counts[NAMES[type(node)]] += times * _command_count(node)
            if isinstance(node, Gwrite):
                counts["gwrite_bursts"] += times * program.bursts.burst_count(node)
    return counts


def length(nodes: Sequence[Node]) -> int:
    """Number of commands of `nodes`, with loops expanded."""
    return sum(
        node.extent * length(node.body) if isinstance(node, Loop) else _command_count(node) for node in nodes
    )


def walk(nodes: Sequence[Node], counters: tuple[int, ...] = ()) -> Iterator[tuple[Node, tuple[int, ...]]]:
    """Command nodes in order of execution, each with the counters of the loops around it."""
    for node in nodes:
        if isinstance(node, Loop):
            for index in range(node.extent):
                yield from walk(node.body, (*counters, index))
        else:
            yield node, counters


def pieces(program: PimProgram, channel: int, max_commands: int = PIECE_COMMANDS) -> Iterator[PimProgram]:
    """A channel as consecutive one-channel programs of at most `max_commands` commands, or a single
    run of COMPs.
    """
    for nodes in _pieces(program.channels[channel], max_commands):
        yield dataclasses.replace(program, channels=(nodes,))


def pim_unsupported_reason(program: PimProgram) -> str:
    """Why a ``.pim`` trace cannot express `program`; empty if it can. Rows are checked on writing."""
    if program.gangs > PIM_GANGS:
        return f"an address has {PIM_GANGS} bank groups, the device {program.gangs} gangs"
    if program.computing_gangs != program.gangs:
        return "a COMP is in all banks, and this loop order computes in some"
    if program.sets_latches:
        return "it has no command that sets latches, and this program sums from values on"
    if program.activation:
        return "it has no command that applies an activation, and this program does"
    for nodes in program.channels:
        for node, extents in command_leaves(nodes, ()):
            if isinstance(node, Write):
                return "it has no command that writes into banks"
            if isinstance(node, Comp) and node.column.max_value(extents) + node.count > PIM_COLUMNS:
                return f"an address has {PIM_COLUMNS} columns a row, the device {program.columns_per_row}"
    return ""


def pim_text(program: PimProgram, channel: int) -> Iterator[bytes]:
    """The ``.pim`` text of one channel (`trace.expand_to_pim`) in chunks of a megabyte or so."""
    for piece in pieces(program, channel):
        yield expand_to_pim(piece, 0)


def _pieces(nodes: Sequence[Node], max_commands: int) -> Iterator[tuple[Node, ...]]:
    batch: list[Node] = []
    size = 0
    for node in nodes:
        commands = length((node,))
        if batch and size + commands > max_commands:
            yield tuple(batch)
            batch, size = [], 0
        if isinstance(node, Loop) and commands > max_commands:
            yield from _loop_pieces(node, max_commands)
        else:
            batch.append(node)
            size += commands
    if batch:
        yield tuple(batch)


def _loop_pieces(loop: Loop, max_commands: int) -> Iterator[tuple[Node, ...]]:
    step = max_commands // length(loop.body)
    if step:
        for start in range(0, loop.extent, step):
            extent = min(step, loop.extent - start)
            yield (Loop(extent=extent, body=_shift(loop.body, start, lambda coefficients: coefficients)),)
    else:
        for index in range(loop.extent):
            yield from _pieces(_shift(loop.body, index, lambda coefficients: coefficients[1:]), max_commands)


def _shift(
    nodes: Sequence[Node], start: int, coefficients_after: Callable[[tuple[int, ...]], tuple[int, ...]]
) -> tuple[Node, ...]:
    """`nodes` with the outermost counter starting at `start`.

    `coefficients_after` gives the remaining coefficients.
    """

    def shift_affine(value: Affine) -> Affine:
        """An operand with its outermost counter fixed."""
        first = value.coefficients[0] if value.coefficients else 0
        return Affine(value.base + start * first, coefficients_after(value.coefficients))

    def shift_node(node: Node) -> Node:
        """A node with the counter fixed in all its operands."""
        if isinstance(node, Loop):
            return Loop(extent=node.extent, body=_shift(node.body, start, coefficients_after))
        values = {name: getattr(node, name) for name in node.__slots__}
        moved: dict[str, Any] = {
            name: shift_affine(value) if isinstance(value, Affine) else value
            for name, value in values.items()
        }
        return type(node)(**moved)

    return tuple(map(shift_node, nodes))


def _command_count(node: Node) -> int:
    return node.count if isinstance(node, Comp) else 1
