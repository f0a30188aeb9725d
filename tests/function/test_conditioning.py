"""Are outputs bounded by what rounding does to the network, and wrong builds refused all the same?"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx
import pytest
import verify_networks as script
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import flat
from length import examples, long_but
from onnx import TensorProto, helper, numpy_helper
from onnx_models import onnx_model
from rounding_networks import ON_PIM, SYSTEMS, build_on_stand_in, model, plan_on_pim, with_weight

import pimflow
from pimflow import frontend, zoo
from pimflow.commands.main import main
from pimflow.compiler.artifact import PlacedRegions
from pimflow.compiler.build import Build
from pimflow.compiler.conditioning import RUNS, OutputReference, output_checks, reference_deviations
from pimflow.compiler.verification import Verification, require_finite, verify
from pimflow.core.commands import Comp
from pimflow.core.output_error import (
    DEVIATION_MULTIPLE,
    LARGEST_BOUND,
    OUTPUT_BOUND,
    OutputCheck,
    error_text,
    relative_error,
)
from pimflow.core.program import PimProgram
from pimflow.decomposition.network import decompose
from pimflow.decomposition.request import DecompositionRequest
from pimflow.errors import VerificationError
from pimflow.frontend import onnx_runtime
from pimflow.frontend.perturbed_onnx import FP16_ROUNDOFF, nodes_of_layers, perturb
from pimflow.frontend.reference import Fp16Storage, Perturbed
from pimflow.pim_backend.runtime import codegen

KINDS = ("amplifies", "damps")


class NetworkCase:
    """A network, and what verification says of builds that claim to be of it."""

    def __init__(self, kind: str, dtype: str = "fp16") -> None:
        self.model, self.dtype = model(kind), dtype
        self.network = frontend.load(self.model)
        self.inputs = self.network.example_inputs()
        self.expected = self.network.reference(self.inputs)

    def verify_build(self, built_network: Build) -> Verification:
        return verify(self.network, built_network, SYSTEMS[self.dtype], self.inputs, self.expected)

    def verify_model(self, wrong: onnx.ModelProto) -> Verification:
        return self.verify_build(build_on_stand_in(frontend.load(wrong), self.dtype))


@pytest.fixture(scope="module")
def cases() -> dict[str, NetworkCase]:
    return {kind: NetworkCase(kind) for kind in KINDS}


@pytest.mark.long
@pytest.mark.parametrize(
    "kind, dtype", [("amplifies", "fp16"), ("amplifies more", "fp32"), ("damps", "fp16"), ("damps", "fp32")]
)
def test_a_right_build_is_verified(kind, dtype):
    """Beyond the fixed bound too, if that is what rounding does; and then both figures are there."""
    case = NetworkCase(kind, dtype)
    result = case.verify_build(build_on_stand_in(case.network, dtype))
    result.require()
    assert result.is_verified
    (output,) = result.outputs
    if kind == "damps":
        assert output == OutputCheck(relative_error=result.max_relative_error, bound=OUTPUT_BOUND[dtype])
        return
    assert result.max_relative_error > OUTPUT_BOUND[dtype]
    assert result.bound == DEVIATION_MULTIPLE * output.reference_deviation < LARGEST_BOUND
    text = error_text(output)
    assert f"{output.relative_error:.1e}" in text and f"by {output.reference_deviation:.1e}" in text


def negate(filters: np.ndarray) -> None:
    filters[3] *= -1


def swap(filters: np.ndarray) -> None:
    filters[[3, 5]] = filters[[5, 3]]


@pytest.mark.long
def test_what_is_stored_decides():
    """A network whose fp16 cannot be told from noise is refused, and the line says so."""
    case = NetworkCase("amplifies more")
    with pytest.raises(VerificationError, match=r"bound is 1e-01; .* amplifies rounding .* --dtype fp32"):
        case.verify_build(build_on_stand_in(case.network)).require()


@pytest.mark.long
@pytest.mark.parametrize("kind", long_but(["amplifies"], KINDS))
@pytest.mark.parametrize("layer", long_but(["last"], ["first", "last"]))
@pytest.mark.parametrize("change", long_but([swap], [negate, swap]))
def test_wrong_weights_outside_pim_are_refused(cases, kind, layer, change):
    verification = cases[kind].verify_model(with_weight(cases[kind].model, f"{layer}.w", change))
    assert all(region.matches for region in verification.regions)
    with pytest.raises(VerificationError, match=r"roundings alone move the reference by .* outside PIM"):
        verification.require()


@pytest.mark.long
@pytest.mark.parametrize("kind", long_but(["amplifies"], KINDS))
@pytest.mark.parametrize("layer", long_but(["last"], ["first", "last"]))
def test_a_skipped_border_outside_pim_is_refused(cases, kind, layer):
    wrong = onnx.ModelProto()
    wrong.CopyFrom(cases[kind].model)
    node = next(node for node in wrong.graph.node if node.name == layer)
    pads = next(attribute for attribute in node.attribute if attribute.name == "pads")
    pads.ints[:] = [0, 0, 2, 2]
    verification = cases[kind].verify_model(wrong)
    assert all(region.matches for region in verification.regions) and not verification.is_verified


@pytest.mark.long
@pytest.mark.parametrize("kind", long_but(["amplifies"], KINDS))
@pytest.mark.parametrize("change", long_but([swap], [negate, swap]))
def test_wrong_weights_on_pim_are_refused(cases, kind, change):
    verification = cases[kind].verify_model(with_weight(cases[kind].model, "left.w", change))
    assert [region.region for region in verification.regions if not region.matches] == ["left"]
    with pytest.raises(VerificationError, match="PIM region 'left' differs"):
        verification.require()


@pytest.mark.long
@pytest.mark.parametrize("kind", long_but(["amplifies"], KINDS))
def test_a_dropped_comp_is_refused(cases, kind, monkeypatch):
    add_region = codegen.add_region

    def dropping(module, symbol, program: PimProgram, image, bias, taken) -> None:
        stream = flat(program.channels[0])
        index = next(i for i, node in enumerate(stream) if isinstance(node, Comp))
        run = stream[index]
        stream[index : index + 1] = [replace(run, count=run.count - 1)] if run.count > 1 else []
        channels = (tuple(stream), *program.channels[1:])
        add_region(module, symbol, replace(program, channels=channels), image, bias, taken)

    monkeypatch.setattr(codegen, "add_region", dropping)
    verification = cases[kind].verify_build(build_on_stand_in(cases[kind].network))
    assert [region.region for region in verification.regions if not region.matches] == list(ON_PIM)
    assert not verification.is_verified


# ---- what a user sees ----


def compile_network(capsys, folder, kind: str, *options: object) -> tuple[int, str, str]:
    """``pimflow compile`` of a network of this kind, with `ON_PIM` on PIM."""
    onnx.save(model(kind), folder / "net.onnx")
    plan = plan_on_pim(frontend.load(folder / "net.onnx")).plan
    (folder / "plan.json").write_text(plan.to_json())
    argv = ["compile", folder / "net.onnx", "--plan", folder / "plan.json", "-o", folder / "out", *options]
    code = main([str(word) for word in (*argv, "--conventions", "none", "--quiet")])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.long
def test_the_report_has_both_figures(capsys, tmp_path):
    code, out, _ = compile_network(capsys, tmp_path, "amplifies")
    report = json.loads((tmp_path / "out/report.json").read_text())
    error, deviation = report["max_relative_error"], report["reference_deviation"]
    assert code == 0 and OUTPUT_BOUND["fp16"] < error < report["tolerance"] == DEVIATION_MULTIPLE * deviation
    bounds = {"bound": report["tolerance"], "reference_deviation": deviation}
    assert report["outputs"] == [{"relative_error": error, **bounds, "undecided": 0}]
    (line,) = [line for line in out.splitlines() if line.startswith("check ")]
    assert f"max rel {error:.1e}" in line and f"moves the reference by {deviation:.1e}" in line
    assert PlacedRegions.load(tmp_path / "out").bounds == (report["tolerance"],)


@pytest.mark.long
def test_where_the_fixed_bound_holds_there_is_no_second_figure(capsys, tmp_path):
    code, out, _ = compile_network(capsys, tmp_path, "damps")
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert code == 0 and report["reference_deviation"] is None and "moves the reference" not in out
    assert report["tolerance"] == OUTPUT_BOUND["fp16"] and PlacedRegions.load(tmp_path / "out").bounds == ()


@pytest.mark.long
def test_a_refusal_is_one_line_with_both_figures(capsys, tmp_path):
    code, out, err = compile_network(capsys, tmp_path, "amplifies more")
    assert (code, out) == (5, "") and err.count("\n") == 1 and not (tmp_path / "out").exists()
    assert "differ from the reference by" in err and "roundings alone move the reference by" in err


@pytest.mark.long
def test_what_was_allowed_is_allowed_between_targets(tmp_path, monkeypatch):
    """``run --compare`` refuses no outputs that compilation accepted."""
    pimflow.compile(model("damps"), tmp_path / "out", target="c", tolerance=0.05, conventions="none")
    assert PlacedRegions.load(tmp_path / "out").bounds == (0.05,)
    monkeypatch.setattr("pimflow.commands.run.run.OUTPUT_BOUND", {"fp16": -1.0})
    assert pimflow.infer(tmp_path / "out", compare=True).max_relative_error["llvm+pim"] < 0.05


@pytest.mark.long
def test_the_table_of_networks(tmp_path):
    """Of an installed package's file, what installed it; of a file that is none, the line and the code."""
    installed, info = tmp_path / "some_package", tmp_path / "some_package-1.2.dist-info"
    installed.mkdir(), info.mkdir()
    onnx.save(model("damps"), installed / "net.onnx")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-package\nVersion: 1.2\n")
    (info / "RECORD").write_text("some_package/net.onnx,,\n")
    words = [str(installed / "net.onnx"), "x=1,16,12,12", str(tmp_path / "none.onnx")]
    (path, shapes), (missing, _) = script.networks(words)
    right, wrong = script.row(path, shapes, "fp16", "full"), script.row(missing, {}, "fp16", "full")
    assert right[:4] == ("some-package 1.2", "net", "x 1x16x12x12", "fp16") and right[-1] == "verified"
    assert len(right) == len(wrong) == len(script.HEADER) and wrong[-1].startswith("code 3: ")


