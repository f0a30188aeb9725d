"""Does a sweep search every combination once, and tell which points are worth having?"""

import csv
import itertools
import json

import onnx
import pytest
from command_line import error_line
from drawn_networks import Graph
from hypothesis import given
from hypothesis import strategies as st

import pimflow
from pimflow import placement, system
from pimflow.commands.main import main
from pimflow.commands.sweep.sweep import SweepFigures, SweepRow, sweep, with_pareto
from pimflow.core.options import field_names
from pimflow.errors import InfeasibleError, UnknownNameError, UsageError
from pimflow.hardware.settings import Setting
from pimflow.host.result_cache import ResultCache
from pimflow.placement import Profiling


def settings(*texts: str) -> list[Setting]:
    return [Setting.parse(text) for text in texts]


@pytest.fixture
def profiling(tmp_path):
    return Profiling(cache=ResultCache(tmp_path / "cache.sqlite"))


@pytest.mark.parametrize(
    ("text", "owner", "field", "key", "values"),
    [
        ("pim_channels=0,4,…,16", "system", "pim_channels", "", (0, 4, 8, 12, 16)),
        ("pim_channels=16,12,...,0,2", "system", "pim_channels", "", (16, 12, 8, 4, 0, 2)),
        ("global_buffers=1,2", "pim", "global_buffers", "", (1, 2)),
        ("pim.timing.nRAS=20,30", "pim", "timing", "nRAS", (20, 30)),
        ("timing=strict,ramulator-pimflow", "system", "timing", "", ("strict", "ramulator-pimflow")),
        ("launch_ns=0,2500.5", "gpu", "launch_ns", "", (0.0, 2500.5)),
        ("pim=newton-gddr6,aim-gddr6", "system", "pim", "", ("newton-gddr6", "aim-gddr6")),
    ],
)
def test_what_is_set(text, owner, field, key, values):
    setting = Setting.parse(text)
    assert (setting.owner, setting.field, setting.key, setting.values) == (owner, field, key, values)


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("pim_channels", UsageError, "NAME=VALUE"),
        ("pim_channels=", UsageError, "NAME=VALUE"),
        ("pim_channel=4", UnknownNameError, "did you mean pim_channels"),
        ("pim_channels=4,4", UsageError, "twice"),
        ("pim_channels=x", UsageError, "'x' is no whole number"),
        ("pim.timing.nBL=1,99999999999999999999", UsageError, "is not below 2147483648"),
        ("pim_channels=0,…,8", UsageError, "two whole numbers"),
        ("pim_channels=0,3,…,8", UsageError, "not reached"),
        ("latch_initial_value=1", UsageError, "neither true nor false"),
        ("energy.static_w=1", UsageError, "say gpu.energy.static_w or pim.energy.static_w"),
        ("constraints=1", UnknownNameError, "constraints"),
    ],
)
def test_what_cannot_be_set(text, error, says):
    with pytest.raises(error, match=says):
        Setting.parse(text)


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["channel_sharing=partitioned", "pim_channels=4,32"], "leaves the GPU no channel"),
        (["pim=nothing"], "nothing"),
        (["pim.timing.nRCD=20,30"], "'nRCD'; did you mean .*nRCDR"),
        (["pim.timing.nREFI=1900,300"], "nREFI=300: pim 'newton-gddr6': .* leaves no time to compute"),
        (["pim.timing.nCCDS=0"], "'timing.nCCDS': 0 is not above zero"),
        (["pim_channels=4", "pim_channels=8"], "occurs twice"),
        (["dtype=int8"], "int8"),
    ],
)
def test_a_combination_that_is_no_system_stops_it_all(texts, says, profiling, monkeypatch):
    monkeypatch.setattr(placement, "search", lambda *_: pytest.fail("searched"))
    with pytest.raises(UsageError, match=says):
        sweep(["toy"], settings(*texts), profiling=profiling)


def test_more_points_than_asked_for_stop_it_at_once(capsys, monkeypatch):
    monkeypatch.setattr(placement, "search", None)
    many = [f"pim.timing.{name}=1,2,…,9999" for name in ("nRCDR", "nRP")]
    with pytest.raises(UsageError, match=r"^99980001 points.*--points 99980001$"):
        sweep(["toy"], many)
    with pytest.raises(UsageError, match=r"^6 points"):
        sweep(["toy"], ["pim_channels=4,8,16", "global_buffers=1,2"], points=5)
    options = [part for text in many for part in ("--set", text)]
    line = error_line(capsys, 2, "sweep toy", *options, "--cache", "none").splitlines()[-1]
    assert line.startswith("pimflow: error: 99980001 points")
    assert main(["sweep", "toy", "--set", "pim_channels=4", "--points", "0", "--cache", "none"]) == 2


@pytest.mark.long
def test_every_combination_as_a_search_of_its_own_finds_it(profiling):
    rows = sweep(["toy"], settings("pim_launch_ns=0,1000", "pim_channels=0,8"), profiling=profiling)
    combinations = list(itertools.product((0.0, 1000.0), (0, 8)))
    assert [(row.settings["pim_launch_ns"], row.settings["pim_channels"]) for row in rows] == combinations
    for row, (launch_ns, channels) in zip(rows, combinations):
        result = pimflow.search("toy", system(pim_launch_ns=launch_ns, pim_channels=channels))
        assert row.figures.latency_ns == result.evaluation.latency_ns
        assert row.figures.energy_pj == result.evaluation.energy_pj
        assert row.figures.latency_gpu_only_ns == result.gpu_only.latency_ns


