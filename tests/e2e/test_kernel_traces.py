"""Does ``pimflow trace --format accel-sim`` write the kernels that a plan runs, all or nothing?"""

import json
from dataclasses import replace

import pytest
from command_line import run
from trace_reader import read_kernels_list, read_trace

import pimflow
from pimflow.compiler.artifact import PlacedRegions
from pimflow.compiler.interface import Interface
from pimflow.core.kernel import convolution_kernel
from pimflow.core.layer_text import parse_layer
from pimflow.core.plan import Plan
from pimflow.core.rewrite import OPERATOR_KERNELS, PimRewrite, SplitRewrite
from pimflow.hardware import system
from pimflow.host.files import file_sha256
from pimflow.placement import CandidateGenerator
from pimflow.simulators.accel_sim.kernels import kernel_name
from pimflow.simulators.gpu.region_kernels import gpu_kernel

SYSTEM = system()
LAYER = "conv:1x32x14x14,40,1x1"


def run_trace(capsys, *argv) -> tuple[int, str, str]:
    return run(capsys, "trace", *argv, "--format", "accel-sim")


@pytest.fixture(scope="module")
def search_result():
    return pimflow.search("toy", SYSTEM)


@pytest.fixture
def directory(tmp_path, search_result):
    """A compiled directory, as far as its plan goes: 'down.conv' split, one region on PIM."""
    path = tmp_path / "net"
    path.mkdir()
    modes = {"down.conv": SplitRewrite(gpu_share=0.25), "widen.conv": PimRewrite()}
    choices = [replace(c, rewrite=modes.get(c.region, OPERATOR_KERNELS)) for c in search_result.plan.choices]
    plan = replace(search_result.plan, choices=tuple(choices), gpu_channels=20)
    placed = PlacedRegions(graph=search_result.graph, gpu=SYSTEM.gpu.name, dtype="fp16")
    return write_directory(path, plan, placed)


def write_directory(path, plan: Plan, placed: PlacedRegions):
    (path / "plan.json").write_text(plan.to_json())
    (path / "regions.json").write_text(placed.to_json())
    hashes = {name: file_sha256(path / name) for name in ("plan.json", "regions.json")}
    (path / "interface.json").write_text(Interface(inputs={}, targets=("llvm+pim",), sha256=hashes).to_json())
    return path


def trace_folders(out) -> set[str]:
    return {p.name for p in out.iterdir() if p.is_dir()}


def test_a_layer_with_all_channels_and_with_those_of_a_mixed_plan(capsys, tmp_path):
    out = tmp_path / "out"
    code, said, _ = run_trace(capsys, LAYER, "-o", out, "--pim-channels", 8, "--json")
    name = kernel_name(convolution_kernel(parse_layer(LAYER), "fp16"), "fp16")
    assert code == 0 and trace_folders(out) == {f"{name}.24", f"{name}.32"}
    summary = json.loads(said)
    stored = json.loads((out / "trace.json").read_text())
    digests = {path.relative_to(out).as_posix(): file_sha256(path) for path in out.glob("*/*")}
    assert stored.pop("sha256") == digests
    assert stored == {k: v for k, v in summary.items() if k != "output"}
    assert (summary["gpu"], summary["dtype"]) == ("rtx-2060-pim32", "fp16")
    files = {p.relative_to(out).as_posix(): p.stat().st_size for p in out.glob("*/*")}
    assert files == {path: size for row in summary["kernels"] for path, size in row["files_bytes"].items()}
    for row in summary["kernels"]:
        folder = out / f"{row['kernel']}.{row['gpu_channels']}"
        traces = [read_trace(folder / entry) for entry in read_kernels_list(folder / "kernelslist.g")]
        assert [header.name for header, _ in traces] == row["launches"]
        lanes = [sum(i.lanes for b in blocks for w in b.warps for i in w) for _, blocks in traces]
        assert lanes == row["instructions"]
    assert run_trace(capsys, LAYER, "-o", out, "--gpu", "t4", "--pim-channels", 0)[0] == 0
    assert json.loads((out / "trace.json").read_text())["gpu"] == "t4" and len(trace_folders(out)) == 1


@pytest.mark.long
def test_a_network_is_every_region_with_either(capsys, tmp_path, search_result):
    assert run_trace(capsys, "toy", "-o", tmp_path / "out", "--quiet")[0] == 0
    names = {kernel_name(gpu_kernel(region, "fp16"), "fp16") for region in search_result.graph.regions}
    assert trace_folders(tmp_path / "out") == {f"{name}.{n}" for name in names for n in (16, 32)}


