"""Recurrent layers of ONNX, unrolled step by step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto

from pimflow.errors import UnsupportedOpError
from pimflow.frontend.constant_values import ConstantValues
from pimflow.frontend.optimiser import optimise
from pimflow.zoo.foreign.builder import NodeBuilder
from pimflow.zoo.nodes import attributes

LIMIT = 256  # upper bound on steps; each is a dozen nodes
DYNAMIC = "DynamicQuantizeLSTM"
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1, DYNAMIC: 4}
_ACTIVATIONS = {
    "LSTM": ("Sigmoid", "Tanh", "Tanh"),
    "GRU": ("Sigmoid", "Tanh"),
    "RNN": ("Tanh",),
    DYNAMIC: ("Sigmoid", "Tanh", "Tanh"),
}


# Activations and the attributes that they take, with their defaults.
_PARAMETERS: dict[str, dict[str, float]] = {
    **{name: {} for name in ("Relu", "Sigmoid", "Softplus", "Softsign", "Tanh")},
    "Affine": {"alpha": 1.0, "beta": 0.0},
    "Elu": {"alpha": 1.0},
    "HardSigmoid": {"alpha": 0.2, "beta": 0.5},
    "LeakyRelu": {"alpha": 0.01},
    "ScaledTanh": {"alpha": 1.0, "beta": 1.0},
    "ThresholdedRelu": {"alpha": 1.0},
}
_SPELLINGS = {name.lower(): name for name in _PARAMETERS}  # ONNX does not distinguish cases


def unroll(model: onnx.ModelProto) -> onnx.ModelProto:
    """Replace every LSTM, GRU and RNN by one product of all inputs, and a product of the state in each step.

    PIM runs both well: each is a constant matrix times a vector.

    Parameters
    ----------
    model : ModelProto
        With inferred shapes, opset 13 or newer; weights depend on constants alone.

    Raises
    ------
    UnsupportedOpError
        For a node of more than `LIMIT` steps, or with an attribute or operand that is not supported.
    """
    pending = sum(map(_is_recurrent, model.graph.node))
    while pending:  # the sizes behind a DynamicQuantizeLSTM are known once it is unrolled
        model = _unroll_known(model)
        before, pending = pending, sum(map(_is_recurrent, model.graph.node))
        if pending == before:
            return _unroll_known(model, all_layers=True)
        if pending:  # a stack may reshape between its layers, to sizes that it computes from shapes
            model = onnx.shape_inference.infer_shapes(optimise(model) or model)
    return model


def _unroll_known(model: onnx.ModelProto, all_layers: bool = False) -> onnx.ModelProto:
    """`model` with layers over sequences of known sizes unrolled, or with all."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    constants = ConstantValues(model, {tensor.name: tensor for tensor in graph.initializer})
    values = {value.name: value for value in (*graph.input, *graph.value_info)}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if _is_recurrent(node) and (all_layers or _sizes(values.get(node.input[0]))):
            layer = _UnrolledLayer(node, constants, values)
            nodes += layer.builder.nodes
            graph.initializer.extend(layer.builder.constants)
        else:
            nodes.append(onnx.NodeProto.FromString(node.SerializeToString()))
    del graph.node[:]
    graph.node.extend(nodes)
    return copy


def _sizes(x: onnx.ValueInfoProto | None) -> list[int]:
    """Steps, batch and width of the sequence `x`; empty if one is not known."""
    dims = [] if x is None else [d.dim_value for d in x.type.tensor_type.shape.dim]
    return dims if len(dims) == 3 and 0 not in dims else []


def _is_recurrent(node: onnx.NodeProto) -> bool:
    return node.op_type in GATES and node.domain in ("", "ai.onnx", "com.microsoft")


@dataclass(frozen=True, kw_only=True)
class _Matrix:
    """A constant matrix [width, gates], perhaps in 8 bits with its scale and zero point."""

    values: np.ndarray
    scale: np.ndarray | None = None
    zero: np.ndarray | None = None

    def split_columns(self, place: int) -> tuple[_Matrix, _Matrix]:
        """The columns before `place`, and those from it on."""
        assert self.scale is None
        left, right = np.split(self.values, [place], axis=1)
        return _Matrix(values=left), _Matrix(values=right)


