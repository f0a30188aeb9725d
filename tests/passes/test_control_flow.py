"""Do branches and loops give what ONNX Runtime gives, once they are replaced by what runs?"""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx_models import onnx_model
from test_frontend import BOUND, matches_onnx_runtime, outputs, reference, weight

from pimflow import zoo
from pimflow.errors import UnsupportedOpError
from pimflow.frontend import onnx_graph

VALUE = helper.make_tensor_value_info("b", TensorProto.FLOAT, (2, 3))
FLAG = helper.make_tensor_value_info("go", TensorProto.BOOL, ())
NUMBER = helper.make_tensor_value_info("i", TensorProto.INT64, ())


def body(*nodes, result=VALUE) -> onnx.GraphProto:
    return helper.make_graph(list(nodes), "body", [], [result])


def choice(condition: str, result: str, then=None, otherwise=None) -> onnx.NodeProto:
    """An If between Relu and Neg of `x`, or other bodies."""
    return helper.make_node(
        *("If", [condition], [result], f"{result}.if"),
        then_branch=then or body(helper.make_node("Relu", ["x"], ["b"])),
        else_branch=otherwise or body(helper.make_node("Neg", ["x"], ["b"])),
    )


@pytest.mark.long
@pytest.mark.parametrize("fast", [True, False])
def test_a_constant_condition(fast):
    model = onnx_model([choice("fast", "y")], {"x": (2, 3)}, {"y": (2, 3)}, {"fast": np.array(fast)})
    matches_onnx_runtime(zoo.load_model(model))


def test_a_condition_on_shapes_in_a_branch():
    """ONNX Runtime's optimiser ends its process on such networks."""
    inner = [
        helper.make_node("Size", ["x"], ["size"]),
        helper.make_node("Equal", ["size", "six"], ["is_six"]),
        choice("is_six", "b"),
    ]
    outer = choice("fast", "y", then=body(*inner))
    weights = {"fast": np.array(True), "six": np.array(6)}
    matches_onnx_runtime(zoo.load_model(onnx_model([outer], {"x": (2, 3)}, {"y": (2, 3)}, weights)))


