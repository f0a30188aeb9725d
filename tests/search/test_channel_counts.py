"""Is the number of channels with PIM the best of those that are tried, and is each told as it is?"""

import pytest
from command_line import error_line, run_json
from length import long_but

import pimflow
from pimflow.commands.compile.system_choices import counts
from pimflow.errors import InfeasibleError, UsageError
from pimflow.hardware import system


@pytest.mark.long
@pytest.mark.parametrize("sharing", long_but(["time-shared"], ["partitioned", "time-shared"]))
def test_each_number_is_what_a_search_with_it_finds(sharing):
    base = system(channel_sharing=sharing, pim_channels=2)
    choice = pimflow.choose_channels("toy", base)
    assert [row.pim_channels for row in choice.counts] == counts(base)
    assert (32 in counts(base)) == (sharing == "time-shared")
    fastest = min(choice.counts, key=lambda row: row.latency_ns)
    assert [row for row in choice.counts if row.chosen] == [fastest]
    assert choice.system == system(channel_sharing=sharing, pim_channels=fastest.pim_channels)
    row = choice.counts[-1]
    result = pimflow.search("toy", system(channel_sharing=sharing, pim_channels=row.pim_channels))
    assert (row.latency_ns, row.energy_pj) == (result.evaluation.latency_ns, result.evaluation.energy_pj)
    assert row.speedup == result.baseline.latency_ns / result.evaluation.latency_ns


@pytest.mark.long
def test_the_objective_decides_within_the_bounds():
    frugal = pimflow.choose_channels("toy", objective="energy").counts
    assert min(frugal, key=lambda row: row.energy_pj).chosen
    fastest = min(row.latency_ns for row in pimflow.choose_channels("toy").counts)
    bounded = pimflow.choose_channels("toy", max_latency_ns=fastest).counts
    assert any(row.latency_ns is None for row in bounded)
    assert all(row.latency_ns == fastest for row in bounded if row.chosen)
    with pytest.raises(InfeasibleError, match="latency of 'toy'"):
        pimflow.choose_channels("toy", max_latency_ns=1.0)


@pytest.mark.long
def test_the_command_says_what_each_number_gives(capsys):
    report = run_json(capsys, "compile toy --pim-channels auto --conventions none")
    (chosen,) = (row for row in report["channel_counts"] if row["chosen"])
    assert (chosen["pim_channels"], chosen["latency_ns"]) == (report["pim_channels"], report["latency_ns"])
    assert len(report["channel_counts"]) == len(counts(system()))


def test_what_no_number_can_be_searched_for_is_refused(tmp_path, capsys):
    with pytest.raises(UsageError, match="with --objective memory, give a number"):
        pimflow.choose_channels("toy", objective="memory")
    with pytest.raises(UsageError, match="searches plans, and one is given"):
        pimflow.compile("toy", pim_channels="auto", plan=tmp_path / "plan.json")
    with pytest.raises(UsageError, match="'auto', or None"):
        pimflow.compile("toy", pim_channels=4)
    assert "'some' is neither a number nor auto" in error_line(capsys, 2, "compile toy --pim-channels some")
