"""Layers between dequantised operands and a quantised result (QDQ), as one operator of 8 bits (QOperator).

Both forms say the same network. ONNX Runtime computes such a layer with sums of integers, and so do we.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_BYTES = (TensorProto.INT8, TensorProto.UINT8)


@dataclass(frozen=True, kw_only=True)
class _Quantised:
    """A tensor of integers with its scale and zero point, by name; `array` if it is constant."""

    data: str
    scale: str
    zero: str
    zero_value: np.ndarray
    scale_value: np.ndarray
    array: np.ndarray | None

    @property
    def names(self) -> list[str]:
        return [self.data, self.scale, self.zero]


def fuse_quantised_layers(model: onnx.ModelProto, weights: Mapping[str, onnx.TensorProto]) -> None:
    """Replace ``quantize(layer(dequantize(x), dequantize(w)))`` by an operator of 8 bits, in place.

    Layers are Conv, MatMul and Gemm with constant weights; scales and zero points are constants. A Relu or
    Clip between goes where the range of the result does the same.
    """
    graph = _LayerFinder(model, weights)
    fused: dict[str, onnx.NodeProto] = {}  # by result of a layer
    dropped: set[str] = set()  # results of what follows these layers
    for node in model.graph.node:
        if node.op_type != "QuantizeLinear":
            continue
        layer, between = graph.layer_before(node)
        replacement = layer and graph.integer_operator(layer, between, node)
        if layer and replacement:
            fused[layer.output[0]] = replacement
            dropped |= {node.output[0], *(between.output if between else ())}
    if not fused:
        return
    nodes = [
        fused.get(node.output[0], node) for node in model.graph.node if not dropped.intersection(node.output)
    ]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(copies)
    model.graph.initializer.extend(graph.constants)


class _LayerFinder:
    """The nodes of a network, to look for layers in."""

    def __init__(self, model: onnx.ModelProto, weights: Mapping[str, onnx.TensorProto]) -> None:
        self.weights = weights
        self.producers = {name: node for node in model.graph.node for name in node.output}
        self.reads = Counter(name for node in model.graph.node for name in node.input)
        self.reads.update(value.name for value in model.graph.output)
        self.constants: list[TensorProto] = []

    def layer_before(self, node: onnx.NodeProto) -> tuple[onnx.NodeProto | None, onnx.NodeProto | None]:
        """The layer whose result only `node` reads, and the activation between; None for each that is not."""
        between = self._only_source(node)
        if between is not None and between.op_type in ("Clip", "Relu"):
            layer = self._only_source(between)
        else:
            layer, between = between, None
        is_layer = layer is not None and layer.op_type in _LAYERS and not layer.domain
        return (layer if is_layer else None), between

    def _only_source(self, node: onnx.NodeProto) -> onnx.NodeProto | None:
        return self.producers.get(node.input[0]) if self.reads[node.input[0]] == 1 else None

    def integer_operator(
        self, layer: onnx.NodeProto, between: onnx.NodeProto | None, quantiser: onnx.NodeProto
    ) -> onnx.NodeProto | None:
        """The operator of 8 bits that replaces the three; None if there is none."""
        attrs = {entry.name: helper.get_attribute_value(entry) for entry in layer.attribute}
        x, w = (self._operand(name) for name in layer.input[:2])
        result = self._quantisation(quantiser)
        if x is None or w is None or result is None or w.array is None or x.scale_value.size > 1:
            return None
        output_axis = 0 if layer.op_type == "Conv" or attrs.get("transB", 0) else 1
        outputs = w.array.shape[output_axis] if w.array.ndim > 1 else 0
        if w.scale_value.size not in (1, outputs) or result.scale_value.size > 1 or not outputs:
            return None
        if between is not None and not self._saturates(between, result):
            return None
        bias = layer.input[2] if len(layer.input) > 2 else ""
        if bias:
            bias = self._integer_bias(bias, x.scale_value * w.scale_value)
            if not bias:
                return None
        return _LAYERS[layer.op_type](layer, attrs, [x, w, result], bias, quantiser.output[0])

    def _operand(self, name: str) -> _Quantised | None:
        node = self.producers.get(name)
        return self._quantisation(node) if node is not None and node.op_type == "DequantizeLinear" else None

    def _quantisation(self, node: onnx.NodeProto) -> _Quantised | None:
        """What a QuantizeLinear gives or a DequantizeLinear takes, of 8 bits; None if that is not known."""
        names = {entry.name for entry in node.attribute if entry.name not in ("axis", "saturate")}
        scale, zero = node.input[1], node.input[2] if len(node.input) > 2 else ""
        if names or scale not in self.weights or (zero and zero not in self.weights):
            return None
        data = node.input[0] if node.op_type == "DequantizeLinear" else node.output[0]
        scale_value = numpy_helper.to_array(self.weights[scale])
        if not zero:
            kind = self._element_type(node, data)
            if kind not in _BYTES:
                return None
            zero = self._constant(
                f"{data}.zero", np.zeros(scale_value.shape, helper.tensor_dtype_to_np_dtype(kind))
            )
        elif self.weights[zero].data_type not in _BYTES:
            return None
        stored = self.weights.get(data)
        return _Quantised(
            data=data,
            scale=scale,
            zero=zero,
            zero_value=numpy_helper.to_array(self._tensor(zero)),
            scale_value=scale_value,
            array=None if stored is None else numpy_helper.to_array(stored),
        )

    def _element_type(self, node: onnx.NodeProto, data: str) -> int:
        """The type of integers without a zero point; 0 if it is not known."""
        if data in self.weights:
            return self.weights[data].data_type
        source = self.producers.get(data, node)
        is_default = source.op_type == "QuantizeLinear" and len(source.input) < 3
        return TensorProto.UINT8 if is_default else 0

    def _integer_bias(self, name: str, scale: np.ndarray) -> str:
        """The int32 of a dequantised bias whose scale is that of the sums; empty if it is none."""
        node = self.producers.get(name)
        if node is None or node.op_type != "DequantizeLinear" or not {*node.input} <= self.weights.keys():
            return ""
        data, factor, *zero = (numpy_helper.to_array(self.weights[operand]) for operand in node.input)
        is_plain = data.dtype == np.int32 and not any(value.any() for value in zero)
        return node.input[0] if is_plain and np.allclose(factor, scale, rtol=1e-5, atol=0) else ""

    def _saturates(self, activation: onnx.NodeProto, result: _Quantised) -> bool:
        """Whether integers of `result` end where the activation does."""
        low, high = np.float32(0), np.float32(np.inf)
        if activation.op_type == "Clip":
            bounds = [*activation.input[1:], "", ""][:2]
            if activation.attribute or not {*filter(None, bounds)} <= self.weights.keys():
                return False
            low, high = (
                numpy_helper.to_array(self.weights[name]).reshape(()) if name else np.float32(default)
                for name, default in zip(bounds, (-np.inf, np.inf))
            )
        limits = np.iinfo(result.zero_value.dtype)
        ends = np.rint(np.array([low, high]) / result.scale_value.item()) + result.zero_value.item()
        return bool(ends[0] <= limits.min and ends[1] >= limits.max)

    def _constant(self, name: str, array: np.ndarray) -> str:
        if all(tensor.name != name for tensor in self.constants):
            self.constants.append(numpy_helper.from_array(array, name))
        return name

    def _tensor(self, name: str) -> TensorProto:
        made = {tensor.name: tensor for tensor in self.constants}
        return made[name] if name in made else self.weights[name]


_Operands = list[_Quantised]


def _convolution(
    layer: onnx.NodeProto, attrs: dict[str, Any], operands: _Operands, bias: str, result: str
) -> onnx.NodeProto:
    x, w, y = operands
    names = [*x.names, *w.names, y.scale, y.zero, *([bias] if bias else [])]
    return helper.make_node("QLinearConv", names, [result], layer.name, **attrs)


def _product(
    layer: onnx.NodeProto, attrs: dict[str, Any], operands: _Operands, bias: str, result: str
) -> onnx.NodeProto:
    x, w, y = operands
    return helper.make_node("QLinearMatMul", [*x.names, *w.names, y.scale, y.zero], [result], layer.name)


def _gemm(
    layer: onnx.NodeProto, attrs: dict[str, Any], operands: _Operands, bias: str, result: str
) -> onnx.NodeProto | None:
    x, w, y = operands
    if attrs.get("transA", 0) or attrs.get("alpha", 1.0) != 1 or (bias and attrs.get("beta", 1.0) != 1):
        return None
    names, transposed = [*x.names, *w.names, bias, y.scale, y.zero], attrs.get("transB", 0)
    return helper.make_node("QGemm", names, [result], layer.name, domain="com.microsoft", transB=transposed)


_LAYERS = {"Conv": _convolution, "Gemm": _gemm, "MatMul": _product}
