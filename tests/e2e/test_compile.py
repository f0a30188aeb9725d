"""Does the product do what its first page says: search, rewrite, run by value, verify, write?"""

import functools
import json
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import onnxruntime
import pytest
from branching import network_with_padding
from edited_plans import edited_plan
from onnx import TensorProto, helper
from onnx_models import onnx_model

import pimflow
from pimflow import frontend, zoo
from pimflow.commands.compile import timeline
from pimflow.commands.run import run as inference
from pimflow.commands.shared import prepare
from pimflow.commands.shared.plan_report import ConventionsReport
from pimflow.commands.shared.report_text import MAX_LINES, MIN_LAYERS, summary
from pimflow.commands.shared.report_text import table as report_table
from pimflow.compiler import build
from pimflow.compiler.artifact import UNSEALED
from pimflow.compiler.measurement.kernel_times import kernel_times
from pimflow.core.candidate import Provenance
from pimflow.core.plan import Choice, Plan
from pimflow.errors import ArtifactError, InfeasibleError, PlanError, UsageError, VerificationError
from pimflow.hardware import system
from pimflow.hardware.systems import PADDINGS
from pimflow.pim_backend.runtime import targets
from pimflow.pim_backend.runtime.cuda_binary import cuda_compiler
from pimflow.placement import apply, search
from pimflow.relay_passes.regions.extract_regions import extract_regions

compile_only = functools.partial(pimflow.compile, conventions="none")


@pytest.fixture(scope="module")
def toy(compiled_toy):
    return compiled_toy


def test_the_report_is_stored_and_says_that_outputs_are_right(toy):
    directory, compiled = toy
    report = json.loads((directory / "report.json").read_text())
    assert report["verified"] is True and report["timing_violations"] == 0
    assert report["timing_violations_of"] == report["timing"] == "strict"
    assert report["regions_verified"] == sum(r["on_pim"] for r in report["regions"]) > 0
    assert report == json.loads(json.dumps(compiled.report.to_json()))


def test_report_says_where_the_energy_goes_and_what_is_saved(toy):
    report = toy[1].report
    assert sum(report.energy.energies_pj.values()) == report.energy.energy_pj
    assert sum(report.energy.energies_gpu_only_pj.values()) == report.energy.energy_gpu_only_pj
    saved = report.energy.savings_pj
    assert saved["total"] == pytest.approx(
        report.energy.energy_gpu_only_pj - report.energy.energy_pj, rel=1e-6
    )
    line = next(line for line in report_table(report, None).splitlines() if line.startswith("saved "))
    assert f"{saved['total'] / 1e9:+.2f} mJ: {saved['shorter_runtime'] / 1e9:+.2f} mJ by shorter" in line


def test_each_part_of_a_layer_says_how_its_time_is_known(toy):
    """A transfer over the crossbar is computed, but the PIM programs beside it were simulated."""
    report = toy[1].report
    of_mode = {
        "GPU": {"gpu": "analytic"},
        "PIM": {"pim": "simulated", "crossbar": "analytic"},
        "SPLIT": {"pim": "simulated", "gpu": "analytic", "crossbar": "analytic"},
    }
    assert {region.mode for region in report.regions} >= {"GPU", "PIM"}
    for region in report.regions:
        methods = {part: method.value for part, method in region.known.items() if part != "channels"}
        assert methods == of_mode[region.mode]
    lines = report_table(report, None).splitlines()
    methods = "crossbar analytic; gpu analytic; pim simulated"
    assert any(line.startswith("known  ") and line.endswith(methods) for line in lines)
    first, *others = report.regions
    mixed = replace(report, regions=(replace(first, known={"gpu": Provenance.MEASURED}), *others))
    rest = sum("gpu" in region.known for region in others)
    methods_text = f"gpu measured (1 of the regions), analytic ({rest} of the regions); pim simulated"
    assert methods_text in report_table(mixed, None)


