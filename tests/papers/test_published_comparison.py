"""Does the comparison with the paper compare what it says, and does its page show what was found?"""

import json
import math
import re
import sys
from dataclasses import replace

import pytest
import reproduce_pimflow as script
from papers import pimflow_tables
from papers.pimflow_ablation import TERMS, gains, gpu_side, terms
from papers.pimflow_commands import command_bounds, small_tile_orders
from papers.pimflow_comparison import (
    CONFIGURATIONS,
    CONVENTIONS,
    NEWTON_PLUS_PLUS,
    OURS,
    PIMFLOW,
    Searches,
    compare,
    convolutions_ns,
    energies,
    is_convolution,
    select,
    shares,
)

from pimflow.core.candidate import Cost, makespan_ns
from pimflow.core.rewrite import MODES, OPERATOR_KERNELS, PimRewrite
from pimflow.errors import UsageError
from pimflow.hardware import system
from pimflow.hardware.systems import CHARGES
from pimflow.placement import CandidateGenerator, Goal, Profiling
from pimflow.placement.solvers.evaluate import evaluate

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def searches():
    return Searches(Profiling())


@pytest.fixture(scope="module")
def rows(searches):
    return compare(searches, ["toy"])


def test_what_may_do_more_is_no_slower(rows):
    """By convention; configurations that have the modes and loop orders of others, and some beside."""
    assert len(rows) == len(CONFIGURATIONS) * len(CONVENTIONS)
    for accounting, timing in CONVENTIONS:
        row_by_name = {r["configuration"]: r for r in select(rows, accounting=accounting, timing=timing)}
        latency_ns = {name: row["latency_ns"] for name, row in row_by_name.items()}
        for superset, subset in (
            ("Newton++", "Newton+"),
            ("MD-DP", "Newton++"),
            ("Pipeline", "Newton++"),
            ("PIMFlow", "MD-DP"),
            ("PIMFlow", "Pipeline"),
            ("all loop orders", "Newton++"),
            ("pimflow", "all loop orders"),
            ("pimflow", "PIMFlow"),
        ):
            assert latency_ns[superset] <= latency_ns[subset] * (1 + 1e-9)
        for configuration in CONFIGURATIONS:
            row = row_by_name[configuration.name]
            assert row["latency_ns"] <= row["latency_gpu_only_ns"]
            assert set(row["regions"]) <= set(configuration.modes)


def test_convolutions_are_what_the_regions_take(searches):
    """Of the GPU alone, kernel by kernel; of a plan, together with all else its latency."""
    target = system(accounting="paper")
    search_result = searches.search("toy", target, Goal())
    graph, gpu = search_result.graph, []
    for region in filter(is_convolution, graph.regions):
        gpu.append(search_result.generator.make(region, OPERATOR_KERNELS, target.gpu.memory_channels))
    alone_ns = sum(Cost.from_candidate(candidate).latency_ns for candidate in gpu)
    assert convolutions_ns(search_result, search_result.gpu_only) == pytest.approx(alone_ns, rel=1e-6)
    assert 0 < convolutions_ns(search_result, search_result.evaluation) < search_result.evaluation.latency_ns
    (share,) = shares(searches, ["toy"])
    alone = search_result.gpu_only.latency_ns
    assert share["1x1"] + share["k x k"] + share["depthwise"] == pytest.approx(alone_ns / alone, rel=1e-6)
    assert sum(value for name, value in share.items() if name != "model") == pytest.approx(1.0)


def test_all_terms_together_are_full_accounting(searches):
    """Task by task; and no term makes anything cheaper."""
    graph, full = searches.graph("toy"), CandidateGenerator(searches.graph("toy"), system())
    all_charges = CandidateGenerator(graph, system(accounting="+".join(["paper", *CHARGES])), full.costs)
    paper = CandidateGenerator(graph, system(accounting="paper"), full.costs)
    dearer = set()
    for region in graph.regions:
        splits = [c.rewrite for c in full.candidates(region) if c.rewrite.mode == "SPLIT"]
        for rewrite in [PimRewrite(), *splits]:
            if full.unsupported_reason(region):
                continue
            expected = full.make(region, rewrite)
            assert all_charges.make(region, rewrite) == expected
            free_ns = makespan_ns(paper.make(region, rewrite).tasks)
            for charge in CHARGES:
                some = CandidateGenerator(graph, system(accounting=f"paper+{charge}"), full.costs)
                time_ns = makespan_ns(some.make(region, rewrite).tasks)
                assert free_ns <= time_ns <= makespan_ns(expected.tasks)
                dearer |= {charge} if time_ns > free_ns or some.fused_epilogue_cost(region).task else set()
    assert dearer >= {"pim-launch", "epilogue"}


