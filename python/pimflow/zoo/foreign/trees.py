"""Ensembles of decision trees (ai.onnx.ml) as comparisons and products with constant matrices.

All conditions of a tree are compared at once. A leaf is reached if all conditions of its path are as the path
needs them: a product with a matrix of 1 and -1 counts them (arXiv 2010.04804, section 4).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from onnx import TensorProto, numpy_helper

from pimflow.zoo.foreign.builder import ExpandedNode
from pimflow.zoo.foreign.tabular import bind_label, bind_label_by_threshold, post_transform

_LEAF = "LEAF"
# Operators of the standard, and whether their result is negated; in the order of TreeEnsemble's numbers.
_COMPARISONS = {
    "BRANCH_LEQ": ("LessOrEqual", False),
    "BRANCH_LT": ("Less", False),
    "BRANCH_GTE": ("GreaterOrEqual", False),
    "BRANCH_GT": ("Greater", False),
    "BRANCH_EQ": ("Equal", False),
    "BRANCH_NEQ": ("Equal", True),
}
# Reductions over trees, in the order of TreeEnsemble's numbers.
_AGGREGATES = {"AVERAGE": "ReduceMean", "SUM": "ReduceSum", "MIN": "ReduceMin", "MAX": "ReduceMax"}
MAX_ELEMENTS = 1 << 26  # of the matrices of paths: 256 MiB in fp32


@dataclass(frozen=True, kw_only=True)
class Forest:
    """An ensemble as its file has it.

    Attributes
    ----------
    roots : sequence of int
        A condition of each tree, or ``~leaf``.
    features, thresholds, modes, missing : sequence
        Of each condition: the column that it compares, with what, how, and whether NaN fulfils it.
    children : sequence of (int, int)
        Where a condition leads if it holds, and if it fails: another one, or ``~leaf``.
    scores : ndarray of float32, [leaves, results]
    """

    roots: Sequence[int]
    features: Sequence[int]
    thresholds: Sequence[float]
    modes: Sequence[str]
    missing: Sequence[int]
    children: Sequence[tuple[int, int]]
    scores: np.ndarray


@dataclass(frozen=True, kw_only=True)
class TreeTables:
    """An ensemble as arrays: trees, their conditions, their leaves. Trees are filled up to the same sizes.

    Attributes
    ----------
    features : ndarray of int64, [trees, conditions]
    thresholds : ndarray of float32, [trees, conditions]
    modes : ndarray of str, [trees, conditions]
    missing : ndarray of bool, [trees, conditions]
        Whether NaN fulfils a condition.
    paths : ndarray of float32, [trees, conditions, leaves]
        1 if the path to a leaf needs a condition to hold, -1 if it needs it to fail.
    held : ndarray of float32, [trees, 1, leaves]
        How many conditions the path to a leaf needs to hold; -1 for leaves that fill up.
    scores : ndarray of float32, [trees, leaves, results]
    """

    features: np.ndarray
    thresholds: np.ndarray
    modes: np.ndarray
    missing: np.ndarray
    paths: np.ndarray
    held: np.ndarray
    scores: np.ndarray


def tree_ensemble(node: ExpandedNode) -> None:
    """Expand TreeEnsemble: as TreeEnsembleRegressor, in the element type of the input."""
    attrs, count = node.attrs, len(_AGGREGATES)
    aggregate, transform = int(attrs.get("aggregate_function", 1)), int(attrs.get("post_transform", 0))
    if not 0 <= aggregate < count or transform:
        raise node.unsupported("with such an 'aggregate_function' or 'post_transform' is not supported")
    modes = numpy_helper.to_array(attrs["nodes_modes"]).tolist()
    if max(modes) >= len(_COMPARISONS):
        raise node.unsupported("with conditions on sets is not supported")
    scores = np.zeros((len(attrs["leaf_targetids"]), int(attrs.get("n_targets", 1))), "float32")
    weights = numpy_helper.to_array(attrs["leaf_weights"])
    for leaf, (result, weight) in enumerate(zip(attrs["leaf_targetids"], weights)):
        if not 0 <= result < scores.shape[1]:
            raise node.unsupported(f"with a target {result} is not supported")
        scores[leaf, result] = weight
    sides = [
        [~child if is_leaf else child for child, is_leaf in zip(attrs[f"nodes_{side}nodeids"], leafs)]
        for side, leafs in (("true", attrs["nodes_trueleafs"]), ("false", attrs["nodes_falseleafs"]))
    ]
    forest = Forest(
        roots=attrs["tree_roots"],
        features=attrs["nodes_featureids"],
        thresholds=numpy_helper.to_array(attrs["nodes_splits"]).tolist(),
        modes=[list(_COMPARISONS)[mode] for mode in modes],
        missing=attrs.get("nodes_missing_value_tracks_true") or [0] * len(modes),
        children=list(zip(*sides)),
        scores=scores,
    )
    total = _scores(node, _tables(node, forest), list(_AGGREGATES.values())[aggregate])
    node.bind(node.builder.emit("CastLike", [total, node.operand(0)]))


def tree_regressor(node: ExpandedNode) -> None:
    """Expand TreeEnsembleRegressor: the sum, mean, least or largest score of all trees."""
    kind = node.attrs.get("aggregate_function", b"SUM").decode()
    if kind not in _AGGREGATES:
        raise node.unsupported(f"with aggregate_function '{kind}' is not supported")
    count, leaves = int(node.attrs.get("n_targets", 1)), node.attrs["nodes_modes"].count(_LEAF.encode())
    if kind in ("MIN", "MAX") and len(node.attrs["target_ids"]) < leaves * count:
        raise node.unsupported(f"with {kind} of trees that lack a target is not supported")
    forest = _forest(node, "target", count)
    node.bind(post_transform(node, _scores(node, _tables(node, forest), _AGGREGATES[kind])))


def tree_classifier(node: ExpandedNode) -> None:
    """Expand TreeEnsembleClassifier of numbered classes: the label of the largest score, and all scores."""
    labels = node.attrs.get("classlabels_int64s")
    if not labels:
        raise node.unsupported("with text labels is not supported")
    has_one_score = len(labels) == 2 and len(set(node.attrs["class_ids"])) == 1
    forest = _forest(node, "class", 1 if has_one_score else len(labels))
    scores = _scores(node, _tables(node, forest), "ReduceSum")
    if has_one_score:
        _bind_two_classes(node, scores, labels)
        return
    bind_label(node, scores, labels)
    node.bind(post_transform(node, scores), 1)


def _bind_two_classes(node: ExpandedNode, scores: str, labels: Sequence[int]) -> None:
    """Let one score [rows, 1] decide between two classes: a share, or what a logistic function makes one of.

    That of the first class is made up from it; if it is that of the second, the first has none.
    """
    builder, kind = node.builder, node.attrs.get("post_transform", b"NONE").decode()
    if kind not in ("NONE", "LOGISTIC"):
        raise node.unsupported(f"of one score with post_transform '{kind}' is not supported")
    is_share = min(node.attrs["class_weights"]) >= 0
    bind_label_by_threshold(node, scores, labels, 0.5 if is_share else 0.0)
    if node.attrs["class_ids"][0]:
        both = builder.concat([builder.emit("Sub", [scores, scores]), scores], 1)
        node.bind(post_transform(node, both), 1)
        return
    scores = post_transform(node, scores)
    has_rest = is_share or kind == "LOGISTIC"
    rest = builder.emit("Sub", [builder.scalar(1), scores]) if has_rest else builder.emit("Neg", [scores])
    node.bind(builder.concat([rest, scores], 1), 1)


def _forest(node: ExpandedNode, prefix: str, results: int) -> Forest:
    """The ensemble of a regressor or classifier; `prefix` is that of the attributes of leaves."""
    attrs = node.attrs
    trees, modes = attrs["nodes_treeids"], [mode.decode() for mode in attrs["nodes_modes"]]
    if unknown := set(modes) - _COMPARISONS.keys() - {_LEAF}:
        raise node.unsupported(f"with mode '{min(unknown)}' is not supported")
    number = {pair: index for index, pair in enumerate(zip(trees, attrs["nodes_nodeids"]))}
    scores = np.zeros((len(modes), results), "float32")
    ids = attrs[f"{prefix}_ids"] if results > 1 else [0] * len(attrs[f"{prefix}_ids"])

    def place(tree: int, child: int) -> int:
        """Where an edge leads, as `Forest.children` has it."""
        index = number[tree, child]
        return ~index if modes[index] == _LEAF else index

    try:
        leaf_keys = zip(attrs[f"{prefix}_treeids"], attrs[f"{prefix}_nodeids"])
        for key, result, weight in zip(leaf_keys, ids, attrs[f"{prefix}_weights"]):
            scores[number[key], result] += weight
        edges = zip(trees, modes, attrs["nodes_truenodeids"], attrs["nodes_falsenodeids"])
        children = [(0, 0) if m == _LEAF else (place(t, yes), place(t, no)) for t, m, yes, no in edges]
    except (KeyError, IndexError):
        raise node.unsupported("with an edge or a leaf that leads nowhere is not supported") from None
    roots = {tree: index for index, tree in reversed(list(enumerate(trees)))}
    return Forest(
        roots=[~index if modes[index] == _LEAF else index for index in roots.values()],
        features=attrs["nodes_featureids"],
        thresholds=attrs["nodes_values"],
        modes=modes,
        missing=attrs.get("nodes_missing_value_tracks_true") or [0] * len(modes),
        children=children,
        scores=scores,
    )


@dataclass(frozen=True, kw_only=True)
class _Paths:
    """A tree's conditions and leaves, and for each leaf the last step of its path."""

    conditions: list[int]
    leaves: list[int]
    steps: list[_Step | None]


