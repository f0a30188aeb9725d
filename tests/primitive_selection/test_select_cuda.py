"""Are primitives chosen for a GPU by what the model says of their launches?"""

import json
import math
import re

import pytest
from branching import convolution, model
from command_line import error_line, run
from conv_layers import ON_CUDA, layers_for

import pimflow
from pimflow.commands.main import main
from pimflow.core.kernel import ConvGeometry, convolution_kernel
from pimflow.errors import ProfileError
from pimflow.hardware import GpuSpec
from pimflow.primitive_selection.gpu_model_times import analytic_profile, primitive_ns
from pimflow.primitive_selection.profile import Device, Profile
from pimflow.primitives import PRIMITIVES, get_primitive
from pimflow.primitives.launches import launches
from pimflow.simulators.gpu.model import kernel_cost

GPU = GpuSpec.load("rtx-2060-pim32")
LAYER = ConvGeometry(n=1, h=56, w=56, c=64, oc=64, kh=3, kw=3, padding=(1, 1, 1, 1))
TIMED = [name for name in ON_CUDA if PRIMITIVES[name].shared]


def command(capsys, *arguments):
    return run(capsys, "select toy --device cuda", *arguments)


@pytest.fixture
def without_a_card(monkeypatch):
    monkeypatch.setattr("pimflow.pim_backend.runtime.targets.local_cuda", lambda: None)


@pytest.mark.parametrize("name", TIMED)
def test_launches_move_what_the_formulas_say(name):
    """Every workspace is written once and read once; inputs, filters and results are moved once."""
    chosen = PRIMITIVES[name]
    for layer in layers_for(chosen, 3):
        kernels = launches(chosen, layer)
        moved = sum(k.input_bytes + k.weight_bytes + k.output_bytes for k in kernels)
        stored = 4 * layer.pixels * layer.oc + chosen.filter_bytes(layer)
        read = 4 * layer.n * layer.h * layer.w * layer.c
        workspaces = sum(4 * math.prod(shape) for shape in chosen.stages(layer).values())
        skipped = chosen.implicit and max(layer.stride) > max(layer.kh, layer.kw)
        assert skipped or moved == read + stored + 2 * workspaces, layer
        macs = sum(kernel.macs for kernel in kernels)
        assert macs >= layer.macs or chosen.family == "winograd"


def test_the_operator_is_what_the_search_charges():
    ns = primitive_ns(get_primitive("operator-cuda-hwc"), LAYER, GPU)
    assert ns == kernel_cost(convolution_kernel(LAYER, "fp32"), GPU, dtype="fp32").total_ns


def test_winograd_pays_where_there_is_arithmetic():
    profile = analytic_profile([LAYER, tiny := ConvGeometry(n=1, h=7, w=7, c=16, oc=16, kh=3, kw=3)], [], GPU)
    f4, operator = "winograd-2d-f4-cuda-hwc-64x64", "operator-cuda-hwc"
    assert profile.times_ns[f4, LAYER] < profile.times_ns[operator, LAYER]
    assert profile.times_ns[f4, tiny] > profile.times_ns[operator, tiny]  # three launches


@pytest.mark.long
def test_the_command(capsys, tmp_path, without_a_card):
    path = tmp_path / "gpu.json"
    code, out, err = command(capsys, "--json", "--quiet", "-o", path)
    row = json.loads(out)
    assert (code, err) == (0, "")
    assert row["device"] == "rtx-2060-pim32, analytic, 30 multiprocessors"
    assert {choice["known"] for choice in row["choices"]} == {"analytic"}
    assert {choice["primitive"] for choice in row["choices"]} <= set(ON_CUDA)
    code, out, _ = command(capsys, "--gpu", "v100")
    assert code == 0 and "times of the model (analytic), fp32, for v100" in out
    assert Profile.read(path).device.target == "cuda"
    code, out, _ = command(capsys, "--profile", path, "--json")
    assert code == 0 and json.loads(out)["device"] == row["device"]
    code, out, err = command(capsys, "--profile", path, "--gpu", "v100")
    assert (code, out) == (3, "") and "measured on 'rtx-2060-pim32, analytic" in err
    assert main(["select", "toy", "--profile", str(path)]) == 3


