"""Does the page of a compiled directory say what the report says, and need nothing but itself?"""

import base64
import csv
import functools
import hashlib
import html
import itertools
import json
import math
import operator
import os
import re
import shlex
import shutil

import pytest
from command_line import error_line, run_json
from hostile_names import MARK, NAMES

import pimflow
from pimflow import frontend
from pimflow.commands import parser
from pimflow.commands.command_line.options import target_system
from pimflow.commands.compile import compile_command
from pimflow.commands.main import main
from pimflow.commands.pages import pages
from pimflow.compiler.interface import Interface
from pimflow.compiler.layers_table import layers_table
from pimflow.errors import ArtifactError, UsageError
from pimflow.hardware.systems import CHARGES
from pimflow.host.pages import LIBRARIES, TABULATOR, VEGA, library
from pimflow.placement.solvers.evaluate import STATIC
from pimflow.relay_passes.flat import main_bindings
from pimflow.report_page import charts
from pimflow.report_page.page import KINDS, render_page

LARGEST_PAGE_BYTES = 1_600_000


@pytest.fixture(scope="module")
def toy(compiled_toy):
    return compiled_toy


@pytest.fixture(scope="module")
def report(toy):
    return json.loads((toy[0] / "report.json").read_text())


def data(page: bytes, name: str):
    """What the page holds for its scripts."""
    match = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', page.decode(), re.S)
    return json.loads(match.group(1))


@pytest.mark.long
def test_the_page_is_that_of_the_directory_and_seals_it(toy, tmp_path):
    directory, _ = toy
    page = (directory / "report.html").read_bytes()
    assert page == render_page(directory) and len(page) < LARGEST_PAGE_BYTES
    sealed = Interface.load(directory)
    for name in sealed.sha256:
        sealed.check(directory, name)
    assert "report.html" not in sealed.sha256


def test_the_page_fetches_nothing(toy):
    page = (toy[0] / "report.html").read_text()
    # Of the libraries' own text, addresses are names of namespaces and of schemas.
    for name in (*VEGA, *TABULATOR):
        page = page.replace(library(name), "")
    assert not re.search(r"<(script|img|iframe)[^>]+src=", page)
    assert re.findall(r"<link[^>]*href=\"([^\"]*)\"", page) == ["data:,"]
    assert not re.search(r"@import|url\(\s*['\"]?http|sourceMappingURL", page)


def test_libraries_are_those_that_are_named():
    told = (LIBRARIES / "README.md").read_text()
    files = dict(re.findall(r"\| `([\w.-]+)` .*`([0-9a-f]{64})` \|", told))
    assert files.keys() == {path.name for path in LIBRARIES.iterdir()} - {"README.md", "licences.txt"}
    for name, digest in files.items():
        assert hashlib.sha256((LIBRARIES / name).read_bytes()).hexdigest() == digest


def test_names_cannot_leave_their_place(toy, tmp_path, report):
    shutil.copytree(toy[0], tmp_path / "toy")
    bad = "</script><script>alert(1)</script><b>"
    changed = report | {"model": bad, "assumed": [bad]}
    changed["regions"] = [{**report["regions"][0], "name": bad, "reason": bad}, *report["regions"][1:]]
    (tmp_path / "toy" / "report.json").write_text(json.dumps(changed))
    page = render_page(tmp_path / "toy")
    assert b"alert(1)</script>" not in page and b"<b>" not in page.replace(b"<b class", b"")
    assert data(page, "tables")["layers"]["rows"][0]["name"] == bad


def places(value, path=()):
    """Where figures and texts stand in a report; of a list, its first."""
    if isinstance(value, dict):
        inside = value.items()
    elif isinstance(value, list):
        inside = enumerate(value[:1])
    else:
        yield path
        return
    for key, item in inside:
        yield from places(item, (*path, key))


