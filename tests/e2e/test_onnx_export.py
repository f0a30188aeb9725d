"""Is what ``pimflow decompose`` writes the network that pimflow compiles, and does it come back as such?"""

import numpy as np
import onnx
import pytest
from command_line import error_line, run_json
from onnx import helper, numpy_helper
from onnx_models import onnx_model
from skip_networks import hourglass

import pimflow
from pimflow import frontend
from pimflow.commands.main import main
from pimflow.commands.memory import decompose as onnx_export
from pimflow.commands.shared import prepare
from pimflow.decomposition.network import decompose
from pimflow.decomposition.request import DecompositionRequest
from pimflow.errors import UnsupportedOpError, VerificationError
from pimflow.frontend import onnx_graph
from pimflow.frontend.onnx_roles import ROLES_KEY
from pimflow.hardware import system
from pimflow.relay_passes.flat import LAYER_ROLES


class OnnxModelBuilder:
    """An ONNX network of one input, [N, 8, 12, 12], node by node."""

    def __init__(self) -> None:
        self.draw, self.nodes, self.weights = np.random.default_rng(0), [], []

    def add(self, kind: str, x: str, *shapes: tuple[int, ...], scale: float = 0.3, **attrs) -> str:
        name = f"{kind.lower()}{len(self.nodes)}"
        stored = [
            numpy_helper.from_array(
                (scale * self.draw.standard_normal(shape)).astype(np.float32), f"{name}.w{i}"
            )
            for i, shape in enumerate(shapes)
        ]
        self.weights += stored
        inputs = [x, *(tensor.name for tensor in stored)]
        self.nodes.append(helper.make_node(kind, inputs, [f"{name}.y"], name=name, **attrs))
        return f"{name}.y"

    def batch_norm(self, x: str, channels: int) -> str:
        """A batch norm; means and variances as they come."""
        y = self.add("BatchNormalization", x, *[(channels,)] * 3)
        variances = np.abs(self.draw.standard_normal(channels)).astype(np.float32) + 0.1
        self.weights.append(numpy_helper.from_array(variances, f"{self.nodes[-1].name}.variances"))
        self.nodes[-1].input.append(self.weights[-1].name)
        return y

    def model(self, y: str, batch: int | str = 1) -> onnx.ModelProto:
        return onnx_model(self.nodes, {"x": (batch, 8, 12, 12)}, {y: None}, self.weights, name="drawn")


def all_kinds_model(batch: int | str = 1, odd: bool = False) -> onnx.ModelProto:
    """Strides, dilations, groups, uneven padding, batch norms, biases pushed on, transposed, products.

    If `odd`, with padding that the file leaves to find out, and scaled products: importing those takes
    operators of their own, in front of the first link.
    """
    net = OnnxModelBuilder()
    x = net.batch_norm(net.add("Conv", "x", (12, 8, 3, 3), strides=[2, 1], pads=[1, 0, 1, 2]), 12)
    x = net.add("Conv", x, (16, 12, 1, 1), (16,))  # linear: the bias of the batch norm is pushed through
    x = net.add("Relu", x)
    x = net.add("Conv", x, (16, 8, 3, 3), (16,), group=2, dilations=[2, 1], pads=[2, 1, 2, 1])
    x = net.add("Relu", x)
    x = net.add("ConvTranspose", x, (16, 10, 3, 4), (10,), strides=[2, 2], pads=[1, 0, 0, 1])
    x = net.add("Relu", x)
    padding = {"auto_pad": "SAME_UPPER"} if odd else {"pads": [1, 1, 1, 1]}
    x = net.add("GlobalAveragePool", net.add("Conv", x, (12, 10, 3, 3), **padding))
    scales = {"alpha": 0.5, "beta": 2.0} if odd else {}
    x = net.add("Gemm", net.add("Flatten", x), (20, 12), (20,), transB=1, **scales)
    x = net.add("MatMul", x, (20, 16))  # the bias of the product is pushed through
    x = net.add("Relu", x)
    return net.model(net.add("Gemm", x, (16, 10), (1, 10)), batch)