@pytest.mark.parametrize("accounting", ["papers", "full+crossbar", "paper+", "paper+tax", "crossbar"])
def test_what_is_no_accounting_is_refused(accounting):
    with pytest.raises(UsageError, match=r"none of full, paper and paper\+… with some of pim-launch"):
        system(accounting=accounting)


def test_the_ablation_begins_and_ends_with_the_comparison(searches, rows):
    term_rows = terms(searches, ["toy"])
    assert [row["term"] for row in term_rows] == ["paper", *TERMS]
    for which, (accounting, timing) in ((0, CONVENTIONS[0]), (-1, CONVENTIONS[-1])):
        (row,) = select(rows, accounting=accounting, timing=timing, configuration=PIMFLOW.name)
        assert term_rows[which]["together"]["latency_ns"] == row["latency_ns"]
        (row,) = select(rows, accounting=accounting, timing=timing, configuration=OURS.name)
        assert gains(searches, "toy")[-1][accounting]["latency_ns"] == row["latency_ns"]
    assert term_rows[1]["alone"] == term_rows[1]["together"]


def test_the_published_gpu_is_met(searches):
    """Launches and executions so changed that the GPU alone takes as long as the published one."""
    row_by_way = {row["way"]: row for row in gpu_side(searches, "toy", 2e5, 20)}
    kernels, launch_ns = row_by_way["as here"]["kernels"], row_by_way["as here"]["launch_ns"]
    assert row_by_way["both"]["latency_gpu_only_ns"] == pytest.approx(2e5)
    assert row_by_way["both"]["launch_ns"] * kernels == pytest.approx(20 * launch_ns)
    assert row_by_way["no launches"]["latency_gpu_only_ns"] == pytest.approx(
        row_by_way["as here"]["latency_gpu_only_ns"] - kernels * launch_ns
    )
    graph = searches.graph("toy")
    generator = CandidateGenerator(graph, system())
    gpu_only = tuple(
        generator.make(r, OPERATOR_KERNELS, generator.system.gpu.memory_channels) for r in graph.regions
    )
    slow = replace(generator.system.gpu, launch_ns=row_by_way["launches"]["launch_ns"])
    slow_generator = CandidateGenerator(graph, replace(generator.system, gpu=slow))
    table = searches.search("toy", system(), Goal(modes=("GPU",))).table
    slower = tuple(slow_generator.make(r, OPERATOR_KERNELS, slow.memory_channels) for r in graph.regions)
    before, after = (evaluate(graph, chosen, table, system()).latency_ns for chosen in (gpu_only, slower))
    assert row_by_way["launches"]["latency_gpu_only_ns"] == pytest.approx(after) and after > before


def test_prices_change_energy_alone(searches, rows):
    """By hand, of a COMP in a bank: 16 multiply-adds, a column, and a read of the buffer or a sixteenth."""
    energy_rows = energies(searches, ["toy"])
    e = system().pim.energy
    full_pj = 16 * (e["multiply_pj"] + e["add_pj"]) + e["column_read_pj"] + e["buffer_read_pj"]
    once_pj = full_pj - e["buffer_read_pj"] * 15 / 16
    for row in select(energy_rows, configuration="read once"):
        convention = {name: row[name] for name in ("accounting", "timing")}
        (same,) = select(rows, configuration="PIMFlow", **convention)
        assert row["latency_ns"] == same["latency_ns"]
        comps = same["energies_pj"]["pim_comp"]
        assert row["energies_pj"]["pim_comp"] == pytest.approx(comps * once_pj / full_pj)
        (frugal,) = select(energy_rows, configuration="least energy", **convention)
        (ours,) = select(rows, configuration="pimflow", **convention)
        assert frugal["energy_pj"] <= min(ours["energy_pj"], same["energy_pj"]) * (1 + 1e-9)