def test_nothing_that_a_report_says_is_html(toy, tmp_path, report):
    """Also where it should have a number, which a page may show as it is."""
    shutil.copytree(toy[0], tmp_path / "toy")
    shown = 0
    for place in places(report):
        changed = json.loads(json.dumps(report))
        functools.reduce(operator.getitem, place[:-1], changed)[place[-1]] = NAMES[0]
        (tmp_path / "toy" / "report.json").write_text(json.dumps(changed))
        try:
            page = render_page(tmp_path / "toy").decode()
        except ArtifactError:
            continue
        shown += 1
        text = re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.S)
        assert not re.search(f"<[^>]*{MARK}", text), place
    assert shown > 50


def test_pages_run_only_their_own_scripts(toy):
    """The policy has a digest of every script, which a browser takes of what stands between the tags."""
    page = (toy[0] / "report.html").read_text()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    rules = dict(rule.split(maxsplit=1) for rule in policy.split("; "))
    scripts = re.findall(r"<script>(.*?)</script>", page, re.S)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert rules["default-src"] == "'none'"
    assert rules["script-src"].split() == [f"'sha256-{digest}'" for digest in digests]
    assert page.index("Content-Security-Policy") < page.index("<style")


def test_layers_are_those_of_the_report(toy, report):
    rows = data((toy[0] / "report.html").read_bytes(), "tables")["layers"]["rows"]
    assert [row["name"] for row in rows] == [region["name"] for region in report["regions"]]
    for row, region in zip(rows, report["regions"]):
        assert row["before"] == pytest.approx(region["latency_gpu_only_ns"] / 1e3)
        first = region["covers"][0] == region["name"]
        for device, kind in itertools.product(("gpu", "pim"), ("busy", "idle")):
            us = region[f"{kind}_ns"][device] / 1e3
            assert row[f"{device}_{kind}"] == (pytest.approx(us) if first else None)
        assert row["mode"] == region["mode"]
        ways = [candidate[1] for candidate in next(d for d in row["details"] if "rows" in d)["rows"]]
        assert [way.partition(" of ")[0] for way in ways] == [c["name"] for c in region["candidates"]]
    on_pim = next(row for row in rows if row["mode"] == "PIM")
    assert on_pim["known"] == "PIM simulated, crossbar analytic"
    assert any('["COMP"' in part.get("pre", "") for part in on_pim["details"])


def test_the_report_has_what_the_search_knows(toy, report):
    compiled = toy[1]
    search_result = compiled.search_result
    for region in report["regions"]:
        candidates = search_result.table.candidates[region["name"]]
        assert {c["name"] for c in region["candidates"]} >= {c.name for c in candidates}
        assert sum(candidate["chosen"] for candidate in region["candidates"]) == 1
        assert region["energy_pj"] == search_result.evaluation.region_pj[region["name"]]
    dynamic = sum(region["energy_pj"] for region in report["regions"])
    static = sum(report["energies_pj"][part] for part in STATIC)
    assert dynamic + static == pytest.approx(report["energy_pj"])


def test_programs_are_as_simulated(toy, report):
    programs = [program for region in report["regions"] for program in region["programs"]]
    assert {program["file"] for program in programs} == {
        str(path.relative_to(toy[0])) for path in (toy[0] / "programs").iterdir()
    }
    for program in programs:
        simulation = pimflow.simulate(toy[0] / program["file"])
        assert (program["cycles"], program["commands"]) == (simulation.cycles, simulation.commands)
        assert tuple(program["channel_cycles"]) == simulation.channel_cycles
        assert program["multipliers"] == pytest.approx(simulation.utilisation)
        assert 0 < program["bus"] <= 1 and 0 <= program["refresh"] < 1


def test_tensors_lie_in_the_pool_by_the_names_of_layers(report):
    memory, layers = report["memory"], {region["name"].replace(".", "_") for region in report["regions"]}
    ends = [tensor["offset_bytes"] + tensor["size_bytes"] for tensor in memory["placed"]]
    assert max(ends) == memory["pool_bytes"] and len(ends) == memory["tensors"]
    names = {tensor["name"].partition(":")[2] for tensor in memory["placed"]}
    # What PIM or a later kernel finishes has the name of the operator that comes last in its layer.
    last = {binding.var.name for binding in main_bindings(frontend.load("toy").module)}
    assert names - {"output"} <= layers | last and len(names) == len(ends)