@pytest.mark.long
def test_least_memory_needs_no_workspace(without_a_card):
    weights = {}
    nodes = convolution("a", "x", (64, 64), 3, weights) + convolution("y", "a", (64, 64), 5, weights)
    network = model(nodes, weights, 64, rows=56)
    smallest = pimflow.select(network, device="cuda", minimize="memory")
    assert {p.family for p in smallest.choices.values()} <= {"operator", "windows"}
    fastest = pimflow.select(network, device="cuda")
    assert "winograd" in {p.family for p in fastest.choices.values()}
    assert smallest.selected.sums.time_ns > fastest.selected.sums.time_ns


@pytest.mark.parametrize(
    "options, code, said",
    [
        (["--gpu", "v10"], 2, "did you mean v100"),
        (["--profile", "mixed"], 2, "--profile mixed: times of a GPU are measured, modelled, or of a file"),
    ],
)
def test_wrong_uses(capsys, without_a_card, options, code, said):
    got, out, err = command(capsys, *options)
    assert (got, out) == (code, "") and said in err and err.count("\n") == 1
    assert "give --device cuda too" in error_line(capsys, 2, "select toy --gpu v100")


@pytest.mark.long
def test_compile_builds_them_for_the_gpu(without_a_card, tmp_path, capsys):
    options = ["--target", "cuda+pim", "--select", "--device", "cuda", "--dtype", "fp32", "--modes", "gpu"]
    folder = tmp_path / "toy"
    assert main(["compile", "toy", "-o", str(folder), *options, "--conventions", "none"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^primitives of \d of \d layers \(.*\): .* us saved against operators", out, re.M)
    report = json.loads((folder / "report.json").read_text())
    part = report["primitives"]
    assert report["verified"] and part["device"] == "rtx-2060-pim32, analytic" and part["saved_ns"] >= 0
    assert not json.loads((folder / "interface.json").read_text()).get("cpu")
    named = {choice["layer"]: choice["primitive"] for choice in part["choices"]}
    rows = json.loads((folder / "plan.json").read_text())["choices"]
    assert named and named == {row["region"]: row["primitive"] for row in rows if "primitive" in row}
    assert main(["compile", "toy", *options, "--explain", next(iter(named)), "--quiet"]) == 0
    assert f"* GPU {next(iter(named.values()))}" in capsys.readouterr().out
    argv = ("trace", folder, "--format", "accel-sim", "-o", tmp_path / "traces")
    assert "is computed by primitive" in error_line(capsys, 2, *argv)


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--dtype", "fp16"], 2, "compute in fp32, not in fp16; give --dtype fp32"),
        (["--target", "llvm+pim"], 2, "give --target cuda+pim too"),
        (["--minimize", "memory"], 2, "--minimize memory: with --device cuda a plan is the least of --obj"),
        (["--minimize", "tim"], 2, "did you mean time?"),
        (["--time-budget", "1ms"], 2, "bound the plan by --max-latency"),
        (["--memory-model", "sum"], 2, "a plan counts what is live at once"),
        (["--select", "predicted"], 2, "those of --profiler gpu="),
        (["--measure", "3"], 2, "--measure 3: with --device cuda"),
        (["--profiler", "gpu=learned"], 2, "gpu=learned has no times of primitives"),
        (["--memory-budget", "1KiB"], 4, "--memory-budget"),
    ],
)
def test_what_a_plan_has_no_use_for_is_refused(capsys, options, code, said):
    asked = ["--target", "cuda+pim", "--select", "--device", "cuda", "--dtype", "fp32", "--modes", "gpu"]
    assert said in error_line(capsys, code, "compile toy --quiet", *asked, *options)


def test_a_profile_of_a_cpu_is_refused(without_a_card):
    cpu = Profile(device=Device(cpu="x", model="y", threads=1), code="")
    with pytest.raises(ProfileError, match="measured on 'y, x, 1 threads'"):
        pimflow.select("toy", device="cuda", profile=cpu)