def test_a_summary_fits_a_screen_and_counts_every_region(toy):
    """However many regions there are, and with a line of each kind that a plan may add."""
    with_conventions = toy[1].report
    report = replace(with_conventions, conventions=ConventionsReport(missing=()))
    many = [
        replace(region, name=f"{region.name}.{copy}", covers=(f"{region.name}.{copy}",))
        for region in report.regions
        for copy in range(30)
    ]
    many[0] = replace(many[0], covers=(many[0].name, many[1].name), mode="PIPELINE", latency_ns=1e6)
    many[1] = replace(many[1], covers=many[0].covers, mode="PIPELINE", latency_ns=0.0)
    large = replace(report, regions=tuple(many))
    for shown_report, shown in ((report, 8), (large, 10)):
        lines = summary(shown_report, "out").splitlines()
        assert len(lines) <= MAX_LINES
        heads = next(place for place, line in enumerate(lines) if line.startswith("layer "))
        last = next(place for place, line in enumerate(lines) if line.startswith("latency "))
        assert last - heads - 1 == shown
        counts = [int(line.split()[1]) for line in lines[3:heads]]
        assert sum(counts) == len(shown_report.regions)
        assert set(report_table(shown_report, "out").splitlines()) >= {*lines[:2], *lines[last:]}
    assert lines[heads].endswith(f"10 of {len(many) - 1}; --layers shows all")
    layers = re.search(r"^layer .*?^latency", summary(with_conventions, "out"), re.MULTILINE | re.DOTALL)[0]
    assert MIN_LAYERS <= layers.count("\n") - 1 < 8  # speed-ups under conventions take the rest of a screen
    assert lines[heads + 1].startswith(f"{many[0].name} and 1 more  PIPELINE")  # what changes most


def test_notebooks_and_shells_show_a_few_lines(toy):
    directory, compiled = toy
    for result in (compiled, compiled.report, compiled.search_result, pimflow.trace_plan(directory)):
        assert len(repr(result)) < 250 and "toy" in repr(result)
    assert "latency" in compiled._repr_html_() and compiled._repr_html_().startswith("<pre>system")


@pytest.mark.long
def test_results_are_tables_where_pandas_is(toy, monkeypatch, tmp_path):
    directory, compiled = toy
    regions = compiled.report.to_json()["regions"]
    program = next((directory / "programs").glob("*.pimprog"))
    monkeypatch.setitem(sys.modules, "pandas", None)  # as where it is not installed
    with pytest.raises(UsageError, match="pip install pandas"):
        compiled.report.to_pandas()
    monkeypatch.undo()
    pytest.importorskip("pandas")
    assert list(compiled.report.to_pandas()["latency_ns"]) == [item["latency_ns"] for item in regions]
    tasks = pimflow.trace_plan(directory)
    assert list(tasks.to_pandas().columns) == list(tasks.to_json()["tasks"][0])
    rows = pimflow.sweep(["toy"], ["pim_channels=0,16"])
    assert rows.to_pandas().to_dict("records") == rows.to_json()
    search_result, ran, fused = compiled.search_result, pimflow.infer(directory), pimflow.fuse("toy")
    traces = pimflow.trace(directory, tmp_path / "traces", "pimprog")
    choices = search_result.to_json()["plan"]["choices"]
    assert list(search_result.to_pandas()["region"]) == [row["region"] for row in choices]
    assert list(ran.to_pandas()["name"]) == list(ran.names)
    assert list(fused.to_pandas()["dram_bytes"]) == [item["dram_bytes"] for item in fused.to_json()["groups"]]
    assert sum(fused.to_pandas()["dram_bytes"]) == fused.to_json()["dram_bytes"]
    assert list(traces.to_pandas()["cycles"]) == [item["cycles"] for item in traces.to_json()["layers"]]
    for item in (search_result, ran, fused, traces):
        json.dumps(item.to_json(), allow_nan=False)
    simulated = pimflow.simulate(program)
    assert simulated.to_json()["cycles"] == simulated.cycles == max(simulated.to_pandas()["cycles"])


def test_what_stayed_on_the_gpu_says_why(toy):
    for region in toy[1].report.regions:
        assert bool(region.reason) == (region.mode == "GPU"), region


def test_filters_that_pim_computes_with_are_stored_once(toy):
    """As the banks hold them: TVM's loader of constants would hold them again, in fp32."""
    (built,) = toy[1].builds
    queue, kinds = [built.executable.mod], []
    while queue:
        module = queue.pop()
        kinds.append(module.kind)
        queue = [*queue, *module.imports]
    assert "pim" in kinds and "const_loader" not in kinds


def test_artifact_runs_in_a_fresh_process_with_only_pimflow_imported(toy, tmp_path):
    directory, _ = toy
    x = zoo.example_inputs(zoo.load("toy"), seed=3)["input"]
    np.save(tmp_path / "x.npy", x)
    code = (
        "import sys, numpy as np, pimflow\n"
        "y, = pimflow.run(sys.argv[1], np.load(sys.argv[2]))\n"
        "np.save(sys.argv[3], y)"
    )
    arguments = [str(directory), str(tmp_path / "x.npy"), str(tmp_path / "y.npy")]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True)
    session = onnxruntime.InferenceSession(zoo.load("toy").SerializeToString())
    expected = session.run(None, {"input": x})[0]
    assert np.abs(np.load(tmp_path / "y.npy") - expected).max() <= 2e-3 * np.abs(expected).max()


