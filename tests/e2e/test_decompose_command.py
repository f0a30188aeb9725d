"""Do ``--decompose`` and what it asks for reach the result, the report and the errors?"""

import json
from dataclasses import replace

import numpy as np
import pytest
from command_line import error_line

import pimflow
from pimflow import frontend
from pimflow.commands.main import main
from pimflow.commands.shared import report_text
from pimflow.decomposition import network as decomposed_network
from pimflow.decomposition.request import DecompositionRequest
from pimflow.errors import UsageError
from pimflow.hardware import system
from pimflow.placement import Goal
from pimflow.placement import search as search_graph

LAYERS = ["stem.conv", "block.expand.conv", "block.project.conv", "widen.conv", "down.conv"]


@pytest.fixture(scope="module")
def compiled():
    return pimflow.compile("toy", decompose="tucker:0.5,first=keep", conventions="none")


@pytest.mark.long
def test_the_report_says_that_numbers_changed_and_how_far(compiled):
    part = compiled.report.extras.decomposition
    assert part.request == "tucker:0.5,first=keep"
    assert [layer.name for layer in part.layers] == LAYERS[1:]
    assert all(0 < layer.reconstruction_error < 1 for layer in part.layers)
    assert all(layer.macs < layer.macs_original for layer in part.layers)
    # Filters that are nearly all lost give other outputs: were they equal, nothing was compared.
    assert part.max_relative_difference > 0.01
    assert part.weight_bytes < part.weight_bytes_original


def test_what_is_built_is_the_decomposed_network(compiled):
    assert compiled.verification.is_verified
    names = [region.name for region in compiled.report.regions]
    assert "stem.conv" in names and "down.conv.core" in names and "down.conv" not in names
    assert {region.role for region in compiled.search_result.graph.regions} == {"", "fconv", "core", "lconv"}


