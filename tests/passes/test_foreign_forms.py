"""Are operators of com.microsoft and ai.onnx.ml, written as standard ones, what ONNX Runtime computes?

ONNX Runtime runs both models: the file's, and the one whose operators are replaced.
"""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from test_foreign_operators import LEARNING, MICROSOFT
from test_frontend import matches_onnx_runtime

from pimflow import zoo
from pimflow.errors import ModelError, UnsupportedOpError
from pimflow.frontend import onnx_graph
from pimflow.zoo import foreign

RANDOM = np.random.default_rng(3)


def floats(*dims: int) -> np.ndarray:
    return RANDOM.standard_normal(dims).astype("float32")


def integers(dtype: str, *dims: int) -> np.ndarray:
    bounds = np.iinfo(dtype)
    return RANDOM.integers(bounds.min, bounds.max, dims, dtype=dtype)


def value_info(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)


def outputs(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    return session.run(None, inputs)


def case(kind, operands, inputs, weights=None, *, domain=MICROSOFT, results=("y",), opset=17, **attrs):
    """A model of one operator, and its inputs; `_` in `operands` is a missing one."""
    inputs = {name: np.asarray(value) for name, value in inputs.items()}
    names = ["" if name == "_" else name for name in operands.split()]
    node = helper.make_node(kind, names, list(results), "node", domain=domain, **attrs)
    graph = helper.make_graph(
        [node],
        "net",
        [value_info(name, value) for name, value in inputs.items()],
        [onnx.ValueInfoProto(name=name) for name in results],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (weights or {}).items()],
    )
    opsets = [("", opset), (MICROSOFT, 1), (LEARNING, 5 if kind == "TreeEnsemble" else 3)]
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid(*pair) for pair in opsets])
    model.ir_version = 8
    for value, result in zip(model.graph.output, outputs(model, inputs), strict=True):
        value.CopyFrom(value_info(value.name, result))
    return model, inputs


SEQUENCE = {"x": floats(2, 3, 8)}
NORM = {"g": floats(8), "b": floats(8)}
TABLES = {"w": floats(9, 8), "p": floats(6, 8), "k": floats(3, 8)}
IDS = {"i": np.array([[1, 2, 3]], "int32"), "s": np.array([[0, 1, 0]], "int32")}
HEADS = {"w": floats(8, 24), "b": floats(24)}
KEYS = {"q": floats(2, 3, 8), "k": floats(2, 5, 8), "v": floats(2, 5, 8)}
BYTES = {"s": np.float32(0.03), "z": np.uint8(120), "t": np.float32(0.05), "u": np.uint8(90)}
FILTERS = BYTES | {"k": integers("int8", 4, 3, 3, 3), "ks": np.float32(0.01), "kz": np.int8(0)}
BLOCKS = {"k": integers("uint8", 4, 2, 8), "s": np.abs(floats(8))}
ROWS = {"x": floats(5, 4)}
VECTORS = {"n_supports": 2, "rho": [0.1], "coefficients": [0.5, -0.2], "kernel_params": [0.3, 0.5, 3.0]}
VECTORS |= {"support_vectors": [1.0, 0, 1, 0, 0, 1, 0, 1]}
LOSSES = {f"{name}s": np.float32(0.01) for name in "wpkgb"} | {f"{name}z": np.uint8(99) for name in "wpkgb"}

