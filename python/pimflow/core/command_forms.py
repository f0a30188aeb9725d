"""Command nodes as words for C++ and as the text of ``.pimprog`` files."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, overload

import numpy as np

from pimflow.core.commands import (
    MAX_DEPTH,
    NAMES,
    OPCODES,
    ZERO_COEFFICIENTS,
    Affine,
    CommandNode,
    Loop,
    Node,
    Wrbias,
)

_AFFINE = {cls: {field.name: field.type == "Affine" for field in fields(cls)} for cls in NAMES}


_TYPES = {name: cls for cls, name in NAMES.items()}


_CLASSES = {opcode: cls for cls, opcode in OPCODES.items()}


# The operands of a command node, in the order of its fields.
operands = {cls: attrgetter(*names) for cls, names in _AFFINE.items() if cls is not Loop}


def _operand_words(cls: type[Node]) -> dict[str, int]:
    """By field, the position of its first word among those of a command."""
    positions, position = dict[str, int](), 2
    for name, is_affine in _AFFINE[cls].items():
        positions[name] = position
        position += 1 + MAX_DEPTH if is_affine else 1
    return positions


OPERAND_WORDS = {cls: _operand_words(cls) for cls in NAMES if cls is not Loop}


def encode(node: Node, words: list[int]) -> None:
    """Append the int64 words of `node`; see `PimProgram.channel_words`."""
    start = len(words)
    words += [OPCODES[type(node)], 0]
    if isinstance(node, Loop):
        words.append(node.extent)
        for child in node.body:
            encode(child, words)
    else:
        for value in operands[type(node)](node):
            if type(value) is Affine:
                words.append(value.base)
                words += value.coefficients
                words += ZERO_COEFFICIENTS[len(value.coefficients)]
            else:
                words.append(value)
    words[start + 1] = len(words) - start


def decode(words: Sequence[int]) -> list[Node]:
    """The inverse of `encode`. Affines come back without coefficients after the last that is not 0."""
    nodes: list[Node] = []
    begin = 0
    while begin < len(words):
        size = words[begin + 1]
        if words[begin] == OPCODES[Loop]:
            body = tuple(decode(words[begin + 3 : begin + size]))
            nodes.append(Loop(extent=words[begin + 2], body=body))
        else:
            nodes.append(_decode_command(tuple(words[begin : begin + size])))
        begin += size
    return nodes


# Cached: channels of a program, and programs of a network, have most of their commands in common.
@functools.lru_cache(maxsize=1 << 16)
def _decode_command(words: tuple[int, ...]) -> CommandNode:
    """The command of its words."""
    cls: type[Any] = _CLASSES[words[0]]
    values: dict[str, Any] = {}
    for name, position in OPERAND_WORDS[cls].items():
        is_affine = _AFFINE[cls][name]
        values[name] = _affine(words[position : position + 1 + MAX_DEPTH]) if is_affine else words[position]
    command: CommandNode = cls(**values)
    return command


@functools.lru_cache(maxsize=1 << 16)
def _affine(words: tuple[int, ...]) -> Affine:
    base, *coefficients = words
    while coefficients and not coefficients[-1]:
        coefficients.pop()
    return Affine(base, tuple(coefficients))


class CommandStream(Sequence[Node]):
    """The nodes of a channel, decoded from their words (`PimProgram.channel_words`) at the first access."""

    def __init__(self, words: np.ndarray):
        self.words = words

    @functools.cached_property
    def nodes(self) -> tuple[Node, ...]:
        """The decoded nodes."""
        return tuple(decode(self.words.tolist()))

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    @overload
    def __getitem__(self, index: int) -> Node: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Node, ...]: ...

    def __getitem__(self, index: int | slice) -> Node | tuple[Node, ...]:
        return self.nodes[index]

    def __eq__(self, stream: object) -> bool:
        if isinstance(stream, CommandStream):
            return np.array_equal(self.words, stream.words)
        return self.nodes == stream

    def __hash__(self) -> int:
        return hash(self.nodes)

    def __reduce__(self) -> tuple[type[CommandStream], tuple[np.ndarray]]:
        return CommandStream, (self.words,)


def print_nodes(nodes: Sequence[Node], indent: str, lines: list[str], texts: dict[int, str]) -> None:
    """Append the ``.pimprog`` lines of `nodes`; `texts` keeps those of commands, by identity."""
    for index, node in enumerate(nodes):
        comma = "," if index + 1 < len(nodes) else ""
        if isinstance(node, Loop):
            lines.append(f'{indent}["LOOP", {node.extent}, [')
            print_nodes(node.body, indent + " ", lines, texts)
            lines.append(f"{indent}]]{comma}")
        else:
            text = texts.get(id(node))
            if text is None:
                text = texts[id(node)] = _command_text(node)
            lines.append(f"{indent}{text}{comma}")


def _command_text(node: CommandNode) -> str:
    values = [
        [value.base, *value.coefficients] if type(value) is Affine else value
        for value in operands[type(node)](node)
    ]
    if type(node) is Wrbias and not node.resumed:
        values.pop()
    # Python prints integers and lists of them as JSON does, five times as fast as `json.dumps`.
    return f'["{NAMES[type(node)]}", {str(values)[1:]}'


def parse_nodes(nodes: object, depth: int, where: str) -> tuple[Node, ...]:
    """The inverse of `print_nodes`, from parsed JSON; a `ValueError` names the wrong command."""
    if not isinstance(nodes, list):
        raise ValueError(f"{where}: {nodes!a:.60} is not a list of commands")
    return tuple(_parse_node(node, depth, where) for node in nodes)


def _parse_node(node: object, depth: int, where: str) -> Node:
    if not isinstance(node, list) or not node or not isinstance(node[0], str) or node[0] not in _TYPES:
        raise ValueError(f"{where}: {node!a:.60} is no command")
    cls, arguments = _TYPES[node[0]], node[1:]
    if cls is Loop:
        if depth == MAX_DEPTH or len(arguments) != 2 or type(arguments[0]) is not int or arguments[0] < 1:
            raise ValueError(f"{where}: a loop is [LOOP, extent, body], at most {MAX_DEPTH} deep")
        return Loop(extent=arguments[0], body=parse_nodes(arguments[1], depth + 1, where))
    names = _AFFINE[cls]
    if len(arguments) != len(names) and (cls is not Wrbias or len(arguments) != len(names) - 1):
        raise ValueError(f"{where}: {node[0]} takes {', '.join(names)}")
    values: dict[str, Any] = {}  # an `Affine` or an integer, as `_AFFINE` says of the field
    for (name, affine), value in zip(names.items(), arguments):
        numbers = value if affine else [value]
        if type(numbers) is not list or set(map(type, numbers)) != {int}:
            raise ValueError(f"{where}: {node[0]} has a bad {name}: {value!a:.60}")
        if affine and len(numbers) > depth + 1:
            raise ValueError(f"{where}: {name} of {node[0]} uses more loops than enclose it")
        values[name] = Affine(value[0], tuple(value[1:])) if affine else value
    return cls(**values)
