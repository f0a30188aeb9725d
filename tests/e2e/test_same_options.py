"""Do all commands that search take the same options, and mean the same by them?"""

import json
import re

import pytest

import pimflow
from pimflow import system
from pimflow.commands import parser
from pimflow.commands.main import main
from pimflow.commands.profile.profile import profile
from pimflow.commands.sweep.sweep import sweep
from pimflow.errors import UnknownNameError, UsageError
from pimflow.host.result_cache import ResultCache
from pimflow.placement import Profiling

NETWORK = {"--shape", "--batch", "--context", "--state", "--fuse", "--reorder", "--decompose"}
NETWORK |= {"--optimize-skips", "--skip-criterion", "--fuse-activations"}
GOAL = {"--objective", "--solver", "--search-seconds", "--modes", "--memory-budget"}
GOAL |= {"--max-latency", "--max-energy", "--max-error"}
LINES = {"compile": ["compile", "toy"], "timeline": ["timeline", "toy"]}
LINES |= {"sweep": ["sweep", "toy", "--set", "pim_channels=16"]}
CHAINS = {"decompose": "tucker:0.25", "modes": "gpu,pim"}
OPTIONS = ["--decompose", "tucker:0.25", "--modes", "gpu,pim", "--quiet", "--json"]


@pytest.mark.parametrize("name", LINES)
def test_a_command_that_searches_has_all_options(name):
    assert set(parser.parse(LINES[name]).parser.flags) >= NETWORK | GOAL


def test_a_command_that_profiles_has_those_of_the_network():
    assert set(parser.parse(["profile", "toy"]).parser.flags) >= NETWORK


@pytest.fixture(scope="module")
def searched():
    return pimflow.search("toy", **CHAINS)


@pytest.mark.long
def test_a_sweep_searches_decomposed_networks(searched):
    (row,) = sweep(["toy"], ["pim_channels=16"], system(), **CHAINS)
    assert row.figures.latency_ns == searched.evaluation.latency_ns
    assert row.figures.regions == len(searched.plan.choices)
    baseline = pimflow.search("toy").gpu_only
    assert row.figures.latency_gpu_only_ns == baseline.latency_ns
    assert row.figures.speedup == baseline.latency_ns / searched.evaluation.latency_ns
    assert row.figures.latency_mixture_gpu_only_ns == searched.gpu_only.latency_ns != baseline.latency_ns


def test_a_sweep_has_a_goal(capsys):
    line = [*LINES["sweep"], "--quiet", "--json", "--objective", "energy", "--max-latency", "1ns"]
    assert main(line) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert "try --max-latency" in row["error"]


def test_a_timeline_of_a_decomposed_network(searched, capsys):
    assert main(["timeline", "toy", *OPTIONS]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["latency_ns"] == searched.evaluation.latency_ns
    assert row["latency_gpu_only_ns"] == searched.baseline.latency_ns
    assert row["latency_mixture_gpu_only_ns"] == searched.mixture.latency_ns


def test_an_explanation_has_both_baselines(searched, capsys):
    assert main(["compile", "toy", *OPTIONS, "--explain", "fc"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["latency_ns"] == searched.evaluation.latency_ns
    assert row["baselines"]["given"]["latency_ns"] == searched.baseline.latency_ns
    assert row["baselines"]["mixture"]["energy_pj"] == searched.mixture.energy_pj


@pytest.mark.long
def test_all_that_a_search_of_a_decomposed_network_needs_is_timed_before(tmp_path):
    profiling = Profiling(cache=ResultCache(tmp_path / "cache.sqlite"))
    options = {"decompose": "tucker:0.25", "fuse": True}
    first = profile(["toy"], system(), profiling, **options)
    assert first.layers.computed and first.kernels.computed
    second = profile(["toy"], system(), profiling, **options)
    assert not second.layers.computed and second.layers.kept
    assert first.models[0].regions > profile(["toy"], system(), profiling).models[0].regions


@pytest.mark.long
def test_primitives_of_a_decomposed_network():
    selection = pimflow.select("toy", device="cuda", decompose="tucker:0.25", reorder=True)
    names = {region.name for region in selection.problem.graph.regions}
    assert any(name.endswith(".fconv") for name in names)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"fuse": True}, UsageError, "fuse has no effect: primitives are selected layer by layer"),
        ({"decompose": "tucker:0.5,where=pays"}, UsageError, "where=pays is what a search chooses"),
        ({"reordr": True}, UnknownNameError, "did you mean reorder"),
    ],
)
def test_what_a_selection_does_without_is_refused(options, error, says):
    with pytest.raises(error, match=says):
        pimflow.select("toy", device="cuda", **options)


@pytest.mark.long
def test_a_budget_bounds_the_plan_alone(capsys):
    line = ["compile", "toy", "--fuse", "--explain", "fc", "--json", "--quiet", "--memory-budget"]
    latencies_ns = []
    for budget in ("1GiB", "60000B"):
        assert main([*line, budget]) == 0
        latencies_ns.append(json.loads(capsys.readouterr().out)["latency_ns"])
    assert latencies_ns[0] < latencies_ns[1]
    capsys.readouterr()
    assert main([*line, "1KiB"]) == 4
    suggestion = re.search(r"try (--memory-budget) (\S+)", capsys.readouterr().err)
    assert main([*line[:-1], *suggestion.groups()]) == 0
