"""Does a device that only its user has compile, run and simulate, with nothing asked of the catalogue?"""

import functools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command_line import run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from length import examples
from onnx import helper
from onnx_models import onnx_model

import pimflow
from pimflow import frontend
from pimflow.commands.main import main
from pimflow.commands.run import run as inference
from pimflow.commands.simulate.simulate import simulate
from pimflow.compiler import artifact
from pimflow.core.plan import Choice
from pimflow.core.program import PimProgram
from pimflow.core.rewrite import PimRewrite
from pimflow.errors import ArtifactError, UsageError
from pimflow.hardware import PimSpec, system
from pimflow.hardware.reader import SPECS
from pimflow.simulators.pim.legality import program_violations

PAGE = (Path(__file__).parents[2] / "docs" / "devices.md").read_text(encoding="utf-8")
NEWTON = PimSpec.load("newton-gddr6")


def two_layers():
    """A padded convolution and a product, with biases, and a clamp between them."""
    draw = np.random.default_rng(0)
    shapes = {"w": (20, 7, 3, 3), "b": (20,), "v": (180, 11), "c": (11,)}
    values = {name: (draw.standard_normal(shape) / 6).astype(np.float32) for name, shape in shapes.items()}
    return onnx_model(
        [
            helper.make_node("Conv", ["x", "w", "b"], ["y"], name="conv", pads=[1] * 4, strides=[2, 2]),
            helper.make_node("Relu", ["y"], ["z"], name="relu"),
            helper.make_node("Flatten", ["z"], ["f"], name="flat"),
            helper.make_node("Gemm", ["f", "v", "c"], ["out"], name="product"),
        ],
        {"x": [1, 7, 5, 5]},
        {"out": [1, 11]},
        values,
        name="two",
    )


@functools.cache
def all_on_pim():
    """A plan of `two_layers` for any device: loop orders are left open."""
    plan = pimflow.search(two_layers(), system()).plan
    choices = (Choice(regions=choice.regions, rewrite=PimRewrite()) for choice in plan.choices)
    return replace(plan, choices=tuple(choices))


def compile_on_pim(target_system, out=None):
    """`two_layers`, compiled with both layers on PIM; verified, or it raises."""
    compiled = pimflow.compile(two_layers(), out, system=target_system, plan=all_on_pim(), conventions="none")
    assert compiled.verification.is_verified and len(compiled.programs) == 2
    return compiled


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The toy network, compiled for the device of the page, whose file is then gone."""
    folder = tmp_path_factory.mktemp("own")
    device_file, net = folder / "mydev.toml", folder / "net"
    toml = re.search(r"<!-- example begin.*?```toml\n(.*?)```", PAGE, re.DOTALL)[1]
    device_file.write_text(toml, encoding="utf-8")
    code = main(["compile", "toy", "--pim", str(device_file), "-o", str(net), "--quiet"])
    spec = PimSpec.load(device_file)
    device_file.unlink()
    assert code == 0
    return net, spec


@pytest.mark.long
def test_the_example_of_the_page_compiles(example):
    directory, spec = example
    report = json.loads((directory / "report.json").read_text())
    programs = [PimProgram.load(path) for path in (directory / "programs").iterdir()]
    assert report["verified"] and report["pim"] == "mydev" and programs
    assert {(program.pim, program.gangs, program.banks) for program in programs} == {("mydev", 8, 16)}
    assert artifact.load_device(directory) == spec


@pytest.mark.long
def test_its_directory_needs_no_file_of_the_device(example, capsys, tmp_path):
    """It runs, is simulated on the clocks that it was compiled for, judged, and traced."""
    directory, spec = example
    network = frontend.load("toy")
    inputs = network.example_inputs()
    (expected,) = network.reference(inputs)
    (output,) = inference.infer(directory, inputs).outputs
    assert np.abs(output - expected).max() <= 2e-3 * np.abs(expected).max()
    for path in (directory / "programs").iterdir():
        code, out, err = run(capsys, "simulate", path, "--json", "--quiet")
        row = json.loads(out)
        assert (code, err, row["pim"], row["timing_violations"]) == (0, "", "mydev", 0)
        assert row["cycles"] == simulate(path, spec).cycles
        assert row["time_ns"] == pytest.approx(row["cycles"] * 1.25)
        assert run(capsys, "simulate", path, "--quiet", "--pim", "newton-gddr6")[0] == 3  # other gangs
    for format in ("pimprog", "perfetto"):
        code, out, _ = run(capsys, "trace", directory, "--format", format, "-o", tmp_path / format, "--json")
        assert code == 0 and json.loads(out)["pim"] == "mydev"
    assert run(capsys, "timeline", directory, "--quiet")[0] == 0


def test_its_program_elsewhere_asks_for_the_file(example, capsys, tmp_path):
    directory, _ = example
    loose = shutil.copy(next((directory / "programs").iterdir()), tmp_path / "loose.pimprog")
    code, out, err = run(capsys, "simulate", loose, "--quiet")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "lowered for pim 'mydev'" in err and "--pim" in err


def test_a_damaged_device_is_refused(example, tmp_path):
    copy = shutil.copytree(example[0], tmp_path / "copy")
    text = (copy / "pim.json").read_text()
    (copy / "pim.json").write_text(text.replace('"gangs": 8', '"gangs": 4'))
    with pytest.raises(ArtifactError, match=r"pim\.json is missing or was changed"):
        simulate(next((copy / "programs").iterdir()))
    (copy / "pim.json").unlink()
    with pytest.raises(ArtifactError, match=r"pim\.json is missing or was changed"):
        simulate(next((copy / "programs").iterdir()))


@pytest.mark.long
@pytest.mark.parametrize(
    "change",
    [{"gangs": 2}, {"columns_per_row": 16, "buffer_columns": 8}, {"timing": {**NEWTON.timing, "nCCDS": 4}}],
    ids=("gangs", "columns", "clocks"),
)
def test_a_known_name_does_not_stand_for_another_device(change, tmp_path):
    """What is called as the catalogue's is not taken for it: neither in the code, nor by its files."""
    device = replace(NEWTON, **change)
    compiled = compile_on_pim(system(pim=device), tmp_path / "net")
    for program in compiled.programs.values():
        assert (program.pim, program.gangs) == ("newton-gddr6", device.gangs)
        assert program.pim_digest == device.digest != NEWTON.digest
        assert device.is_target_of(program) and not NEWTON.is_target_of(program)
    for path in (tmp_path / "net" / "programs").iterdir():
        assert simulate(path) == simulate(path, device)
        loose = shutil.copy(path, tmp_path / "loose.pimprog")
        with pytest.raises(UsageError, match="another pim 'newton-gddr6' than the catalogue's"):
            simulate(loose)


