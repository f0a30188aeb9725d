"""Is a network run on the inputs that one gives: files, samples, distributions, constants?"""

import json

import numpy as np
import onnx
import pytest
from command_line import error_line, run
from onnx import helper
from onnx_models import onnx_model

import pimflow
from pimflow import frontend, zoo
from pimflow.commands.main import main
from pimflow.commands.shared.report_text import summary
from pimflow.errors import ModelError, UsageError, VerificationError
from pimflow.zoo import Draw

WEIGHTS = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """y = gain * (x @ w), with the number of rows of x open, and `gain` an input of one number."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["product"], "product"),
        helper.make_node("Mul", ["product", "gain"], ["y"], "scale"),
    ]
    model = onnx_model(nodes, {"x": ("rows", 16), "gain": ()}, {"y": ("rows", 8)}, {"w": WEIGHTS})
    path = tmp_path_factory.mktemp("inputs") / "gain.onnx"
    onnx.save(model, path)
    return path


@pytest.fixture(scope="module")
def samples(file):
    """Three samples of x, of two rows each, in a file."""
    x = np.random.default_rng(1).standard_normal((3, 2, 16)).astype(np.float32)
    np.savez(file.with_name("samples.npz"), x=x)
    return x


@pytest.fixture(scope="module")
def directory(file, samples):
    """The network with gain 3, compiled and verified on all samples; its open shape follows from the file."""
    out = file.with_name("out")
    values = {"gain": 3}
    pimflow.compile(file, out, inputs=file.with_name("samples.npz"), values=values, conventions="none")
    return out


def test_every_sample_of_a_file_is_run(directory, samples):
    (y,) = pimflow.run(directory, directory.with_name("samples.npz"))
    assert y.shape == (3, 2, 8) and np.allclose(y, 3 * samples @ WEIGHTS, atol=0.05)
    (same,) = pimflow.infer(directory, input_values={"": directory.with_name("samples.npz")}).outputs
    assert (same == y).all()
    (first,) = pimflow.run(directory, samples[0])
    assert (first == y[0]).all()
    assert json.loads((directory / "report.json").read_text())["samples"] == 3


@pytest.mark.parametrize(
    "target, subject", [("llvm+pim", "outputs"), ("c", "outputs of the C code")], ids=["llvm", "c"]
)
def test_every_sample_is_verified(file, monkeypatch, target, subject):
    """A build that is wrong for the second sample alone is refused."""
    from pimflow.frontend.reference import Reference

    right, seen = Reference.outputs, []

    def outputs(self, values):
        """The reference, wrong for the second sample."""
        seen.append(len(values))
        results = right(self, values)
        results[1][0][:] += 10
        return results

    monkeypatch.setattr(Reference, "outputs", outputs)
    x = np.ones((2, 2, 16), np.float32)
    with pytest.raises(VerificationError, match=f"{subject} differ from the reference"):
        pimflow.compile(file, inputs={"x": x}, values={"gain": 1}, target=target, conventions="none")
    assert seen == [2]


def test_inputs_are_drawn_as_asked(capsys, directory, tmp_path):
    out = tmp_path / "y.npy"
    assert run(capsys, "run", directory, "--input", "x=int(2,2)", "-o", out, "--quiet")[0] == 0
    assert np.allclose(np.load(out), np.broadcast_to(6 * WEIGHTS.sum(0), (2, 8)), atol=0.05)


def test_a_directory_keeps_what_its_inputs_were_drawn_from(file, tmp_path):
    keywords = {"shapes": {"x": (1, 16)}, "conventions": "none"}
    pimflow.compile(file, tmp_path / "out", input_values={"gain": "int(5,5)"}, **keywords)
    interface = json.loads((tmp_path / "out" / "interface.json").read_text())
    assert interface["inputs"]["gain"]["draw"] == "int(5,5)"
    inputs = zoo.example_arrays({"x": ((1, 16), "float32")})
    (y,) = pimflow.run(tmp_path / "out")
    assert np.allclose(y, 5 * inputs["x"] @ WEIGHTS, atol=0.1)


def test_shapes_of_arrays_fix_what_is_open(file, samples):
    one, three = (pimflow.plan_memory(file, inputs={"x": x, "gain": 1.0}) for x in (samples[0], samples))
    assert one.plan.pool_bytes == three.plan.pool_bytes
    larger = pimflow.plan_memory(file, inputs={"x": np.zeros((64, 16), np.float32), "gain": 1.0})
    assert larger.plan.pool_bytes > one.plan.pool_bytes


def test_a_constant_is_no_input(file):
    bound = frontend.with_values(file, {"gain": np.array(3)})
    network = frontend.load(bound, {"x": (1, 16)})
    assert list(network.inputs) == ["x"] and network.name == "gain"
    x = np.ones((1, 16), np.float32)
    assert np.allclose(network.reference({"x": x})[0], 3 * x @ WEIGHTS, atol=1e-4)


@pytest.mark.parametrize("words, code, says", [
    (["--shape", "x=1,16", "--shape", "x=2,16"], 2, "--shape x=…: 'x' is given twice"),
    (["--value", "gain=1", "--value", "gain=2"], 2, "--value gain=…: 'gain' is given twice"),
    (["--value", "gain=loud"], 2, "'loud' is no number"),
    (["--value", "gain=1,2"], 2, "value of input 'gain' has shape [2]"),
    (["--value", "gian=1"], 2, "did you mean gain"),
    (["--value", "gain=1", "--value", "x=0"], 2, "a network needs an input"),
    (["--shape", "x=1,16", "--input", "x=uniform(0)"], 2, "is no distribution"),
    (["--shape", "x=1,16", "--input", "x=uniform(1,0)"], 2, "the smaller first"),
    (["--shape", "x=1,16", "--input", "y=uniform(0,1)"], 2, "unknown input 'y'"),
    (["--shape", "x=1,16", "--inputs", "none.npz"], 3, "cannot be read"),
    (["--inputs", "samples.npz", "--value", "gain=1", "--input", "x=samples.npz"], 3, "several arrays"),
    (["--inputs", "samples.npz"], 3, "input 'gain' of shape () is missing"),
])  # fmt: skip
def test_what_is_refused(capsys, file, samples, monkeypatch, words, code, says):
    monkeypatch.chdir(file.parent)
    assert says in error_line(capsys, code, "compile", file, *words, "--quiet")


@pytest.mark.parametrize("text", ["normal(0,3000)", "uniform(-1,0.5)", "int(0,30000)"])
def test_distributions(text):
    draw = Draw.parse(text)
    assert str(draw) == text
    values = draw.array("x", (4000,), np.float32)
    assert (values == draw.array("x", (4000,), np.float32)).all()
    if draw.kind == "normal":
        assert abs(values.mean()) < 150 and abs(values.std() - 3000) < 150
    else:
        assert draw.first <= values.min() and values.max() <= draw.second
        assert values.max() - values.min() > 0.95 * (draw.second - draw.first)
    if draw.kind == "int":
        assert (values == np.floor(values)).all()
        with pytest.raises(UsageError, match="does not hold"):
            draw.array("x", (4,), np.int8)


def spectrum():
    """log(max(x^2 @ w, c)): of x about 1 as well as of audio, whose squares leave fp16."""
    nodes = [
        helper.make_node("Mul", ["x", "x"], ["power"], "power"),
        helper.make_node("MatMul", ["power", "w"], ["energy"], "mel.bank"),
        helper.make_node("Max", ["energy", "floor"], ["above"], "above"),
        helper.make_node("Log", ["above"], ["y"], "log"),
    ]
    mel = np.abs(np.random.default_rng(2).standard_normal((128, 64), np.float32))
    weights = {"w": mel, "floor": np.float32(1e-6)}
    return onnx_model(nodes, {"x": [8, 128]}, {"y": [8, 64]}, weights)


@pytest.mark.long
def test_values_beyond_fp16_are_an_error_that_names_the_layer(tmp_path):
    system = pimflow.system(accounting="paper")
    keywords = {"conventions": "none", "system": system, "modes": "gpu,pim"}
    compiled = pimflow.compile(spectrum(), tmp_path / "out", **keywords)
    assert compiled.programs
    pimflow.run(tmp_path / "out")
    loud = np.full((8, 128), 3000, np.float32)
    for call in (
        lambda: pimflow.run(tmp_path / "out", loud),
        lambda: pimflow.compile(spectrum(), input_values={"x": "normal(0,3000)"}, **keywords),
    ):
        with pytest.raises(VerificationError, match=r"layer 'mel\.bank' on PIM .* fp16.*--dtype fp32"):
            call()


def test_inputs_are_positive_where_usual_ones_give_nan(tmp_path):
    """The root of a product: no operator says what its operands may be."""
    product = helper.make_node("MatMul", ["x", "w"], ["p"], "product")
    nodes = [product, helper.make_node("Sqrt", ["p"], ["y"], "root")]
    model = onnx_model(nodes, {"x": [2, 16]}, {"y": [2, 8]}, {"w": np.abs(WEIGHTS)})
    pimflow.compile(model, tmp_path / "out", conventions="none")
    interface = json.loads((tmp_path / "out" / "interface.json").read_text())
    assert interface["inputs"]["x"]["draw"] == "uniform(0.1,0.9)"
    assert np.isfinite(pimflow.run(tmp_path / "out")[0]).all()


def test_a_power_of_three_says_nothing(capfd, tmp_path):
    """TVM's C++ warns of it on standard error."""
    product = helper.make_node("MatMul", ["x", "w"], ["p"], "product")
    nodes = [product, helper.make_node("Pow", ["p", "three"], ["y"], "cube")]
    weights = {"w": WEIGHTS, "three": np.float32(3)}
    onnx.save(onnx_model(nodes, {"x": [2, 16]}, {"y": [2, 8]}, weights), tmp_path / "cube.onnx")
    assert main(["compile", str(tmp_path / "cube.onnx"), "--quiet", "--conventions", "none"]) == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_filters_that_are_not_finite_are_not_decomposed(value):
    filters = np.full((16, 8, 3, 3), 0.1, np.float32)
    filters[0, 0, 0, 0] = value
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], "c", pads=[1] * 4)]
    model = onnx_model(nodes, {"x": [1, 8, 9, 9]}, {"y": [1, 16, 9, 9]}, {"w": filters})
    with pytest.raises(ModelError, match="layer 'c': its filters have NaN or infinity"):
        pimflow.plan_memory(model, decompose="tucker:0.3")


