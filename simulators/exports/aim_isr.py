"""AiM ISR traces, the input of the public simulator of SK hynix's GDDR6-AiM.

A line is an instruction, with one space between words: ``W CFR id data``, ``AiM WR_GB opsize gpr mask``, …;
the last is ``AiM EOC``. `opsize` counts 32-byte columns and always starts at column 0; bit 0 of a channel
mask is channel 31. Numbers are decimal, or hexadecimal with ``0x``. Blank lines are ignored, and a line whose
first word is ``#`` is a comment. docs/traces.md has the table.

Source: github.com/arkhadem/aim_simulator, ``src/base/request.h`` (operands), ``aim_trace.cpp`` (grammar)
and ``aim_DRAM_system.cpp`` (masks, columns), read 2026-11.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pimflow.core.commands import Af, Comp, Gwrite, Node, Readres, Wrbias, Write, command_leaves
from pimflow.core.program import PimProgram
from pimflow.errors import UsageError
from pimflow.simulators.pim.expansion import length, walk

CHANNELS = 32
BANKS = 16
COLUMNS = 64  # 32-byte columns of a 2 KiB row
ROWS = 1 << 14
COLUMN_ELEMENTS = 16
QUEUE_REQUESTS = 33  # waiting requests of a channel; an instruction that finds no room delays all that follow
DTYPES = ("fp16", "bf16")  # instructions do not name the type

_AFM = 2  # configuration register that selects the activation function of AF
_CHUNK_LINES = 4096
Instruction = tuple[Any, ...]  # opcode and operands: equal instructions of several channels are one


def unsupported_reason(program: PimProgram) -> str:
    """Why AiM's instructions cannot express `program`; empty if they can.

    AiM has one global buffer, and writes a column of one bank or an element of each.
    """
    if program.dtype not in DTYPES or program.elements_per_column != COLUMN_ELEMENTS:
        return f"AiM multiplies {COLUMN_ELEMENTS} elements of {' or '.join(DTYPES)} a column"
    if program.computing_gangs != program.gangs:
        return "AiM multiplies in all banks, and this loop order in some"
    if program.banks != BANKS or len(program.channels) > CHANNELS:
        return f"AiM has {BANKS} banks a channel and {CHANNELS} channels"
    if program.columns_per_row > COLUMNS or program.row_begin + program.rows > ROWS:
        return f"AiM has {COLUMNS} columns a row and {ROWS} rows"
    leaf_nodes = [leaf for nodes in program.channels for leaf in command_leaves(nodes, ())]
    if any(isinstance(node, Write) and not _is_expressible(node) for node, _ in leaf_nodes):
        return f"AiM writes whole columns of a bank, or an element of each of {BANKS} banks"
    if len({node.buffer % program.buffers for node, _ in leaf_nodes if isinstance(node, Comp)}) > 1:
        return "AiM has one global buffer"
    return ""


def _is_expressible(node: Write) -> bool:
    """Whether WR_SBKs or a WR_ABK can express a WRITE."""
    whole_columns = (node.element, node.elements) == (0, COLUMN_ELEMENTS)
    return whole_columns or (node.banks, node.count, node.elements) == (BANKS, 1, 1)


def export(program: PimProgram) -> Iterator[tuple[bytes, int]]:
    """The trace of all channels, in chunks, each with the number of PIM commands that it executes.

    Groups of channels with different input vectors are written in turn, in pieces of half a queue, so that no
    group waits for another. Channels that do the same at the same step share one instruction, whose mask has
    all of them: COMPs of the same row and number of columns, the same input vector, initial values or values
    to store (AiM multicasts them), or reads of results (into consecutive GPRs). A WR_ABK goes to one channel.
    Every channel keeps its order. A sum that a WR_BIAS resumes stays in a GPR of its own until then. A
    configuration register selects the activation function of AFs.

    Raises
    ------
    UsageError
        If `unsupported_reason` has a reason.
    """
    problem = unsupported_reason(program)
    if problem:
        raise UsageError(f"'{program.region}' ({program.schedule}) has no AiM form: {problem}")
    lines, commands = ["W CFR 0 1"], 0
    if program.activation:
        lines.append(f"W CFR {_AFM} {program.table_row}")
    result_gpr = program.columns_per_row * len(program.channels)
    write_gpr = result_gpr + 2 * len(program.channels)
    sum_gpr = write_gpr + len(program.channels)
    for group, command_count in _steps(program):
        commands += command_count
        lines += _gwrites(
            program, {key: key_channels for key, key_channels in group.items() if key[0] == "WR_GB"}
        )
        for (opcode, *operands), channels in group.items():
            mask, first = _mask(channels), channels[0]
            if opcode == "MAC_ABK":
                lines.append(f"AiM MAC_ABK {operands[0]} {mask:#x} {operands[1]}")
            elif opcode == "WR_BIAS":
                resumed_gpr = sum_gpr + operands[2] * len(program.channels)
                begin = result_gpr + len(program.channels) if operands[2] < 0 else resumed_gpr
                lines.append(f"AiM WR_BIAS {begin + first} {mask:#x}")
            elif opcode == "WR_SBK":
                lines.append(f"AiM WR_SBK {write_gpr + first} {mask:#x} {operands[0]} {operands[1]}")
            elif opcode == "WR_ABK":
                lines += [
                    f"AiM WR_ABK {write_gpr + channel} {1 << CHANNELS - 1 - channel:#x} {operands[0]}"
                    for channel in channels
                ]
            elif opcode == "AF":
                lines.append(f"AiM AF {mask:#x}")
            elif opcode in ("RD_MAC", "RD_AF"):
                begin = result_gpr if operands[0] < 0 else sum_gpr + operands[0] * len(program.channels)
                lines.append(f"AiM {opcode} {begin + first} {mask:#x}")
        if len(lines) >= _CHUNK_LINES:
            yield ("\n".join(lines) + "\n").encode(), commands
            lines, commands = [], 0
    lines.append("AiM EOC")
    yield ("\n".join(lines) + "\n").encode(), commands


def _mask(channels: Iterable[int]) -> int:
    return sum(1 << CHANNELS - 1 - channel for channel in channels)


def _gwrites(program: PimProgram, group: dict[Instruction, list[int]]) -> Iterator[str]:
    """WR_GBs of the GWRITEs of a step; if there are several, their pieces take turns."""
    bursts = max((key[1] for key in group), default=0)
    max_bursts = QUEUE_REQUESTS // 2 if len(group) > 1 else COLUMNS
    for begin in range(0, bursts, max_bursts):
        for (_, size, *_), channels in group.items():
            if begin < size:
                gpr = program.columns_per_row * channels[0] + begin
                yield f"AiM WR_GB {min(max_bursts, size - begin)} {gpr} {_mask(channels):#x}"


def _steps(program: PimProgram) -> Iterator[tuple[dict[Instruction, list[int]], int]]:
    """Steps: channels by instruction, where equal instructions are one, and the number of PIM commands.

    The first channel has the most commands; the others wait while it executes a different instruction.
    """
    streams = {channel: _stream(program, channel) for channel in range(len(program.channels))}
    next_instructions = {channel: next(stream) for channel, stream in streams.items()}
    while next_instructions:
        group: dict[Instruction, list[int]] = {}
        command_count = 0
        leader, _ = next(iter(next_instructions.values()))
        for channel, (key, commands) in list(next_instructions.items()):
            if key is not None and leader is not None and key[0] != leader[0]:
                continue
            command_count += commands
            if key is None:
                del next_instructions[channel]
            else:
                group.setdefault(key, []).append(channel)
                next_instructions[channel] = next(streams[channel])
        yield group, command_count


def _stream(program: PimProgram, channel: int) -> Iterator[tuple[Instruction | None, int]]:
    """Instructions of one channel, each with the PIM commands since the one before; None at the end."""
    command_count = 0
    places: dict[tuple[int, int], int] | None = {} if program.resumes else None
    activated: set[int] = set()
    for node, counters in walk(program.channels[channel]):
        command_count += length((node,))
        for key in _instructions(node, counters, program, places, activated):
            yield key, command_count
            command_count = 0
    yield None, command_count


def _instructions(
    node: Node,
    counters: tuple[int, ...],
    program: PimProgram,
    places: dict[tuple[int, int], int] | None,
    activated: set[int],
) -> list[Instruction]:
    """Instructions of a command; none for a G_ACT, since MAC_ABK, WR_SBK, WR_ABK and AF open their row.

    `places` numbers the sums that were read, if the program resumes sums. `activated` are the latches whose
    sum an AF has been applied to; it is then in another register.
    """
    if isinstance(node, Gwrite):
        return [
            (
                "WR_GB",
                node.bursts,
                node.pixel.value(counters),
                node.pixels,
                node.k.value(counters),
                node.columns,
            )
        ]
    if isinstance(node, Comp):
        return [("MAC_ABK", node.count, node.row.value(counters))]
    if isinstance(node, Write):
        place = (node.row.value(counters), node.pixel.value(counters), node.k.value(counters))
        if node.elements == 1:
            return [("WR_ABK", *place)]
        first = node.gang * (BANKS // program.gangs) + node.bank
        banks = range(first, first + node.banks)
        return [("WR_SBK", bank, *place, column) for bank in banks for column in range(node.count)]
    if isinstance(node, Af):
        activated.add(node.buffer)
        return [("AF",)]
    if not isinstance(node, Wrbias | Readres):
        return []
    sum_key = (node.pixel.value(counters), node.channel.value(counters))
    if isinstance(node, Readres):
        opcode = "RD_AF" if node.buffer in activated else "RD_MAC"
        activated.discard(node.buffer)
        return [(opcode, -1 if places is None else places.setdefault(sum_key, len(places)))]
    if node.resumed and places is not None:
        return [("WR_BIAS", *sum_key, places.setdefault(sum_key, len(places)))]
    return [("WR_BIAS", sum_key[0] if program.initial == "add" else 0, sum_key[1], -1)]