def test_the_page_has_a_place_for_every_table(searches, rows):
    parts = {"comparison": rows, "energies": energies(searches, ["toy"]), "shares": shares(searches, ["toy"])}
    parts["command bounds"] = command_bounds(searches, ["toy"])
    parts |= {"terms": terms(searches, ["toy"]), "gains": gains(searches, "toy")}
    parts |= {"GPU side": gpu_side(searches, "toy", 2e5, 20), "sizes": select(rows, configuration="PIMFlow")}
    tables = script.tables(json.loads(json.dumps(parts)))
    text = script.PAGE.read_text(encoding="utf-8")
    assert set(re.findall(r"<!-- (pimflow [^>]*) begin: ", text)) == set(tables)
    for name, table in tables.items():
        filled = script.fill(text, name, table)
        assert filled.count(table) == 1 and filled.count("<!--") == text.count("<!--")
        head, rule, *body = table.splitlines()
        assert body and all(line.count("|") == head.count("|") for line in (rule, *body))


def test_small_tiles_are_those_of_layers_of_few_pixels(searches):
    """There the compiler tries them itself, so that none is left to gain; and reading takes some time."""
    target = searches.costs(NEWTON_PLUS_PLUS.system("paper", "strict"), searches.profiling).pim_target
    geometries = [region.geometry for region in searches.graph("toy").regions if region.geometry]
    (fc,) = (geometry for geometry in geometries if geometry.pixels == 1)
    orders = target.schedules(fc)
    assert {*small_tile_orders(orders, target.pim.gangs)} <= {*orders} and len(orders) > 1
    for r in command_bounds(searches, ["toy"]):
        assert r["small_ns"] <= r["newton_ns"] and (r["faster"] == 0) == (r["small_ns"] == r["newton_ns"])
        assert (r["unread_ns"] is None) == (r["timing"] != "strict")
        assert r["unread_ns"] is None or 0 < r["unread_ns"] < r["newton_ns"]


def test_means_are_those_of_the_networks(rows):
    """Two networks: the toy, and one that is four times as much faster."""
    twin = [{**row, "model": "twin", "speedup": 4 * row["speedup"]} for row in rows]
    paper_rows = select(rows, accounting="paper", timing="strict", configuration="PIMFlow")
    table = pimflow_tables.speedups(rows + twin, "paper", "strict")
    mean = next(line for line in table.splitlines() if "geometric mean" in line)
    assert f"/ {2 * paper_rows[0]['speedup']:.3f} |" in mean
    assert f"/ {4 * paper_rows[0]['speedup']:.3f} |" in next(r for r in table.splitlines() if "most" in r)


def test_the_script_prints_and_draws(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PIMFLOW_CACHE", str(tmp_path / "cache.sqlite"))
    run = ["reproduce_pimflow.py", "toy", "--quiet", "--jobs", "1"]
    monkeypatch.setattr(sys, "argv", [*run, "--parts", "shares", "--json"])
    script.main()
    out, err = capsys.readouterr()
    (row,) = json.loads(out)["shares"]
    assert row["model"] == "toy" and math.isclose(row["1x1"] + row["FC"], 0.476, abs_tol=0.2) and not err
    monkeypatch.setattr(sys, "argv", [*run, "--parts", "share"])
    with pytest.raises(SystemExit, match="2"):
        script.main()
    assert "there are comparison, shares" in capsys.readouterr().err


def test_the_picture_shows_every_configuration(rows):
    chart = pimflow_tables.figure(rows)
    shown = chart["data"]["values"]
    assert len({value["convention"] for value in shown}) == len(CONVENTIONS)
    first = select(rows, accounting=CONVENTIONS[0][0], timing=CONVENTIONS[0][1])
    values = [v for v in shown if v["convention"] == shown[0]["convention"] and v["network"] != "mean"]
    assert sorted(value["speedup"] for value in values) == sorted(row["speedup"] for row in first)
    assert set(MODES) >= {mode for row in first for mode in row["regions"]}
