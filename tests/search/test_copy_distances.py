"""Is the distance of copies the fastest within the bound, and is each that is tried told as it is?"""

import pytest
from command_line import error_line, run_json

import pimflow
from pimflow.commands.compile import system_choices
from pimflow.errors import InfeasibleError, UsageError
from pimflow.hardware import system

STREAMED = system(weights="streamed")


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(system_choices, "DISTANCES", (0, 4))
    return {"modes": "gpu"}


def test_the_fastest_is_chosen():
    choice = pimflow.choose_copy_ahead("toy", STREAMED, modes="gpu")
    rows = choice.distances
    assert [row.copy_ahead for row in rows] == list(system_choices.DISTANCES)
    latencies, pools = [row.latency_ns for row in rows], [row.pool_bytes for row in rows]
    assert latencies == sorted(latencies, reverse=True) and pools == sorted(pools)
    (chosen,) = (row for row in rows if row.chosen)
    assert chosen == rows[latencies.index(min(latencies))]
    assert choice.system == system(weights="streamed", copy_ahead=chosen.copy_ahead)


@pytest.mark.long
def test_no_pool_is_above_the_bound(few):
    least_bytes = pimflow.choose_copy_ahead("toy", STREAMED, **few).distances[0].pool_bytes
    near, far = pimflow.choose_copy_ahead("toy", STREAMED, max_memory_bytes=least_bytes, **few).distances
    assert near.chosen and near.pool_bytes == least_bytes and not far.chosen
    assert far.pool_bytes is None or far.latency_ns > near.latency_ns
    with pytest.raises(InfeasibleError, match="memory of 'toy'"):
        pimflow.choose_copy_ahead("toy", STREAMED, max_memory_bytes=1000, **few)


def test_what_is_compiled_has_the_chosen_distance_and_its_pool(few, capsys):
    report = run_json(
        capsys, "compile toy --modes gpu --weights streamed --copy-ahead auto --conventions none"
    )
    (chosen,) = (row for row in report["copy_distances"] if row["chosen"])
    assert chosen["copy_ahead"] == report["copy_ahead"] == report["streaming"]["copy_ahead"]
    assert chosen["latency_ns"] == report["streaming"]["plan"]["latency_ns"]
    assert chosen["pool_bytes"] == report["memory"]["pool_bytes"]


def test_refused(capsys, tmp_path):
    with pytest.raises(UsageError, match="give --weights streamed"):
        pimflow.choose_copy_ahead("toy")
    with pytest.raises(UsageError, match="with --objective energy, give a number"):
        pimflow.choose_copy_ahead("toy", STREAMED, objective="energy")
    with pytest.raises(UsageError, match="searches plans, and one is given"):
        pimflow.compile("toy", system=STREAMED, copy_ahead="auto", plan=tmp_path / "plan.json")
    assert "'far' is neither a number nor auto" in error_line(capsys, 2, "compile toy --copy-ahead far")