def test_terms_lead_from_one_accounting_to_the_other(toy, report):
    terms = {entry["term"]: entry["latency_ns"] for entry in report["accounting_terms"]}
    assert list(terms) == ["accounting paper", "timing strict", *CHARGES, "searched again"]
    paper = next(entry for entry in report["conventions"] if "paper" in entry["what"])
    paper_speedup = paper["searched_again"]
    assert terms["accounting paper"] == pytest.approx(report["latency_gpu_only_ns"] / paper_speedup)
    assert terms["searched again"] == report["latency_ns"]
    # What the plan of the one accounting takes in full is no less than the best that the search finds.
    assert terms[CHARGES[-1]] >= report["latency_ns"] * (1 - 1e-9)
    paper = pimflow.system(accounting="paper", timing="ramulator-pimflow")
    events = pimflow.search("toy", paper).evaluation.timeline.events
    submissions = sum(event.launched for event in events if event.resource == "pim")
    added = terms["pim-launch"] - terms["timing strict"]
    launch_ns = toy[1].search_result.system.pim_launch_ns
    assert submissions > 0 and added <= launch_ns * submissions * (1 + 1e-6)
    # Refreshes that are served ahead take their time beside a launch, before each program.
    pim = toy[1].search_result.system.pim
    ahead_ns = pim.refreshes_ahead * pim.timing["nRFC"] * pim.tCK_ns
    assert added >= (launch_ns - min(ahead_ns, launch_ns)) * submissions
    assert added > 0.9 * launch_ns * submissions


# Of a system, and none of them its own.
OTHERS = {
    "channel_sharing": "partitioned",
    "pim_channels": 8,
    "launches": "ahead",
    "copies": "made",
    "padding": "symmetric",
    "splits": "grid",
    "scheduling": "newton+",
    "accounting": "paper+crossbar",
}


@pytest.mark.parametrize("changes", [{}, OTHERS], ids=["as it is", "all else"])
def test_the_command_to_compile_again_asks_for_the_same(toy, tmp_path, report, changes):
    shutil.copytree(toy[0], tmp_path / "toy")
    changed = report | changes | ({"objective": "energy", "modes": ["gpu", "split"]} if changes else {})
    (tmp_path / "toy" / "report.json").write_text(json.dumps(changed))
    text = html.unescape(render_page(tmp_path / "toy").decode())
    (line,) = re.findall(r"pimflow (compile toy .*) -o toy", text)
    args = parser.build_parser(compile_command).parse_args(shlex.split(line)[1:])
    wanted = pimflow.system(**{"timing": "strict", **changes})
    assert target_system(args).identity == wanted.identity
    assert args.objective == changed["objective"]
    assert pimflow.Goal(modes=args.modes) == pimflow.Goal(modes=changed["modes"])


def test_the_timeline_has_the_baseline_beneath(toy):
    chart = data((toy[0] / "report.html").read_bytes(), "charts")["timeline"]
    rows = {value["row"] for value in chart["data"]["values"]}
    assert rows == {"GPU", "PIM", "crossbar", "GPU alone"}
    latest = max(v["end"] for v in chart["data"]["values"] if v["row"] == "GPU alone")
    assert latest == pytest.approx(toy[1].report.plan.latency_gpu_only_ns / 1e3)


def test_the_command_writes_the_page_again(toy, tmp_path, capsys):
    shutil.copytree(toy[0], tmp_path / "toy")
    (tmp_path / "toy" / "report.html").unlink()
    told = run_json(capsys, "report", tmp_path / "toy")
    written = (tmp_path / "toy" / "report.html").read_bytes()
    assert told == {"wrote": str(tmp_path / "toy" / "report.html"), "bytes": len(written)}
    assert written == (toy[0] / "report.html").read_bytes()
    assert main(["report", str(tmp_path / "toy"), "-o", str(tmp_path / "page.html")]) == 0
    assert "page.html (1." in capsys.readouterr().out
    assert (tmp_path / "page.html").read_bytes() == written


