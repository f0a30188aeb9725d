"""Does ``pimflow memory`` print, write and draw what the planner found, and exit with the right code?"""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import error_line, run_json
from onnx import helper
from onnx_models import onnx_model

from pimflow import memory
from pimflow.commands.main import main
from pimflow.memory import csv_form, validator

DATA = Path(__file__).parent / "data"
TABLE = str(DATA / "input.12.csv")
LARGE = str(DATA / "A.1048576.csv")


def test_json_has_the_keys_and_the_plan_is_legal(capsys, tmp_path):
    path = tmp_path / "plan.csv"
    assert main(["memory", TABLE, "--json", "--quiet", "-o", str(path)]) == 0
    out, err = capsys.readouterr()
    row = json.loads(out)
    assert err == ""
    assert (row["pool_bytes"], row["lower_bound_bytes"], row["optimal"]) == (12, 12, True)
    assert row["seconds"] >= 0
    assert set(row["policies"]) == {*memory.POLICIES, "best", "exact"}
    offsets = {buffer["id"]: buffer["offset"] for buffer in row["allocations"]}
    lifetimes = csv_form.read(TABLE)
    assert {buffer["id"]: buffer["bytes"] for buffer in row["allocations"]} == {
        life.name: life.size_bytes for life in lifetimes
    }
    validator.check(lifetimes, offsets, {csv_form.DEFAULT_MEMORY: 12})
    assert {life.name: life.offset_bytes for life in csv_form.read(path)} == offsets


def test_a_plan_that_was_written_is_planned_as_it_is(capsys, tmp_path):
    path = tmp_path / "plan.csv"
    table = str(DATA / "F.1048576.csv")
    rows = []
    for arguments in ([table, "--policy", "bigger-first", "-o", str(path)], [str(path)]):
        rows.append(run_json(capsys, "memory", *arguments))
    assert rows[0]["allocations"] == rows[1]["allocations"]
    assert not rows[0]["optimal"] and rows[1]["optimal"]  # no offset is free any more


def test_policies_stand_side_by_side(capsys):
    assert main(["memory", str(DATA / "A.1048576.csv"), "--policy", "best"]) == 0
    out, err = capsys.readouterr()
    expected = memory.policy_bytes(csv_form.read(DATA / "A.1048576.csv"))
    for policy, size_bytes in expected.items():
        assert f"  {policy:<12} {size_bytes:>14} B" in out
    assert f"  {'best':<12} {min(expected.values()):>14} B" in out
    assert "lower bound 1048576 B" in out and "planning 154 buffers" in err


def test_alignment(capsys):
    row = run_json(capsys, "memory", TABLE, "--alignment", "64")
    assert row["pool_bytes"] == 64 + 64 + 4
    assert all(buffer["offset"] % 64 == 0 for buffer in row["allocations"])


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            [TABLE, "--capacity", "11"],
            4,
            "lower bound 12 B, 1 B above the capacity): needs 12 B, 11 B available",
        ),
        ([LARGE, "--capacity", "1048575"], 4, "needs 1048576 B, 1048575 B available"),
        ([LARGE, "--capacity", "1048576", "--policy", "best"], 4, "try --policy exact or"),
        ([TABLE, "--policy", "exakt"], 2, "unknown policy 'exakt'; did you mean exact"),
        ([TABLE, "--alignment", "0"], 2, "--alignment 0"),
        ([TABLE, "--capacity", "-1"], 2, "--capacity -1"),
        ([TABLE, "--time-limit", "0"], 2, "--time-limit 0"),
        ([TABLE, "--time-limit", "nan"], 2, "--time-limit nan"),
        (["nothing.csv"], 3, "nothing.csv: cannot be read"),
        ([TABLE, "-o", "no/such/folder.csv"], 3, "cannot be written"),
        ([TABLE, "--plot", "plot.gif"], 2, ".png, .svg, .html"),
    ],
)
def test_errors_are_one_line_and_a_code(arguments, code, message, capsys):
    if "--plot" in arguments:
        pytest.importorskip("vl_convert")
    assert message in error_line(capsys, code, "memory", *arguments, "--quiet")