@pytest.mark.long
def test_whole_devices_and_who_uses_their_channels_are_settings(profiling):
    devices = settings("pim=newton-gddr6,aim-gddr6", "channel_sharing=partitioned,time-shared")
    rows = sweep(["toy"], devices, profiling=profiling)
    for row in rows:
        result = pimflow.search("toy", system(**row.settings), profiling=profiling)
        assert row.figures.latency_ns == result.evaluation.latency_ns
        timeline = result.evaluation.timeline
        busy_ns = [timeline.busy_ps(resource) / 1000 for resource in ("gpu", "pim", "crossbar")]
        assert [row.figures.gpu_busy_ns, row.figures.pim_busy_ns, row.figures.crossbar_busy_ns] == busy_ns
        assert row.figures.launching_ns <= busy_ns[0] + busy_ns[1]
    assert len({row.figures.latency_ns for row in rows}) > 2 and len(rows) == 4


def test_copies_change_what_is_searched(profiling, monkeypatch, tmp_path):
    """Parts that lie in their tensor are no kernels; where copies are made, they are."""
    graph, model = Graph((1, 32, 4, 4)), tmp_path / "joined.onnx"
    graph.concat(*(graph.conv("x0", 32) for _ in range(2)), axis=2)  # rows above others
    onnx.save(graph.model(), model)
    search, regions = placement.search, {}

    def seeing(graph, target, *rest):
        regions[target.copies] = [region.is_view for region in graph.regions]
        return search(graph, target, *rest)

    monkeypatch.setattr(placement, "search", seeing)
    sweep([model], settings("copies=elided,made", "pim_channels=0"), profiling=profiling)
    assert any(regions["elided"]) and not any(regions["made"])


@pytest.mark.long
def test_the_gpu_keeps_its_channels_unless_told(profiling):
    rows = sweep(["toy"], settings("pim_channels=4,16"), profiling=profiling)
    assert len({row.figures.latency_gpu_only_ns for row in rows}) == 1
    wider = settings("gpu.memory_channels=20,32", "pim_channels=4")
    assert len({row.figures.latency_gpu_only_ns for row in sweep(["toy"], wider, profiling=profiling)}) == 2


@pytest.mark.long
def test_a_stopped_sweep_goes_on_where_it_was(profiling, monkeypatch):
    search, searched = placement.search, []

    def stopping(graph, target, *rest):
        searched.append(target.pim_channels)
        if len(searched) == 2:
            raise KeyboardInterrupt
        return search(graph, target, *rest)

    monkeypatch.setattr(placement, "search", stopping)
    wanted = settings("pim_channels=0,8,16")
    with pytest.raises(KeyboardInterrupt):
        sweep(["toy"], wanted, profiling=profiling)
    rows = sweep(["toy"], wanted, profiling=profiling)
    assert searched == [0, 8, 8, 16] and [row.settings["pim_channels"] for row in rows] == [0, 8, 16]


@pytest.mark.long
def test_groups_are_candidates_of_every_search(profiling):
    """Not what was kept without; no point is slower for more candidates."""
    axes = settings("pim_channels=0,16")
    unfused, fused = (sweep(["toy"], axes, profiling=profiling, fuse=fuse) for fuse in (False, True))
    for row, fused_row in zip(unfused, fused):
        assert fused_row.figures.latency_gpu_only_ns < row.figures.latency_gpu_only_ns
        assert fused_row.figures.latency_ns <= row.figures.latency_ns
    import pimflow

    result = pimflow.search("toy", system(pim_channels=16), fuse=True)
    assert fused[1].figures.latency_ns == result.evaluation.latency_ns


def test_what_does_not_fit_is_a_row(profiling, monkeypatch):
    def search(*_):
        raise InfeasibleError("weights", 2, 1, "rows", ["more channels"])

    monkeypatch.setattr(placement, "search", search)
    (row,) = sweep(["toy"], settings("pim_channels=8"), profiling=profiling)
    assert "weights" in row.error and not row.pareto


def figures(latency_ns, energy_pj):
    others = {name: 1 for name in field_names(SweepFigures)}
    return SweepFigures(**others | {"latency_ns": latency_ns, "energy_pj": energy_pj})


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.booleans()), min_size=1, max_size=8))
def test_the_pareto_front(points):
    rows = [
        SweepRow(model="m", settings={}, figures=None if bad else figures(x, y), error="none" if bad else "")
        for x, y, bad in points
    ]
    legal = [(x, y) for x, y, bad in points if not bad]
    for row, (x, y, bad) in zip(with_pareto(rows), points):
        beaten = any(a <= x and b <= y and (a, b) != (x, y) for a, b in legal)
        assert row.pareto == (not bad and not beaten)


@pytest.mark.long
def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PIMFLOW_CACHE", str(tmp_path / "cache.sqlite"))
    out = tmp_path / "out"
    line = ["sweep", "toy", "--set", "pim_channels=0,8", "-o", str(out), "--json", "--quiet", "--jobs", "1"]
    assert main(line) == 0
    rows = json.loads(capsys.readouterr().out)
    assert json.loads((out / "sweep.json").read_text()) == rows
    with open(out / "sweep.csv", newline="") as file:
        assert [row["pim_channels"] for row in csv.DictReader(file)] == ["0", "8"]
    assert main([*line, "--modes", "gpu"]) == 0
    assert not any(row["regions_with_pim"] for row in json.loads(capsys.readouterr().out))
    assert "did you mean pipeline" in error_line(capsys, 2, *line, "--modes", "gpu,pipe")
    assert "did you mean pim_channels" in error_line(capsys, 2, "sweep toy --set pim_chanels=1")
