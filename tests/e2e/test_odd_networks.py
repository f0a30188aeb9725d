"""Networks that are odd but right compile and run; those that are wrong end with one clear line."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import ALONE, run
from length import long_but
from onnx import TensorProto, helper, numpy_helper
from onnx_models import onnx_model

import pimflow
from pimflow.compiler.artifact import file_stems


def weight(name, *dims, value=None):
    values = np.random.default_rng(0).uniform(-1, 1, dims) if value is None else np.full(dims, value)
    return numpy_helper.from_array(values.astype(np.float32), name)


def save_network(folder, nodes, weights, dims=(1, 4, 8, 8), kind=TensorProto.FLOAT) -> Path:
    """A network from ``x`` to ``y``."""
    model = onnx_model(nodes, {"x": dims}, {"y": (kind, None)}, weights)
    onnx.save(model, folder / "net.onnx")
    return folder / "net.onnx"


CONV = helper.make_node("Conv", ["x", "w"], ["a"], "conv")
ODD_RESULTS = {
    "truths": (helper.make_node("Greater", ["a", "zero"], ["y"], "last"), TensorProto.BOOL, "bool"),
    "nothing": (
        helper.make_node("Slice", ["a", "none", "none"], ["y"], "last"),
        TensorProto.FLOAT,
        "no values",
    ),
    "infinity": (helper.make_node("Mul", ["a", "zero"], ["y"], "last"), TensorProto.FLOAT, "nan .. nan"),
}


@pytest.mark.parametrize("what", long_but(["nothing"], list(ODD_RESULTS)))
def test_results_of_other_kinds_are_said(capsys, tmp_path, what):
    last, kind, expected_text = ODD_RESULTS[what]
    none = numpy_helper.from_array(np.zeros(1, np.int64), "none")
    path = save_network(
        tmp_path, [CONV, last], [weight("w", 8, 4, 3, 3), weight("zero", 1, value=0), none], kind=kind
    )
    assert run(capsys, "compile", path, "-o", tmp_path / "out", "--quiet", *ALONE)[0] == 0
    values = np.full((1, 4, 8, 8), np.nan if what == "infinity" else 1, np.float32)
    np.save(tmp_path / "x.npy", values)
    argv = ["run", tmp_path / "out", "--input", tmp_path / "x.npy"]
    code, out, _ = run(capsys, *argv)
    assert code == 0 and expected_text in out
    code, out, _ = run(capsys, *argv, "--json")
    (row,) = json.loads(out, parse_constant=pytest.fail)["outputs"]
    assert code == 0 and (what == "truths") == (row["min"] is not None)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_no_numbers(capsys, tmp_path, value):
    node = helper.make_node("Conv", ["x", "w"], ["y"], "conv")
    path = save_network(tmp_path, [node], [weight("w", 8, 4, 3, 3, value=value)])
    code, out, err = run(capsys, "compile", path, "-o", tmp_path / "out", "--quiet", *ALONE)
    assert (code, out) == (5, "") and "NaN or infinity" in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dims", [(1, 4, 1 << 40, 8), (1 << 30, 4, 8, 8)])
def test_tensors_that_nobody_can_hold(capsys, tmp_path, dims):
    node = helper.make_node("Relu", ["x"], ["y"], "relu")
    code, _, err = run(capsys, "compile", save_network(tmp_path, [node], [], dims), "--quiet", *ALONE)
    assert code == 3 and "'x'" in err and err.count("\n") == 1


def test_what_the_importer_refuses_is_one_line(capfd, tmp_path):
    """C++ says nothing beside it: TVM warns of builders that were left in the middle."""
    node = helper.make_node("Conv", ["x", "w"], ["y"], "conv", group=3)
    code, out, err = run(
        capfd, "compile", save_network(tmp_path, [node], [weight("w", 8, 4, 3, 3)]), "--quiet"
    )
    assert (code, out) == (3, "") and err.startswith("pimflow: error: ") and err.count("\n") == 1
    assert "Conv of node 'conv' cannot be imported" in err


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "filters", "dims", "says"),
    [
        ("Conv", (0, 4, 3, 3), (1, 4, 8, 8), "0x3x3x4"),
        ("MatMul", (16, 0), (4, 16), "16x0"),
        ("Slice", (16, 32), (4, 16), "0x16"),
    ],
)
def test_layers_of_nothing_are_named(capsys, tmp_path, kind, filters, dims, says):
    """Files with constants without elements could not be loaded; products of nothing were tracebacks."""
    nodes = [helper.make_node(kind, ["x", "w"], ["y"], "last")]
    weights = [weight("w", *filters)]
    if kind == "Slice":
        nodes = [
            helper.make_node("Slice", ["x", "none", "none"], ["a"], "cut"),
            helper.make_node("MatMul", ["a", "w"], ["y"], "last"),
        ]
        weights.append(numpy_helper.from_array(np.zeros(1, np.int64), "none"))
    path = save_network(tmp_path, nodes, weights, dims)
    for command in ("compile", "memory"):
        code, out, err = run(capsys, command, path, "--quiet")
        assert (code, out) == (3, "")
        assert err.startswith(f"pimflow: error: 'last' reads a tensor of shape {says}, "), err
        assert err.count("\n") == 1


def test_every_region_has_files_of_its_own(capsys, tmp_path):
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], "a/b"),
        helper.make_node("Conv", ["a", "v"], ["y"], "a_b"),
    ]
    weights = [weight("w", 256, 256, 1, 1), weight("v", 256, 256, 1, 1)]
    path = save_network(tmp_path, nodes, weights, dims=(1, 256, 7, 7))
    assert (
        run(capsys, "compile", path, "-o", tmp_path / "out", "--accounting", "paper", "--quiet", *ALONE)[0]
        == 0
    )
    modes = [c["mode"] for c in json.loads((tmp_path / "out/plan.json").read_text())["choices"]]
    programs = [json.loads(p.read_text()) for p in (tmp_path / "out/programs").iterdir()]
    assert len(programs) == len(modes) - modes.count("GPU") == 2
    assert {program["region"] for program in programs} == {"a/b", "a_b"}


def test_names_of_files():
    plain = ["features.8.conv.2", "слой"]
    assert file_stems(plain) == {name: name for name in plain}
    odd = ["a/b", "a_b", "A_B", ".", "..", "", "n" * 400, "n" * 401, "層" * 100, "a\nb", "-o"]
    stems = file_stems(odd)
    assert list(stems) == odd
    assert len({stem.casefold() for stem in stems.values()}) == len(odd)
    for stem in stems.values():
        assert stem and stem[0] != "." and "/" not in stem and stem.isprintable()
        assert len(f"{stem}.perfetto.json".encode()) < 255


def test_a_network_that_pim_computes_alone(capsys, tmp_path):
    """There is no machine code to make once: the network has no kernels."""
    node = helper.make_node("MatMul", ["x", "w"], ["y"], "product")
    path = save_network(tmp_path, [node], [weight("w", 256, 256)], (1, 256))
    assert run(capsys, "compile", path, "-o", tmp_path / "out", "--quiet", *ALONE)[0] == 0
    assert [c["mode"] for c in json.loads((tmp_path / "out/plan.json").read_text())["choices"]] == ["PIM"]
    assert run(capsys, "run", tmp_path / "out")[0] == 0


PART = {"begin": np.int64([0]), "end": np.int64([1])}
VIEWS = {
    "another shape": (helper.make_node("Flatten", ["x"], ["y"], "last"), {}),
    "a part": (helper.make_node("Slice", ["x", *PART], ["y"], "last"), PART),
    "the whole": (helper.make_node("Split", ["x"], ["y"], "last", num_outputs=1), {}),
}


@pytest.mark.parametrize("what", long_but(list(VIEWS)[:1], list(VIEWS)))
def test_networks_that_only_look_at_their_inputs_copy_them(capsys, tmp_path, what):
    last, constants = VIEWS[what]
    path = save_network(tmp_path, [last], [numpy_helper.from_array(v, n) for n, v in constants.items()])
    model = onnx.load(path)
    model.opset_import[0].version = 18
    onnx.save(model, path)
    code, out, _ = run(capsys, "compile", path, "-o", tmp_path / "out", "--quiet", *ALONE)
    assert code == 0 and "the outputs match" in out and "(1.000x)" in out
    assert run(capsys, "run", tmp_path / "out")[0] == 0
    for command in ("memory", "profile"):
        assert run(capsys, command, path)[0] == 0, command
    code, _, err = run(capsys, "fuse", path)
    assert code == (3 if what == "another shape" else 0) and err.count("\n") == (code > 0)


def test_parts_without_a_name_are_refused(capsys, tmp_path):
    """ONNX Runtime, which is the reference, ends by a signal where it runs such a Split."""
    nodes = [
        helper.make_node("Split", ["x", "sizes"], ["", "part", ""], "cut", axis=1),
        helper.make_node("Relu", ["part"], ["y"], "relu"),
    ]
    path = save_network(tmp_path, nodes, [numpy_helper.from_array(np.int64([1, 2, 1]), "sizes")])
    code, out, err = run(capsys, "compile", path, "--quiet", *ALONE)
    assert (code, out) == (3, "") and "Split 'cut' has a result without a name" in err
    assert err.count("\n") == 1


@pytest.mark.long
def test_c_code_of_an_extreme_begins_at_infinity():
    node = helper.make_node("ReduceMax", ["x"], ["y"], "high", keepdims=0)
    model = onnx_model([node], {"x": (1, 4096)}, {"y": None})
    assert pimflow.compile(model, target="c", conventions="none").verification.is_verified


@pytest.mark.long
def test_a_scale_that_a_prologue_reads_before_the_feature_map(tmp_path):
    """A layer that is split by rows reads rows of the map, and all of the scale, which has none."""
    nodes = [
        helper.make_node("Sqrt", ["s"], ["scale"], "scale"),
        helper.make_node("Exp", ["scale"], ["other"], "other"),
        helper.make_node("Div", ["one", "scale"], ["inverse"], "inverse"),
        helper.make_node("Mul", ["inverse", "x"], ["scaled"], "scaled"),
        helper.make_node("Conv", ["scaled", "w"], ["y"], "conv", pads=[1] * 4),
    ]
    inputs, outputs = {"s": (1,), "x": (1, 32, 56, 56)}, {"y": None, "other": None}
    model = onnx_model(nodes, inputs, outputs, [weight("w", 64, 32, 3, 3), weight("one", 1, value=1)])
    onnx.save(model, tmp_path / "net.onnx")
    compiled = pimflow.compile(tmp_path / "net.onnx", conventions="none")
    conv = compiled.search_result.generator.graph.region("conv")
    assert conv.inputs[0] == "scale" and compiled.report.to_json()["verified"]