def squeeze_if_one(x: str) -> list[onnx.NodeProto]:
    """What PyTorch writes for ``squeeze(0)``: the axis goes if its size is 1."""
    result = onnx.ValueInfoProto(name="b", type=helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    size = [
        helper.make_node("Shape", [x], [f"{x}.shape"]),
        helper.make_node("Gather", [f"{x}.shape", "zero"], [f"{x}.size"], axis=0),
        helper.make_node("Equal", [f"{x}.size", "one"], [f"{x}.is_one"]),
    ]
    squeeze = helper.make_node("Squeeze", [x, "zero"], ["b"])
    same = helper.make_node("Identity", [x], ["b"])
    bodies = {"then": body(squeeze, result=result), "otherwise": body(same, result=result)}
    return [*size, choice(f"{x}.is_one", f"{x}.squeezed", **bodies)]


def test_conditions_on_sizes_that_constants_decide():
    """The second is on the result of the first; shape inference alone knows neither of them."""
    nodes = [
        helper.make_node("Reshape", ["pads", "two_rows"], ["rows"]),
        helper.make_node("Transpose", ["rows"], ["columns"]),
        helper.make_node("Reshape", ["columns", "flat"], ["widths"]),
        helper.make_node("Pad", ["x", "widths"], ["a"]),
        *squeeze_if_one("a"),
        *squeeze_if_one("a.squeezed"),
        helper.make_node("Relu", ["a.squeezed.squeezed"], ["y"]),
    ]
    weights = {"pads": np.array([0, 0, 1, 2]), "two_rows": np.array([2, 2]), "flat": np.array([-1])}
    weights |= {"one": np.array([1]), "zero": np.array([0])}
    model = onnx_model(nodes, {"x": (1, 2)}, {"y": [None]}, weights)
    (y,) = outputs(onnx_graph.from_onnx(zoo.load_model(model)), [np.ones((1, 2), np.float32)])
    assert y.tolist() == [0, 1, 1, 0, 0]


@pytest.mark.long
@pytest.mark.parametrize("rate", [3.0, 30.0])
def test_a_computed_condition_chooses_between_results(rate):
    nodes = [helper.make_node("Greater", ["rate", "limit"], ["fast"]), choice("fast", "y")]
    model = zoo.load_model(
        onnx_model(nodes, {"x": (2, 3), "rate": ()}, {"y": (2, 3)}, {"limit": np.float32(8)})
    )
    operands = {"x": weight(2, 3), "rate": np.array(rate, "float32")}
    (y,) = outputs(onnx_graph.from_onnx(model), list(operands.values()))
    (expected,) = reference(model, operands)
    assert abs(y - expected).max() <= BOUND


def test_results_of_different_shapes_name_what_decides():
    wide = helper.make_node("Concat", ["x", "x"], ["b"], axis=1)
    shape = helper.make_tensor_value_info("b", TensorProto.FLOAT, (2, 6))
    fast = helper.make_node("Greater", ["rate", "limit"], ["fast"])
    nodes = [fast, choice("fast", "y", otherwise=body(wide, result=shape))]
    model = onnx_model(nodes, {"x": (2, 3), "rate": ()}, {"y": [2, None]}, {"limit": np.float32(8)})
    with pytest.raises(UnsupportedOpError, match=r"If of node 'y\.if' chooses by the values of 'rate'"):
        onnx_graph.from_onnx(zoo.load_model(model))


def loop(trips: str, condition: str, *nodes: onnx.NodeProto, rows: bool = True) -> onnx.ModelProto:
    """A Loop that adds `w` to `x` in each trip; `rows` of all trips are a second result."""
    step = [helper.make_node("Add", ["state", "w"], ["b"]), *nodes]
    state = helper.make_tensor_value_info("state", TensorProto.FLOAT, (2, 3))
    keep = helper.make_tensor_value_info("keep", TensorProto.BOOL, ())
    results = [keep, VALUE]
    if rows:
        step.append(helper.make_node("Relu", ["b"], ["row"]))
        results.append(helper.make_tensor_value_info("row", TensorProto.FLOAT, (2, 3)))
    graph = helper.make_graph(step, "body", [NUMBER, FLAG, state], results)
    names = ["y", "z"][: 1 + rows]
    node = helper.make_node("Loop", [trips, condition, "x"], names, "loop", body=graph)
    outs = {"y": (2, 3), "z": (None, 2, 3)}
    weights = {"w": weight(2, 3), "three": np.array(3), "yes": np.array(True), "two": np.array(2)}
    weights["none"] = np.array(0)
    return onnx_model([node], {"x": (2, 3)}, {name: outs[name] for name in names}, weights)


ALWAYS = helper.make_node("Identity", ["go"], ["keep"])
TWICE = helper.make_node("Less", ["i", "two"], ["keep"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("trips", "condition", "keep"),
    [("three", "yes", ALWAYS), ("three", "", ALWAYS), ("", "yes", TWICE), ("three", "yes", TWICE)],
)
def test_a_loop_of_known_trips(trips, condition, keep):
    matches_onnx_runtime(zoo.load_model(loop(trips, condition, keep)))


def test_a_loop_of_no_trip():
    matches_onnx_runtime(zoo.load_model(loop("none", "yes", ALWAYS, rows=False)))


def test_a_loop_that_ends_by_what_it_computes():
    top = helper.make_node("ReduceMax", ["b"], ["top"], keepdims=0)
    keep = [top, helper.make_node("Less", ["top", "limit"], ["keep"])]
    model = loop("three", "yes", *keep)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(9), "limit"))
    with pytest.raises(UnsupportedOpError, match="Loop of node 'loop' ends when computed values say so"):
        onnx_graph.from_onnx(zoo.load_model(model))


@pytest.mark.long
def test_a_loop_of_too_many_trips():
    model = loop("three", "yes", ALWAYS)
    model.graph.initializer[1].CopyFrom(onnx.numpy_helper.from_array(np.array(10**9), "three"))
    with pytest.raises(UnsupportedOpError, match="Loop of node 'loop' makes more than 256 trips"):
        onnx_graph.from_onnx(zoo.load_model(model))


@pytest.mark.long
def test_loops_of_too_many_nodes_end_soon():
    steps = [helper.make_node("Relu", ["b"], [f"r{number}"]) for number in range(200)]
    with pytest.raises(UnsupportedOpError, match="more than 20000 nodes"):
        model = loop("three", "yes", ALWAYS, *steps)
        model.graph.initializer[1].CopyFrom(onnx.numpy_helper.from_array(np.array(250), "three"))
        onnx_graph.from_onnx(zoo.load_model(model))


@pytest.mark.long
@pytest.mark.parametrize("backward", [0, 1])
def test_a_scan(backward):
    element, state = (helper.make_tensor_value_info(name, TensorProto.FLOAT, (3,)) for name in ("e", "s"))
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (3,)) for name in ("t", "row")]
    nodes = [helper.make_node("Add", ["s", "e"], ["t"]), helper.make_node("Relu", ["t"], ["row"])]
    graph = helper.make_graph(nodes, "body", [state, element], results)
    node = helper.make_node(
        *("Scan", ["x", "xs"], ["y", "z"], "scan"),
        body=graph,
        num_scan_inputs=1,
        scan_input_axes=[1],
        scan_input_directions=[backward],
        scan_output_directions=[1 - backward],
    )
    matches_onnx_runtime(
        zoo.load_model(onnx_model([node], {"x": (3,), "xs": (3, 4)}, {"y": (3,), "z": (4, 3)}))
    )
