"""Does every model get in, its inputs drawn, and is every bad one turned away in one clear line?"""

import ast

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper, shape_inference
from onnx_models import onnx_model

from pimflow import zoo
from pimflow.errors import ModelError, PimflowError, UnknownNameError, UsageError
from pimflow.frontend import onnx_runtime


def small(dims=("N", 4), output=("N", 2)):
    """x @ w, with w of ones."""
    return onnx_model(
        [helper.make_node("MatMul", ["x", "w"], ["y"], "product")],
        {"x": dims},
        {"y": output},
        {"w": np.ones((4, 2), np.float32)},
        name="small",
    )


def test_example_inputs_are_reproducible_normal_and_typed():
    model = zoo.load("mobilenet-v2")
    (first,), (second,) = (zoo.example_inputs(model).values() for _ in range(2))
    assert first.dtype == np.float32 and first.tobytes() == second.tobytes()
    assert abs(first.mean()) < 0.01 and abs(first.std() - 1) < 0.01 and np.abs(first).max() <= 3
    graph = small(dims=(2, 4), output=(2, 2))
    for kind, dtype in ((TensorProto.INT64, np.int64), (TensorProto.FLOAT16, np.float16)):
        graph.graph.input[0].type.tensor_type.elem_type = kind
        drawn = zoo.example_inputs(graph)["x"]
        assert drawn.dtype == dtype and drawn.shape == (2, 4)
        assert kind == TensorProto.FLOAT16 or drawn.min() >= 0
    graph.graph.input[0].type.tensor_type.elem_type = TensorProto.STRING
    with pytest.raises(ModelError, match="input 'x'"):
        zoo.example_inputs(graph)
    with pytest.raises(ModelError, match="--shape x="):
        zoo.example_inputs(small())


def embedding(rows, width, carriers, axis=0):
    """Rows of a table picked by an input `ids` of shape 2 x 3, behind `carriers`."""
    nodes, source = [], "ids"
    for index, (operator, extra, attributes) in enumerate(carriers):
        nodes.append(helper.make_node(operator, [source, *extra], [f"c{index}"], f"c{index}", **attributes))
        source = f"c{index}"
    nodes.append(helper.make_node("Gather", ["table", source], ["y"], "pick", axis=axis))
    stored = [
        numpy_helper.from_array(np.zeros((rows, width), np.float32), "table"),
        numpy_helper.from_array(np.array([6], np.int64), "six"),
    ]
    return onnx_model(nodes, {"ids": (TensorProto.INT64, (2, 3))}, {"y": None}, stored, name="embedding")


@pytest.mark.parametrize("carriers", [
    [], [("Cast", (), {"to": TensorProto.INT32})], [("Reshape", ("six",), {}), ("Identity", (), {})]
])  # fmt: skip
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_inputs_that_pick_rows_are_drawn_from_all_of_them(carriers, axis):
    model = zoo.load_model(embedding(5, 7, carriers, axis))
    rows = (5, 7)[axis]
    assert zoo.index_bounds(model) == {"ids": rows}
    drawn = np.concatenate([zoo.example_inputs(model, seed)["ids"].ravel() for seed in range(40)])
    assert {*drawn.tolist()} == {*range(rows)}


@pytest.mark.long
def test_computed_indices_bound_no_input():
    added = [("Add", ("six",), {})]
    assert zoo.index_bounds(embedding(5, 7, added)) == {}
    assert zoo.index_bounds(zoo.load("mobilenet-v1")) == {}
    assert zoo.index_bounds(zoo.load("bert-base")) == {"input_ids": 30522, "token_type_ids": 2}


