"""Operators of classical machine learning (ai.onnx.ml) that are arithmetic on tensors."""

from __future__ import annotations

from collections.abc import Sequence

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


def feature_vectorizer(node: ExpandedNode) -> None:
    """Expand FeatureVectorizer: columns of all operands side by side, in fp32."""
    parts = [_single(node, index) for index in range(len(node.proto.input))]
    node.bind(node.builder.concat(parts, 1))


def label_encoder(node: ExpandedNode) -> None:
    """Expand LabelEncoder of numbers: the value of the key that an element is, or a default."""
    keys, values, default = _table(node, "keys"), _table(node, "values"), _default(node)
    if keys is None or values is None or len(keys) != len(values) or not len(keys):
        raise node.unsupported("of texts, or without keys and values, is not supported")
    builder, emit = node.builder, node.builder.emit
    column = emit("Unsqueeze", [node.operand(0), builder.constant(np.array([-1]))])
    matches = emit("Equal", [column, builder.constant(keys)])
    if keys.dtype == np.float32 and np.isnan(keys).any():
        is_nan = builder.constant(np.isnan(keys))
        matches = emit("Or", [matches, emit("And", [emit("IsNaN", [column]), is_nan])])
    flags = emit("Cast", [matches], to=TensorProto.INT32)
    place = emit("ArgMax", [flags], axis=-1, keepdims=0)
    known = emit("Cast", [node.reduce("ReduceMax", flags, [-1], keepdims=0)], to=TensorProto.BOOL)
    chosen = emit("Gather", [builder.constant(values), place])
    node.bind(emit("Where", [known, chosen, builder.constant(values.dtype.type(default))]))


def _table(node: ExpandedNode, name: str) -> np.ndarray | None:
    """Keys or values of a LabelEncoder; None if they are texts, or missing."""
    for suffix, dtype in (("int64s", "int64"), ("floats", "float32")):
        if f"{name}_{suffix}" in node.attrs:
            return np.array(node.attrs[f"{name}_{suffix}"], dtype)
    return None


def _default(node: ExpandedNode) -> float:
    """What a LabelEncoder makes of an unknown element."""
    is_float = "values_floats" in node.attrs
    number: float = node.attrs.get("default_float", 0.0) if is_float else node.attrs.get("default_int64", -1)
    return number


def one_hot_encoder(node: ExpandedNode) -> None:
    """Expand OneHotEncoder of numbered categories: 1 at the place of an element's category."""
    categories = node.attrs.get("cats_int64s")
    if not categories or not node.attrs.get("zeros", 1):
        raise node.unsupported("of texts, or that fails for other categories, is not supported")
    builder, emit = node.builder, node.builder.emit
    numbers = emit("Cast", [node.operand(0)], to=TensorProto.INT64)
    column = emit("Unsqueeze", [numbers, builder.constant(np.array([-1]))])
    matches = emit("Equal", [column, builder.constant(np.array(categories, "int64"))])
    node.bind(emit("Cast", [matches], to=TensorProto.FLOAT))


def linear_regressor(node: ExpandedNode) -> None:
    """Expand LinearRegressor: a product with coefficients, plus intercepts."""
    attrs, builder = node.attrs, node.builder
    targets = int(attrs.get("targets", 1))
    matrix = np.array(attrs["coefficients"], "float32").reshape(targets, -1).T
    bias = np.array(attrs.get("intercepts", [0.0] * targets), "float32")
    scores = builder.emit("Gemm", [_single(node, 0), builder.constant(matrix), builder.constant(bias)])
    node.bind(post_transform(node, scores))


def linear_classifier(node: ExpandedNode) -> None:
    """Expand LinearClassifier of numbered classes: scores are a product, the label has the largest."""
    attrs, builder = node.attrs, node.builder
    labels = attrs.get("classlabels_ints")
    count = len(attrs["intercepts"]) if "intercepts" in attrs else len(labels or ())
    has_one_score = count == 1 and len(labels or ()) == 2
    if labels is None or len(labels) < 2 or (count != len(labels) and not has_one_score):
        raise node.unsupported("with text labels, or fewer scores than labels, is not supported")
    matrix = np.array(attrs["coefficients"], "float32").reshape(count, -1).T
    bias = np.array(attrs.get("intercepts", [0.0] * count), "float32")
    scores = builder.emit("Gemm", [_single(node, 0), builder.constant(matrix), builder.constant(bias)])
    if has_one_score:  # that of the second class; no softmax is taken of it
        bind_label_by_threshold(node, scores, labels, 0.0)
        is_logistic = attrs.get("post_transform", b"NONE") == b"LOGISTIC"
        scores = builder.emit("Sigmoid", [scores]) if is_logistic else scores
        rest = builder.emit("Sub", [builder.scalar(1), scores])
        node.bind(builder.concat([rest, scores], 1), 1)
        return
    bind_label(node, scores, labels)
    node.bind(post_transform(node, scores), 1)