def test_a_report_of_another_form_is_refused(toy, tmp_path, capsys, report):
    """Those of other versions have other keys, and those that say none are older still."""
    shutil.copytree(toy[0], tmp_path / "toy")
    unversioned = {key: report[key] for key in report if key != "schema_version"}
    of_other_versions = report | {"schema_version": "pimflow-report/1"}, unversioned
    for content in ("{}", "[1]", "not JSON", '{"model": 3}', *map(json.dumps, of_other_versions)):
        (tmp_path / "toy" / "report.json").write_text(content)
        says = r"report\.json:1: Expecting value" if content == "not JSON" else "compile again"
        with pytest.raises(ArtifactError, match=says):
            pages.write_report(tmp_path / "toy")
    (tmp_path / "toy" / "report.json").unlink()
    assert "report.json: cannot be read" in error_line(capsys, 3, "report", tmp_path / "toy")
    assert main(["report", str(tmp_path)]) == 3


def test_a_report_shows_files_of_its_own_directory_only(toy, tmp_path, capsys):
    """The report has no digest, so anyone may have written which files its programs are."""
    shutil.copytree(toy[0], tmp_path / "toy")
    (tmp_path / "secret").write_text("first\nsecret\nlast\n")
    (tmp_path / "toy" / "added").write_text("first\nsecret\nlast\n")
    text = (toy[0] / "report.json").read_text()
    (program, *_) = re.findall(r'"file": "(programs/[^"]*)"', text)
    for file in (str(tmp_path / "secret"), "../secret", "programs/../../secret", "added", "programs"):
        (tmp_path / "toy" / "report.json").write_text(text.replace(program, file))
        assert main(["report", str(tmp_path / "toy"), "-o", str(tmp_path / "page.html")]) == 3
        error = capsys.readouterr().err
        assert f"has no digest of {file}, and it is not read" in error and error.count("\n") == 1
    (tmp_path / "toy" / "report.json").write_text(text)
    (tmp_path / "toy" / program).unlink()
    (tmp_path / "toy" / program).symlink_to(tmp_path / "secret")
    assert f"{program} is missing or was changed" in error_line(
        capsys, 3, "report", tmp_path / "toy", "-o", tmp_path / "page.html"
    )
    assert not (tmp_path / "page.html").exists()


def test_a_directory_whose_name_is_no_utf8(toy, tmp_path, capsys, monkeypatch):
    folder = tmp_path / os.fsdecode(b"b\xff")
    shutil.copytree(toy[0], folder)
    monkeypatch.chdir(folder)
    for argv in (["compare", str(toy[0]), "."], ["report", "."]):
        assert (
            error_line(capsys, 3, *argv, "-o", tmp_path / "page.html")
            == "pimflow: error: .: 'b\\udcff' is not UTF-8; rename it\n"
        )


@pytest.mark.long
def test_plans_side_by_side(toy, tmp_path, capsys):
    second_directory = tmp_path / "other" / "toy"
    pimflow.compile("toy", second_directory, system=pimflow.system(accounting="paper"))
    out = tmp_path / "both.html"
    assert main(["compare", str(toy[0]), str(second_directory), "-o", str(out), "--json"]) == 0
    page = out.read_bytes()
    assert json.loads(capsys.readouterr().out)["bytes"] == len(page) < LARGEST_PAGE_BYTES
    tables = data(page, "tables")
    assert [column["title"] for column in tables["figures"]["columns"]] == ["", "toy", "toy (2)"]
    latency = next(row for row in tables["figures"]["rows"] if row["what"] == "latency, ms")
    assert latency["plan0"] == f"{toy[1].report.plan.latency_ns / 1e6:.4f}" != latency["plan1"]
    speedups = {row["what"]: row for row in tables["speedups"]["rows"]}
    for launch in ("0", "500 ns", "as the GPU's"):
        shown = speedups[f"PIM launch {launch}"]
        for kind in KINDS:
            ratios = [float(shown[f"{kind}{number}"].rstrip("x")) for number in range(2)]
            mean = float(shown[f"mean {kind}"].rstrip("x"))
            assert mean == pytest.approx(math.sqrt(ratios[0] * ratios[1]), abs=2e-3)
    titles = [column["title"] for column in tables["speedups"]["columns"][1:3]]
    assert titles == ["toy, same plan", "toy, searched again"]
    rows = {value["row"] for value in data(page, "charts")["timeline"]["data"]["values"]}
    assert {"toy: GPU", "toy (2): PIM", "toy: GPU alone"} <= rows
    assert "toy (2): GPU alone" not in rows  # the same as the first's
    with pytest.raises(UsageError, match="give 2 to"):
        pages.write_comparison([toy[0]], out)