@pytest.mark.parametrize("kind, nodes, draw", [
    (TensorProto.FLOAT, [("Sqrt", ["x"], {})], "uniform(0.1,0.9)"),
    (TensorProto.FLOAT, [("Add", ["x", "c"], {}), ("Log", ["0"], {})], "uniform(0.1,0.9)"),
    (TensorProto.FLOAT, [("Pow", ["x", "half"], {})], "uniform(0.1,0.9)"),
    (TensorProto.FLOAT, [("Div", ["c", "x"], {})], "uniform(0.5,2)"),
    (TensorProto.INT64, [("Mod", ["x", "x"], {})], "int(1,9)"),
    (TensorProto.FLOAT, [("Div", ["x", "scale"], {})], "normal(0,3276)"),
    (TensorProto.FLOAT, [("Mul", ["x", "pixel"], {})], "uniform(0,255)"),
    (TensorProto.UINT8, [("DequantizeLinear", ["x", "c"], {})], "int(0,255)"),
    (TensorProto.FLOAT, [("Pow", ["x", "c"], {})], None),
    (TensorProto.FLOAT, [("Sub", ["c", "x"], {}), ("Sqrt", ["0"], {})], None),
    (TensorProto.FLOAT, [("Exp", ["x"], {}), ("Log", ["0"], {})], None),
])  # fmt: skip
def test_inputs_are_drawn_where_the_graph_is_defined(kind, nodes, draw):
    made = [helper.make_node(op, names, [str(i)], **more) for i, (op, names, more) in enumerate(nodes)]
    constants = {"c": 2.0, "half": 0.5, "scale": 32768.0, "pixel": 1 / 255}
    weights = {name: np.array(value, np.float32) for name, value in constants.items()}
    output = (TensorProto.INT64 if kind == TensorProto.INT64 else TensorProto.FLOAT, [4, 3])
    model = zoo.load_model(onnx_model(made, {"x": (kind, [4, 3])}, {str(len(nodes) - 1): output}, weights))
    drawn = {name: str(distribution) for name, distribution in zoo.input_draws(model).items()}
    assert drawn == ({"x": draw} if draw else {})


@pytest.mark.parametrize("operator, shapes, rows", [
    ("GatherElements", ([5, 7], [5, 2]), 7),
    ("GatherND", ([5, 4, 7], [6, 2]), 4),
    ("ScatterElements", ([5, 7], [5, 2], [5, 2]), 7),
])  # fmt: skip
def test_every_kind_of_index_has_its_bound(operator, shapes, rows):
    attributes = {} if operator == "GatherND" else {"axis": 1}
    table, ids, *updates = shapes
    inputs = {"ids": (TensorProto.INT64, ids)} | ({"u": updates[0]} if updates else {})
    node = helper.make_node(operator, ["table", "ids", *inputs.keys() - {"ids"}], ["y"], **attributes)
    model = onnx_model([node], inputs, {"y": None}, {"table": np.zeros(table, np.float32)})
    assert zoo.index_bounds(zoo.load_model(model)) == {"ids": rows}


def test_bit_identical_to_the_recorded_draw():
    drawn = zoo.weights.uniform("fc.weight", 4, 0) * 2**23
    assert drawn.tolist() == [6476451.0, -8216031.0, 5123300.0, -2666883.0]
    for count in (1, zoo.weights.CHUNK, zoo.weights.CHUNK + 1, 3 * zoo.weights.CHUNK + 3):
        longest = zoo.weights.uniform("fc.weight", 4 * zoo.weights.CHUNK, 0)
        assert (zoo.weights.uniform("fc.weight", count, 0) == longest[:count]).all()
    assert (longest[-4:] * 2**23).tolist() == [-2860070.0, 6943634.0, 6929603.0, 591508.0]


def test_imports_neither_tvm_nor_torch():
    for path in zoo.GRAPHS.parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not {str(module).partition(".")[0] for module in modules} & {"tvm", "torch"}


def test_load_model_takes_name_path_and_model(tmp_path, monkeypatch):
    by_name = zoo.load_model("toy")
    onnx.save(zoo.load("toy"), tmp_path / "copy.onnx")
    (tmp_path / "bare").write_bytes((tmp_path / "copy.onnx").read_bytes())
    (tmp_path / "toy").write_text("a file of that name does not hide the zoo's")
    monkeypatch.chdir(tmp_path)
    for source in ("toy", "copy.onnx", "bare", "./bare", tmp_path / "copy.onnx", zoo.load("toy")):
        assert zoo.load_model(source) == by_name
    assert zoo.load_model(zoo.GRAPHS / "toy.onnx", seed=5) == zoo.load_model("toy", seed=5)