@dataclass(frozen=True, kw_only=True)
class _Direction:
    """One direction of a layer.

    Attributes
    ----------
    matrices : tuple of _Matrix
        Of the inputs and of the state.
    order : int
        1 for the order of the inputs, -1 for the opposite one.
    activations : list of functions
        Each adds the nodes of an activation, and returns its result.
    peepholes : list of str
        Weights of the cell in the gates i, o and f of an LSTM; empty if it has none.
    """

    matrices: tuple[_Matrix, _Matrix]
    biases: list[np.ndarray]
    order: int
    activations: list[Callable[[str], str]]
    peepholes: list[str]


class _UnrolledLayer:
    """The nodes that replace a recurrent node, and the constants that they read."""

    def __init__(
        self, node: onnx.NodeProto, constants: ConstantValues, values: Mapping[str, onnx.ValueInfoProto]
    ):
        self.node = node
        self.kind = "LSTM" if node.op_type == DYNAMIC else node.op_type
        self.constants = constants
        self.builder = NodeBuilder(node.name or node.output[0])
        attrs = attributes(node)
        operands = [*node.input, *[""] * (12 - len(node.input))]
        x, _, _, b, lengths, h0, c0, peepholes = operands[:8]
        directions = {b"forward": [1], b"reverse": [-1], b"bidirectional": [1, -1]}[
            attrs.get("direction", b"forward")
        ]
        self.couples_gates = bool(attrs.get("input_forget"))
        activations = self._activations(attrs, len(directions))
        self.steps, self.batch, width = self._sequence_sizes(values.get(x))
        self.linear_before_reset = bool(attrs.get("linear_before_reset"))
        matrices = [self._matrices(operands, index) for index in (1, 2)]
        self.hidden, gates = matrices[1][0].values.shape[0], GATES[node.op_type]
        biases = np.zeros((len(directions), 2 * gates * self.hidden), "float32")
        if b:
            biases = self._constant_value(b)
        self.inside = self._steps_inside(lengths)
        self.zeros = self.builder.constant(np.zeros((self.batch, self.hidden), "float32"))
        emit, constant = self.builder.emit, self.builder.constant
        rows = emit("Reshape", [x, constant(np.array([self.steps * self.batch, width]))])
        activation_count = len(activations) // len(directions)
        finals = []
        for d, direction in enumerate(directions):
            state = [self._initial(name, d) for name in (h0, c0)]
            weights = self._initial(peepholes, d) if peepholes else ""
            layer_direction = _Direction(
                matrices=(matrices[0][d], matrices[1][d]),
                biases=np.split(biases[d], 2),
                order=direction,
                activations=activations[d * activation_count :],
                peepholes=self._split(weights, 3, 0, self.hidden) if weights else [],
            )
            finals.append(self._unroll(rows, state, layer_direction))
        self._emit_results(finals)

    def _constant_value(self, name: str) -> np.ndarray:
        value = self.constants.value(name)
        if value is None:
            raise self._unsupported("with computed weights is not supported; make them initializers")
        return value

    def _matrices(self, operands: list[str], index: int) -> list[_Matrix]:
        """The weights of each direction, transposed: W if `index` is 1, R if it is 2."""
        stored = self._constant_value(operands[index])
        if self.node.op_type != DYNAMIC:
            return [_Matrix(values=matrix.T) for matrix in stored]
        scale, zero = (self._constant_value(operands[6 + 2 * index + part]) for part in (0, 1))
        return [_Matrix(values=stored[d], scale=scale[d], zero=zero[d]) for d in range(len(stored))]

    def _steps_inside(self, lengths: str) -> list[np.ndarray | str | None]:
        """For each step, which sequences last so long, [batch, 1]; None where all do."""
        if not lengths:
            return [None] * self.steps
        ends = self.constants.value(lengths)
        if ends is not None:
            masks = [np.asarray(ends > step).reshape(-1, 1) for step in range(self.steps)]
            return [None if mask.all() else mask for mask in masks]
        emit, constant = self.builder.emit, self.builder.constant
        column = emit("Unsqueeze", [emit("Cast", [lengths], to=TensorProto.INT64), constant(np.array([1]))])
        return [emit("Greater", [column, constant(np.array(step))]) for step in range(self.steps)]

    def _choose(self, step: int, inside: str, outside: str) -> str:
        """`inside` for sequences that last beyond `step`, else `outside`."""
        mask = self.inside[step]
        if mask is None:
            return inside
        if isinstance(mask, np.ndarray) and not mask.any():
            return outside
        name = mask if isinstance(mask, str) else self.builder.constant(mask)
        return self.builder.emit("Where", [name, inside, outside])

    def _activations(self, attrs: dict, directions: int) -> list[Callable[[str], str]]:
        """The activations of all directions; raises `UnsupportedOpError` for one that ONNX does not have."""
        kinds = [kind.decode() for kind in attrs.get("activations", ())]
        given = {name: list(attrs.get(f"activation_{name}", ())) for name in ("alpha", "beta")}
        functions = []
        for kind in kinds or _ACTIVATIONS[self.node.op_type] * directions:
            name = _SPELLINGS.get(kind.lower())
            if name is None:
                raise self._unsupported(f"with the activation '{kind}' is not supported")
            parameters = {
                key: given[key].pop(0) if given[key] else default
                for key, default in _PARAMETERS[name].items()
            }
            functions.append(functools.partial(self._activate, name, parameters, attrs.get("clip", 0.0)))
        return functions

    def _activate(self, kind: str, parameters: Mapping[str, float], bound: float, value: str) -> str:
        """Add the nodes of an activation, of operands within `bound` of zero if that is not zero."""
        emit, scalar = self.builder.emit, self.builder.scalar
        if bound:
            value = emit("Clip", [value, scalar(-bound), scalar(bound)])
        if kind == "Affine":
            scaled = emit("Mul", [value, scalar(parameters["alpha"])])
            return emit("Add", [scaled, scalar(parameters["beta"])])
        if kind == "ScaledTanh":
            inner = emit("Tanh", [emit("Mul", [value, scalar(parameters["beta"])])])
            return emit("Mul", [inner, scalar(parameters["alpha"])])
        return emit(kind, [value], **parameters)

    def _sequence_sizes(self, x: onnx.ValueInfoProto | None) -> list[int]:
        """Steps, batch and width of the sequence `x`."""
        dims = _sizes(x)
        if not dims:
            raise self._unsupported(
                "over a sequence of unknown length; fix the shapes of the inputs with --shape"
            )
        if dims[0] > LIMIT:
            raise self._unsupported(f"over {dims[0]} steps: {LIMIT} are supported; use shorter inputs")
        return dims

    def _emit_results(self, finals: list[tuple[list[str], list[str]]]) -> None:
        """Add the nodes of the results, from the hidden states and the last state of each direction."""
        emit, constant = self.builder.emit, self.builder.constant
        sequences = [emit("Concat", list(steps), axis=0) for steps, _ in finals]
        shape = constant(np.array([self.steps, 1, self.batch, self.hidden]))
        results = [self.builder.concat([emit("Reshape", [y, shape]) for y in sequences], 1)]
        for i in range(len(finals[0][1])):
            last = [emit("Unsqueeze", [s[i], constant(np.array([0]))]) for _, s in finals]
            results.append(self.builder.concat(last, 0))
        for result, output in zip(results, self.node.output):
            if output:
                self.builder.bind(result, output)

    def _unroll(self, rows: str, state: list[str], direction: _Direction) -> tuple[list[str], list[str]]:
        """Add the nodes of a direction: hidden states in the order of the inputs, and the last state."""
        halves, matrices, activations = direction.biases, direction.matrices, direction.activations
        separate = self.kind == "GRU" and self.linear_before_reset  # the reset gate scales this bias
        outer, inner = (
            (halves[0], halves[1]) if separate else (halves[0] + halves[1], np.zeros_like(halves[1]))
        )
        projected = self._product(rows, matrices[0], outer)
        recurrent = [matrices[1]]
        if self.kind == "GRU" and not separate:  # the reset gate scales the state itself
            recurrent = list(matrices[1].split_columns(2 * self.hidden))
        products = [self._function(matrix) for matrix in recurrent]
        hidden_bias = self.builder.constant(inner)
        inputs = self._split(projected, self.steps, 0, self.batch)
        order = list(range(self.steps))[:: direction.order]
        hidden = [""] * self.steps
        for t in order:
            if self.kind == "LSTM":
                new = self._lstm(self._add(inputs[t], products[0](state[0])), state[1], direction)
            elif self.kind == "GRU":
                new = [self._gru(inputs[t], state[0], products, hidden_bias, activations)]
            else:
                new = [activations[0](self._add(inputs[t], products[0](state[0])))]
            hidden[t] = self._choose(t, new[0], self.zeros)
            state = [self._choose(t, *pair) for pair in zip(new, state)]
        return hidden, state[: 2 if self.kind == "LSTM" else 1]

    def _lstm(self, sums: str, cell: str, direction: _Direction) -> list[str]:
        """The state after a step: hidden values and the cell."""
        emit, (activate, activate_cell, activate_state, *_) = self.builder.emit, direction.activations

        def gate(value: str, place: int, seen_cell: str) -> str:
            """An activated gate, which may see the cell."""
            if direction.peepholes:
                value = self._add(value, emit("Mul", [seen_cell, direction.peepholes[place]]))
            return activate(value)

        i, o, f, c = self._split(sums, 4, 1, self.hidden)
        i = gate(i, 0, cell)
        c = emit("Mul", [i, activate_cell(c)])
        f = emit("Sub", [self.builder.scalar(1), i]) if self.couples_gates else gate(f, 2, cell)
        c = self._add(emit("Mul", [f, cell]), c)
        return [emit("Mul", [gate(o, 1, c), activate_state(c)]), c]

    def _gru(
        self, x: str, h: str, products: list, hidden_bias: str, activations: list[Callable[[str], str]]
    ) -> str:
        """The hidden values after a step; of two products, the second is of the state that is reset."""
        emit = self.builder.emit
        xz, xr, xn = self._split(x, 3, 1, self.hidden)
        if len(products) > 1:
            hz, hr = self._split(products[0](h), 2, 1, self.hidden)
        else:
            sums = self._add(products[0](h), hidden_bias)
            hz, hr, hn = self._split(sums, 3, 1, self.hidden)
        z, r = (activations[0](self._add(a, b)) for a, b in ((xz, hz), (xr, hr)))
        new = products[1](emit("Mul", [r, h])) if len(products) > 1 else emit("Mul", [r, hn])
        new = activations[1](self._add(xn, new))
        return self._add(new, emit("Mul", [z, emit("Sub", [h, new])]))

    def _product(self, x: str, matrix: _Matrix, bias: np.ndarray) -> str:
        """The product of all inputs with a matrix, plus `bias`."""
        if matrix.scale is None:
            constants = [self.builder.constant(array) for array in (matrix.values, bias)]
            return self.builder.emit("Gemm", [x, *constants])
        return self._add(self._function(matrix)(x), self.builder.constant(bias))

    def _function(self, matrix: _Matrix) -> Callable[[str], str]:
        """The function that multiplies by a matrix; one of 8 bits quantises its operand by its range."""
        builder = self.builder
        values = builder.constant(matrix.values)
        if matrix.scale is None or matrix.zero is None:
            return lambda x: builder.emit("MatMul", [x, values])
        scale, zero = builder.constant(matrix.scale), builder.constant(matrix.zero)

        def multiply(x: str) -> str:
            """The product; nothing is quantised for a state of zeros, whose range is empty."""
            if x == self.zeros:
                return builder.constant(np.zeros((self.batch, matrix.values.shape[1]), "float32"))
            narrow, x_scale, x_zero = builder.emit_tuple("DynamicQuantizeLinear", [x], 3)
            total = builder.emit("MatMulInteger", [narrow, values, x_zero, zero])
            total = builder.emit("Cast", [total], to=TensorProto.FLOAT)
            return builder.emit("Mul", [total, builder.emit("Mul", [x_scale, scale])])

        return multiply

    def _initial(self, name: str, direction: int) -> str:
        if not name:
            return self.zeros
        return self.builder.emit("Gather", [name, self.builder.constant(np.array(direction))], axis=0)

    def _split(self, value: str, parts: int, axis: int, size: int) -> list[str]:
        return self.builder.split(value, [size] * parts, axis)

    def _add(self, x: str, y: str) -> str:
        return self.builder.emit("Add", [x, y])

    def _unsupported(self, reason: str) -> UnsupportedOpError:
        return UnsupportedOpError(f"'{self.builder.prefix}': {self.node.op_type} {reason}")
