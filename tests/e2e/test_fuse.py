"""Does ``--fuse`` reach the plan, the kernels, the timeline, the report and the errors?"""

import json
import random
from dataclasses import replace

import pytest
from command_line import ALONE, error_line, run_json

import pimflow
from pimflow import frontend
from pimflow.commands.main import main
from pimflow.compiler import build, phases
from pimflow.compiler.verification import verify
from pimflow.core.plan import Choice
from pimflow.core.rewrite import FusedGroupRewrite
from pimflow.fusion import GroupTiling
from pimflow.hardware import system
from pimflow.pim_backend.runtime import targets
from pimflow.placement import apply
from pimflow.relay_passes.regions.kernel_groups import kernel_groups


@pytest.fixture(scope="module")
def searched():
    return pimflow.search("toy", fuse=True)


def test_a_plan_with_groups_is_compiled_and_verified(searched, tmp_path, capsys):
    report = run_json(capsys, "compile toy --fuse -o", tmp_path / "toy", *ALONE)
    (covers,) = searched.group_tilings()
    rows = [row for row in report["regions"] if row["name"] in covers]
    assert report["verified"] and [row["covers"] for row in rows] == [list(covers)] * len(covers)
    assert rows[0]["schedule"] == str(searched.group_tilings()[covers]) and rows[0]["latency_ns"] > 0
    assert {row["latency_ns"] for row in rows[1:]} == {0.0}, "the group's time is at its first region"
    (event,) = (e for e in searched.evaluation.timeline.events if set(covers) <= set(e.regions))
    assert event.label == " + ".join(covers) and event.resource == "gpu" and event.launched
    plan = str(tmp_path / "toy" / "plan.json")
    assert run_json(capsys, "compile toy --fuse --plan", plan, *ALONE)["latency_ns"] == report["latency_ns"]
    assert "may be part of such a kernel" in error_line(capsys, 3, "compile toy --json --quiet --plan", plan)
    assert run_json(capsys, "timeline toy --fuse")["latency_ns"] == pytest.approx(report["latency_ns"], abs=1)
    assert main(["compile", "toy", "--fuse", "--quiet", "--explain", covers[0]]) == 0
    assert f"* FUSED {len(covers)} tiles" in capsys.readouterr().out


@pytest.mark.long
def test_random_groups_give_the_reference_and_launch_what_is_charged(searched):
    """Groups between regions on PIM, which leave work undone, and on the GPU."""
    network, draw = frontend.load("toy"), random.Random(1)
    graph, target, tilings = searched.graph, searched.system, searched.generator.tilings
    names = [region.name for region in graph.regions]
    runs = [tuple(names[a:b]) for a in range(8) for b in range(a + 2, 9)]
    runs = [r for r in runs if len(r) < 4 and not tilings.unsupported_reason(r, GroupTiling(h=8, w=8))]
    inputs = network.example_inputs()
    reference = network.reference(inputs)
    tiled = 0
    for _ in range(3):
        choices, remaining = [], list(names)
        while remaining:
            fitting = [run for run in runs if run[0] == remaining[0] and draw.random() < 0.5]
            if fitting:
                covers, tiling = draw.choice(fitting), GroupTiling(h=draw.randint(1, 8), w=draw.randint(1, 8))
                if tilings.unsupported_reason(covers, tiling):  # too large a tile
                    tiling = GroupTiling(h=8, w=8)
                choices.append(Choice(regions=covers, rewrite=FusedGroupRewrite(tiling=str(tiling))))
            else:
                candidates = [c for c in searched.table.candidates[remaining[0]] if len(c.covers) == 1]
                chosen = draw.choice([c for c in candidates if c.uses_pim] or candidates)
                choices.append(Choice(regions=chosen.covers, rewrite=chosen.rewrite))
            del remaining[: len(choices[-1].regions)]
        plan_result = apply(graph, target, replace(searched.plan, choices=tuple(choices)))
        tiled += len(plan_result.group_tilings())
        applied = phases.apply_plan(network.module, phases.PlanRewrites.from_search(plan_result), target)
        events = plan_result.evaluation.timeline.events
        launches = sum(event.launched for event in events if event.resource == "gpu")
        assert sum(g.fusible for g in kernel_groups(applied)) + len(plan_result.group_tilings()) == launches
        built = build.build(network, plan_result, targets.target_by_name("llvm+pim"))
        verify(network, built, target, inputs, reference).require()
    assert tiled > 2


@pytest.mark.long
def test_the_memory_of_groups(capsys):
    """`pimflow memory --fuse` has the pool of what a search for the GPU alone finds."""
    gpu_only = system(pim_channels=0)
    plans = []
    search_result = pimflow.search("toy", gpu_only, fuse=True)
    rewrites = phases.PlanRewrites(tilings=search_result.group_tilings())
    applied = phases.apply_plan(frontend.load("toy").module, rewrites, gpu_only)
    phases.build(applied, "llvm+pim", gpu_only, plans.append)
    command = ["memory", "toy", "--json", "--quiet"]
    assert main(command) == 0
    unfused = json.loads(capsys.readouterr().out)
    assert main([*command, "--fuse"]) == 0
    fused = json.loads(capsys.readouterr().out)
    assert fused["fused"] == [list(c) for c in search_result.group_tilings()] != unfused["fused"] == []
    assert fused["pool_bytes"] == plans[0].pool_bytes < unfused["pool_bytes"]
    assert "--fuse: buffers.csv is a table of buffers, not a network" in error_line(
        capsys, 2, "memory buffers.csv --fuse --quiet"
    )