def small() -> onnx.ModelProto:
    """A convolution and a product."""
    net = OnnxModelBuilder()
    x = net.add("Relu", net.add("Conv", "x", (12, 8, 3, 3), (12,), pads=[1, 1, 1, 1]))
    x = net.add("Flatten", net.add("GlobalAveragePool", x))
    return net.model(net.add("Gemm", x, (12, 10), (10,)))


def copied_constants() -> onnx.ModelProto:
    """A bias of a batch norm that is pushed through a layer whose constants are behind Identity."""
    net = OnnxModelBuilder()
    x = net.batch_norm(net.add("Conv", "x", (12, 8, 3, 3)), 12)
    x = net.add("Conv", x, (16, 12, 1, 1), (16,))
    for place in (1, 2):
        stored = net.nodes[-1].input[place]
        net.nodes[-1].input[place] = f"{stored}.copy"
        net.nodes.insert(0, helper.make_node("Identity", [stored], [f"{stored}.copy"], name=f"copy{place}"))
    return net.model(net.add("Relu", x))


MODELS = {
    "small": small,
    "copied constants": copied_constants,
    "hourglass": hourglass,
    "all kinds": all_kinds_model,
    "odd": lambda: all_kinds_model(odd=True),
}


@pytest.mark.parametrize(
    ("name", "request_text"),
    [
        ("small", "tucker:0.5,fc=decompose"),
        ("copied constants", "tucker:0.5"),
        pytest.param("hourglass", "tt:0.5", marks=pytest.mark.long),
        pytest.param("all kinds", "tucker:0.5,fc=decompose", marks=pytest.mark.long),
        pytest.param("all kinds", "cp:0.4,first=keep", marks=pytest.mark.long),
        pytest.param("odd", "tucker:0.5,fc=decompose", marks=pytest.mark.long),
    ],
)
def test_the_model_is_the_decomposed_network_and_comes_back_as_such(tmp_path, name, request_text):
    """Values by ONNX Runtime against TVM's pipeline, on inputs that the export was not checked on."""
    model, path = MODELS[name](), tmp_path / "out.onnx"
    summary = pimflow.export_decomposed(model, request_text, path)
    network = frontend.load(model)
    change = decompose(network, DecompositionRequest.parse(request_text))
    draw = np.random.default_rng(1)
    inputs = {n: draw.standard_normal(dims).astype(dtype) for n, (dims, dtype) in network.inputs.items()}
    back = frontend.load(path)
    for y, x in zip(back.reference(inputs), change.network.reference(inputs), strict=True):
        np.testing.assert_allclose(y, x, rtol=0, atol=2e-6 * np.abs(x).max())
    assert summary.export_error < 1e-5 < summary.max_relative_difference
    regions, reread_regions = prepare.regions(change.network), prepare.regions(back)
    if name != "odd" and request_text[:2] != "cp":  # whose two transposed cores crop one by one
        assert (reread_regions.regions, reread_regions.outputs) == (regions.regions, regions.outputs)
    assert LAYER_ROLES.read(back.module) == LAYER_ROLES.read(change.network.module)
    onnx.checker.check_model(onnx.load(path), full_check=True)
    graph = onnx.load(path).graph
    named = {tensor.name for tensor in graph.initializer}
    assert named <= {operand for node in graph.node for operand in node.input}, "a weight that nothing reads"


def test_biases_are_pushed_through_layers_of_the_drawn_network():
    """Else nothing of what makes up for them is tested."""
    pushed: dict[str, np.ndarray] = {}
    onnx_graph.from_onnx(all_kinds_model(), pushed)
    assert {name.rstrip("0123456789") for name in pushed} == {"conv", "matmul"}


@pytest.mark.long
def test_what_comes_back_is_optimised_without_decomposing_again(tmp_path):
    path = tmp_path / "out.onnx"
    pimflow.export_decomposed(hourglass(), "tucker:0.3", path)
    options = {"optimize_skips": "pool", "fuse_activations": True, "policy": "best"}
    reread = pimflow.plan_memory(path, system(), **options)
    direct = pimflow.plan_memory(hourglass(), system(), decompose="tucker:0.3", **options)
    assert reread.plan.pool_bytes == direct.plan.pool_bytes and reread.fused == direct.fused
    assert reread.skips.changed == direct.skips.changed