class _Step(NamedTuple):
    """A condition on a path, whether it holds there, and the step before it."""

    condition: int
    holds: bool
    before: _Step | None


def _path(step: _Step | None) -> Iterator[_Step]:
    """The steps of a path, the last one first."""
    while step is not None:
        yield step
        step = step.before


def _paths(forest: Forest, root: int) -> _Paths:
    """Walk a tree; raises `IndexError` where an edge leads nowhere, or back."""
    result = _Paths(conditions=[], leaves=[], steps=[])
    pending: list[tuple[int, _Step | None]] = [(root, None)]
    visited = set()
    while pending:
        index, step = pending.pop()
        if index < 0:
            result.leaves.append(~index)
            result.steps.append(step)
            continue
        if index in visited:
            raise IndexError
        visited.add(index)
        result.conditions.append(index)
        for child, holds in zip(forest.children[index], (True, False)):
            pending.append((child, _Step(index, holds, step)))
    return result


def _tables(node: ExpandedNode, forest: Forest) -> TreeTables:
    """The arrays of an ensemble; raises `UnsupportedOpError` if they are too large, or the file is wrong."""
    try:
        trees = [_paths(forest, root) for root in forest.roots]
        conditions = max(1, *(len(tree.conditions) for tree in trees))
        leaves = max(len(tree.leaves) for tree in trees)
        if len(trees) * conditions * leaves > MAX_ELEMENTS:
            sizes = f"{len(trees)} trees of up to {conditions} conditions and {leaves} leaves"
            raise node.unsupported(f"of {sizes} is not supported")
        return _tree_tables(forest, trees, conditions, leaves)
    except (IndexError, ValueError, TypeError):
        raise node.unsupported("with nodes that are not there, or in a circle, is not supported") from None


