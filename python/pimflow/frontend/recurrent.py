"""Recurrent layers of ONNX, unrolled step by step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper

from pimflow.errors import UnsupportedOpError
from pimflow.zoo.nodes import attributes

LIMIT = 256  # upper bound on steps; each is a dozen nodes
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_ACTIVATIONS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}


def unroll(model: onnx.ModelProto) -> onnx.ModelProto:
    """Replace every LSTM, GRU and RNN by one product of all inputs, and a product of the state in each step.

    PIM runs both well: each is a constant matrix times a vector.

    Parameters
    ----------
    model : ModelProto
        With inferred shapes, opset 13 or newer; weights are initializers.

    Raises
    ------
    UnsupportedOpError
        For a node of more than `LIMIT` steps, or with an attribute or operand that is not supported.
    """
    if not any(node.op_type in GATES for node in model.graph.node):
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    values = {value.name: value for value in (*graph.input, *graph.value_info)}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.op_type in GATES and node.domain in ("", "ai.onnx"):
            layer = _UnrolledLayer(node, weights, values)
            nodes += layer.nodes
            graph.initializer.extend(layer.constants)
        else:
            nodes.append(onnx.NodeProto.FromString(node.SerializeToString()))
    del graph.node[:]
    graph.node.extend(nodes)
    return copy


class _UnrolledLayer:
    """The nodes that replace a recurrent node, and the constants that they read."""

    def __init__(
        self,
        node: onnx.NodeProto,
        weights: Mapping[str, onnx.TensorProto],
        values: Mapping[str, onnx.ValueInfoProto],
    ):
        self.node = node
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.prefix = node.name or node.output[0]
        attrs = attributes(node)
        operands = [*node.input, *[""] * (8 - len(node.input))]
        x, w, r, b, _, h0, c0, _ = operands
        directions = {b"forward": [1], b"reverse": [-1], b"bidirectional": [1, -1]}[
            attrs.get("direction", b"forward")
        ]
        kinds = [a.decode() for a in attrs.get("activations", ())] or [
            *_ACTIVATIONS[node.op_type] * len(directions)
        ]
        self._require_supported(attrs, operands, kinds)
        if not all(name in weights for name in (w, r, b) if name):
            raise self._unsupported("with computed weights is not supported; make them initializers")
        self.steps, self.batch, width = self._sequence_sizes(values.get(x))
        self.linear_before_reset = bool(attrs.get("linear_before_reset"))
        matrices = [numpy_helper.to_array(weights[name]) for name in (w, r)]
        self.hidden, gates = matrices[1].shape[2], GATES[node.op_type]
        biases = np.zeros((len(directions), 2 * gates * self.hidden), matrices[0].dtype)
        if b:
            biases = numpy_helper.to_array(weights[b])
        rows = self._emit("Reshape", [x, self._constant(np.array([self.steps * self.batch, width]))])
        kinds_per_direction = len(kinds) // len(directions)
        finals = []
        for d, direction in enumerate(directions):
            state = [self._initial(name, d, biases.dtype) for name in (h0, c0)]
            direction_kinds = kinds[d * kinds_per_direction :]
            halves, transposed = np.split(biases[d], 2), [m[d].T for m in matrices]
            finals.append(self._unroll(rows, transposed, halves, state, direction, direction_kinds))
        self._emit_results(finals)

    def _require_supported(self, attrs: dict, operands: list[str], kinds: list[str]) -> None:
        """Raise `UnsupportedOpError` for attributes and operands that change what the layer computes."""
        for name, value in (
            ("sequence_lens", operands[4]),
            ("P", operands[7]),
            ("clip", attrs.get("clip")),
            ("input_forget", attrs.get("input_forget")),
            ("layout", attrs.get("layout")),
            ("activations", not set(kinds) <= {"Sigmoid", "Tanh", "Relu"}),
        ):
            if value:
                raise self._unsupported(f"with '{name}' is not supported")

    def _sequence_sizes(self, x: onnx.ValueInfoProto | None) -> list[int]:
        """Steps, batch and width of the sequence `x`."""
        dims = [] if x is None else [d.dim_value for d in x.type.tensor_type.shape.dim]
        if len(dims) != 3 or 0 in dims:
            raise self._unsupported(
                "over a sequence of unknown length; fix the shapes of the inputs with --shape"
            )
        if dims[0] > LIMIT:
            raise self._unsupported(f"over {dims[0]} steps: {LIMIT} are supported; use shorter inputs")
        return dims

    def _emit_results(self, finals: list[tuple[list[str], list[str]]]) -> None:
        """Add the nodes of the results, from the hidden states and the last state of each direction."""
        sequences = [self._emit("Concat", list(steps), axis=0) for steps, _ in finals]
        shape = self._constant(np.array([self.steps, 1, self.batch, self.hidden]))
        results = [self._concat([self._emit("Reshape", [y, shape]) for y in sequences], 1)]
        for i in range(len(finals[0][1])):
            last = [self._emit("Unsqueeze", [s[i], self._constant(np.array([0]))]) for _, s in finals]
            results.append(self._concat(last, 0))
        for result, output in zip(results, self.node.output):
            if output:
                self.nodes.append(helper.make_node("Identity", [result], [output], f"{self.prefix}.{output}"))

    def _unroll(self, rows, matrices, halves, state, direction, kinds) -> tuple[list[str], list[str]]:
        """Add the nodes of a direction: hidden states in the order of the inputs, and the last state."""
        gates = GATES[self.node.op_type]
        separate = self.node.op_type == "GRU" and self.linear_before_reset  # the reset gate scales this bias
        outer, inner = (
            (halves[0], halves[1]) if separate else (halves[0] + halves[1], np.zeros_like(halves[1]))
        )
        projected = self._emit("Gemm", [rows, self._constant(matrices[0]), self._constant(outer)])
        recurrent, hidden_bias = self._constant(matrices[1]), self._constant(inner)
        parts = {}
        if self.node.op_type == "GRU" and not separate:  # the reset gate scales the state itself
            parts = {
                part: self._constant(m)
                for part, m in zip("gn", np.split(matrices[1], [2 * self.hidden], axis=1))
            }
        inputs = self._split(projected, self.steps, 0, self.batch)
        order = list(range(self.steps))[::direction]
        hidden = [""] * self.steps
        for t in order:
            if self.node.op_type == "LSTM":
                sums = self._add(inputs[t], self._emit("MatMul", [state[0], recurrent]))
                i, o, f, c = self._split(sums, gates, 1, self.hidden)
                i, o, f = (self._emit(kinds[0], [v]) for v in (i, o, f))
                c = self._emit("Mul", [i, self._emit(kinds[1], [c])])
                c = self._add(self._emit("Mul", [f, state[1]]), c)
                state = [self._emit("Mul", [o, self._emit(kinds[2], [c])]), c]
            elif self.node.op_type == "GRU":
                state = [self._gru(inputs[t], state[0], recurrent, hidden_bias, parts, kinds)]
            else:
                sums = self._add(inputs[t], self._emit("MatMul", [state[0], recurrent]))
                state = [self._emit(kinds[0], [sums])]
            hidden[t] = state[0]
        return hidden, state[: 2 if self.node.op_type == "LSTM" else 1]

    def _gru(self, x, h, recurrent, hidden_bias, parts, kinds) -> str:
        xz, xr, xn = self._split(x, 3, 1, self.hidden)
        if parts:
            hz, hr = self._split(self._emit("MatMul", [h, parts["g"]]), 2, 1, self.hidden)
        else:
            sums = self._add(self._emit("MatMul", [h, recurrent]), hidden_bias)
            hz, hr, hn = self._split(sums, 3, 1, self.hidden)
        z, r = (self._emit(kinds[0], [self._add(a, b)]) for a, b in ((xz, hz), (xr, hr)))
        if parts:
            new = self._emit("MatMul", [self._emit("Mul", [r, h]), parts["n"]])
        else:
            new = self._emit("Mul", [r, hn])
        new = self._emit(kinds[1], [self._add(xn, new)])
        return self._add(new, self._emit("Mul", [z, self._emit("Sub", [h, new])]))

    def _initial(self, name: str, direction: int, dtype: np.dtype) -> str:
        if not name:
            return self._constant(np.zeros((self.batch, self.hidden), dtype))
        return self._emit("Gather", [name, self._constant(np.array(direction))], axis=0)

    def _split(self, value: str, parts: int, axis: int, size: int) -> list[str]:
        if parts == 1:
            return [value]
        names = [f"{self.prefix}.{len(self.nodes)}.{i}" for i in range(parts)]
        sizes = self._constant(np.array([size] * parts))
        self.nodes.append(helper.make_node("Split", [value, sizes], names, f"{names[0]}.node", axis=axis))
        return names

    def _concat(self, values: list[str], axis: int) -> str:
        return values[0] if len(values) == 1 else self._emit("Concat", values, axis=axis)

    def _add(self, x: str, y: str) -> str:
        return self._emit("Add", [x, y])

    def _emit(self, op: str, operands: list[str], **attributes) -> str:
        name = f"{self.prefix}.{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, operands, [name], name, **attributes))
        return name

    def _constant(self, array: np.ndarray) -> str:
        name = f"{self.prefix}.constant{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(array, order="C"), name))
        return name

    def _unsupported(self, reason: str) -> UnsupportedOpError:
        return UnsupportedOpError(f"'{self.prefix}': {self.node.op_type} {reason}")