@pytest.mark.long
def test_the_difference_is_that_of_the_two_references(compiled):
    network = frontend.load("toy")
    change = decomposed_network.decompose(network, DecompositionRequest.parse("tucker:0.5,first=keep"))
    inputs = network.example_inputs()
    (x,), (y,) = network.reference(inputs), change.network.reference(inputs)
    expected = np.abs(x - y).max() / np.abs(x).max()
    assert compiled.report.extras.decomposition.max_relative_difference == pytest.approx(expected, rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(("where", "fuse"), [("all", False), ("pays", True)])
def test_the_baseline_is_the_network_that_was_given(where, fuse):
    """In every figure; on short launches, so that some layers pay as chains."""
    short_launches = system().with_launches(gpu_ns=300.0, pim_ns=100.0)
    request, modes = f"tucker:0.5,where={where}", "gpu,pim"
    conventions = ["no-launches", "copies=made"] if where == "all" else ["no-launches"]
    options = {"decompose": request, "modes": modes, "fuse": fuse, "conventions": conventions}
    compiled = pimflow.compile("toy", system=short_launches, **options)
    report, result = compiled.report, compiled.search_result
    assert report.extras.decomposition.layers

    def gpu_baseline(target_system):
        return pimflow.search("toy", target_system, modes=modes, fuse=fuse).gpu_only

    baseline = gpu_baseline(short_launches)
    assert report.plan.baseline == "the network as it was given, on the GPU with all memory channels"
    assert report.plan.latency_gpu_only_ns == baseline.latency_ns
    assert report.energy.energy_gpu_only_pj == pytest.approx(baseline.energy_pj)
    assert report.energy.energies_gpu_only_pj == pytest.approx(baseline.energies_pj)
    assert report.energy.savings_pj["total"] == pytest.approx(baseline.energy_pj - report.energy.energy_pj)
    assert report.plan.speedup == pytest.approx(baseline.latency_ns / report.plan.latency_ns)
    assert sum(region.latency_gpu_only_ns for region in report.regions) == pytest.approx(baseline.latency_ns)
    assert result.baseline == baseline != result.gpu_only
    assert report.plan.mixture_gpu_only.latency_ns == result.mixture.latency_ns
    assert report.plan.mixture_gpu_only.energy_pj == result.mixture.energy_pj
    if where == "all":
        assert result.mixture == result.gpu_only
    else:
        assert result.mixture.latency_ns <= min(baseline.latency_ns, result.gpu_only.latency_ns) * (1 + 1e-9)
    assert "baseline  the network as it was given" in report_text.table(report, None)

    none = short_launches.with_launches(gpu_ns=0.0, pim_ns=0.0)
    plan = search_graph(result.graph, none, goal=Goal(modes=modes))
    ratio = gpu_baseline(none).latency_ns / plan.evaluation.latency_ns
    ratios = {convention.name: convention.searched_again for convention in report.conventions.searched}
    assert ratios["no-launches"] == pytest.approx(ratio)
    if where == "all":
        copying = replace(short_launches, copies="made")
        plan = pimflow.search("toy", copying, decompose=request, modes=modes, fuse=fuse).evaluation
        assert ratios["copies=made"] == pytest.approx(gpu_baseline(copying).latency_ns / plan.latency_ns)


@pytest.mark.long
@pytest.mark.parametrize("options", [{"optimize_skips": "pool"}, {"fuse_activations": True}])
def test_what_works_on_chains_changes_no_baseline(options):
    search_result = pimflow.search("toy", decompose="tucker:0.5", modes="gpu", **options)
    assert search_result.baseline == pimflow.search("toy", modes="gpu").gpu_only
    assert search_result.gpu_only != search_result.baseline
    reasons = {choice.reason for choice in search_result.plan.choices}
    assert any("no mixed plan of the changed network beats" in reason for reason in reasons)


@pytest.mark.long
def test_nothing_is_decomposed_where_nothing_pays():
    """On ordinary launches, three kernels in place of one cost more; what works on chains has none."""
    options = {"optimize_skips": "pool", "fuse_activations": True, "modes": "gpu"}
    compiled = pimflow.compile("toy", decompose="tucker:0.9,where=pays", conventions="none", **options)
    part = compiled.report.extras.decomposition
    assert part.layers == () and list(part.kept) == LAYERS
    assert part.max_relative_difference == 0 and part.weight_bytes == part.weight_bytes_original
    report = compiled.report
    assert report.extras.skips is None
    assert report.plan.mixture_gpu_only.latency_ns == report.plan.latency_gpu_only_ns
    assert "0 layers decomposed (tucker:0.9,where=pays), 5 kept" in report_text.table(compiled.report, None)


@pytest.mark.long
def test_a_layer_of_a_chain_can_be_explained(capsys):
    options = ["--decompose", "tucker:0.5", "--cache", "none", "--quiet", "--json"]
    assert main(["compile", "toy", "--explain", "down.conv.core", *options]) == 0
    explanation = json.loads(capsys.readouterr().out)
    assert explanation["region"] == "down.conv.core" and explanation["candidates"]


def test_memory_of_a_decomposed_network(capsys, tmp_path):
    path = tmp_path / "ranks.toml"
    path.write_text('"down.conv" = [3, 4]\n"widen.conv" = 2\n')
    assert main(["memory", "toy", "--json", "--policy", "best", "--decompose", f"tucker:{path}"]) == 0
    out, _ = capsys.readouterr()
    part = json.loads(out)["decomposition"]
    assert {r["name"]: r["ranks"] for r in part["layers"]} == {"down.conv": [3, 4], "widen.conv": [2]}
    assert part["max_relative_difference"] is None  # nothing was run
    assert main(["memory", "toy", "--quiet", "--policy", "best", "--decompose", "cp:0.5"]) == 0
    assert "5 layers decomposed (cp:0.5), weights" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["compile", "toy", "--decompose", "tuker:0.1"], 2, "unknown decomposition 'tuker'; did you mean"),
        (["compile", "nothing", "--decompose", "tucker:2"], 2, "rank '2': 2 is not in (0, 1]"),
        (["memory", "toy", "--decompose", "tucker:"], 2, "no rank; give for example tucker:0.1"),
        (["memory", "toy", "--decompose", "tucker:0.1,where=pays"], 2, "is what a search chooses"),
        (["compile", "toy", "--decompose", "tucker:0.1,where=x"], 2, "give where once, as one of all, pays"),
        (["memory", "toy", "--decompose", "tucker:no.toml"], 3, "no.toml: cannot be read"),
        (["memory", "buffers.csv", "--decompose", "tucker:0.1"], 2, "a table of buffers, not a network"),
    ],
)
def test_bad_input(arguments, code, message, capsys):
    assert message in error_line(capsys, code, *arguments, "--quiet")


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"down.cnov" = [1, 1]', "ranks.toml: no layer 'down.cnov' to decompose; did you mean down.conv"),
        ('"block.depthwise.conv" = 1', "no layer 'block.depthwise.conv' to decompose; did you mean"),
        ('"widen.conv" = 2000', "ranks.toml: rank 2000 of layer 'widen.conv': its ranks are 1 to"),
        ('"down.conv" = 2', "layer 'down.conv' takes 2 ranks, not 1"),
    ],
)
def test_a_file_that_does_not_fit_the_network(text, message, capsys, tmp_path):
    (tmp_path / "ranks.toml").write_text(text)
    assert message in error_line(capsys, 3, "memory toy --quiet --decompose", f"tucker:{tmp_path}/ranks.toml")


def test_nothing_to_decompose():
    network = frontend.load("toy")
    with pytest.raises(UsageError, match=r"'toy': nothing to decompose.* 1 fully connected"):
        depthwise = decomposed_network.decompose(network, DecompositionRequest.parse("tucker:0.5")).network
        decomposed_network.decompose(depthwise, DecompositionRequest.parse("tucker:0.5"))