def _tree_tables(forest: Forest, trees: Sequence[_Paths], conditions: int, leaves: int) -> TreeTables:
    """The arrays of `trees`, filled up to so many conditions and leaves."""
    count, shape = len(trees), (len(trees), conditions)
    tables = TreeTables(
        features=np.zeros(shape, "int64"),
        thresholds=np.zeros(shape, "float32"),
        modes=np.full(shape, next(iter(_COMPARISONS)), object),
        missing=np.zeros(shape, bool),
        paths=np.zeros((count, conditions, leaves), "float32"),
        held=np.full((count, 1, leaves), -1, "float32"),
        scores=np.zeros((count, leaves, forest.scores.shape[1]), "float32"),
    )
    for index, tree in enumerate(trees):
        place = {condition: column for column, condition in enumerate(tree.conditions)}
        for condition, column in place.items():
            tables.features[index, column] = forest.features[condition]
            tables.thresholds[index, column] = forest.thresholds[condition]
            tables.modes[index, column] = forest.modes[condition]
            tables.missing[index, column] = forest.missing[condition]
        for leaf, (number, last) in enumerate(zip(tree.leaves, tree.steps)):
            tables.scores[index, leaf] = forest.scores[number]
            tables.held[index, 0, leaf] = sum(step.holds for step in _path(last))
            for step in _path(last):
                tables.paths[index, place[step.condition], leaf] = 1 if step.holds else -1
    return tables


def _scores(node: ExpandedNode, tables: TreeTables, aggregate: str) -> str:
    """Scores [rows, results] of all trees together, with the base values."""
    builder, emit = node.builder, node.builder.emit
    count, conditions = tables.features.shape
    x = emit("Cast", [node.operand(0)], to=TensorProto.FLOAT)
    columns = emit("Gather", [x, builder.constant(tables.features.ravel())], axis=1)
    columns = builder.reshape(columns, [-1, count, conditions])
    holds = emit("Cast", [_conditions(node, tables, columns)], to=TensorProto.FLOAT)
    by_tree = emit("Transpose", [holds], perm=[1, 0, 2])
    counts = emit("MatMul", [by_tree, builder.constant(tables.paths)])
    reached = emit("Cast", [emit("Equal", [counts, builder.constant(tables.held)])], to=TensorProto.FLOAT)
    scores = emit("MatMul", [reached, builder.constant(tables.scores)])
    total = node.reduce(aggregate, scores, [0], keepdims=0)
    base = np.array(node.attrs.get("base_values") or [0.0], "float32")
    return emit("Add", [total, builder.constant(base)]) if base.any() else total


def _conditions(node: ExpandedNode, tables: TreeTables, columns: str) -> str:
    """Whether each condition holds, [rows, trees, conditions], of the features in `columns`."""
    builder, emit = node.builder, node.builder.emit
    thresholds, result = builder.constant(tables.thresholds), ""
    modes = sorted(set(tables.modes.ravel()))
    for mode in modes:
        op, is_negated = _COMPARISONS[mode]
        holds = emit(op, [columns, thresholds])
        holds = emit("Not", [holds]) if is_negated else holds
        if len(modes) > 1:
            holds = emit("And", [holds, builder.constant(tables.modes == mode)])
        result = emit("Or", [result, holds]) if result else holds
    if tables.missing.any():
        nan = emit("And", [emit("IsNaN", [columns]), builder.constant(tables.missing)])
        result = emit("Or", [result, nan])
    return result