def test_shapes_fix_what_is_dynamic_and_are_inferred_again():
    original = small()
    before = original.SerializeToString()
    model = zoo.load_model(original, {"x": (3, 4)})
    (value,) = model.graph.output
    assert [dim.dim_value for dim in value.type.tensor_type.shape.dim] == [3, 2]
    assert original.SerializeToString() == before
    assert zoo.load_model(small(dims=None, output=None), {"x": (3, 4)}).graph.output


def test_a_question_mark_is_no_symbol():
    """Paddle's exporter calls every open dimension so."""
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    model = zoo.load_model(onnx_model(nodes, {"x": ("?", "?")}, {"y": ("?", "?")}), {"x": (2, 3)})
    assert zoo.example_inputs(model)["x"].shape == (2, 3)


def test_a_symbol_is_one_size_everywhere():
    model = small()
    model.graph.input.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, ("N",)))
    fixed = zoo.load_model(model, {"x": (3, 4)})
    assert fixed.graph.input[1].type.tensor_type.shape.dim[0].dim_value == 3
    with pytest.raises(ModelError, match="'N' is both 3 and 5"):
        zoo.load_model(model, {"x": (3, 4), "z": (5,)})


def test_inputs_that_name_initializers_are_dropped():
    model = small(dims=(1, 4), output=(1, 2))
    model.ir_version = 3
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, (4, 2)))
    assert [value.name for value in zoo.load_model(model).graph.input] == ["x"]


@pytest.mark.parametrize(
    ("dims", "shapes", "error", "says"),
    [
        (("N", 4), None, ModelError, "input 'x' has dynamic shape .x4.* --shape x=1,4"),
        (("N", 3, None, -1), None, ModelError, "--shape x=1,3,224,224"),
        (None, None, ModelError, "unknown rank.* --shape x=1,3,224,224"),
        (("N", 4), {"X": (1, 4)}, UnknownNameError, "unknown input 'X'.*x"),
        (("N", 4), {"x": (1, 5)}, ModelError, "input 'x' has shape .x4, not 1x5"),
        (("N", 4), {"x": (1, 4, 1)}, ModelError, "input 'x' has shape .x4, not 1x4x1"),
        (("N", 4), {"x": (-1, 4)}, UsageError, "input 'x'.* 0 or more"),
        ((0, 4), None, ModelError, "input 'x' has shape 0x4: .* dimension of 0 .* --shape x=1,4"),
        (("N", 0), None, ModelError, r"input 'x' has shape \?x0: "),
        (("N", "M"), {"x": (1, 5)}, ModelError, "not a valid ONNX model"),
    ],
)
def test_bad_shapes(dims, shapes, error, says):
    with pytest.raises(error, match=says) as raised:
        zoo.load_model(small(dims), shapes)
    assert "\n" not in str(raised.value)


def external(path, keep):
    onnx.save(small((1, 4), output=(1, 2)), path, save_as_external_data=True, size_threshold=0)
    data = [file for file in path.parent.iterdir() if file != path]
    assert len(data) == 1
    data[0].write_bytes(data[0].read_bytes()[:keep])
    if not keep:
        data[0].unlink()


