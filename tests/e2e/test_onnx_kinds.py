"""Does every kind of operator give what ONNX Runtime gives, or is it refused by name?

Kinds of one opset are compiled together, in both storage types where PIM can compute any of them: only what
that computes is rounded here. They are compared on inputs that verification never saw.
"""

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from length import long_but
from onnx import TensorProto, helper, numpy_helper
from onnx_kinds import KINDS
from onnx_models import onnx_model

import pimflow
from pimflow import frontend, hardware, zoo
from pimflow.commands.main import main
from pimflow.compiler import build
from pimflow.core.output_error import OUTPUT_BOUND, relative_error
from pimflow.errors import ModelError, UnsupportedOpError
from pimflow.pim_backend.runtime import targets
from pimflow.pim_backend.runtime.network_module import infer

REFUSED = {
    "Dropout training": "Dropout of node 'n' is in training mode",
    "NonZero": "the shape of nonzero .*depends on the data",
    "GN18": "GroupNormalization is deprecated",
    "NMS": "NonMaxSuppression of node 'n'.*the number of its results",
    "Unique": "Unique of node 'n'.*the number of its results",
}
TOGETHER = 12


def with_prefix(model: onnx.ModelProto, prefix: str) -> onnx.GraphProto:
    """Its graph with other names of tensors and nodes."""
    graph = onnx.GraphProto()
    graph.CopyFrom(model.graph)
    for node in graph.node:
        node.name = prefix + node.name
        for names in (node.input, node.output):
            names[:] = [name and prefix + name for name in names]
    for value in (*graph.input, *graph.output, *graph.initializer):
        value.name = prefix + value.name
    return graph


def join_networks(names: list[str]) -> tuple[onnx.ModelProto, list[str]]:
    """Networks of one opset as one, and which of them each output is of."""
    joined, owners = onnx.GraphProto(name="kinds"), []
    for index, name in enumerate(names):
        graph = with_prefix(KINDS[name], f"k{index}.")
        for field in ("node", "input", "output", "initializer"):
            getattr(joined, field).extend(getattr(graph, field))
        owners += [name] * len(graph.output)
    first = KINDS[names[0]]
    return helper.make_model(joined, opset_imports=first.opset_import, ir_version=first.ir_version), owners


def groups() -> list[list[str]]:
    by_opset: dict[int, list[str]] = {}
    for name, model in KINDS.items():
        if name not in REFUSED:
            by_opset.setdefault(model.opset_import[0].version, []).append(name)
    return [names[i : i + TOGETHER] for names in by_opset.values() for i in range(0, len(names), TOGETHER)]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(names, id=names[0].replace(" ", "-"), marks=() if n % 20 == 0 else pytest.mark.long)
        for n, names in enumerate(groups())
    ],
)
def test_what_onnx_runtime_computes(names):
    model, owners = join_networks(names)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    inputs = zoo.example_arrays(zoo.input_types(model), seed=7)
    expected_outputs = session.run(None, inputs)
    for dtype in ("fp32", "fp16"):
        # How channels are shared changes no value; searches of networks side by side take long if they are.
        system = hardware.system(dtype=dtype, channel_sharing="partitioned")
        compiled = pimflow.compile(model, system=system, conventions="none")
        built, search_result = compiled.builds[-1], compiled.search_result
        results = infer(built.module, inputs, built.device)
        for name, result, expected in zip(owners, results, expected_outputs, strict=True):
            assert (name, result.shape, result.dtype) == (name, expected.shape, expected.dtype)
            assert relative_error(result, expected.astype(np.float64)) <= OUTPUT_BOUND[dtype], name
        if all(map(search_result.generator.unsupported_reason, search_result.graph.regions)):
            break


@pytest.mark.parametrize("name", long_but(list(REFUSED)[:4], list(REFUSED)))
def test_what_is_refused_is_named(name):
    with pytest.raises((ModelError, UnsupportedOpError), match=REFUSED[name]) as raised:
        pimflow.compile(KINDS[name], system=hardware.system())
    assert "\n" not in str(raised.value)


def test_few_kinds_are_refused():
    assert len(REFUSED) <= 0.06 * len(KINDS)


# ---- types of results ----


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16])
def test_results_have_the_type_that_the_network_declares(kind, dtype):
    """An output that other layers read, one that none reads, and one that is of another type."""
    store = helper.tensor_dtype_to_np_dtype(kind)
    filters = np.random.default_rng(0).uniform(-1, 1, (32, 32, 1, 1)).astype(store)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "conv"),
        helper.make_node("Relu", ["c"], ["y"], "relu"),
        helper.make_node("GlobalAveragePool", ["y"], ["z"], "pool"),
        helper.make_node("ArgMax", ["y"], ["i"], "place", axis=1),
    ]
    results = {"y": (kind, None), "z": (kind, None), "i": (TensorProto.INT64, None)}
    model = onnx_model(nodes, {"x": (kind, (1, 32, 8, 8))}, results, {"w": filters}, opset=22)
    network = frontend.load(model)
    inputs = network.example_inputs()
    compiled = pimflow.compile(model, system=hardware.system(dtype=dtype), conventions="none")
    built = compiled.builds[-1]
    y, z, place = infer(built.module, inputs, built.device)
    assert y.dtype == z.dtype == store and place.dtype == np.int64
    plain = np.maximum(np.einsum("oi,nihw->nohw", filters[:, :, 0, 0].astype(np.float64), inputs["x"]), 0)
    for result, expected in ((y, plain), (z, plain.mean(axis=(2, 3), keepdims=True))):
        assert relative_error(result, expected) <= max(OUTPUT_BOUND[dtype], ml_dtypes.finfo(store).eps)
    assert compiled.verification.is_verified


