"""Does a search keep to layers that are pinned, and does a plan that is applied give its own figures?"""

import json

import pytest
from command_line import error_line, run_json

import pimflow
from pimflow.core.plan import CHOICE_MEANINGS, PLAN_MEANINGS, Plan
from pimflow.core.rewrite import Mode, SplitRewrite
from pimflow.errors import PlanError, UnknownNameError, UsageError

LAYER = "block.expand.conv"


@pytest.mark.parametrize(
    ("how", "mode"), [("gpu", "GPU"), ("pim", "PIM"), ("split", "SPLIT"), ("split:0.4", "SPLIT")]
)
def test_a_pinned_layer_is_done_so_and_the_rest_is_searched(how, mode):
    free, pinned = pimflow.search("toy"), pimflow.search("toy", pins={LAYER: how})
    choice = pinned.plan.choice(LAYER)
    assert choice.mode == mode
    assert pinned.evaluation.latency_ns >= free.evaluation.latency_ns
    if how == "split:0.4":
        extent = pinned.graph.region(LAYER).layer
        split = choice.rewrite.split(extent)
        assert split.gpu == round(0.4 * split.extent(extent))
    unpinned = [name for name in free.candidate_by_region if name != LAYER]
    assert any(pinned.plan.choice(name).uses_pim for name in unpinned) or mode == "GPU"
    if how == "gpu":
        assert choice.reason == "it is pinned to the GPU (--pin)"


def test_a_pinned_search_is_the_best_plan_of_those():
    """Every plan of the same candidates is tried."""
    pins = {LAYER: "pim", "stem.conv": "gpu", "block.depthwise.conv": "gpu", "pool": "gpu", "fc": "pim"}
    partitioned = pimflow.system(channel_sharing="partitioned")
    best, proved = (
        pimflow.search("toy", partitioned, pins=pins, modes="gpu,pim", solver=solver)
        for solver in ("label", "exhaustive")
    )
    assert best.evaluation.latency_ns == pytest.approx(proved.evaluation.latency_ns, rel=1e-12)
    assert best.plan.choice("stem.conv").mode is Mode.GPU and best.plan.choice(LAYER).mode is Mode.PIM


@pytest.mark.long
def test_pinning_what_the_search_found_changes_nothing():
    free = pimflow.search("toy")
    pins = {}
    for choice in free.plan.choices:
        share = choice.rewrite.gpu_share
        is_split = isinstance(choice.rewrite, SplitRewrite)
        pins[choice.region] = f"split:{share}" if is_split else str(choice.mode).lower()
    assert pimflow.search("toy", pins=pins).evaluation.latency_ns == free.evaluation.latency_ns


@pytest.mark.long
@pytest.mark.parametrize(
    ("pins", "error", "message"),
    [
        ({"block.expand.con": "gpu"}, UnknownNameError, "did you mean block.expand.conv"),
        ({LAYER: "tpu"}, UnknownNameError, "pin of layer 'block.expand.conv'"),
        ({LAYER: "pim:0.4"}, UsageError, "write split:SHARE"),
        ({LAYER: "split:1.5"}, UsageError, "write split:SHARE"),
        ({"pool": "pim"}, PlanError, "layer 'pool' cannot be pim: "),
        ({"fc": "split:0.0001"}, PlanError, "layer 'fc' cannot be split:0.0001: "),
    ],
)
def test_what_cannot_be_pinned(pins, error, message):
    with pytest.raises(error, match=message):
        pimflow.search("toy", pins=pins)


@pytest.mark.long
def test_pins_on_the_command_line(capsys, tmp_path):
    cmd = ("compile", "toy", "--conventions", "none", "--pin", f"{LAYER}=split:0.4", "--pin", "stem.conv=gpu")
    report = run_json(capsys, *cmd, "-o", tmp_path / "toy")
    assert report["pins"] == {LAYER: "split:0.4", "stem.conv": "gpu"}
    assert f"--pin {LAYER}=split:0.4" in (tmp_path / "toy" / "report.html").read_text()
    assert "LAYER=gpu" in error_line(capsys, 2, "compile", "toy", "--pin", LAYER)
    assert "--pin has no effect" in error_line(
        capsys, 2, "compile", "toy", "--pin", "fc=gpu", "--plan", tmp_path / "toy" / "plan.json"
    )
    assert "--pin restricts one search" in error_line(
        capsys, 2, "compile", "toy", "--pin", "fc=gpu", "--objective", "memory"
    )


@pytest.mark.long
@pytest.mark.parametrize("modes", ["gpu,pim,split,pipeline", "gpu"])
def test_a_plan_that_is_applied_gives_its_own_figures(modes):
    """To the last digit: of the network, and of every layer."""
    found = pimflow.search("toy", modes=modes)
    applied = pimflow.search("toy", plan=Plan.from_json(found.plan.to_json()))
    assert applied.evaluation == found.evaluation and applied.baseline == found.baseline
    assert applied.plan.latency_ns == found.plan.latency_ns
    assert applied.plan.choices == found.plan.choices


def test_a_plan_file_says_what_its_fields_mean():
    table = json.loads(pimflow.search("toy").plan.to_json())
    meanings = table.pop("meanings")
    assert meanings == {"plan": PLAN_MEANINGS, "choice": CHOICE_MEANINGS}
    assert table.keys() <= meanings["plan"].keys()
    assert {key for choice in table["choices"] for key in choice} <= meanings["choice"].keys()