# ---- when the reference runs again ----


def record_runs(network: frontend.Network, runs: list) -> frontend.Network:
    """`network`, noting what its reference is made to round, and each run of that."""

    def record_perturbed(stored: Fp16Storage):
        runs.append(stored)
        run = network.perturbed(stored)

        def record_run(values):
            runs.append(stored)
            return run(values)

        return record_run

    return replace(network, perturbed=record_perturbed)


def test_the_reference_runs_again_only_beyond_the_bound(cases):
    case, runs, stored = cases["amplifies"], [], Fp16Storage(layers=frozenset(ON_PIM))
    network = record_runs(case.network, runs)
    near = [y + np.float32(1e-3) * abs(y).max() for y in case.expected]
    far = [y + np.float32(1e-2) * abs(y).max() for y in case.expected]
    reference = OutputReference(expected=case.expected, perturbed=network.perturbed)
    fixed = replace(reference, tolerance=1e-3)
    arguments = (stored, "fp16", case.inputs)
    assert output_checks(reference, *arguments, near)[0].reference_deviation is None and not runs
    assert output_checks(fixed, *arguments, far)[0].bound == 1e-3 and not runs
    checks = output_checks(reference, *arguments, far)
    assert checks[0].reference_deviation > 0 and runs == [stored] * (2 + RUNS)
    assert output_checks(reference, *arguments, far) == checks, "other directions in another run"


