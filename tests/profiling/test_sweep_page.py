"""Does the page of a sweep show what matters, and does `best` find what it asks for?"""

import dataclasses
import itertools
import json
import re

import pytest
from command_line import error_line, run, run_json
from hostile_names import MARK, NAMES

import pimflow
from pimflow.commands.sweep import sweep_directory
from pimflow.commands.sweep.best import ColumnBound
from pimflow.commands.sweep.sweep_page import render_sweep, variance_shares
from pimflow.commands.sweep.sweep_rows import SweepRow
from pimflow.errors import UsageError


@pytest.fixture(scope="module")
def swept():
    return pimflow.sweep(["toy"], ["pim_channels=4,8", "global_buffers=1,4"], max_latency_ns=33_500.0)


@pytest.fixture(scope="module")
def directory(swept, tmp_path_factory):
    path = tmp_path_factory.mktemp("sweeps") / "sweep"
    sweep_directory.write(path, swept)
    return path


def with_speedups(swept, function):
    """Rows of a grid whose speed-ups are a function of two settings."""
    figures = next(row.figures for row in swept if row.figures)
    settings = [{"a": a, "b": b} for a, b in itertools.product((1.0, 2.0), (1.0, 2.0, 3.0))]
    results = [dataclasses.replace(figures, speedup=function(*setting.values())) for setting in settings]
    return [SweepRow(model="net", settings=s, figures=f, error="") for s, f in zip(settings, results)]


@pytest.mark.long
def test_settings_explain_the_variance_that_they_make(swept):
    assert variance_shares(with_speedups(swept, lambda a, b: a), ["a", "b"]) == pytest.approx(
        {"a": 1, "b": 0}
    )
    added = variance_shares(with_speedups(swept, lambda a, b: a + b), ["a", "b"])
    # Variances of {1, 2} and {1, 2, 3}, over their sum.
    assert added == pytest.approx({"a": 0.25 / (0.25 + 2 / 3), "b": (2 / 3) / (0.25 + 2 / 3)})
    crossed = variance_shares(with_speedups(swept, lambda a, b: (a - 1.5) * (b - 2)), ["a", "b"])
    assert crossed == pytest.approx({"a": 0, "b": 0}, abs=1e-9)
    assert variance_shares(with_speedups(swept, lambda *_: 1.0), ["a"]) == {"a": 0.0}


def page_data(page, name):
    match = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', page, re.S)
    return json.loads(match[1])


def test_the_page_has_every_point_the_best_and_those_that_failed(swept, directory):
    page = (directory / "sweep.html").read_text()
    tables, charts = page_data(page, "tables"), page_data(page, "charts")
    planned = [row for row in swept if row.figures]
    failed = [row for row in swept if row.error]
    assert planned and failed
    assert len(tables["points"]["rows"]) == len(swept)
    fastest = min(planned, key=lambda row: row.figures.latency_ns)
    best = next(row for row in tables["best"]["rows"] if row["what"] == "best latency")
    assert best["latency"] == fastest.figures.latency_ns / 1e6
    assert {name for name in charts if name.startswith(("map", "curve"))} == {"map-0", "curve-0", "curve-1"}
    assert f"{len(failed)} points without a plan" in page and "pim_channels" in page


def test_names_of_networks_are_text(swept):
    rows = [dataclasses.replace(row, model=NAMES[0], error=NAMES[0] if row.error else "") for row in swept]
    page = render_sweep(rows).decode()
    text = re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.S)
    assert not re.search(f"<[^>]*{MARK}", text)


def test_best_is_the_best_within_the_conditions(swept, directory, capsys):
    planned = [row for row in swept if row.figures]
    found = run_json(capsys, "best", directory)
    assert found["points"] == len(planned)
    assert found["rows"][0]["latency_ns"] == min(row.figures.latency_ns for row in planned)
    most = max(row.figures.latency_ns for row in planned)
    bounds = ("--within", f"latency_ns>={most}", "--within", "model=toy", "--objective", "energy")
    found = run_json(capsys, "best", directory, *bounds)
    assert [row["latency_ns"] for row in found["rows"]] == [most]
    assert "best latency of" in run(capsys, "best", directory)[1]
    for within, code, text in (
        ("area<1", 2, "unknown column 'area'"),
        ("model<toy", 2, "'toy' and 'toy' are not two numbers"),
        ("latency_ns", 2, "give a column, a comparison and a value, such as energy_pj<2e9"),
        ("latency_ns<0", 4, "points that have a plan"),
    ):
        assert text in error_line(capsys, code, "best", directory, "--within", within)
    assert "is no sweep" in error_line(capsys, 3, "best", directory.parent)


def test_a_condition_is_a_column_a_comparison_and_a_value():
    bound = ColumnBound.parse(" pim.timing.nRCDR <= 10 ")
    assert bound == ColumnBound(column="pim.timing.nRCDR", comparison="<=", value="10")
    with pytest.raises(UsageError):
        ColumnBound.parse("<3")


def test_compiled_points_have_reports_that_the_page_links_to(capsys, tmp_path):
    folder = tmp_path / "sweep"
    sweep = ["sweep toy --set pim_channels=8,16 -o", folder]
    code, _, err = run(capsys, *sweep, "--compile", "best")
    assert code == 0, err
    rows = json.loads((folder / "sweep.json").read_text())
    best = min(rows, key=lambda row: row["latency_ns"])
    assert [row["report"] for row in rows if row is not best] == [""]
    report = folder / best["report"]
    assert json.loads(report.with_suffix(".json").read_text())["latency_ns"] == best["latency_ns"]
    table = page_data((folder / "sweep.html").read_text(), "tables")["best"]
    assert {row["report"] for row in table["rows"]} == {best["report"]}
    assert best["report"] in run(capsys, "best", folder)[1]
    (report.parent / "mine.txt").write_text("keep me")  # a file of the user's
    assert "mine.txt" in error_line(capsys, 3, *sweep)
    (report.parent / "mine.txt").unlink()
    assert run(capsys, *sweep)[0] == 0  # what it compiled before goes
    assert not report.exists()