def silent_network(threshold: float) -> onnx.ModelProto:
    """A convolution whose Relu is zero but for inputs beyond a threshold."""
    conv = helper.make_node("Conv", ["x", "w", "b"], ["c"], "conv")
    nodes = [conv, helper.make_node("Relu", ["c"], ["y"], "gate")]
    filters = np.full((4, 1, 2, 2), 0.25, np.float32)
    weights = {"w": filters, "b": np.full(4, -threshold, np.float32)}
    return onnx_model(nodes, {"x": [1, 1, 8, 8]}, {"y": None}, weights, name="silent")


@pytest.mark.parametrize(
    ("threshold", "draw"), [(0.1, None), (90, "uniform(0,255)"), (900, "normal(0,3276)"), (60000, None)]
)
def test_a_range_is_tried_if_outputs_are_constant(threshold, draw):
    compiled = pimflow.compile(silent_network(threshold), conventions="none")
    found = compiled.report.extras.input_range
    lines = [line for line in summary(compiled.report, None).splitlines() if line.startswith("inputs")]
    assert (found is None and not lines) if draw is None else (f", {draw}: outputs are constant" in found)
    if draw:
        assert lines == [f"inputs    {found}"] and "--input x=" in found
        (y,) = compiled.builds[0].infer({"x": np.full((1, 1, 8, 8), 1000, np.float32)})
        assert np.allclose(y, 1000 - threshold, rtol=2e-3)


def loud_network(size: float) -> onnx.ModelProto:
    """A product with weights of one size, of either sign."""
    signs = np.sign(np.random.default_rng(0).standard_normal((256, 512)))
    node = helper.make_node("MatMul", ["x", "w"], ["y"], "fc")
    weights = {"w": (size * signs).astype(np.float32)}
    return onnx_model([node], {"x": [1, 256]}, {"y": None}, weights, name="loud")


def test_a_smaller_range_is_tried_if_values_leave_fp16():
    compiled = pimflow.compile(loud_network(1500), conventions="none")
    found = compiled.report.extras.input_range
    assert found.startswith("drawn as numbers from 0 to 1, uniform(0,1): values leave fp16 for usual ones")
    with pytest.raises(VerificationError, match=r"'fc' on PIM has values beyond fp16.*or give inputs"):
        pimflow.compile(loud_network(1e9), conventions="none")


def test_a_given_range_is_kept():
    compiled = pimflow.compile(silent_network(90), conventions="none", input_values={"x": "uniform(0,1)"})
    assert compiled.report.extras.input_range is None