@pytest.mark.long
def test_bf16_is_its_bits_in_c_and_fp32_in_files(tmp_path):
    nodes = [helper.make_node("Softplus", ["x"], ["y"], "softplus")]
    typed = (TensorProto.BFLOAT16, (3, 50))
    model = onnx_model(nodes, {"x": typed}, {"y": typed}, opset=22)
    onnx.save(model, tmp_path / "net.onnx")
    out, file = tmp_path / "out", tmp_path / "y.npy"
    options = ["-o", str(out), "--target", "c", "--quiet", "--conventions", "none"]
    assert main(["compile", str(tmp_path / "net.onnx"), *options]) == 0
    inputs = zoo.example_arrays({"x": ((3, 50), np.float32)})
    plain = np.log1p(np.exp(inputs["x"].astype(np.float64)))
    for target in ("c", "llvm+pim"):
        (result,) = pimflow.run(out, inputs, target=target)
        assert result.dtype == ml_dtypes.bfloat16
        assert (np.abs(result.astype(np.float64) - plain) <= 2.0**-8 * plain).all()
        assert main(["run", str(out), "--target", target, "-o", str(file), "--quiet"]) == 0
        assert np.load(file).dtype == np.float32
        assert (np.load(file) == result.astype(np.float32)).all()


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
@pytest.mark.parametrize("cast, dtype", [("Cast", "fp32"), ("CastLike", "fp32"), ("CastLike", "fp16")])
def test_casts_that_round(kind, cast, dtype):
    """Of an input, of a product and between two, of a constant; through a transpose, too: as ONNX Runtime.

    The cosines are of large angles, so that a rounding of the angle decides.
    """
    rng, nodes = np.random.default_rng(0), []

    def add_rounding(x: str, *moves: str) -> str:
        options = {"to": kind} if cast == "Cast" else {}
        nodes.append(helper.make_node(cast, [x] if options else [x, "like"], [f"{x}_narrow"], **options))
        nodes.extend(helper.make_node(op, [f"{x}_narrow"], [f"{x}_moved"]) for op in moves)
        last = f"{x}_moved" if moves else f"{x}_narrow"
        nodes.append(helper.make_node("Cast", [last], [f"{x}_rounded"], to=TensorProto.FLOAT))
        return f"{x}_rounded"

    arrays = {"v": (32, 32), "w": (32, 32), "c": (32,)}
    arrays = {name: rng.uniform(-0.3, 0.3, dims).astype(np.float32) for name, dims in arrays.items()}
    arrays["large"] = np.float32(3e3)
    nodes.append(helper.make_node("MatMul", [add_rounding("x"), "v"], ["p"], "first"))
    nodes.append(helper.make_node("MatMul", [add_rounding("p"), "w"], ["q"], "second"))
    nodes.append(helper.make_node("Mul", [add_rounding("q", "Transpose"), add_rounding("c")], ["y"], "scale"))
    nodes.append(helper.make_node("Mul", ["x", "large"], ["angle"], "angles"))
    nodes.append(helper.make_node("Cos", [add_rounding("angle")], ["z"], "cosines"))
    weights = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    weights += [helper.make_tensor("like", kind, [1], np.ones(1))] * (cast == "CastLike")
    model = onnx_model(nodes, {"x": (32, 32)}, {"y": (32, 32), "z": (32, 32)}, weights)
    inputs = {"x": rng.uniform(-1, 1, (32, 32)).astype(np.float32)}
    expected_outputs = onnxruntime.InferenceSession(model.SerializeToString()).run(None, inputs)
    compiled = pimflow.compile(model, system=hardware.system(dtype=dtype), conventions="none")
    built = compiled.builds[-1]
    # A sum that is another by its order may be rounded to the neighbour.
    bounds = (2.0 ** (-6 if kind == TensorProto.BFLOAT16 else -9), OUTPUT_BOUND["fp16"])
    for result, expected, bound in zip(infer(built.module, inputs, built.device), expected_outputs, bounds):
        assert relative_error(result, expected.astype(np.float64)) <= bound
    assert compiled.verification.is_verified


# ---- what is no number ----


NOT_FINITE = np.float32([[np.nan, np.inf, -np.inf, 0, 1, -1, 3, -7]])
OF_NAN = {
    **dict.fromkeys(("Relu", "HardSigmoid", "HardSwish", "Sign", "Elu", "Selu", "Celu", "Softsign"), ()),
    **dict.fromkeys(("ThresholdedRelu", "LeakyRelu", "Abs", "Floor", "Sigmoid", "Tanh"), ()),
    "Clip": ("zero", "six"),
    "Max": ("halves",),
    "Min": ("halves",),
    "PRelu": ("halves",),
}


@pytest.mark.long
def test_what_is_not_a_number_stays_so():
    """One network of operators that have NaN and infinity as input, as ONNX Runtime has them."""
    nodes = [helper.make_node(kind, ["x", *more], [kind], name=kind) for kind, more in OF_NAN.items()]
    shape = NOT_FINITE.shape
    constants = {"zero": np.float32(0), "six": np.float32(6), "halves": np.full(shape, 0.5, np.float32)}
    model = onnx_model(nodes, {"x": shape}, dict.fromkeys(OF_NAN, shape), constants, name="nan", opset=20)
    network = frontend.load(model)
    _, search_result = pimflow.search_network(network, hardware.system(dtype="fp32"), None)
    built = build.build(network, search_result, targets.target_by_name("llvm+pim"))
    results = infer(built.module, {"x": NOT_FINITE}, built.device)
    for kind, expected, result in zip(OF_NAN, network.reference({"x": NOT_FINITE}), results):
        np.testing.assert_allclose(result, expected, rtol=1e-4, err_msg=kind)