@pytest.mark.parametrize("error, advised", [(0.05, True), (0.61, False), (float("inf"), False)])
def test_a_tolerance_is_advised_where_rounding_may_explain_it(error, advised):
    with pytest.raises(VerificationError) as raised:
        OutputCheck(relative_error=error, bound=1e-5).require_match("outputs")
    assert ("--tolerance" in str(raised.value)) == advised and "\n" not in str(raised.value)


def test_zeros_are_refused_whatever_the_network(cases):
    """However far roundings move the reference, an output of zeros is not right."""
    case = NetworkCase("amplifies more")
    stored = Fp16Storage(layers=frozenset(("first", "left", "right", "last")), kernels=True)
    wrong = [np.zeros_like(y) for y in case.expected]
    reference = OutputReference(expected=case.expected, perturbed=case.network.perturbed)
    (check,) = output_checks(reference, stored, "fp16", case.inputs, wrong)
    assert check.bound == LARGEST_BOUND and not check.matches


def moving_reference(runs: Sequence[np.ndarray]) -> Perturbed:
    """A reference whose runs give `runs`, one after another."""
    values = itertools.cycle(runs)
    return lambda stored: lambda inputs: [next(values)]


def test_places_of_maxima_that_roundings_decide():
    """Of a hundred places, two are of nearly equal values; a build may choose either, and no third."""
    expected = np.arange(100, dtype=np.int64)
    flipped = expected.copy()
    flipped[[7, 90]] = [60, 2]
    reference = OutputReference(expected=[expected], perturbed=moving_reference([expected, flipped]))
    (check,) = output_checks(reference, Fp16Storage(), "fp16", {}, [flipped])
    assert check.matches and check.undecided == 2 and "decides 2 elements" in error_text(check)
    wrong = flipped.copy()
    wrong[7] = 61
    (check,) = output_checks(reference, Fp16Storage(), "fp16", {}, [wrong])
    assert not check.matches


