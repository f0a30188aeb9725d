"""Is the distance of copies the fastest within the bound, and is each that is tried told as it is?"""

import pytest
from command_line import error_line, run_json

import pimflow
from pimflow.commands.compile.copy_distances import DISTANCES
from pimflow.errors import InfeasibleError, UsageError
from pimflow.hardware import system

STREAMED = system(weights="streamed")


def test_the_fastest_within_the_bound_is_chosen():
    choice = pimflow.choose_copy_ahead("toy", STREAMED)
    rows = choice.distances
    assert [row.copy_ahead for row in rows] == list(DISTANCES)
    latencies, pools = [row.latency_ns for row in rows], [row.pool_bytes for row in rows]
    assert latencies == sorted(latencies, reverse=True) and pools == sorted(pools)
    (chosen,) = (row for row in rows if row.chosen)
    assert chosen == rows[latencies.index(min(latencies))]
    assert choice.system == system(weights="streamed", copy_ahead=chosen.copy_ahead)
    bound = pools[1]
    bounded = pimflow.choose_copy_ahead("toy", STREAMED, max_memory_bytes=bound)
    within = [row for row in bounded.distances if row.pool_bytes is not None]
    assert all(row.pool_bytes <= bound for row in within)
    (chosen,) = (row for row in within if row.chosen)
    assert chosen.latency_ns == min(row.latency_ns for row in within)
    with pytest.raises(InfeasibleError, match="memory of 'toy'"):
        pimflow.choose_copy_ahead("toy", STREAMED, max_memory_bytes=1000)


def test_what_is_compiled_has_the_chosen_distance_and_its_pool(capsys):
    report = run_json(capsys, "compile toy --weights streamed --copy-ahead auto --conventions none")
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