BAD_FILES = {
    "missing": (lambda path: None, "No such file"),
    "directory": (lambda path: path.mkdir(), "directory"),
    "a decoder": (lambda path: (path.mkdir(), (path / "config.json").write_text("{}")), "pimflow generate"),
    "empty": (lambda path: path.write_bytes(b""), "no nodes"),
    "text": (lambda path: path.write_text("hello, world\n" * 9), "not an ONNX file"),
    "random": (lambda path: path.write_bytes(np.random.Philox(1).random_raw(99)), "not an ONNX"),
    "truncated": (lambda path: path.write_bytes(small((1, 4)).SerializeToString()[:-9]), "damaged"),
    "not UTF-8": (lambda path: path.write_bytes(small((1, 4)).SerializeToString().replace(
        b"product", b"prod\xffct")), "damaged"),
    "no graph": (lambda path: path.write_bytes(onnx.ModelProto(ir_version=9).SerializeToString()),
                 "no nodes"),
    "external data missing": (lambda path: external(path, 0), "with its data|No such file"),
    "external data truncated": (lambda path: external(path, 7), "with its data|valid"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files(case, tmp_path):
    make, says = BAD_FILES[case]
    path = tmp_path / "net.onnx"
    make(path)
    for file in (path, str(path)):
        with pytest.raises(ModelError, match=says) as raised:
            zoo.load_model(file)
        assert "\n" not in str(raised.value) and "net.onnx" in str(raised.value)


def test_every_truncation_is_turned_away(tmp_path):
    content = zoo.load("toy").SerializeToString()
    path = tmp_path / "net.onnx"
    for length in range(0, len(content), 397):
        path.write_bytes(content[:length])
        with pytest.raises(ModelError):
            zoo.load_model(path)


def test_bad_models():
    dangling = small((1, 4), output=(1, 2))
    dangling.graph.node[0].input[0] = "nowhere"
    for model in (dangling, onnx.ModelProto()):
        with pytest.raises(ModelError):
            zoo.load_model(model)
    unloaded = small((1, 4), output=(1, 2))
    unloaded.graph.initializer[0].data_location = TensorProto.EXTERNAL
    with pytest.raises(ModelError, match="another file"):
        zoo.load_model(unloaded)
    malformed = onnx.load(zoo.GRAPHS / "toy.onnx")
    malformed.graph.input[1].metadata_props[0].value = "weight:zero"
    with pytest.raises(ModelError, match=r"'stem\.conv\.weight'.* 'weight:zero'"):
        zoo.load_model(malformed)


def test_shapes_of_weights_are_not_for_the_caller():
    for source in ("toy", zoo.GRAPHS / "toy.onnx", zoo.load("toy")):
        with pytest.raises(UnknownNameError, match=r"unknown input 'fc\.weight'.*input"):
            zoo.load_model(source, {"fc.weight": (10, 32)})


def test_unknown_names_and_seeds():
    for call in (zoo.load, zoo.describe, zoo.load_model):
        with pytest.raises(UnknownNameError, match=r"unknown model 'mobilenet_v2'.*mobilenet-v2"):
            call("mobilenet_v2")
    for seed in (-1, 2**64):
        with pytest.raises(UsageError, match="seed"):
            zoo.load("toy", seed)


def test_parse_shape():
    assert zoo.parse_shape("input=1,3,224,224") == ("input", (1, 3, 224, 224))
    assert zoo.parse_shape("a=b=7") == ("a=b", (7,))
    assert zoo.parse_shape("x=2,0") == ("x", (2, 0))
    for junk in ("", "input", "=1,2", "x=", "x=1,,2", "x=1,-2", "x=1.5", "x=1x3", "x=a"):
        with pytest.raises(UsageError, match="input=1,3,224,224") as raised:
            zoo.parse_shape(junk)
        assert isinstance(raised.value, PimflowError) and raised.value.exit_code == 2


# ---- names of nodes ----


def test_nodes_without_a_name_of_their_own_get_one():
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Neg", ["a"], ["b"], "same"),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("Neg", ["c"], ["y"], "Relu_a"),
    ]
    model = onnx_model(nodes, {"x": [2]}, {"y": [2]})
    named = [node.name for node in zoo.load_model(model).graph.node]
    assert named == ["Relu_a_", "same", "Relu_c", "Relu_a"]
    for node, name in zip(model.graph.node, ["same", "same", "same.2", "same"]):
        node.name = name
    named = [node.name for node in zoo.load_model(model).graph.node]
    assert named == ["same", "same.3", "same.2", "same.4"]


@pytest.mark.parametrize(
    ("dims", "place", "why"), [([2, 3], 9, "outside of its shape"), ([1 << 40], 0, "more than 2147483647")]
)
def test_damaged_sparse_weights_are_one_line(dims, place, why):
    model = onnx_model([helper.make_node("Mul", ["x", "w"], ["y"])], {"x": [2, 3]}, {"y": [2, 3]})
    values = numpy_helper.from_array(np.ones(1, "float32"), "w")
    places = numpy_helper.from_array(np.array([place]), "places")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, dims))
    with pytest.raises(ModelError, match=why):
        zoo.load_model(model)