def test_many_elements_that_jump_verify_nothing():
    expected = np.arange(10, dtype=np.int64)
    reference = OutputReference(expected=[expected], perturbed=moving_reference([expected[::-1]]))
    (check,) = output_checks(reference, Fp16Storage(), "fp16", {}, [expected[::-1]])
    assert not check.matches and not check.undecided


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_special_values_are_right_where_the_reference_has_them(special):
    expected = np.array([1.0, special, 2.0], "float32")
    assert relative_error(expected.copy(), expected) == 0
    assert relative_error(np.array([1.0, 5.0, 2.0], "float32"), expected) == np.inf
    assert relative_error(expected, np.array([1.0, 5.0, 2.0], "float32")) == np.inf
    assert relative_error(np.array([special, special, 2.0], "float32"), expected) == np.inf
    assert relative_error(np.array([1.5, special, 2.0], "float32"), expected) == 0.25
    require_finite([expected])
    with pytest.raises(VerificationError, match="NaN or infinity everywhere"):
        require_finite([expected[1:2]])


def test_one_output_lends_another_no_bound():
    """Of two outputs, each has the bound of its own roundings."""
    two_outputs = model("amplifies")
    two_outputs.graph.output.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, None))
    network = frontend.load(two_outputs)
    inputs = network.example_inputs()
    y, a = network.reference(inputs)
    off = [y, a + np.float32(5e-3) * abs(a).max()]
    reference = OutputReference(expected=[y, a], perturbed=network.perturbed)
    checks = output_checks(reference, Fp16Storage(layers=frozenset(ON_PIM)), "fp16", inputs, off)
    assert [check.matches for check in checks] == [True, False]
    assert checks[0].bound > 5e-3 > checks[1].bound == OUTPUT_BOUND["fp16"]


# ---- the roundings themselves ----


def run_once(light: onnx.ModelProto, full_model: onnx.ModelProto, inputs) -> list[np.ndarray]:
    return onnx_runtime.open_session(full_model, light)(inputs)


@given(st.integers(0, 2**16), st.floats(-3, 3))
@settings(max_examples=examples(15))
def test_roundings_reach_what_is_stored(seed, scale):
    """A result is on fp16's grid, at most two roundings away; 1.7 times as far as the nearest value is."""
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((1, 64, 16, 16)).astype(np.float32) * np.float32(10**scale)
    eye = numpy_helper.from_array(np.eye(64, dtype=np.float32)[:, :, None, None], "w")
    node = helper.make_node("Conv", ["x", "w"], ["y"], "same")
    full_model = onnx_model([node], {"x": x.shape}, {"y": x.shape}, [eye], name="same")
    full_model = zoo.load_model(full_model)
    light = perturb(full_model, Fp16Storage(layers=frozenset({"same"})))
    weights = [node.input[1] for node in light.graph.node if node.op_type == "Conv"]
    assert weights != ["w"]
    for node in light.graph.node:  # only the operand and the result are rounded; a third error would add up
        if node.op_type == "Conv":
            node.input[:] = ["x", "w"]
    (result,) = run_once(light, full_model, {"x": x})
    np.testing.assert_array_equal(result, result.astype(np.float16))
    nearest = x.astype(np.float16).astype(np.float32)
    normal = abs(x) > np.finfo(np.float16).tiny
    error = abs(result - x)[normal]
    assert (error <= 2.01 * FP16_ROUNDOFF * abs(x[normal])).all() and error.any()
    ratio = np.sqrt(np.mean(error**2) / np.mean((nearest - x)[normal] ** 2))
    assert 1.5 < ratio < 1.9