@pytest.mark.long
def test_what_was_compiled_anew_is_what_runs(tmp_path):
    """The system's loader knows the library of a place that was run from before."""
    x = np.float32([[-2, 3]])
    for operator, expected in (("Relu", [[0, 3]]), ("Neg", [[2, -3]])):
        nodes = [helper.make_node(operator, ["x"], ["y"], "n")]
        compile_only(onnx_model(nodes, {"x": x.shape}, {"y": x.shape}), tmp_path / "out")
        (y,) = pimflow.run(tmp_path / "out", x)
        assert y.tolist() == expected


def test_the_timeline_is_in_the_directory(toy):
    directory, compiled = toy
    plan_trace = pimflow.trace_plan(directory)
    assert plan_trace == timeline.PlanTrace.from_search(compiled.search_result)
    row = plan_trace.report()
    assert row.latency_ns == compiled.report.plan.latency_ns
    assert row.tasks["gpu"] >= compiled.report.gpu_part.kernels
    assert row.busy_ns["gpu"] == pytest.approx(compiled.report.gpu_part.modelled_ns)


@pytest.mark.long
def test_same_inputs_same_bytes(toy, tmp_path):
    directory, _ = toy
    compile_only("toy", tmp_path / "again")
    for path in directory.rglob("*"):
        if path.is_dir() or path.name in UNSEALED:  # they hold how long it took
            continue
        assert path.read_bytes() == (tmp_path / "again" / path.relative_to(directory)).read_bytes()


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"region": "pool", "mode": "PIM", "gpu_share": 0.0}, "no product with constant weights"),
        ({"region": "fc", "mode": "SPLIT", "gpu_share": 0.5}, "no rows"),
        ({"region": "down.conv", "mode": "SPLIT", "gpu_share": 0.99}, "1 to 7 of 8 rows"),
        ({"region": "down.conv", "mode": "PIM", "gpu_share": 0.5}, "gpu_share 0"),
        ({"region": "down.conv", "mode": "PIM", "gpu_share": 0.0, "schedule": "sideways"}, "sideways"),
    ],
)
def test_an_illegal_plan_is_refused_by_region(toy, changes, says):
    region = changes["region"]
    with pytest.raises(PlanError, match=says) as caught:
        plan = with_choice(toy[1].plan, **changes)
        pimflow.compile("toy", plan=plan)
    assert region in str(caught.value)


@pytest.mark.long
def test_rows_of_zeros_are_charged_and_lie_in_place():
    """One split layer: a fill more than without, no copy, and at most a row of its input more in the pool."""
    network = frontend.load(network_with_padding())
    by_padding = {}
    for padding in PADDINGS:
        target = system(padding=padding)
        search_result = search(prepare.regions(network, target), target)
        whole_plan = replace(
            search_result.plan,
            choices=tuple(Choice(regions=(region.name,)) for region in search_result.graph.regions),
        )
        split = with_choice(whole_plan, "h.conv", mode="SPLIT", gpu_share=0.5)
        applied = apply(search_result.graph, target, split, search_result.costs)
        built = build.build(network, applied, targets.target_by_name("llvm+pim"))
        by_padding[padding] = applied.evaluation.timeline.events, built
    (before, plain), (after, padded) = by_padding.values()
    fills = {event.label for event in after} - {event.label for event in before}
    assert fills == {"h.conv (rows of zeros)"}
    assert padded.copies == plain.copies
    assert padded.memory.pool_bytes - plain.memory.pool_bytes <= 16 * 16 * 4


@pytest.mark.long
@pytest.mark.parametrize("name", ["fc__values", "fc__stage1"])
def test_a_layer_may_have_a_name_that_ends_as_a_part_does(name):
    weights = np.random.default_rng(0).standard_normal((2048, 512), np.float32) / 32
    node = helper.make_node("Gemm", ["x", "w"], ["y"], name)
    compiled = compile_only(onnx_model([node], {"x": [1, 2048]}, {"y": [1, 512]}, {"w": weights}))
    assert [r.mode for r in compiled.report.regions] == ["PIM"] and compiled.verification.is_verified


@pytest.mark.long
def test_a_wrong_result_is_refused_and_nothing_is_written(tmp_path, monkeypatch):
    def corrupt(function):
        def wrapper(program, weights):
            image = function(program, weights)
            image.table[0, 0] = -1
            return image

        return wrapper

    monkeypatch.setattr("pimflow.pim_backend.runtime.codegen.memory_image", corrupt(api_memory_image()))
    with pytest.raises(VerificationError, match="region '"):
        compile_only("toy", tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.iterdir())


def api_memory_image():
    from pimflow.pim_backend.programs.layout import memory_image

    return memory_image


