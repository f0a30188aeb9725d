"""Does a network from a file compute, kernel by kernel, what ONNX Runtime computes?"""

import warnings

import numpy as np
import onnx
import onnxruntime
import pytest
import tvm
from graphs import operators, outputs, shaped_model
from onnx import helper
from onnx_models import onnx_model

from pimflow import frontend, zoo
from pimflow.errors import UnsupportedOpError
from pimflow.frontend import onnx_graph
from pimflow.relay_passes.flat import main_bindings, operator
from pimflow.relay_passes.regions.extract_regions import extract_regions

BOUND = 1e-5  # of the largest magnitude of the reference, in fp32


def weight(*dims: int) -> np.ndarray:
    return np.random.default_rng(dims).uniform(-1, 1, dims).astype(np.float32)


def node(op: str, operands: str, result: str, **attributes) -> onnx.NodeProto:
    return helper.make_node(op, operands.split(), [result], f"{result}.node", **attributes)


def reference(model: onnx.ModelProto, operands: dict[str, np.ndarray]) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, operands)


def matches_onnx_runtime(model: onnx.ModelProto, mod: tvm.IRModule | None = None) -> None:
    mod = onnx_graph.from_onnx(model) if mod is None else mod
    operands = zoo.example_inputs(model)
    results = outputs(mod, list(operands.values()))
    for result, expected in zip(results, reference(model, operands), strict=True):
        assert result.shape == expected.shape
        assert abs(result - expected).max() <= BOUND * abs(expected).max()


# ---- operators that the importer does not leave as they are ----

CONV = node("Conv", "x w", "a")
WEIGHTS = {"w": weight(4, 3, 3, 3), "v": weight(4, 4, 1, 1)}
SHAPES = {"x": (1, 3, 6, 6)}


@pytest.mark.long
@pytest.mark.parametrize(("operands", "additions"), [("a b", 1), ("a b a", 2), ("a b a b", 3)])
def test_a_sum_is_additions(operands, additions):
    nodes = [CONV, node("Conv", "a v", "b"), node("Sum", operands, "y")]
    model = shaped_model(nodes, SHAPES, WEIGHTS, ["y"])
    mod = onnx_graph.from_onnx(model)
    assert operators(mod).count("add") == additions
    assert not {"stack", "sum", "broadcast_to"} & set(operators(mod))
    matches_onnx_runtime(model, mod)


@pytest.mark.long
@pytest.mark.parametrize("op", ["Sum", "Identity", "Dropout"])
def test_an_operator_of_one_operand_that_does_nothing(op):
    for nodes in ([CONV, node(op, "a", "y")], [CONV, node(op, "a", "b"), node("Relu", "b", "y")]):
        model = shaped_model(nodes, SHAPES, WEIGHTS, ["y"])
        mod = onnx_graph.from_onnx(model)
        assert set(operators(mod)) <= {"permute_dims", "nn.conv2d", "nn.relu"}
        matches_onnx_runtime(model, mod)


def test_several_results_in_their_order():
    nodes = [CONV, node("Relu", "a", "b"), node("Conv", "b v", "c"), node("GlobalMaxPool", "b", "d")]
    matches_onnx_runtime(shaped_model(nodes, SHAPES, WEIGHTS, ["d", "a", "c"]))


@pytest.mark.parametrize(
    "nodes",
    [
        [node("GlobalAveragePool", "a", "p"), node("Squeeze", "p last", "y")],
        [node("LayerNormalization", "a cube", "y", axis=-3)],
        [node("LayerNormalization", "a row", "y")],
    ],
)
def test_axes_counted_from_the_end(nodes):
    weights = WEIGHTS | {"last": np.array([-1, -2]), "cube": weight(4, 4, 4), "row": weight(4)}
    matches_onnx_runtime(shaped_model([CONV, *nodes], SHAPES, weights, ["y"]))


# ---- what the importer cannot do as it stands ----


# ---- what cannot be imported ----


@pytest.mark.long
@pytest.mark.parametrize("read", [False, True])
def test_places_of_maxima(read):
    """If nobody reads them, the layer stays a pooling."""
    pool = helper.make_node("MaxPool", ["a"], ["y", "at"], "pool", kernel_shape=[2, 2])
    model = shaped_model([CONV, pool], SHAPES, WEIGHTS, ["y"])
    kinds = [operator(binding.value) for binding in main_bindings(onnx_graph.from_onnx(model))]
    assert "nn.max_pool2d" in kinds
    if read:
        model.graph.output.append(helper.make_tensor_value_info("at", onnx.TensorProto.INT64, None))
    matches_onnx_runtime(model)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_a_table_is_one_kernel(axis):
    """Negative indices count from the end; `pimflow run` may be given others, which are no crash."""
    table = shaped_model([node("Gather", "w x", "y", axis=axis)], {"x": (2, 2)}, {"w": weight(5, 3)}, ["y"])
    table.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
    mod = onnx_graph.from_onnx(table)
    assert operators(mod) == ["take"]
    indices = np.array([[0, 2], [-1, -3]])
    (y,) = outputs(mod, [indices])
    (expected,) = reference(table, {"x": indices})
    np.testing.assert_array_equal(y, expected)
    (y,) = outputs(mod, [np.full((2, 2), 2**40)])
    assert np.isin(y, weight(5, 3)).all()