# Operator, operands, inputs, constants, attributes.
CASES = {
    "SkipLayerNormalization of opset 13": lambda: case(
        "SkipLayerNormalization", "x s g b", SEQUENCE | {"s": floats(2, 3, 8)}, NORM, opset=13
    ),
    "EmbedLayerNormalization without a mask": lambda: case(
        "EmbedLayerNormalization", "i s w p k g b", IDS, TABLES | NORM, results=("y", "mask")
    ),
    "QEmbedLayerNormalization": lambda: case(
        *("QEmbedLayerNormalization", "i s w p k g b _ ws ps ks gs bs wz pz kz gz bz", IDS),
        {name: integers("uint8", *value.shape) for name, value in (TABLES | NORM).items()} | LOSSES,
        results=("y", "mask"),
    ),
    "FusedMatMul of a batch behind rows": lambda: case(
        "FusedMatMul", "a b", {"a": floats(3, 2, 4), "b": floats(2, 4, 5)}, transBatchA=1
    ),
    **{
        f"FusedGemm with {kind}": lambda kind=kind: case(
            *("FusedGemm", "x m", {"x": floats(3, 8)}, {"m": floats(8, 8)}),
            activation=kind,
            activation_alpha=0.3,
            activation_beta=0.2,
        )
        for kind in ("Elu", "ParametricSoftplus", "ScaledTanh", "Softplus", "Softsign", "ThresholdedRelu")
    },
    "Attention between two places": lambda: case(
        "Attention", "x w b m", SEQUENCE, HEADS | {"m": np.array([2, 3, 0, 1], "int32")}, num_heads=2
    ),
    "ExpandDims": lambda: case("ExpandDims", "x a", SEQUENCE, {"a": np.int32(-1)}),
    "Trilu": lambda: case("Trilu", "x k", {"x": floats(2, 4, 4)}, {"k": np.int64(1)}, upper=0),
    "CDist": lambda: case("CDist", "a b", {"a": floats(4, 3), "b": floats(5, 3)}, metric="euclidean"),
    "Pad": lambda: case("Pad", "x p", {"x": floats(3, 4)}, {"p": np.array([0, 1, 2, 0])}, mode="reflect"),
    "GatherND": lambda: case("GatherND", "x i", SEQUENCE, {"i": np.array([[0, 1], [1, 2]])}),
    "GridSample": lambda: case("GridSample", "x g", {"x": floats(1, 2, 4, 4), "g": floats(1, 3, 3, 2) / 2}),
    "UnfoldTensor": lambda: case("UnfoldTensor", "x", {"x": floats(2, 9, 3)}, dim=1, size=4, step=2),
    "ConvTransposeWithDynamicPads": lambda: case(
        *("ConvTransposeWithDynamicPads", "x k p", {"x": floats(1, 3, 5, 5)}),
        {"k": floats(3, 2, 3, 3), "p": np.array([1, 1, 1, 1])},
        strides=[2, 2],
    ),
    "NhwcMaxPool": lambda: case(
        "NhwcMaxPool", "x", {"x": integers("uint8", 1, 6, 4, 3)}, kernel_shape=[2, 2], strides=[2, 2]
    ),
    "MatMulInteger16": lambda: case(
        "MatMulInteger16", "a b", {"a": integers("int16", 3, 4), "b": integers("int16", 4, 5)}
    ),
    "QLinearWhere": lambda: case(
        *("QLinearWhere", "c x s z v s z t u"),
        {"c": np.array([True, False, True, True])} | {n: integers("uint8", 3, 4) for n in "xv"},
        BYTES,
    ),
    "QLinearConv, channels last": lambda: case(
        *("QLinearConv", "x s z k ks kz t u", {"x": integers("uint8", 1, 6, 5, 3)}, FILTERS), channels_last=1
    ),
    "QLinearGlobalAveragePool, channels last": lambda: case(
        *("QLinearGlobalAveragePool", "x s z t u", {"x": integers("uint8", 1, 6, 5, 3)}, BYTES),
        channels_last=1,
    ),
    "GatherBlockQuantized": lambda: case(
        *("GatherBlockQuantized", "d i s", {"i": np.array([1, 3])}),
        {"d": integers("uint8", 6, 16), "s": np.abs(floats(6, 2))},
        **{"bits": 4, "block_size": 16, "gather_axis": 0, "quantize_axis": 1},
    ),
    **{
        f"MatMulBnb4 of type {kind}": lambda kind=kind: case(
            *("MatMulBnb4", "x k s", {"x": floats(2, 32)}),
            {"k": integers("uint8", 64), "s": np.abs(floats(8))},
            **{"K": 32, "N": 4, "block_size": 16, "quant_type": kind},
        )
        for kind in (0, 1)
    },
    "MatMulNBits in another order": lambda: case(
        *("MatMulNBits", "x k s _ g", {"x": floats(2, 32)}),
        BLOCKS | {"g": np.array([1, 0] * 16, "int32")},
        **{"K": 32, "N": 4, "bits": 4, "block_size": 16},
    ),
    "FeatureVectorizer": lambda: case(
        *("FeatureVectorizer", "x z", ROWS | {"z": floats(5, 2)}), domain=LEARNING, inputdimensions=[4, 2]
    ),
    "LabelEncoder": lambda: case(
        *("LabelEncoder", "x", {"x": np.array([1, 2, 7])}),
        **{"domain": LEARNING, "keys_int64s": [1, 2, 3], "values_floats": [1.0, 2.0, 3.0]},
        default_float=-1.0,
    ),
    "OneHotEncoder": lambda: case(
        "OneHotEncoder", "x", {"x": np.array([1, 2, 7])}, domain=LEARNING, cats_int64s=[2, 1, 3], zeros=1
    ),
    **{
        f"SVMRegressor with {kind}": lambda kind=kind: case(
            "SVMRegressor", "x", ROWS, domain=LEARNING, kernel_type=kind, **VECTORS
        )
        for kind in ("LINEAR", "POLY", "RBF", "SIGMOID")
    },
}