@pytest.mark.long
def test_a_plan_on_the_gpu_alone_has_a_page(tmp_path):
    compiled = pimflow.compile("toy", tmp_path / "toy", modes=("gpu",))
    page = (tmp_path / "toy" / "report.html").read_bytes()
    assert "utilisation" not in data(page, "charts")
    assert {term.latency_ns for term in compiled.report.conventions.accounting_terms} == {
        compiled.report.plan.latency_ns
    }


def test_the_waterfall_starts_and_ends_with_whole_latencies():
    shown = charts.waterfall([("a", 100.0), ("b", 150.0), ("searched again", 120.0)], 200.0)["data"]["values"]
    bars = [(bar["term"], bar["begin"] * 1e3, bar["end"] * 1e3, bar["kind"]) for bar in shown]
    assert bars == [
        ("a", 0.0, 100.0, "latency"),
        ("b", 100.0, 150.0, "more"),
        ("searched again", 150.0, 120.0, "less"),
        ("plan", 0.0, 120.0, "latency"),
    ]


def test_energy_over_time_ends_with_the_energies_of_the_report(toy, report):
    steps = data((toy[0] / "report.html").read_bytes(), "charts")["energy-over-time"]["data"]["values"]
    ends = {"plan": ("latency_ns", "energy_pj"), "GPU alone": ("latency_gpu_only_ns", "energy_gpu_only_pj")}
    for plan, (latency, energy) in ends.items():
        line = [step for step in steps if step["plan"] == plan]
        energies = [step["mj"] for step in line]
        assert energies == sorted(energies) and energies[0] == 0.0
        assert line[-1]["time"] == pytest.approx(report[latency] / 1e3)
        assert energies[-1] == pytest.approx(report[energy] / 1e9)


def test_no_layer_is_above_what_its_device_can_do(toy, report):
    roofline = data((toy[0] / "report.html").read_bytes(), "charts")["roofline"]
    lines, points = (layer["data"]["values"] for layer in roofline["layer"])
    assert {line["device"] for line in lines} == {"GPU", "PIM"} and len(points) == 7
    roof = report["rooflines"]["gpu"]
    assert (roof["macs_per_ns"], roof["bytes_per_ns"]) == pytest.approx((30 * 1.365 * 256, 896), rel=1e-2)
    for point in points:
        roof = report["rooflines"].get(point["mode"].lower())
        if roof:  # a layer on both devices has two lines above it
            at_most = min(roof["macs_per_ns"], point["macs_per_byte"] * roof["bytes_per_ns"])
            assert 0 < point["macs_per_ns"] < at_most
    assert {"GPU", "PIM"} <= {point["mode"] for point in points}


def test_the_network_has_the_layers_and_what_they_read(toy, report):
    graph = data((toy[0] / "report.html").read_bytes(), "graph")
    rows = report["regions"]
    assert [(layer["name"], layer["mode"]) for layer in graph] == [(r["name"], r["mode"]) for r in rows]
    for layer, row in zip(graph, rows, strict=True):
        assert [graph[number]["name"] for number in layer["reads"]] == row["reads"]
        assert all(graph[number]["y"] < layer["y"] for number in layer["reads"])
    assert len({(layer["x"], layer["y"]) for layer in graph}) == len(graph)


def test_layers_are_a_table_for_other_programs_too(toy, report):
    with (toy[0] / "layers.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == [row["name"] for row in report["regions"]]
    for row, layer in zip(rows, report["regions"], strict=True):
        assert float(row["latency_ns"]) == layer["latency_ns"]
        assert float(row["busy_ns.pim"]) == layer["busy_ns"]["pim"]
        assert row["output_shape"] == "x".join(map(str, layer["output_shape"]))
    assert layers_table({"regions": [{"name": "=1+1", "macs": -1}]}) == "name,macs\n'=1+1,-1\n"
