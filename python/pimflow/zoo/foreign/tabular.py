"""Operators of classical machine learning (ai.onnx.ml) that are arithmetic on tensors."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from pimflow.zoo.foreign.builder import ExpandedNode


def scaler(node: ExpandedNode) -> None:
    """Expand Scaler: ``(x - offset) * scale``."""
    x = _single(node, 0)
    offset, scale = (np.array(node.attrs.get(name, [default]), "float32") for name, default in _SCALE)
    shifted = node.builder.emit("Sub", [x, node.builder.constant(offset)])
    node.bind(node.builder.emit("Mul", [shifted, node.builder.constant(scale)]))


_SCALE = (("offset", 0.0), ("scale", 1.0))


def normalizer(node: ExpandedNode) -> None:
    """Expand Normalizer: rows over their largest element, or their norm; rows of norm 0 stay."""
    kind = node.attrs.get("norm", b"MAX").decode()
    op = {"MAX": "ReduceMax", "L1": "ReduceL1", "L2": "ReduceL2"}.get(kind)
    if op is None:
        raise node.unsupported(f"with norm '{kind}' is not supported")
    builder, x = node.builder, _single(node, 0)
    length = node.reduce(op, x, [-1])
    nothing = builder.emit("Equal", [length, builder.scalar(0)])
    node.bind(builder.emit("Div", [x, builder.emit("Where", [nothing, builder.scalar(1), length])]))


def imputer(node: ExpandedNode) -> None:
    """Expand Imputer: one value, NaN by default, becomes others, one for all columns or one each."""
    attrs, builder, x = node.attrs, node.builder, node.operand(0)
    if "imputed_value_int64s" in attrs:
        new = np.array(attrs["imputed_value_int64s"], "int64")
        chosen = builder.emit("Equal", [x, builder.constant(np.int64(attrs.get("replaced_value_int64", 0)))])
    else:
        new, old = np.array(attrs["imputed_value_floats"], "float32"), attrs.get("replaced_value_float", 0.0)
        chosen = (
            builder.emit("IsNaN", [x]) if np.isnan(old) else builder.emit("Equal", [x, builder.scalar(old)])
        )
    node.bind(builder.emit("Where", [chosen, builder.constant(new), x]))


def array_feature_extractor(node: ExpandedNode) -> None:
    """Expand ArrayFeatureExtractor: columns by their numbers."""
    builder = node.builder
    columns = builder.emit("Reshape", [node.operand(1), builder.constant(np.array([-1]))])
    chosen = builder.emit("Gather", [node.operand(0), columns], axis=-1)
    if node.rank(0) == 1:
        chosen = builder.emit("Unsqueeze", [chosen, builder.constant(np.array([0]))])
    node.bind(chosen)


def binarizer(node: ExpandedNode) -> None:
    """Expand Binarizer: whether elements exceed a threshold, as numbers."""
    threshold = node.builder.scalar(node.attrs.get("threshold", 0.0))
    above = node.builder.emit("Greater", [node.operand(0), threshold])
    node.bind(node.builder.emit("Cast", [above], to=TensorProto.FLOAT))


def linear_regressor(node: ExpandedNode) -> None:
    """Expand LinearRegressor: a product with coefficients, plus intercepts."""
    attrs, builder = node.attrs, node.builder
    if attrs.get("post_transform", b"NONE") != b"NONE":
        raise node.unsupported(f"with post_transform '{attrs['post_transform'].decode()}' is not supported")
    targets = int(attrs.get("targets", 1))
    matrix = np.array(attrs["coefficients"], "float32").reshape(targets, -1).T
    bias = np.array(attrs.get("intercepts", [0.0] * targets), "float32")
    node.bind(builder.emit("Gemm", [_single(node, 0), builder.constant(matrix), builder.constant(bias)]))


def linear_classifier(node: ExpandedNode) -> None:
    """Expand LinearClassifier of numbered classes: scores are a product, the label has the largest."""
    attrs, builder = node.attrs, node.builder
    labels = attrs.get("classlabels_ints")
    kind = attrs.get("post_transform", b"NONE").decode()
    count = len(attrs["intercepts"]) if "intercepts" in attrs else len(labels or ())
    if labels is None or count != len(labels) or len(labels) < 2:
        raise node.unsupported("with text labels, or fewer scores than labels, is not supported")
    if kind not in _TRANSFORMS:
        raise node.unsupported(f"with post_transform '{kind}' is not supported")
    matrix = np.array(attrs["coefficients"], "float32").reshape(count, -1).T
    bias = np.array(attrs.get("intercepts", [0.0] * count), "float32")
    scores = builder.emit("Gemm", [_single(node, 0), builder.constant(matrix), builder.constant(bias)])
    place = builder.emit("ArgMax", [scores], axis=1, keepdims=0)
    node.bind(builder.emit("Gather", [builder.constant(np.array(labels, "int64")), place]))
    transform = _TRANSFORMS[kind]
    if transform == "Softmax":
        scores = builder.emit(transform, [scores], axis=1)
    elif transform:
        scores = builder.emit(transform, [scores])
    node.bind(scores, 1)


_TRANSFORMS = {"NONE": "", "SOFTMAX": "Softmax", "LOGISTIC": "Sigmoid"}


def _single(node: ExpandedNode, index: int) -> str:
    """An operand in fp32."""
    return node.builder.emit("Cast", [node.operand(index)], to=TensorProto.FLOAT)