def test_the_first_run_rounds_to_the_nearest():
    """Equal weights all move the same way in a build, which random directions never do."""
    weights = np.full((256, 8), 0.1, np.float32)
    node = helper.make_node("MatMul", ["x", "w"], ["y"], "same")
    model = onnx_model([node], {"x": (2, 256)}, {"y": (2, 8)}, {"w": weights}, name="same")
    x = np.random.default_rng(0).integers(-4, 5, (2, 256)).astype(np.float32)
    run = frontend.load(model).perturbed(Fp16Storage(layers=frozenset({"same"})))
    (first,), (second,) = run({"x": x}), run({"x": x})
    np.testing.assert_array_equal(first, (x @ weights.astype(np.float16)).astype(np.float16))
    assert (second != first).any()


@pytest.mark.long
@pytest.mark.parametrize("opset", [17, 23])
def test_shapes_and_masks_keep_their_values(opset):
    """A size that a float says, and the infinities of a mask, are what they were; in new opsets too."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"], "s"),
        helper.make_node("Cast", ["s"], ["f"], "f", to=TensorProto.FLOAT),
        helper.make_node("Mul", ["f", "one"], ["m"], "m"),
        helper.make_node("Floor", ["m"], ["n"], "n"),
        helper.make_node("Cast", ["n"], ["i"], "i", to=TensorProto.INT64),
        helper.make_node("Add", ["x", "mask"], ["a"], "a"),
        helper.make_node("Softmax", ["a"], ["p"], "p"),
        helper.make_node("Reshape", ["p", "i"], ["y"], "y"),
    ]
    mask = np.array([0, -np.inf, 0, np.finfo(np.float32).min], np.float32)
    tensors = [numpy_helper.from_array(mask, "mask"), numpy_helper.from_array(np.float32([1]), "one")]
    model = onnx_model(nodes, {"x": (3, 4)}, {"y": None}, tensors, name="masked")
    model.opset_import[0].version = opset
    model = zoo.load_model(model)
    x = {"x": np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)}
    (exact,) = frontend.load(model).reference(x)
    for stored in (Fp16Storage(), Fp16Storage(kernels=True)):
        (result,) = run_once(perturb(model, stored), model, x)
        assert (result[:, [1, 3]] == 0).all() and (result != exact).any()
        np.testing.assert_allclose(result, exact, rtol=1e-2 if stored.kernels else 1e-5)


@pytest.mark.torch
@pytest.mark.long
def test_a_torch_program_has_roundings_too(tmp_path):
    """As far off as the same network in ONNX is, within the factor of about two of more roundings.

    What kernels store is rounded behind each operator of a program, and in ONNX behind those that are fused.
    """
    torch = pytest.importorskip("torch")
    nn, onnx_model = torch.nn, model("amplifies")
    weights = {
        t.name: torch.from_numpy(numpy_helper.to_array(t).copy()) for t in onnx_model.graph.initializer
    }

    class RoundedNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv2d(16, 64, 3, padding=1)
            self.left, self.right = nn.Conv2d(64, 64, 1), nn.Conv2d(64, 64, 1)
            self.last = nn.Conv2d(64, 32, 3, padding=1, bias=False)

        def forward(self, x):
            b = self.first(x).relu()
            return self.last((self.left(b) - self.right(b)).relu()).relu()

    net = RoundedNet().eval()
    names = {"weight": "w", "bias": "b"}
    net.load_state_dict({k: weights[f"{k.split('.')[0]}.{names[k.split('.')[1]]}"] for k in net.state_dict()})
    torch.export.save(torch.export.export(net, (torch.zeros(1, 16, 12, 12),)), tmp_path / "net.pt2")
    network = frontend.load(tmp_path / "net.pt2")
    inputs = network.example_inputs()
    expected, onnx_network = network.reference(inputs), frontend.load(onnx_model)
    assert reference_deviations(network.perturbed(Fp16Storage()), inputs, expected)[0] < 1e-5
    for stored in (
        Fp16Storage(layers=frozenset(ON_PIM)),
        Fp16Storage(kernels=True),
        Fp16Storage(layers=frozenset({"?"})),
    ):
        (result,) = reference_deviations(network.perturbed(stored), inputs, expected)
        (deviation,) = reference_deviations(onnx_network.perturbed(stored), {"x": inputs["x"]}, expected)
        assert 0.5 * deviation < result < 3 * deviation
    result = verify(network, build_on_stand_in(network), SYSTEMS["fp16"], inputs, expected)
    result.require()
    assert result.max_relative_error > OUTPUT_BOUND["fp16"] and result.worst.reference_deviation


@pytest.mark.long
def test_relax_modules_round_as_their_models():
    """The same network as a Relax module; and a decomposed one, whose reference is such a module."""
    onnx_network = frontend.load(model("amplifies"))
    network, inputs = frontend.load(onnx_network.module), onnx_network.example_inputs()
    expected = network.reference(inputs)
    for stored in (Fp16Storage(layers=frozenset(ON_PIM)), Fp16Storage(kernels=True)):
        (deviation,) = reference_deviations(network.perturbed(stored), inputs, expected)
        (model_deviation,) = reference_deviations(onnx_network.perturbed(stored), inputs, expected)
        assert model_deviation / 3 < deviation < 3 * model_deviation
    decomposed = decompose(onnx_network, DecompositionRequest.parse("tucker:0.5")).network
    expected = decomposed.reference(inputs)
    stored = Fp16Storage(layers=frozenset({"left.fconv", "left.lconv"}))
    (exact,) = reference_deviations(decomposed.perturbed(Fp16Storage()), inputs, expected)
    (rounded,) = reference_deviations(decomposed.perturbed(stored), inputs, expected)
    assert 0 < exact < 1e-4 and 10 * exact < rounded < LARGEST_BOUND


def test_a_run_that_leaves_fp16_widens_no_bound():
    expected = np.array([1.0, 2.0], np.float32)
    moved, infinite = expected + 0.01, np.array([1.0, np.inf], np.float32)
    for runs, deviation in (([moved, infinite], 0.005), ([infinite], None)):
        reference = OutputReference(expected=[expected], perturbed=moving_reference(runs))
        (check,) = output_checks(reference, Fp16Storage(), "fp16", {}, [expected + 0.02])
        assert check.reference_deviation == (deviation and pytest.approx(deviation, rel=1e-3))
        assert check.bound == OUTPUT_BOUND["fp16"] and "inf" not in error_text(check)


@pytest.mark.long
@pytest.mark.parametrize("wider, most", [(1.0, 0.01), (1.5, 0.001)])
def test_few_right_builds_are_refused(wider, most):
    """If the errors of build and runs are draws of one normal distribution, of one degree of freedom."""
    draws = abs(np.random.default_rng(0).standard_normal((1 << 20, 1 + RUNS)))
    refused = draws[:, 0] > DEVIATION_MULTIPLE * wider * draws[:, 1:].max(axis=1)
    assert 0 < refused.mean() < most


def test_layers_are_found_by_their_nodes():
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], "a.b"),
        helper.make_node("LSTM", ["a", "w", "r"], ["l"], "lstm"),
        helper.make_node("Relu", ["l"], ["y"], "relu"),
    ]
    assert nodes_of_layers(nodes, ["a.b"]) == {"a.b"}
    assert nodes_of_layers(nodes, ["lstm.12", "a.b"]) == {"lstm", "a.b"}
    assert nodes_of_layers(nodes, ["elsewhere"]) == {"lstm", "a.b"}
    assert nodes_of_layers(nodes, []) == set()


def test_a_weight_is_rounded_when_it_is_needed():
    """What no input reaches comes first, so that ONNX Runtime computes it last: not all weights at once."""
    light = perturb(zoo.load_model(model("amplifies"), seed=None), Fp16Storage(layers=frozenset(ON_PIM)))
    names, reached = {value.name for value in light.graph.input}, []
    for node in light.graph.node:
        reached.append(any(name in names for name in node.input))
        names.update(node.output if reached[-1] else ())
    assert reached == sorted(reached) and len({*reached}) == 2
    of_weights = [n for n, later in zip(light.graph.node, reached) if not later and n.op_type == "Cast"]
    assert len(of_weights) >= 2 * len(ON_PIM)


@pytest.mark.parametrize("off, step, is_right", [(3, 3, True), (4, 3, False), (1, 4, False), (2, 1, True)])
def test_integers_are_off_as_often_and_as_far_as_in_runs_of_the_reference(off, step, is_right):
    """Results of runs are moved by roundings too, which makes none of them another integer."""
    expected = np.arange(1000, dtype=np.float32) % 120
    run = expected * np.float32(1 - 1e-6)
    run[500] += 3
    result = expected.copy()
    result[:off] += step
    reference = OutputReference(
        expected=[expected], perturbed=moving_reference([run]), rounded=frozenset({0})
    )
    (check,) = output_checks(reference, Fp16Storage(), "fp16", {}, [result])
    assert check.matches == is_right and check.undecided == off * is_right
