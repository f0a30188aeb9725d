"""ONNX networks with random roundings, to measure how far rounding moves their outputs.

This is independent of how networks are lowered: nodes with random factors are inserted between those of the
file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import onnx
from onnx import TensorProto, helper

from pimflow import zoo
from pimflow.frontend.onnx_rewrites import opset_of, strip_weights
from pimflow.frontend.reference import Fp16Storage
from pimflow.zoo.nodes import (
    ACTIVATIONS,
    ARITHMETIC,
    BIASED,
    MOVES,
    PRODUCTS,
    RECURRENT,
    REDUCTIONS,
    SHAPES,
    attributes,
)

FP16_ROUNDOFF = 2.0**-11
FP32_ROUNDOFF = 2.0**-24
# Rounding to integers turns the last bit of a value near a tie into a whole step. Drawn values are hardly
# ever so near, so that they are moved by more: some elements in a thousand take the other step.
_QUANTISERS = ("DynamicQuantizeLinear", "QuantizeLinear", "Round")
TIE = 2.0**-16

_WITHOUT_UNIFORM = 22  # opset from which ONNX Runtime has no RandomUniformLike on CPUs; it has Dropout
# Operators that a compiler fuses into the kernel of the operator before them.
_ELEMENTWISE = (*ACTIVATIONS, *ARITHMETIC, "BatchNormalization", "Identity")


def perturb(model: onnx.ModelProto, stored: Fp16Storage, to_nearest: bool = False) -> onnx.ModelProto:
    """`model` without its weights; each of its runs rounds in other random directions.

    Tensors that `stored` names are rounded to fp16, up or down at random: multiplied by a factor of 1 ±
    2^-11, then cast. Operands of other sums of K terms, which a build adds in another order, are multiplied
    by factors of 1 ± 2^-24 √K, and results of other arithmetic by 1 ± 2^-23; operands that are rounded to
    integers by 1 ± 2^-16, see `TIE`. Tensors that do not depend on
    the values of inputs, such as shapes, are not changed unless `stored` names them.

    Parameters
    ----------
    model : ModelProto
        A result of `zoo.load_model`, with inferred shapes and named nodes.
    to_nearest : bool
        Whether what `stored` names is rounded to the nearest instead, as a build does.
    """
    return _RoundingInserter(model, stored, to_nearest).result()


class _RoundingInserter:
    def __init__(self, model: onnx.ModelProto, stored: Fp16Storage, to_nearest: bool) -> None:
        self.to_nearest = to_nearest
        self.stored, self.light, self.opset = stored, strip_weights(model), opset_of(model)
        graph = self.light.graph
        drawn_weights = [value for value in model.graph.input if zoo.is_weight(value)]
        weights = {t.name: tuple(t.dims) for t in model.graph.initializer}
        weights |= {value.name: zoo.dims_of(value) for value in drawn_weights}
        types = {value.name: value.type.tensor_type for value in (*model.graph.input, *graph.value_info)}
        types |= {value.name: value.type.tensor_type for value in graph.output}
        self.shapes = {name: tuple(d.dim_value for d in t.shape.dim) for name, t in types.items()} | weights
        self.floats = {
            name for name, tensor_type in types.items() if tensor_type.elem_type == TensorProto.FLOAT
        }
        self.floats |= {t.name for t in model.graph.initializer if t.data_type == TensorProto.FLOAT}
        self.input_dependent = _input_dependent_names(graph)
        self.layers = nodes_of_layers(graph.node, stored.layers)
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        for node in graph.node:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)
        self.used_names = {name for node in graph.node for name in (*node.input, *node.output)}
        self.seeds = np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []

    def result(self) -> onnx.ModelProto:
        """The model with inserted roundings."""
        original_nodes = [
            onnx.NodeProto.FromString(node.SerializeToString()) for node in self.light.graph.node
        ]
        for node in original_nodes:
            self._add_node(node)
        del self.light.graph.node[:]
        self.light.graph.node.extend(self._weights_first())
        del self.light.graph.value_info[:]
        return self.light

    def _weights_first(self) -> list[onnx.NodeProto]:
        """All nodes, first those that do not depend on inputs.

        ONNX Runtime computes those operands of a node last that are listed first. So each weight is rounded
        shortly before it is read; in the order of the readers, all would be rounded before the first product.
        """
        reached = {value.name for value in self.light.graph.input}
        last: list[onnx.NodeProto] = []
        first: list[onnx.NodeProto] = []
        for node in self.nodes:
            later = any(name in reached for name in node.input)
            (last if later else first).append(node)
            if later:
                reached.update(node.output)
        return first + last

    def _add_node(self, node: onnx.NodeProto) -> None:
        narrow = node.name in self.layers
        product = node.op_type in PRODUCTS
        terms, rank = self._terms(node), len(self.shapes.get(next(iter(node.output), ""), ()))
        for index, name in enumerate(node.input):
            if name not in self.floats:
                continue
            bias = node.op_type in BIASED and index == 2
            weight = product and index > 0 and len(self.shapes.get(name, ())) > 1
            if not bias and (narrow or (self.stored.kernels and weight)):
                node.input[index] = self._round(name)
            elif index == 0 and node.op_type in _QUANTISERS and name in self.input_dependent:
                node.input[0] = self._scale(name, TIE)
            elif index == 0 and terms > 1 and name in self.input_dependent:
                node.input[0] = self._scale(name, FP32_ROUNDOFF * max(2.0, math.sqrt(terms)))
        if narrow:
            self._narrow(node, rank)
        elif self.stored.kernels and self._ends_kernel(node):
            self._perturb_results(node, self._round)
        elif terms == 1 and node.op_type not in MOVES and not product:
            self._perturb_results(node, lambda name: self._scale(name, 2 * FP32_ROUNDOFF))
        else:
            self.nodes.append(node)

    def _narrow(self, node: onnx.NodeProto, rank: int) -> None:
        """Add a layer on PIM, which rounds its product to fp16 before the bias is added."""
        has_bias = node.op_type in BIASED and len(node.input) == 3 and rank >= 2
        bias = node.input.pop() if has_bias else ""
        if not bias:
            self._perturb_results(node, self._round)
            return
        final = node.output[0]
        node.output[0] = self._fresh_name(f"{final}.product")
        self.floats.add(node.output[0])
        self.nodes.append(node)
        product = self._round(node.output[0])
        if node.op_type == "Gemm":
            factor = self._constant(f"{final}.beta", np.float32(attributes(node).get("beta", 1.0)))
            added = self._add("Mul", [bias, factor], f"{final}.bias")
        else:
            shape = self._constant(f"{final}.shape", np.array([-1] + [1] * (rank - 2), np.int64))
            added = self._add("Reshape", [bias, shape], f"{final}.bias")
        self.nodes.append(helper.make_node("Add", [product, added], [final]))

    def _perturb_results(self, node: onnx.NodeProto, change: Callable[[str], str]) -> None:
        """Add `node`, followed by nodes that perturb its floating-point results by `change`."""
        self.nodes.append(node)
        for index, final in enumerate(node.output):
            if final in self.floats and final in self.input_dependent:
                exact_name = node.output[index] = self._fresh_name(f"{final}.exact")
                self.nodes.append(helper.make_node("Identity", [change(exact_name)], [final]))

    def _round(self, name: str) -> str:
        near = name if self.to_nearest else self._scale(name, FP16_ROUNDOFF)
        half = self._add("Cast", [near], f"{name}.half", to=TensorProto.FLOAT16)
        return self._add("Cast", [half], f"{name}.rounded", to=TensorProto.FLOAT)

    def _scale(self, name: str, roundoff: float) -> str:
        """Multiply a tensor by random factors; adding noise would give NaN for the infinities of masks."""
        seed = int(self.seeds.integers(1, 1 << 24))
        if self.opset < _WITHOUT_UNIFORM:
            span = {"low": 1.0 - roundoff, "high": 1.0 + roundoff, "seed": float(seed)}
            factors = self._add(
                "RandomUniformLike", [name], f"{name}.factors", dtype=TensorProto.FLOAT, **span
            )
        else:
            factors = self._two_factors(name, roundoff / math.sqrt(3), seed)
        return self._add("Mul", [name, factors], f"{name}.scaled")

    def _two_factors(self, name: str, roundoff: float, seed: int) -> str:
        """Factors of 1 - `roundoff` or 1 + `roundoff`, by a Dropout of one half."""
        one = onnx.numpy_helper.from_array(np.ones(1, np.float32))
        shape = self._add("Shape", [name], f"{name}.shape")
        ones = self._add("ConstantOfShape", [shape], f"{name}.ones", value=one)
        ratio, mode = (self._constant(f"{name}.{n}", x) for n, x in (("half", np.float32(0.5)), ("on", True)))
        drawn = self._add("Dropout", [ones, ratio, mode], f"{name}.drawn", seed=seed)
        is_up = self._add("Cast", [drawn], f"{name}.is_up", to=TensorProto.BOOL)
        factors = (np.float32(1.0 + sign * roundoff) for sign in (1, -1))
        up, down = (self._constant(f"{name}.factor", factor) for factor in factors)
        return self._add("Where", [is_up, up, down], f"{name}.factors")

    def _add(self, kind: str, inputs: list[str], output: str, **attributes: object) -> str:
        name = self._fresh_name(output)
        self.nodes.append(helper.make_node(kind, inputs, [name], **attributes))
        return name

    def _constant(self, name: str, value: np.ndarray) -> str:
        return self._add("Constant", [], name, value=onnx.numpy_helper.from_array(np.asarray(value)))

    def _fresh_name(self, name: str) -> str:
        while name in self.used_names:
            name += "_"
        self.used_names.add(name)
        return name

    def _ends_kernel(self, node: onnx.NodeProto) -> bool:
        """Whether a result is stored, if elementwise operators are fused with their only operand."""
        if node.op_type in MOVES and node.op_type not in _ELEMENTWISE:
            return False
        readers = self.readers.get(node.output[0], [])
        return len(readers) != 1 or readers[0].op_type not in _ELEMENTWISE

    def _terms(self, node: onnx.NodeProto) -> int:
        """Number of terms of the sums of `node`; 1 if it has no sums, or if the number is unknown."""
        operand = self.shapes.get(node.input[0], ()) if node.input else ()
        weights = self.shapes.get(node.input[1], ()) if len(node.input) > 1 else ()
        if node.op_type == "Conv":
            return max(1, math.prod(weights[1:]))
        if node.op_type == "ConvTranspose" and weights:
            return max(1, weights[0] * math.prod(weights[2:]))
        if node.op_type == "Gemm" and len(operand) == 2:
            return max(1, operand[0 if attributes(node).get("transA") else 1])
        if node.op_type == "MatMul" and operand:
            return max(1, operand[-1])
        if node.op_type in RECURRENT and len(weights) == 3:
            return max(1, sum(self.shapes.get(name, (0,))[-1] for name in node.input[1:3]))
        if node.op_type in REDUCTIONS:
            return max(1, math.prod(operand) // max(1, math.prod(self.shapes.get(node.output[0], operand))))
        return 1


def _input_dependent_names(graph: onnx.GraphProto) -> set[str]:
    """Names of the tensors that depend on the values of inputs."""
    names = {value.name for value in graph.input}
    for node in graph.node:
        if node.op_type not in SHAPES and any(name in names for name in node.input):
            names.update(node.output)
    return names


def nodes_of_layers(nodes: Iterable[onnx.NodeProto], layers: Iterable[str]) -> set[str]:
    """Names of the nodes that `layers` are imported from.

    A layer has the name of its node, or, if the node was rewritten, that name with a suffix after a dot.
    For a layer whose node is not found, all products count.
    """
    kinds = {node.name: node.op_type for node in nodes}
    names: set[str] = set()
    for layer in layers:
        parts = layer.split(".")
        begins = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        name = next((begin for begin in begins if begin in kinds), None)
        names |= {name} if name is not None else {n for n, kind in kinds.items() if kind in PRODUCTS}
    return names