def test_a_directory_is_its_plan(capsys, tmp_path, directory, search_result):
    """All channels for the network on the GPU alone; those of the plan for what it leaves to the GPU."""
    code, said, _ = run_trace(capsys, directory, "-o", tmp_path / "out", "--json")
    assert code == 0
    expected = set()
    for region in search_result.graph.regions:
        whole_kernel = kernel_name(gpu_kernel(region, "fp16"), "fp16")
        expected.add(f"{whole_kernel}.32")
        if region.name not in ("down.conv", "widen.conv"):
            expected.add(f"{whole_kernel}.20")
    rows = convolution_kernel(search_result.graph.region("down.conv").geometry.first_rows(2), "fp16")
    expected.add(f"{kernel_name(rows, 'fp16')}.20")
    assert trace_folders(tmp_path / "out") == expected
    (row,) = [row for row in json.loads(said)["kernels"] if row["kernel"] == kernel_name(rows, "fp16")]
    assert row["layers"] == ["down.conv"]


def test_a_split_that_pads_alike_reads_rows_of_zeros(capsys, tmp_path, search_result, directory):
    """Two rows of a 3x3 with padding: the GPU's part has a row of zeros before its input, and none after."""
    placed = PlacedRegions(graph=search_result.graph, gpu=SYSTEM.gpu.name, dtype="fp16", padding="symmetric")
    write_directory(directory, Plan.load(directory / "plan.json"), placed)
    assert run_trace(capsys, directory, "-o", tmp_path / "out", "--quiet")[0] == 0
    part = search_result.graph.region("down.conv").geometry.first_rows(2)
    pad_top, pad_left, pad_bottom, pad_right = part.padding
    assert (pad_top, pad_bottom) == (1, 0)
    padded = convolution_kernel(replace(part, h=part.h + 1, padding=(0, pad_left, 0, pad_right)), "fp16")
    names = {kernel_name(kernel, "fp16") for kernel in (padded, convolution_kernel(part, "fp16"))}
    padded_name = f"{kernel_name(padded, 'fp16')}.20"
    assert {f"{name}.20" for name in names} & trace_folders(tmp_path / "out") == {padded_name}


def test_they_are_the_kernels_that_the_search_asks_for(search_result):
    """The rows of a split, as candidates are charged for them."""
    region = search_result.graph.region("down.conv")
    generator = CandidateGenerator(search_result.graph, SYSTEM)
    split = generator.make(region, SplitRewrite(gpu_share=2 / region.geometry.oh))
    (task,) = [t for t in split.tasks if t.resource == "gpu" and "rows" in t.label]
    kernel = convolution_kernel(region.geometry.first_rows(2), "fp16")
    cost = generator.costs.kernel_cost(kernel, SYSTEM.gpu_channels)
    assert task.execution_ns == cost.execution_ns > 0


def test_regions_come_back_from_a_file(search_result, tmp_path):
    stored = PlacedRegions(graph=search_result.graph, gpu=SYSTEM.gpu.name, dtype="fp32", padding="symmetric")
    placed = PlacedRegions.load(write_directory(tmp_path, search_result.plan, stored))
    assert placed == stored
    assert placed.graph.digest == search_result.plan.model


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["toi"], 2, "did you mean toy"),
        (["absent.onnx"], 3, "absent.onnx"),
        ([LAYER, "--dtype", "fp32"], 2, "traces for Accel-Sim are of fp16 kernels"),
        ([LAYER, "--gpu", "t5"], 2, "did you mean t4"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(capsys, tmp_path, argv, code, says):
    exit_code, out, err = run_trace(capsys, *argv, "-o", tmp_path / "out", "--quiet")
    assert (exit_code, out, err.count("\n")) == (code, "", 1) and says in err
    assert list(tmp_path.iterdir()) == []


def test_directories_that_cannot_be_traced(capsys, tmp_path, directory):
    target = tmp_path / "out"
    code, _, err = run_trace(capsys, directory, "-o", target, "--gpu", "v100")
    assert code == 2 and "was compiled for gpu 'rtx-2060-pim32'" in err and err.count("\n") == 1
    code, _, err = run_trace(capsys, directory, "-o", target, "--dtype", "fp16")
    assert code == 2 and "--dtype: " in err and "of its own; leave that out" in err
    for name, old, new in (("regions.json", "fp16", "fp32"), ("plan.json", "SPLIT", "GPU")):
        text = (directory / name).read_text()
        (directory / name).write_text(text.replace(old, new))
        code, _, err = run_trace(capsys, directory, "-o", target)
        assert code == 3 and f"{name} is missing or was changed; compile again" in err
        (directory / name).write_text(text)
    (directory / "interface.json").unlink()
    code, _, err = run_trace(capsys, directory, "-o", target)
    assert code == 3 and "is no compiled network" in err
    assert not target.exists()