def test_weights_that_do_not_fit_stay_on_the_gpu_unless_a_plan_has_them(toy):
    base = system()
    small = replace(base, pim=replace(base.pim, rows_per_bank=base.pim.row_base + 2))
    graph = extract_regions(frontend.load("toy").module, "toy")
    search_result = search(graph, small)
    assert sum(candidate.footprint.bank_rows for candidate in search_result.candidates) <= 2
    assert search_result.evaluation.latency_ns > toy[1].report.plan.latency_ns
    plan = replace(toy[1].plan, system=search_result.plan.system, model=search_result.plan.model)
    with pytest.raises(InfeasibleError, match="rows a bank"):
        apply(graph, small, plan)


@pytest.mark.parametrize(
    "inputs",
    [{}, {"imput": np.zeros((1, 3, 16, 16))}, {"input": np.zeros((1, 3, 16))}, {"input": np.array(["a"])}],
)
def test_wrong_inputs_are_refused(toy, inputs):
    with pytest.raises(ArtifactError, match="input"):
        inference.run(toy[0], inputs)


def with_choice(plan: Plan, region: str, **changes) -> Plan:
    """With all tensors where everything can read them."""
    return edited_plan(plan.with_gpu_channels(), region, **changes)


def test_inputs_by_name_may_come_in_any_order(tmp_path):
    node = helper.make_node("Sub", ["a", "b"], ["y"], name="difference")
    model = onnx_model([node], {"a": [1, 4], "b": [1, 4]}, {"y": [1, 4]})
    a, b = np.full((1, 4), 3.0, np.float32), np.ones((1, 4), np.float32)
    compile_only(model, tmp_path / "out", inputs={"b": b, "a": a})
    assert (pimflow.run(tmp_path / "out", {"b": b, "a": a})[0] == 2).all()
    with pytest.raises(ArtifactError, match="missing"):
        compile_only(model, inputs={"a": a})


@pytest.mark.long
def test_cuda_artifacts_hold_both_targets(tmp_path, monkeypatch):
    compiled = compile_only("toy", tmp_path / "out", target="cuda+pim")
    assert [built.target for built in compiled.builds] == ["cuda+pim", "llvm+pim"]
    assert compiled.verification.is_verified
    assert "__global__" in (tmp_path / "out" / "kernels.cu").read_text()
    assert pimflow.run(tmp_path / "out", target="llvm+pim")[0].shape == (1, 10)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("pimflow.pim_backend.runtime.cuda_binary._has_nvrtc", lambda: False)
    network = frontend.load("toy")
    built = build.build(network, compiled.search_result, targets.target_by_name("cuda+pim"))
    assert built.kernels.source and "pimflow[cuda]" in built.kernels.problem and not built.can_run_here


@pytest.mark.long
@pytest.mark.parametrize("compiler", ["nvcc", "nvrtc"])
def test_each_compiler_of_cuda(toy, monkeypatch, compiler):
    monkeypatch.setenv("TVM_CUDA_COMPILE_MODE", compiler)
    if cuda_compiler() != compiler:
        pytest.skip(f"{compiler} is not installed")
    network = frontend.load("toy")
    built = build.build(network, toy[1].search_result, targets.target_by_name("cuda+pim"))
    assert (built.kernels.compiler, built.kernels.problem) == (compiler, "")


@pytest.mark.long
def test_the_stand_in_and_its_kernels_can_be_timed(toy):
    search_result = toy[1].search_result
    network = frontend.load("toy")
    built = build.build(network, search_result, targets.target_by_name("llvm+pim"))
    times = kernel_times(built, network.example_inputs(), number=1, repeat=1)
    launches = sum(e.launched for e in search_result.evaluation.timeline.events if e.resource == "gpu")
    assert sum(time.calls for time in times) == launches == toy[1].report.gpu_part.kernels
    assert all(time.call_ns > 0 for time in times)
    assert toy[1].report.gpu_part.measured_ns is None


@pytest.mark.long
def test_a_tolerance_of_the_user(toy):
    error = toy[1].verification.max_relative_error
    with pytest.raises(VerificationError, match="--tolerance"):
        compile_only("toy", tolerance=error / 2)
    assert compile_only("toy", tolerance=error * 2).report.verification.tolerance == error * 2
    with pytest.raises(UsageError, match="between 0 and 1"):
        compile_only("toy", tolerance=-1.0)


def test_a_boolean_input_runs(tmp_path):
    node = helper.make_node("Where", ["c", "a", "b"], ["y"], "choice")
    model = onnx_model([node], {"c": (TensorProto.BOOL, [4]), "a": [4], "b": [4]}, {"y": [4]})
    compile_only(model, tmp_path / "out")
    a, b = np.ones(4, np.float32), np.zeros(4, np.float32)
    (y,) = pimflow.run(tmp_path / "out", {"c": np.array([True, False, True, False]), "a": a, "b": b})
    assert y.tolist() == [1, 0, 1, 0]
