"""Does --reorder give the same network in less memory, and say what it costs?"""

from dataclasses import replace

import onnx
import pytest
from branching import wide_branches
from command_line import error_line, run_json

import pimflow
from pimflow.commands.main import main
from pimflow.commands.shared.report_text import table
from pimflow.errors import PlanError, UsageError
from pimflow.hardware import system
from pimflow.hardware.reader import SPECS

MAP_BYTES = 16 * 16 * 2  # of one channel, in fp16
# Orders are of memory; where many branches share channels a search takes long.
SYSTEM = system(channel_sharing="partitioned")


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    directory = tmp_path_factory.mktemp("wide")
    onnx.save(wide_branches(), directory / "wide.onnx")
    compiled = pimflow.compile(
        directory / "wide.onnx", directory / "out", reorder=True, system=SYSTEM, conventions="none"
    )
    return (directory, compiled, pimflow.compile(directory / "wide.onnx", system=SYSTEM, conventions="none"))


@pytest.mark.long
def test_one_branch_at_a_time(wide):
    """Given: four wide maps and the stem's; then one of them, the stem's and three narrow ones."""
    _, compiled, plain = wide
    order = compiled.report.extras.order
    assert compiled.verification.is_verified and order.reordered and order.optimal
    assert order.live_given_bytes == (4 * 128 + 16) * MAP_BYTES
    assert order.live_bytes == order.lower_bound_bytes == (128 + 16 + 3 * 16) * MAP_BYTES
    # The CPU stores fp32.
    assert order.pool_given_bytes == plain.report.memory.pool.pool_bytes == 2 * order.live_given_bytes
    assert order.pool_bytes == compiled.report.memory.pool.pool_bytes == 2 * order.live_bytes
    assert "0.270 → 0.098 MB" in table(compiled.report, None)


def test_the_layers_stay_the_same_and_both_latencies_are_said(wide):
    _, compiled, plain = wide
    order = compiled.report.extras.order
    assert order.latency_given_ns == plain.report.plan.latency_ns
    assert order.latency_ns == compiled.report.plan.latency_ns
    assert plain.report.extras.order is None
    named = {region.name: region for region in plain.search_result.graph.regions}
    assert named == {region.name: region for region in compiled.search_result.graph.regions}
    assert compiled.search_result.graph.digest != plain.search_result.graph.digest


@pytest.mark.long
def test_a_plan_says_its_order(wide):
    directory, compiled, plain = wide
    recompiled = pimflow.compile(
        directory / "wide.onnx",
        plan=directory / "out" / "plan.json",
        reorder=True,
        system=SYSTEM,
        conventions="none",
    )
    assert recompiled.plan.choices == compiled.plan.choices and recompiled.verification.is_verified
    keys = ("live_bytes", "lower_bound_bytes", "optimal", "pool_given_bytes", "pool_bytes", "latency_ns")
    assert [getattr(recompiled.report.extras.order, key) for key in keys] == [
        getattr(compiled.report.extras.order, key) for key in keys
    ]
    with pytest.raises(PlanError, match="--reorder"):
        pimflow.search(directory / "wide.onnx", plan=compiled.plan, system=SYSTEM)
    backwards = replace(compiled.plan, choices=compiled.plan.choices[::-1])
    with pytest.raises(UsageError, match="would come before"):
        pimflow.search(directory / "wide.onnx", plan=backwards, reorder=True, system=SYSTEM)
    search_result = pimflow.search(directory / "wide.onnx", plan=plain.plan, reorder=True, system=SYSTEM)
    assert search_result.graph == plain.search_result.graph


@pytest.mark.long
def test_memory_command(wide, capsys):
    directory, compiled, plain = wide
    system_text = (SPECS / "system/pimflow.toml").read_text(encoding="utf-8")
    (directory / "own.toml").write_text(f'channel_sharing = "{SYSTEM.channel_sharing}"\n{system_text}')
    system_options = ("--system", str(directory / "own.toml"))
    command = ["memory", str(directory / "wide.onnx"), "--quiet", "--reorder", *system_options]
    report = run_json(capsys, *command)
    compiled_order = compiled.report.extras.order
    assert {k: v for k, v in report["order"].items() if k != "seconds"} == {
        k: getattr(compiled_order, k) for k in report["order"] if k != "seconds"
    }
    assert report["pool_bytes"] == report["order"]["pool_bytes"] < plain.report.memory.pool.pool_bytes
    assert main(command) == 0
    assert "proved the fewest" in capsys.readouterr().out
    assert main(["memory", "toy", "--quiet", "--reorder"]) == 0
    assert "as given: no order has fewer bytes live" in capsys.readouterr().out


def test_a_table_has_no_order(tmp_path, capsys):
    (tmp_path / "t.csv").write_text("id,lower,upper,size\na,0,1,4\n")
    assert "--reorder" in error_line(capsys, 2, "memory", tmp_path / "t.csv", "--reorder")


@pytest.mark.long
def test_the_order_of_a_plan_with_a_fused_run_is_taken():
    options = {"decompose": "tucker:0.25", "fuse_activations": True, "reorder": True}
    search_result = pimflow.search(wide_branches(), system=SYSTEM, **options)
    run = search_result.graph.runs[0]
    assert run in [choice.regions for choice in search_result.plan.choices]
    replanned = pimflow.search(wide_branches(), plan=search_result.plan, system=SYSTEM, **options)
    assert replanned.graph == search_result.graph and run in replanned.group_tilings()