@pytest.mark.long
def test_programs_of_the_catalogue_say_its_name_alone(tmp_path):
    compiled = compile_on_pim(system(pim="aim-gddr6"), tmp_path / "net")
    assert all("pim_digest" not in program.to_json() for program in compiled.programs.values())
    for path in (tmp_path / "net" / "programs").iterdir():
        loose = shutil.copy(path, tmp_path / "loose.pimprog")
        assert simulate(loose) == simulate(path) == simulate(path, "aim-gddr6")
    # Plans for AiM use only what its instructions say.
    assert main(["trace", str(tmp_path / "net"), "--format", "aim", "-o", str(tmp_path / "aim")]) == 0


@st.composite
def organisations(draw):
    """Devices of every shape that `PimSpec` admits and that hold two small layers."""
    dtypes = draw(st.sampled_from((("fp16",), ("fp32",), ("fp16", "fp32"))))
    lanes = draw(st.sampled_from((1, 2)))
    column_bytes = 4 * lanes * draw(st.integers(1, 12))
    buffer_columns = draw(st.integers(1, 40))
    row_base = draw(st.sampled_from((0, 0, 5)))
    spec = replace(
        NEWTON,
        name=draw(st.sampled_from(("mine", "newton-gddr6", "aim-gddr6"))),
        gangs=draw(st.integers(1, 8)),
        banks_per_gang=(banks := draw(st.integers(1, 6))),
        faw_banks=max(4, banks),
        rows_per_bank=row_base + draw(st.integers(3300, 9000)),
        row_base=row_base,
        columns_per_row=buffer_columns * draw(st.integers(1, 4)),
        column_bytes=column_bytes,
        buffer_columns=buffer_columns,
        global_buffers=draw(st.integers(1, 6)),
        result_lanes=lanes,
        dtypes=dtypes,
    )
    assert list(spec.faults()) == []
    return spec


@pytest.mark.long
@settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(organisations(), st.integers(1, 5))
def test_any_organisation_compiles_and_is_right(spec, channels):
    """By value: every PIM region against its own rounding bound, the outputs against ONNX Runtime."""
    compiled = compile_on_pim(system(pim=spec, pim_channels=channels, dtype=spec.dtypes[0]))
    for program in compiled.programs.values():
        organisation = (spec.gangs, spec.banks, spec.global_buffers)
        assert (program.gangs, program.banks, program.buffers) == organisation
        assert PimProgram.from_json(program.to_json()) == program
        assert program_violations(program, spec) == 0
    assert PimSpec.from_json(spec.to_json()) == spec


def test_every_preset_survives_being_stored():
    for path in sorted((SPECS / "pim").glob("*.toml")):
        spec = PimSpec.load(path.stem)
        restored = PimSpec.from_json(spec.to_json())
        assert restored == spec and restored.digest == spec.digest and restored.custom_digest == ""