def test_places_in_a_sequence_count_from_its_end():
    """An insertion at -1 is before the last element; elements in fp64 are computed in fp32, too."""
    nodes = [
        helper.make_node("SplitToSequence", ["x"], ["all"], axis=0, keepdims=0),
        helper.make_node("SequenceErase", ["all", "first"], ["two"]),
        helper.make_node("SequenceInsert", ["two", "one", "last"], ["three"]),
        helper.make_node("SequenceAt", ["three", "middle"], ["y"]),
        helper.make_node("SequenceLength", ["three"], ["count"]),
    ]
    numbers = {"first": np.int64(-3), "last": np.int64(-1), "middle": np.int64(-2), "one": np.ones(4)}
    double, whole = onnx.TensorProto.DOUBLE, onnx.TensorProto.INT64
    model = onnx_model(nodes, {"x": (double, (3, 4))}, {"y": (double, (4,)), "count": (whole, ())}, numbers)
    model = zoo.load_model(onnx.shape_inference.infer_shapes(model))
    y, count = outputs(onnx_graph.from_onnx(model), [np.zeros((3, 4), np.float32)])
    assert (y == 1).all() and count == 3


def test_statistics_of_each_element():
    """BatchNormalization with `spatial` of 0, of opsets before 9."""
    draw = np.random.default_rng(0)
    weights = {name: draw.uniform(0.5, 2, (2, 3, 3)).astype("float32") for name in "gbmv"}
    node = helper.make_node("BatchNormalization", ["x", *"gbmv"], ["y"], spatial=0)
    matches_onnx_runtime(onnx_model([node], {"x": (1, 2, 3, 3)}, {"y": (1, 2, 3, 3)}, weights, opset=7))


@pytest.mark.long
def test_samples_of_a_map_of_one_row():
    """At its corners, and reflected there."""
    node = helper.make_node(
        "GridSample", ["x", "g"], ["y"], mode="bilinear", padding_mode="reflection", align_corners=1
    )
    model = onnx_model([node], {"x": (1, 2, 1, 4), "g": (1, 3, 3, 2)}, {"y": (1, 2, 3, 3)}, opset=16)
    x, grid = np.arange(8, dtype=np.float32).reshape(1, 2, 1, 4), np.zeros((1, 3, 3, 2), np.float32)
    grid[..., 0], grid[..., 1] = np.linspace(-1, 1, 9).reshape(1, 3, 3), 5.3
    (y,) = outputs(onnx_graph.from_onnx(model), [x, grid])
    expected = np.linspace(0, 3, 9).reshape(3, 3) + np.array([0, 4]).reshape(1, 2, 1, 1)
    np.testing.assert_allclose(y, expected, atol=1e-5)


def test_more_choices_than_elements():
    node = helper.make_node("Compress", ["x", "chosen"], ["y"], axis=0)
    chosen = {"chosen": np.array([True, False, True])}
    matches_onnx_runtime(onnx_model([node], {"x": (1, 4)}, {"y": (1, 4)}, chosen))


def test_a_range_that_depends_on_data_is_refused():
    node = helper.make_node("Range", ["zero", "x", "one"], ["y"], "count")
    whole = onnx.TensorProto.INT64
    model = onnx_model(
        [node], {"x": (whole, ())}, {"y": (whole, ("n",))}, {"zero": np.int64(0), "one": np.int64(1)}
    )
    with pytest.raises(UnsupportedOpError, match=r"Range of node 'count'.* the number of its results"):
        onnx_graph.from_onnx(model)


def test_nodes_that_share_a_name():
    """Names are optional in ONNX; each layer has one of its own."""
    conv = helper.make_node("Conv", ["x", "w"], ["a"], "block")
    model = shaped_model([conv, helper.make_node("Relu", ["a"], ["y"], "block")], SHAPES, WEIGHTS, ["y"])
    assert [region.name for region in extract_regions(onnx_graph.from_onnx(model)).regions] == ["block"]


def test_an_operand_that_holds_nothing():
    """Exported lists start empty; ONNX Runtime runs them."""
    nodes = [node("Slice", "x zero zero one", "nothing"), node("Concat", "nothing x", "y", axis=1)]
    weights = {"zero": np.array([0]), "one": np.array([1])}
    matches_onnx_runtime(zoo.load_model(shaped_model(nodes, SHAPES, weights, ["y"])))


def test_an_output_of_another_declared_shape():
    """ONNX Runtime warns, and runs the network."""
    model = shaped_model([node("Conv", "x w", "y")], SHAPES, WEIGHTS, ["y"])
    del model.graph.output[0].type.tensor_type.shape.dim[1:]
    assert frontend.load(model).module is not None


def test_steps_of_a_layer_have_its_name():
    """Errors and reports name nodes, not TVM's variables."""
    model = shaped_model([node("LpNormalization", "x", "y", axis=1)], SHAPES, {}, ["y"])
    names = [region.name for region in extract_regions(onnx_graph.from_onnx(model)).regions]
    assert names and all(name.startswith(("y.node", "y_node")) for name in names)


def test_a_network_stays_as_it_was_given():
    model = shaped_model([CONV, node("Sum", "a a", "y")], SHAPES, WEIGHTS, ["y"])
    given_bytes = model.SerializeToString()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        onnx_graph.from_onnx(model)
    assert model.SerializeToString() == given_bytes


def test_an_input_of_rank_0():
    """Such as the sampling rate of an audio network."""
    matches_onnx_runtime(shaped_model([CONV, node("Mul", "a s", "y")], SHAPES | {"s": ()}, WEIGHTS, ["y"]))