@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_an_operator_as_standard_ones(make):
    model, inputs = make()
    is_close(*expanded(model), inputs)


def expanded(model: onnx.ModelProto) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """A model, and the same with its operators replaced but for those that importers know."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    zoo.name_nodes(result)
    foreign.expand(result, {tensor.name: tensor for tensor in result.graph.initializer})
    assert "node" not in {node.name for node in result.graph.node}
    return model, result


def is_close(model: onnx.ModelProto, other: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> None:
    for expected, result in zip(outputs(model, inputs), outputs(other, inputs), strict=True):
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
        if expected.dtype.kind == "f":
            np.testing.assert_allclose(result, expected, rtol=0, atol=2e-5 * abs(expected).max())
        else:
            np.testing.assert_array_equal(result, expected)


MASKS = {"lengths": np.array([3, 5], "int32"), "flags by query": np.tril(np.ones((2, 3, 5), "int32"))}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_masks_of_attention(mask):
    model, _ = case("MultiHeadAttention", "q k v _ m", KEYS, {"m": mask}, num_heads=2)
    matches_onnx_runtime(zoo.load_model(model))


def test_a_product_of_operands_of_unknown_rank():
    """Results of operators that only ONNX Runtime knows, as its optimiser writes them; `n` are lengths."""
    weights = {"m": floats(8, 8), "n": np.array([2, 3], "int32")} | HEADS
    nodes = [
        helper.make_node("QuickGelu", ["x"], ["a"], "gelu", domain=MICROSOFT),
        helper.make_node("Attention", ["a", "w", "b", "n"], ["h"], "heads", domain=MICROSOFT, num_heads=2),
        helper.make_node("Attention", ["h", "w", "b", "n"], ["o"], "more", domain=MICROSOFT, num_heads=2),
        helper.make_node("FusedMatMul", ["o", "m"], ["y"], "product", domain=MICROSOFT, alpha=0.5),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [value_info("x", SEQUENCE["x"])],
        [value_info("y", SEQUENCE["x"])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
    matches_onnx_runtime(zoo.load_model(helper.make_model(graph, opset_imports=opsets, ir_version=8)))


def test_a_norm_without_an_epsilon():
    inputs = {"x": floats(2, 3, 8) / 100, "s": floats(2, 3, 8) / 100}
    model, _ = case("SkipSimplifiedLayerNormalization", "x s g", inputs, {"g": floats(8)})
    matches_onnx_runtime(zoo.load_model(model))


@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC", "SOFTMAX"])
def test_one_linear_score_of_two_classes(transform):
    attrs = {"coefficients": [1.0, 2, 3, 4], "intercepts": [0.5], "classlabels_ints": [5, 3]}
    model, inputs = case(
        *("LinearClassifier", "x", ROWS),
        **{"domain": LEARNING, "results": ("label", "y"), "post_transform": transform, **attrs},
    )
    is_close(*expanded(model), inputs)


# ---- trees ----

MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ")


def drawn_trees(seed: int, prefix: str, results: int) -> dict:
    """Attributes of an ensemble of uneven trees; thresholds are whole, so that equality happens."""
    random = np.random.default_rng(seed)
    nodes: dict[str, list] = {
        name: []
        for name in (
            *("treeids", "nodeids", "featureids", "values", "modes", "truenodeids", "falsenodeids"),
            "missing_value_tracks_true",
        )
    }
    leaves: dict[str, list] = {name: [] for name in ("treeids", "nodeids", "ids", "weights")}

    def grow(tree: int, depth: int) -> int:
        """Add a node and what is below it; returns its number."""
        index = nodes["treeids"].count(tree)
        is_leaf = depth == 0 or random.random() < 0.2
        entry = (tree, index, int(random.integers(4)), float(random.integers(-1, 2)))
        for name, value in zip(nodes, (*entry, "LEAF" if is_leaf else random.choice(MODES), 0, 0, 0)):
            nodes[name].append(value)
        place = len(nodes["treeids"]) - 1
        if is_leaf:
            for result in range(results):
                for name, value in zip(leaves, (tree, index, result, float(random.normal()))):
                    leaves[name].append(value)
        else:
            nodes["missing_value_tracks_true"][place] = int(random.integers(2))
            nodes["truenodeids"][place] = grow(tree, depth - 1)
            nodes["falsenodeids"][place] = grow(tree, depth - 1)
        return index

    for tree in range(3):
        grow(tree, 1 + tree)
    return {f"nodes_{name}": list(map(str, v)) if name == "modes" else v for name, v in nodes.items()} | {
        f"{prefix}_{name}": values for name, values in leaves.items()
    }


def whole_rows(seed: int, has_nan: bool) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).integers(-2, 3, (20, 4)).astype("float32")
    x[3 : 3 + 4 * has_nan] = np.nan
    return {"x": x}


@pytest.mark.parametrize("aggregate", ["SUM", "AVERAGE", "MIN", "MAX"])
@pytest.mark.parametrize("seed", range(6))
def test_regression_by_trees(seed, aggregate):
    # ONNX Runtime takes trees with NaN apart from those of other modes.
    attrs = drawn_trees(seed, "target", 2) | {"aggregate_function": aggregate, "n_targets": 2}
    has_nan = seed % 2 == 0
    if has_nan:
        attrs["nodes_modes"] = ["LEAF" if mode == "LEAF" else "BRANCH_LT" for mode in attrs["nodes_modes"]]
    attrs |= {"domain": LEARNING, "base_values": [0.5, 0]}
    model, inputs = case("TreeEnsembleRegressor", "x", whole_rows(seed, has_nan), **attrs)
    is_close(*expanded(model), inputs)


@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC", "SOFTMAX"])
def test_classification_by_trees(transform):
    model, inputs = case(
        *("TreeEnsembleClassifier", "x", whole_rows(7, False)),
        **{"domain": LEARNING, "results": ("label", "y"), "classlabels_int64s": [4, 2, 9]},
        **{"post_transform": transform, **drawn_trees(7, "class", 3)},
    )
    is_close(*expanded(model), inputs)


@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC"])
@pytest.mark.parametrize("class_id", [0, 1])
@pytest.mark.parametrize("is_share", [False, True])
def test_classification_by_one_score(transform, class_id, is_share):
    attrs = drawn_trees(8, "class", 1)
    attrs["class_ids"] = [class_id] * len(attrs["class_ids"])
    if is_share:
        attrs["class_weights"] = [abs(weight) / 4 for weight in attrs["class_weights"]]
    model, inputs = case(
        *("TreeEnsembleClassifier", "x", whole_rows(8, False)),
        **{"domain": LEARNING, "results": ("label", "y"), "classlabels_int64s": [4, 7]},
        **{"post_transform": transform, **attrs},
    )
    is_close(*expanded(model), inputs)


ENSEMBLE = {
    **{"n_targets": 2, "aggregate_function": 1, "leaf_targetids": [0, 1, 0, 1], "tree_roots": [0, 2]},
    **{"nodes_featureids": [0, 1, 2], "nodes_trueleafs": [0, 1, 1], "nodes_truenodeids": [1, 0, 2]},
    **{"nodes_falseleafs": [1, 1, 1], "nodes_falsenodeids": [3, 1, 2]},
    "leaf_weights": numpy_helper.from_array(np.array([1.0, 2, 3, 4], "float32")),
    "nodes_modes": numpy_helper.from_array(np.array([0, 3, 0], "uint8")),
    "nodes_splits": numpy_helper.from_array(np.array([0.0, -1, 1], "float32")),
}


def test_attributes_that_contradict_each_other():
    node = helper.make_node("MatMulBnb4", ["x", "k", "s"], ["y"], "node", domain=MICROSOFT, K="a", N=4)
    attributes = {"block_size": 16, "quant_type": 1}
    node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
    graph = onnx.GraphProto(node=[node])
    model = onnx.ModelProto(graph=graph, opset_import=[helper.make_opsetid("", 17)])
    with pytest.raises(ModelError, match="'node': MatMulBnb4 has attributes or constants that contradict"):
        foreign.expand(model, {})


def test_trees_of_opset_5():
    model, _ = case("TreeEnsemble", "x", whole_rows(9, False), domain=LEARNING, **ENSEMBLE)
    matches_onnx_runtime(zoo.load_model(model))


def test_trees_whose_edges_are_wrong():
    """In a circle, to nowhere, and a deep one whose matrix would be too large."""
    chain = {"nodes_featureids": [0] * 9000}
    chain |= {"nodes_trueleafs": [0] * 8999 + [1], "nodes_falseleafs": [1] * 9000}
    chain |= {"nodes_truenodeids": [*range(1, 9000), 0], "nodes_falsenodeids": [0] * 9000, "tree_roots": [0]}
    chain["nodes_modes"] = numpy_helper.from_array(np.zeros(9000, "uint8"))
    chain["nodes_splits"] = numpy_helper.from_array(np.zeros(9000, "float32"))
    away = "with nodes that are not there"
    for changed, why in (
        ({"nodes_truenodeids": [0, 0, 2]}, away),
        ({"nodes_falsenodeids": [30, 1, 2]}, away),
        (chain, "of 1 trees of up to 9000 conditions and 9001 leaves"),
    ):
        node = helper.make_node("TreeEnsemble", ["x"], ["y"], "node", domain=LEARNING, **ENSEMBLE | changed)
        model = helper.make_model(
            helper.make_graph(
                [node],
                "net",
                [helper.make_tensor_value_info("x", TensorProto.FLOAT, (2, 4))],
                [helper.make_tensor_value_info("y", TensorProto.FLOAT, (2, 2))],
            ),
            opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid(LEARNING, 5)],
            ir_version=8,
        )
        with pytest.raises(UnsupportedOpError, match=f"'node': TreeEnsemble {why}"):
            onnx_graph.from_onnx(zoo.load_model(model))