@pytest.mark.long
@pytest.mark.parametrize("suffix", [".png", ".svg", ".html"])
def test_plots(tmp_path, suffix, capsys):
    if suffix != ".html":
        pytest.importorskip("vl_convert")
    paths = [tmp_path / f"{name}{suffix}" for name in "ab"]
    for path in paths:
        assert main(["memory", TABLE, "--quiet", "--plot", str(path)]) == 0
    first, second = (path.read_bytes() for path in paths)
    assert first == second
    starts = {".png": b"\x89PNG", ".svg": b"<svg", ".html": b"<!doctype html>"}
    assert first.startswith(starts[suffix])
    assert sorted(tmp_path.iterdir()) == paths


def test_a_plot_shows_every_buffer_where_it_lies(tmp_path):
    from pimflow.memory import plot

    lifetimes = csv_form.read(TABLE)
    plan = memory.plan(lifetimes)
    plot.write(tmp_path / "a.html", lifetimes, plan)
    chart = plot.figure(lifetimes, plan, "memory")
    drawn = {r["name"]: (r["begin"], r["end"], r["low"], r["high"]) for r in chart["data"]["values"]}
    assert drawn.keys() == {life.name for life in lifetimes}
    for life in lifetimes:
        low = plan.offsets_bytes[life.name]
        corners = (life.begin, life.end, low / 1e6, (low + life.size_bytes) / 1e6)
        assert drawn[life.name] == pytest.approx(corners)


def test_a_part_is_an_outline_in_what_it_is_part_of():
    from pimflow.memory.plot import pool_view

    placed = [("0:whole", 0, 4, 0, 100), ("1:part", 1, 3, 40, 60)]
    placed += [("2:other", 4, 5, 0, 100), ("3:none", 0, 1, 0, 0)]
    rows = {row["name"]: row for row in pool_view(placed, 100, 100)["data"]["values"]}
    assert rows.keys() == {"0:whole", "1:part", "2:other"}
    assert [rows[name]["label"] for name in rows] == ["whole", "other", ""]
    assert rows["1:part"]["opacity"] == 0.0 < rows["0:whole"]["opacity"]


# ---- networks ----


def network(capsys, *options):
    return run_json(capsys, "memory toy", *options)


@pytest.mark.long
def test_a_network(capsys):
    row = network(capsys)
    assert row["optimal"] and row["pool_bytes"] == row["lower_bound_bytes"] == row["policies"]["exact"]
    assert row["pool_bytes"] <= row["lazy_peak_bytes"] < row["tvm_pool_bytes"] < row["eager_bytes"]
    assert row["best_policy"] in row["policies"]
    assert row["policies"]["best"] == row["policies"][row["best_policy"]]
    assert max(buffer["offset"] + buffer["bytes"] for buffer in row["allocations"]) == row["pool_bytes"]
    assert row["eager_allocations"] == len(row["allocations"]) == 8 and row["lazy_groups"] == 8


@pytest.mark.long
def test_batches_of_a_network(capsys):
    """Twice the inferences, twice the bytes: weights lie elsewhere."""
    single, double = network(capsys), network(capsys, "--batch", "2")
    assert double["eager_bytes"] == 2 * single["eager_bytes"]
    assert double["lazy_peak_bytes"] == 2 * single["lazy_peak_bytes"]


@pytest.mark.long
def test_half_the_bytes_on_a_gpu(capsys):
    """All but the network's result, which keeps its type."""
    cpu, gpu = network(capsys), network(capsys, "--target", "cuda+pim")
    assert gpu["eager_bytes"] == (cpu["eager_bytes"] - 40) / 2 + 40


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["mobilenet-v3"], 2, "mobilenet-v2"),
        (["toy", "--batch", "0"], 2, "--batch 0: give 1 or more"),
        (["toy", "--weights", "cached"], 2, "resident, streamed"),
        (["toy", "--target", "cuda"], 2, "cuda+pim"),
        (["toy", "--capacity", "1000"], 4, "lower bound 147456 B"),
        (["toy", "--shape", "inputs=1,3,16,16"], 2, "did you mean input"),
    ],
)
def test_networks_that_cannot_be_planned(options, code, says, capsys):
    assert says in error_line(capsys, code, "memory", *options, "--quiet")


def test_a_batch_that_the_graph_does_not_take(tmp_path, capsys):
    """Its result has one shape whatever comes in."""
    node = helper.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=1)
    model = onnx_model([node], {"x": (1, 4)}, {"y": (1, 4)}, {"axes": np.array([0])})
    onnx.save(model, tmp_path / "sum.onnx")
    assert "has a fixed batch" in error_line(
        capsys, 3, "memory", tmp_path / "sum.onnx", "--batch", "2", "--quiet"
    )
