"""Counts of n-grams (TfIdfVectorizer of ONNX) as comparisons and sums."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from pimflow.zoo.foreign.builder import ExpandedNode


def tf_idf_vectorizer(node: ExpandedNode) -> None:
    """Expand TfIdfVectorizer: how often each n-gram of a pool of integers stands in a row."""
    attrs, builder, dims = node.attrs, node.builder, node.shape(0)
    if "pool_int64s" not in attrs:
        raise node.unsupported("of texts is not supported: of integers it is")
    columns = np.array(attrs["ngram_indexes"])
    outputs = int(columns.max()) + 1
    if len(set(columns.tolist())) != len(columns):
        raise node.unsupported("with one column for several n-grams is not supported")
    rows, length = (1, *dims)[-2:]
    tokens = builder.emit("Cast", [node.operand(0)], to=TensorProto.INT64)
    tokens = builder.reshape(tokens, [rows, length])
    counts = [_counts(node, tokens, (rows, length), grams) for grams in _pools(attrs) if len(grams)]
    counts.append(builder.constant(np.zeros((rows, 1), "float32")))  # of columns without an n-gram
    places = np.full(outputs, len(columns))
    places[columns] = np.arange(len(columns))
    result = builder.emit("Gather", [builder.concat(counts, 1), builder.constant(places)], axis=1)
    mode = attrs["mode"]
    if mode == b"IDF":
        result = builder.emit("Min", [result, builder.scalar(1)])
    if mode != b"TF" and "weights" in attrs:
        weights = np.array(attrs["weights"], "float32")[:outputs]
        result = builder.emit("Mul", [result, builder.constant(weights)])
    node.bind(builder.reshape(result, [*dims[:-1], outputs]))


def _pools(attrs: dict) -> list[np.ndarray]:
    """The n-grams of the pool, by growing n: [number, n]."""
    pool, begins = np.array(attrs["pool_int64s"], "int64"), list(attrs["ngram_counts"])
    ends = [*begins[1:], len(pool)]
    return [pool[begin:end].reshape(-1, n) for n, (begin, end) in enumerate(zip(begins, ends), 1)]


def _counts(node: ExpandedNode, tokens: str, dims: tuple[int, int], grams: np.ndarray) -> str:
    """How often each of `grams` stands in each row of tokens, also with tokens skipped between its own."""
    builder, (rows, length), (count, n) = node.builder, dims, grams.shape
    attrs = node.attrs
    total = builder.constant(np.zeros((rows, count), "float32"))
    if not attrs["min_gram_length"] <= n <= attrs["max_gram_length"]:
        return total
    for step in range(1, 2 if n == 1 else attrs["max_skip_count"] + 2):
        begins = np.arange(length - step * (n - 1))
        if not begins.size:
            break
        places = builder.constant(begins[:, None] + step * np.arange(n))
        windows = builder.emit("Gather", [tokens, places], axis=1)
        windows = builder.reshape(windows, [rows, 1, len(begins), n])
        same = builder.emit("Equal", [windows, builder.constant(grams[:, None])])
        same = builder.emit("Cast", [same], to=TensorProto.FLOAT)
        found = node.reduce("ReduceSum", node.reduce("ReduceMin", same, [3], 0), [2], 0)
        total = builder.emit("Add", [total, found])
    return total