def bind_label_by_threshold(node: ExpandedNode, scores: str, labels: Sequence[int], threshold: float) -> None:
    """Let the first result be the second label where a score [rows, 1] is above `threshold`."""
    builder = node.builder
    above = builder.emit("Greater", [scores, builder.scalar(threshold)])
    place = builder.reshape(builder.emit("Cast", [above], to=TensorProto.INT64), [-1])
    node.bind(builder.emit("Gather", [builder.constant(np.array(labels, "int64")), place]))


def bind_label(node: ExpandedNode, scores: str, labels: Sequence[int]) -> None:
    """Let the first result be the label of the largest of `scores`."""
    place = node.builder.emit("ArgMax", [scores], axis=1, keepdims=0)
    node.bind(node.builder.emit("Gather", [node.builder.constant(np.array(labels, "int64")), place]))


def post_transform(node: ExpandedNode, scores: str) -> str:
    """`scores` behind the attribute ``post_transform``; raises `UnsupportedOpError` for a rare one."""
    kind = node.attrs.get("post_transform", b"NONE").decode()
    if kind not in _TRANSFORMS:
        raise node.unsupported(f"with post_transform '{kind}' is not supported")
    if kind == "SOFTMAX":
        return node.builder.emit("Softmax", [scores], axis=1)
    return node.builder.emit("Sigmoid", [scores]) if kind == "LOGISTIC" else scores


_TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC")


def svm_regressor(node: ExpandedNode) -> None:
    """Expand SVMRegressor: weighted kernels of support vectors, or a product with coefficients."""
    attrs, builder, emit = node.attrs, node.builder, node.builder.emit
    if attrs.get("one_class", 0):
        raise node.unsupported("of one class is not supported")
    coefficients = np.array(attrs["coefficients"], "float32")[:, None]
    count, x = int(attrs.get("n_supports", 0)), _single(node, 0)
    if count:
        x = _kernel(node, x, np.array(attrs["support_vectors"], "float32").reshape(count, -1))
    total = emit("MatMul", [x, builder.constant(coefficients)])
    total = emit("Add", [total, builder.constant(np.array(attrs["rho"][:1], "float32"))])
    node.bind(post_transform(node, total))


def _kernel(node: ExpandedNode, x: str, vectors: np.ndarray) -> str:
    """The kernel of each row of `x` and each support vector."""
    builder, emit, scalar = node.builder, node.builder.emit, node.builder.scalar
    gamma, offset, degree = node.attrs.get("kernel_params", (0.0, 0.0, 0.0))
    kind = node.attrs.get("kernel_type", b"LINEAR").decode()
    if kind == "RBF":
        column = emit("Unsqueeze", [x, builder.constant(np.array([1]))])
        difference = emit("Sub", [column, builder.constant(vectors[None])])
        squares = node.reduce("ReduceSum", emit("Mul", [difference, difference]), [-1], keepdims=0)
        return emit("Exp", [emit("Mul", [squares, scalar(-gamma)])])
    product = emit("MatMul", [x, builder.constant(vectors.T)])
    if kind == "LINEAR":
        return product
    inner = emit("Add", [emit("Mul", [product, scalar(gamma)]), scalar(offset)])
    if kind not in ("POLY", "SIGMOID"):
        raise node.unsupported(f"with kernel '{kind}' is not supported")
    return emit("Tanh", [inner]) if kind == "SIGMOID" else emit("Pow", [inner, scalar(degree)])


def _single(node: ExpandedNode, index: int) -> str:
    """An operand in fp32."""
    return node.builder.emit("Cast", [node.operand(index)], to=TensorProto.FLOAT)
