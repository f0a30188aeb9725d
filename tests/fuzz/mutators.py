"""Mutants of files: of bytes, of text, of JSON and TOML values, and of ONNX graphs."""

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import onnx

NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
NUMBERS = (
    *(b"0", b"-1", b"1", b"2", b"7", b"255", b"65536", b"2147483647", b"2147483648", b"-2147483649"),
    *(b"9223372036854775807", b"9223372036854775808", b"1e308", b"1e999", b"-0.0", b"0.5", b"1e-320"),
    *(b"nan", b"inf", b"NaN", b"Infinity", b"1_0", b"0x10", b"00", b"9" * 400),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 2**31, 1 << 63, 1 << 70, 0.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", "x", "../x", "\x00", "\ud800", "é" * 50, "a\nb", [], {}, [[]], [0], [None], {"x": 1}, ["x", 1]),
)


def mutant(data: bytes, draw: random.Random, suffix: str) -> bytes:
    """A file that differs from `data` in one to three places."""
    kinds = [_bytes, _bytes, _numbers]
    if suffix in (".json", ".pimprog"):
        kinds += [_json] * 6
    elif suffix == ".onnx":
        kinds += [_onnx] * 9
    elif suffix in (".toml", ".pim"):
        kinds += [_lines] * 3 + [_numbers] * 3
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        data = draw.choice(kinds)(data, draw)
    return data


def _bytes(data: bytes, draw: random.Random) -> bytes:
    offset, size = draw.randrange(len(data) + 1), draw.choice((1, 1, 2, 8, 64, 1024))
    replaced = draw.choice(
        (b"", bytes(draw.randrange(256) for _ in range(min(size, 8))), data[offset : offset + size] * 2)
    )
    return data[:offset] + replaced + data[offset + size :]


def _numbers(data: bytes, draw: random.Random) -> bytes:
    numbers = list(NUMBER.finditer(data[: 1 << 20]))
    if not numbers:
        return _bytes(data, draw)
    number = draw.choice(numbers)
    return data[: number.start()] + draw.choice(NUMBERS) + data[number.end() :]


def _lines(data: bytes, draw: random.Random) -> bytes:
    lines = data.split(b"\n")
    index, other_index = draw.randrange(len(lines)), draw.randrange(len(lines))
    edit = draw.randrange(4)
    if edit == 0:
        del lines[index]
    elif edit == 1:
        lines.insert(index, lines[other_index])
    elif edit == 2:
        lines[index], lines[other_index] = lines[other_index], lines[index]
    else:
        words = lines[index].split(b" ")
        words[draw.randrange(len(words))] = draw.choice(
            (b"", b"x", b"[]", b'""', b"true", b"{}", b"=", b'"a"')
        )
        lines[index] = b" ".join(words)
    return b"\n".join(lines)