@pytest.mark.long
def test_open_dimensions_stay_open(tmp_path):
    path = tmp_path / "out.onnx"
    pimflow.export_decomposed(all_kinds_model("N"), "tucker:0.5", path, shapes={"x": (1, 8, 12, 12)})
    graph = onnx.load(path).graph
    assert graph.input[0].type.tensor_type.shape.dim[0].dim_param == "N"
    assert not any(dim.HasField("dim_value") for dim in graph.output[0].type.tensor_type.shape.dim)
    assert frontend.load(path, {"x": (3, 8, 12, 12)}).inputs["x"] == ((3, 8, 12, 12), "float32")


@pytest.mark.long
def test_a_model_that_is_not_the_network_is_not_written(tmp_path, monkeypatch):
    """A bias lost on the way, as one that the last link does not make up for."""
    true = onnx_export.with_chains
    monkeypatch.setattr(onnx_export, "with_chains", lambda *given: true(*given[:-1], {}))
    path = tmp_path / "out.onnx"
    with pytest.raises(VerificationError, match="differ from the decomposed network's"):
        pimflow.export_decomposed(all_kinds_model(), "tucker:0.3,fc=decompose", path)
    assert not path.exists()


def test_filters_that_another_node_changes_are_refused(tmp_path):
    """One product for what are two nodes of the file."""
    net = OnnxModelBuilder()
    y = net.add("Conv", "x", (12, 8, 3, 3))
    model = net.model(y)
    model.graph.initializer[0].name = "stored"
    model.graph.node.insert(0, helper.make_node("Neg", ["stored"], ["conv0.w0"], name="neg"))
    with pytest.raises(UnsupportedOpError, match="layer 'conv0'"):
        pimflow.export_decomposed(model, "tucker:0.5", tmp_path / "out.onnx")


@pytest.mark.long
def test_the_command_says_what_it_wrote(capsys, tmp_path):
    path, data = tmp_path / "small.onnx", tmp_path / "data.npz"
    (name, (dims, dtype)), *_ = frontend.load("toy").inputs.items()
    np.savez(data, **{name: np.random.default_rng(0).standard_normal((4, *dims[1:])).astype(dtype)})
    options = ["--decompose", "tucker:0.4", "-o", str(path), "--calibration", str(data)]
    report = run_json(capsys, "decompose toy", *options)
    assert report["bytes"] == path.stat().st_size and report["calibration"]["samples"] == 4
    assert report["weight_bytes"] < report["weight_bytes_original"]
    args = ["--decompose", "tucker:0.5,where=pays", "-o", str(path), "--cache", "none", "--modes", "gpu"]
    assert "give where once" in error_line(
        capsys, 2, "decompose vgg-11", *args[:1], "tucker:0.5,where=here", *args[2:]
    )
    assert "leaves all layers of 'toy' as they are" in error_line(capsys, 2, "decompose toy --quiet", *args)


@pytest.mark.long
def test_damaged_roles_are_refused(tmp_path):
    path = tmp_path / "out.onnx"
    pimflow.export_decomposed("toy", "tucker:0.4", path)
    model = onnx.load(path)
    for text in ("[1]", "{", '{"down.conv.core": "kernel"}'):
        helper.set_model_props(model, {ROLES_KEY: text})
        onnx.save(model, path)
        with pytest.raises(frontend.onnx_graph.ModelError, match="metadata"):
            frontend.load(path)


def test_explain_refuses_what_it_does_not_do(capsys):
    options = ["--decompose", "tucker:0.5", "--calibration", "data.npz", "--quiet"]
    assert main(["compile", "toy", "--explain", "down.conv.core", *options]) == 2
    out, err = capsys.readouterr()
    assert not out and "--calibration: --explain prints candidates" in err and err.count("\n") == 1
