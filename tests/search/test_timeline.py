"""Is the timeline that is shown the one that was evaluated?"""

import itertools
import json

import pytest
from command_line import run_json
from length import long_but

import pimflow
from pimflow.commands.compile import timeline
from pimflow.core.candidate import RESOURCES
from pimflow.errors import OutputError, UsageError


@pytest.fixture(scope="module")
def searched():
    return pimflow.search("toy")


@pytest.fixture(scope="module")
def found(searched):
    return timeline.PlanTrace.from_search(searched)


def test_a_trace_has_every_event(searched, found, tmp_path):
    found.write(tmp_path / "t.json")
    read = json.loads((tmp_path / "t.json").read_text())
    events = searched.evaluation.timeline.events
    rows = {(e["pid"], e["tid"]) for e in read["traceEvents"] if e["name"] == "thread_name"}
    assert rows == {(0, row) for row in range(len(RESOURCES))} | {(1, RESOURCES.index("gpu"))}
    for process, line in enumerate((searched.evaluation.timeline, searched.baseline.timeline)):
        tasks = [e for e in _tasks(read) if e["pid"] == process]
        shown = sorted((e["name"], round(e["ts"] * 1e6), round(e["dur"] * 1e6)) for e in tasks)
        assert shown == sorted((e.label, e.start_ps, e.end_ps - e.start_ps) for e in line.events)
    for name in {name for event in events for name in event.regions}:
        assert searched.graph.region(name)


def _tasks(read):
    return [event for event in read["traceEvents"] if event["ph"] == "X"]


def test_figures_are_those_of_the_evaluation(searched, found):
    row, line = found.report(), searched.evaluation.timeline
    assert row.latency_ns == searched.evaluation.latency_ns
    for resource in RESOURCES:
        assert row.busy_ns[resource] == pytest.approx(line.busy_ps(resource) / 1e3)
    instants = sorted({t for e in line.events for t in (e.start_ps, e.end_ps)})
    both_ps = sum(
        b - a
        for a, b in itertools.pairwise(instants)
        if {"gpu", "pim"} <= {e.resource for e in line.events if e.start_ps <= a and b <= e.end_ps}
    )
    assert row.both_devices_ns == pytest.approx(both_ps / 1e3, abs=1e-3)
    assert f"{row.latency_ns / 1e6:.4f} ms" in row.text()


@pytest.mark.parametrize("suffix", long_but(["html"], ["png", "svg", "html"]))
def test_a_picture_is_the_same_every_time(found, tmp_path, suffix):
    if suffix != "html":
        pytest.importorskip("vl_convert")
    paths = [tmp_path / f"{name}.{suffix}" for name in "ab"]
    for path in paths:
        timeline.draw(path, found)
    first, second = (path.read_bytes() for path in paths)
    assert first == second and len(first) > 1000


def test_the_command_writes_what_is_asked_for(searched, tmp_path, capsys):
    files = [str(tmp_path / "t.json"), str(tmp_path / "t.html")]
    printed = run_json(capsys, "timeline toy --perfetto", files[0], "--plot", files[1])
    assert printed["latency_ns"] == pytest.approx(searched.evaluation.latency_ns)
    assert json.loads((tmp_path / "t.json").read_text())["otherData"]["model"] == printed["model"]
    assert "stem.conv" in (tmp_path / "t.html").read_text()


def test_what_cannot_be_written_is_refused(found, tmp_path):
    with pytest.raises(UsageError, match="is written as"):
        timeline.draw(tmp_path / "t.bmp", found)
    with pytest.raises(OutputError, match="cannot be written"):
        found.write(tmp_path / "no" / "t.json")