def _places(value: object) -> Iterator[tuple[Any, Any]]:
    """Containers of a JSON value with each of their keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from _places(inner)


def _json(data: bytes, draw: random.Random) -> bytes:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return _bytes(data, draw)
    places = list(_places(value))
    if not places:
        return _bytes(data, draw)
    # As many of the outermost places as of all: a header is small beside what it heads.
    holder, key = draw.choice(
        draw.choice((places, [position for position in places if position[0] is value] or places))
    )
    edit = draw.randrange(6)
    if edit == 0:
        del holder[key]
    elif edit == 1 and isinstance(holder, list):
        holder.insert(key, holder[key])
    elif edit == 2 and isinstance(holder, dict):
        holder[draw.choice(("x", "", key + "_", key.upper()))] = holder.pop(key)
    elif edit == 3:
        source_holder, place = draw.choice(places)
        holder[key] = json.loads(json.dumps(source_holder[place]))
    elif edit == 4 and type(holder[key]) in (int, float):
        holder[key] += draw.choice((-2, -1, 1, 2, 100))
    else:
        holder[key] = draw.choice(VALUES)
    return json.dumps(value).encode("utf-8", "surrogatepass")


def _onnx(data: bytes, draw: random.Random) -> bytes:
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except Exception:  # protobuf's own hierarchy
        return _bytes(data, draw)
    graph = model.graph
    if not graph.node:
        return _bytes(data, draw)
    node = draw.choice(graph.node)
    names = [name for n in graph.node for name in (*n.input, *n.output)] + ["", "new"]
    edit = draw.randrange(10)
    if edit == 0:
        graph.node.remove(node)
    elif edit == 1:
        node.op_type = draw.choice([n.op_type for n in graph.node] + ["Softmax", "Resize", "If", "X"])
    elif edit == 2 and node.input:
        node.input[draw.randrange(len(node.input))] = draw.choice(names)
    elif edit == 3 and node.output:
        node.output[draw.randrange(len(node.output))] = draw.choice(names)
    elif edit == 4 and node.attribute:
        _attribute(draw.choice(node.attribute), draw)
    elif edit == 5 and graph.initializer:
        tensor = draw.choice(graph.initializer)
        if tensor.dims and draw.random() < 0.7:
            tensor.dims[draw.randrange(len(tensor.dims))] = draw.choice((0, 1, 2, 3, -1, 1 << 40))
        else:
            tensor.data_type = draw.randrange(25)
    elif edit == 6:
        value = draw.choice([*graph.input, *graph.output])
        shape = value.type.tensor_type.shape
        if shape.dim and draw.random() < 0.7:
            shape.dim[draw.randrange(len(shape.dim))].dim_value = draw.choice((0, 1, 2, 5, -1, 2**31, 2**40))
        else:
            value.type.tensor_type.elem_type = draw.randrange(25)
    elif edit == 7 and model.opset_import:
        model.opset_import[0].version = draw.choice((0, 1, 6, 7, 9, 10, 11, 13, 17, 18, 21, 22, 25, 99))
    elif edit == 8:
        graph.node.insert(draw.randrange(len(graph.node) + 1), node)
    else:
        node.input.append(draw.choice(names))
    try:
        return model.SerializeToString()
    except Exception:  # protobuf's own hierarchy
        return data


def _attribute(attribute: onnx.AttributeProto, draw: random.Random) -> None:
    number = draw.choice((0, 1, 2, 3, -1, 7, 1 << 31, 1 << 40))
    if attribute.ints and draw.random() < 0.8:
        if draw.random() < 0.3:
            attribute.ints.append(number)
        else:
            attribute.ints[draw.randrange(len(attribute.ints))] = number
    elif attribute.HasField("i"):
        attribute.i = number
    elif attribute.HasField("f"):
        attribute.f = draw.choice((0.0, -1.0, 1e30, float("nan"), float("inf")))
    elif attribute.HasField("s"):
        attribute.s = draw.choice((b"", b"x", b"SAME_UPPER", b"\xff"))
    else:
        attribute.name = draw.choice(("", "x", "axis", "axes", "pads", "strides", "group"))


_ALIKE = [  # operators in place of one another
    ["Relu", "Sigmoid", "Tanh", "Elu", "Selu", "Softplus", "Softsign", "HardSwish", "HardSigmoid"],
    ["Abs", "Neg", "Erf", "Floor", "Ceil", "Exp", "Sign", "Cos", "Relu"],
    ["Add", "Sub", "Mul", "Div", "Max", "Min", "Mean", "Sum"],
    ["MaxPool", "AveragePool", "LpPool"],
    ["ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceProd"],
    ["Softmax", "LogSoftmax"],
]


def neighbour(data: bytes, draw: random.Random) -> bytes:
    """A network that is often a right one too: other operators, attributes and sizes, other operands."""
    model = onnx.ModelProto.FromString(data)
    for _ in range(draw.choice((1, 2, 3))):
        draw.choice((_operator, _number, _number, _size, _operand))(model.graph, draw)
    del model.graph.value_info[:]
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    return model.SerializeToString()


def _operator(graph: onnx.GraphProto, draw: random.Random) -> None:
    places = [(node, alike) for node in graph.node for alike in _ALIKE if node.op_type in alike]
    if places:
        node, alike = draw.choice(places)
        node.op_type = draw.choice(alike)


def _number(graph: onnx.GraphProto, draw: random.Random) -> None:
    places = [
        node_attribute
        for node in graph.node
        for node_attribute in node.attribute
        if node_attribute.ints or node_attribute.HasField("i")
    ]
    if not places:
        return
    attribute = draw.choice(places)
    if attribute.ints:
        attribute.ints[draw.randrange(len(attribute.ints))] = draw.choice((0, 1, 1, 2, 2, 3, 4))
    else:
        attribute.i = draw.choice((0, 1, 2, 3, -1, -2))


def _size(graph: onnx.GraphProto, draw: random.Random) -> None:
    dims = draw.choice(graph.input).type.tensor_type.shape.dim
    if dims:
        draw.choice(dims).dim_value = draw.choice((1, 2, 3, 5, 7, 8, 9, 16, 17))


def _operand(graph: onnx.GraphProto, draw: random.Random) -> None:
    index = draw.randrange(len(graph.node))
    node = graph.node[index]
    names = [value.name for value in graph.input] + [
        name for earlier_node in graph.node[:index] for name in earlier_node.output
    ]
    if node.input:
        node.input[draw.choice((0, 0, draw.randrange(len(node.input))))] = draw.choice(names)