# ---- precision ----


@pytest.mark.long
def test_whole_numbers_above_2_to_24_keep_their_digits():
    """Integers in fp64 stay so to the end of their chain; products and what else is fp64 become fp32."""
    nodes = [
        helper.make_node("Cast", ["i"], ["d"], to=TensorProto.DOUBLE),
        helper.make_node("Div", ["d", "three"], ["q"]),
        helper.make_node("Floor", ["q"], ["f"]),
        helper.make_node("Cast", ["f"], ["y"], to=TensorProto.INT64),
        helper.make_node("MatMul", ["x", "w"], ["p"]),
    ]
    weights = {"three": np.float64(3), "w": np.ones((4, 2))}
    inputs = {"i": (TensorProto.INT64, [2]), "x": (TensorProto.DOUBLE, [1, 4])}
    outputs = {"y": (TensorProto.INT64, [2]), "p": (TensorProto.DOUBLE, [1, 2])}
    file = onnx_model(nodes, inputs, outputs, weights)
    single, exact = zoo.load_model(file), zoo.load_exact(file)
    tensors = (*single.graph.input, *single.graph.value_info)
    types = {value.name: value.type.tensor_type.elem_type for value in tensors}
    assert {types[name] for name in "dqf"} == {TensorProto.DOUBLE} and types["x"] == TensorProto.FLOAT
    assert zoo.has_double(exact) and exact.graph.input[1].type.tensor_type.elem_type == TensorProto.DOUBLE
    values = {"i": np.array([10**12 + 7, 2**24 + 1]), "x": np.full((1, 4), 1 + 2**-40)}
    (y, p), (y_single, p_single) = (onnx_runtime.reference(model)(values) for model in (exact, single))
    assert y.tolist() == y_single.tolist() == [(10**12 + 7) // 3, (2**24 + 1) // 3]
    assert p[0, 0] > 4 == p_single[0, 0] and p_single.dtype == np.float64


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_every_narrow_floating_point_type_is_fp32_inside(kind):
    unit = helper.make_tensor("one", kind, [1], [1.0])
    nodes = [
        helper.make_node("Cast", ["x"], ["a"], to=kind),
        helper.make_node("Constant", [], ["b"], value=helper.make_tensor("b", kind, [1], [2.0])),
        helper.make_node("Add", ["a", "b"], ["c"]),
        helper.make_node("Add", ["c", "one"], ["y"]),
    ]
    model = zoo.load_model(onnx_model(nodes, {"x": (TensorProto.INT64, [3])}, {"y": (kind, [3])}, [unit]))
    (y,) = onnx_runtime.reference(model)({"x": np.array([0, 1, 2])})
    assert y.dtype == helper.tensor_dtype_to_np_dtype(kind)
    assert y.tolist() == [3, 4, 5]
    inside = {value.name: value.type.tensor_type.elem_type for value in model.graph.value_info}
    assert set(inside.values()) == {TensorProto.FLOAT}


def casts(kind, *between) -> onnx.ModelProto:
    """fp32 cast to `kind`, then operators, each of so many of the one before, then cast back."""
    names = ["c", *(f"m{place}" for place in range(len(between)))]
    nodes = [helper.make_node("Cast", ["x"], ["c"], to=kind)]
    nodes += [helper.make_node(op, [a] * n, [b]) for (op, n), a, b in zip(between, names, names[1:])]
    nodes.append(helper.make_node("Cast", names[-1:], ["y"], to=TensorProto.FLOAT))
    return onnx_model(nodes, {"x": [64]}, {"y": [64]})


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
@pytest.mark.parametrize("between", [(), (("Identity", 1), ("Relu", 1)), (("Greater", 2),)])
def test_casts_back_and_forth_round(kind, between):
    """To the values that NumPy's own types have."""
    x = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    rounded = x.astype(helper.tensor_dtype_to_np_dtype(kind)).astype(np.float32)
    kinds = [op for op, _ in between]
    expected = rounded * 0 if "Greater" in kinds else np.maximum(rounded, 0) if between else rounded
    model = zoo.load_model(casts(kind, *between))
    (y,) = onnx_runtime.reference(model)({"x": x})
    assert (y == expected).all() and (rounded != x).any()
    cast_nodes = [node for node in model.graph.node if node.op_type == "Cast"]
    assert [node.attribute[0].i for node in cast_nodes] == [kind, TensorProto.FLOAT, TensorProto.FLOAT]


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
@pytest.mark.parametrize("like", ["weight", "input", "result"])
def test_casts_to_the_type_of_a_tensor_round(kind, like):
    """As casts to that type do, wherever the tensor comes from."""
    model = casts(kind)
    (wanted,) = onnx_runtime.reference(zoo.load_model(model))(
        inputs := zoo.example_arrays({"x": ((64,), np.float32)})
    )
    (cast, _) = model.graph.node
    cast.CopyFrom(helper.make_node("CastLike", ["x", "like"], ["c"]))
    if like == "weight":
        model.graph.initializer.append(helper.make_tensor("like", kind, [1], np.ones(1)))
    elif like == "input":
        model.graph.input.append(helper.make_tensor_value_info("like", kind, [1]))
        inputs["like"] = np.ones(1, np.float32)
    else:
        model.graph.node.insert(0, helper.make_node("Cast", ["x"], ["like"], to=kind))
    (y,) = onnx_runtime.reference(zoo.load_model(model))(inputs)
    assert (y == wanted).all() and (y != inputs["x"]).any()


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_a_cast_in_front_of_arithmetic_does_not_round(kind):
    """It says in which type to compute: in fp32, which is more exact."""
    model = zoo.load_model(casts(kind, ("Mul", 2), ("Relu", 1)))
    assert [node.op_type for node in model.graph.node] == ["Cast", "Mul", "Relu", "Cast"]
    assert {n.attribute[0].i for n in model.graph.node if n.op_type == "Cast"} == {TensorProto.FLOAT}


@pytest.mark.parametrize("others", [TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE])
def test_operands_of_several_types_are_refused(others):
    """As ONNX Runtime does; as fp32 they would be the same."""
    model = small()
    (weights,) = model.graph.initializer
    model.graph.initializer[0].CopyFrom(helper.make_tensor(weights.name, others, weights.dims, np.ones(8)))
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.Fail):
        onnxruntime.InferenceSession(model.SerializeToString())
    with pytest.raises(ModelError, match=r"not a valid ONNX model.*type") as raised:
        zoo.load_model(model)
    assert "\n" not in str(raised.value)


def test_a_flag_that_is_neither_0_nor_1_is_refused():
    """ONNX Runtime takes a keepdims of 2 for 0, others for 1."""
    model = small()
    model.graph.node[0].CopyFrom(helper.make_node("ReduceMax", ["x"], ["y"], "most", axes=[1], keepdims=2))
    with pytest.raises(ModelError, match="keepdims of ReduceMax 'most' is 2, not 0 or 1"):
        zoo.load_model(model)


@pytest.mark.parametrize("field", ["input", "output", "value_info"])
def test_a_tensor_of_no_type_is_refused(field):
    model = shape_inference.infer_shapes(small())
    values = getattr(model.graph, field)
    if field == "value_info":
        values.add(name="inside").type.tensor_type.shape.dim.add().dim_value = 1
    else:
        values[0].type.tensor_type.elem_type = TensorProto.UNDEFINED
    with pytest.raises(ModelError, match="has no element type"):
        zoo.load_model(model)
