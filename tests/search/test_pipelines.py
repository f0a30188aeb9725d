"""Are runs in stages charged what they execute, and offered only where they pay?"""

import itertools
from dataclasses import replace

import pytest
from edited_plans import edited
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples

from pimflow import system
from pimflow.commands.compile.explain import explain
from pimflow.core.candidate import makespan_ns
from pimflow.core.kernel import ELEMENT_BYTES
from pimflow.core.plan import Choice, Plan
from pimflow.core.rewrite import Mode, PipelineRewrite
from pimflow.core.stages import Pipeline, stage_name
from pimflow.errors import PlanError
from pimflow.hardware import PimSpec
from pimflow.placement import CandidateGenerator, apply, search
from pimflow.placement.candidates import pipelines

EXPAND, DEPTHWISE, PROJECT = (f"block.{part}.conv" for part in ("expand", "depthwise", "project"))
BLOCK = Pipeline(regions=(EXPAND, DEPTHWISE, PROJECT), modes=(Mode.PIM, Mode.GPU, Mode.PIM), cuts=(4, 10))


@pytest.fixture(scope="module")
def maker(toy):
    generator = CandidateGenerator(toy, system())
    generator.prepare()
    return generator


@pytest.fixture(scope="module")
def runs(maker):
    return list(pipelines.runs(maker))


def test_a_part_is_charged_on_its_device(maker):
    """A launch each, both ways over the crossbar, and beside it the traffic of the GPU's kernels."""
    candidate = pipelines.make(maker, BLOCK)
    gpu, pim, crossbar = ([t for t in candidate.tasks if t.resource == n] for n in ("gpu", "pim", "crossbar"))
    assert [len(gpu), len(pim), len(crossbar)] == [3, 6, 9]
    assert all(task.launched and task.launch_ns > 0 for task in gpu)
    assert all(task.launch_ns == maker.system.pim_launch_ns for task in pim)
    assert candidate.rewrite.gpu_share is None and candidate.pim_regions == (EXPAND, PROJECT)
    assert candidate.deferred_epilogue == ("add",)  # the residual waits for the next kernel
    paper = CandidateGenerator(maker.graph, system(accounting="paper"))
    free_tasks = pipelines.make(paper, BLOCK).tasks
    assert [t.resource for t in free_tasks].count("crossbar") == 0
    assert all(task.launch_ns == 0 for task in free_tasks if task.resource == "pim")


def test_devices_overlap_and_wait_for_each_other(maker):
    """By hand: rows 0..3 of three need 0..4 of the two before; the second stage is issued behind that."""
    tasks = pipelines.make(maker, BLOCK).tasks
    labels = [task.label for task in tasks if task.resource != "crossbar"]
    first = [f"{EXPAND}, stage 0 (PIM)", f"{EXPAND}, stage 1 (PIM)"]
    assert labels[:4] == [*first, f"{DEPTHWISE}, stage 0", f"{EXPAND}, stage 2 (PIM)"]
    for task in tasks:
        region, stage = task.label.split(" (")[0].split(", stage ")
        waits = {tasks[i].label.split(" (")[0] for i in task.after}
        before = {DEPTHWISE: EXPAND, PROJECT: DEPTHWISE}.get(region)
        assert waits == ({f"{before}, stage {stage}"} if before else set())
    one_after_the_other = sum(t.duration_ns for t in tasks if t.resource != "crossbar")
    assert makespan_ns(tasks) < one_after_the_other


def test_what_runs_is_what_was_timed(maker, runs):
    """The program of every part takes just the time that it is charged, and weights lie apart."""
    side = maker.costs.pim_target
    for run in runs[:: len(runs) // 12]:
        candidate = pipelines.make(maker, run.pipeline)
        tasks = [t for t in candidate.tasks if t.resource == "pim"]
        places = [stage_name(*t.label.removesuffix(" (PIM)").rsplit(", stage ", 1)) for t in tasks]
        charged = {place: t.execution_ns for place, t in zip(places, tasks)}
        programs = dict(pipelines.pim_programs(maker, candidate.covers, candidate.rewrite, 5))
        assert programs.keys() == charged.keys()
        used = []
        for name, program in programs.items():
            program.validate()
            assert side.profiler.time_program(program, side.pim).time_ns == charged[name]
            used.append(range(program.row_begin, program.row_begin + program.rows))
        assert used[0].start == maker.system.pim.row_base + 5
        assert all(a.stop == b.start for a, b in itertools.pairwise(used))
        assert sum(map(len, used)) == candidate.footprint.bank_rows


@settings(max_examples=examples(36))
@given(st.data())
def test_kernels_of_the_parts_do_the_work_of_the_whole(maker, runs, data):
    run = data.draw(st.sampled_from(runs))
    for position, region in enumerate(run.regions):
        parts = [run.geometry(position, stage) for stage in range(len(run.rows[position]))]
        assert sum(part.macs for part in parts) == region.geometry.macs
        assert all(part.oh == end - begin for part, (begin, end) in zip(parts, run.rows[position]))
        if run.pipeline.modes[position] == Mode.GPU:
            kernels = [run.kernel(position, stage) for stage in range(len(parts))]
            written = sum(kernel.output_bytes for kernel in kernels)
            assert written == region.output_elements * ELEMENT_BYTES["fp16"]
            for kernel, part in zip(kernels, parts):
                assert kernel.input_bytes >= part.n * part.h * part.w * part.c * ELEMENT_BYTES["fp16"]


def test_a_bound_is_no_more_than_what_is_charged(maker, runs):
    """What is left out may not pay: the bound holds for every run, up to the margin."""
    bounds = pipelines._RunBounds(maker)
    for run in runs:
        latency_ns = makespan_ns(pipelines.make(maker, run.pipeline).tasks)
        assert bounds.share_bound_ns(run) * pipelines.MARGIN <= latency_ns


@pytest.mark.long
@pytest.mark.parametrize(
    "other",
    [system(), system(launches="ahead"), system().with_launches(gpu_ns=0.0, pim_ns=0.0)],
    ids=["charged", "ahead", "free"],
)
def test_kernels_and_work_on_pim_take_no_longer_than_what_is_charged(maker, runs, other):
    charged = CandidateGenerator(maker.graph, other, maker.costs)
    bounds = pipelines._RunBounds(charged)
    for run in runs:
        tasks = pipelines.make(charged, run.pipeline).tasks
        assert bounds.lower_bounds_ns([run])[0] <= charged.task_builder.standalone_ns(tasks)


def test_only_what_pays_is_offered(maker, runs):
    """By brute force over all runs: every one that beats its regions one by one, the best of its kind."""
    offered = pipelines.candidates(maker)
    bounds = pipelines._RunBounds(maker)
    best: dict[tuple, float] = {}
    for run in runs:
        latency_ns = makespan_ns(pipelines.make(maker, run.pipeline).tasks)
        if latency_ns < bounds.sequential_ns(run):
            key = run.pipeline.regions, run.pipeline.modes
            best[key] = min(best.get(key, latency_ns), latency_ns)
    offered_ns = {(c.covers, c.rewrite.modes): makespan_ns(c.tasks) for c in offered}
    assert offered_ns == best


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"modes": (Mode.PIM, Mode.PIM, Mode.PIM)}, "a mode for each of its 3 regions, GPU and PIM both"),
        ({"modes": (Mode.GPU, Mode.PIM)}, "a mode for each of its 3 regions"),
        (
            {"regions": (EXPAND, DEPTHWISE), "modes": (Mode.PIM, Mode.PIM)},
            "a mode for each of its 2 regions, GPU and PIM both",
        ),
        (
            {"modes": (Mode.PIM, Mode.PIM, Mode.GPU)},
            f"what PIM leaves undone of '{EXPAND}' needs the GPU before PIM can go on",
        ),
        ({"regions": ("stem.conv", EXPAND), "modes": (Mode.PIM, Mode.GPU)}, "'stem.conv': its kernel does"),
        ({"cuts": (16,)}, "ascending rows of 1 to 15"),
        ({"cuts": (15,)}, "computes no rows"),
        (
            {"regions": (DEPTHWISE, EXPAND, PROJECT), "modes": (Mode.GPU, Mode.PIM, Mode.GPU)},
            "not the only one that reads",
        ),
        ({"regions": ("stem.conv", EXPAND, DEPTHWISE)}, "'stem.conv': its kernel does more"),
        (
            {"regions": (DEPTHWISE, PROJECT, "pool"), "modes": (Mode.GPU, Mode.PIM, Mode.GPU)},
            "'pool': it is no conv",
        ),
    ],
)
def test_what_cannot_be_staged_says_why(maker, changes, says):
    with pytest.raises(PlanError, match=says) as caught:
        pipelines.make(maker, replace(BLOCK, **changes))
    assert (changes.get("regions") or BLOCK.regions)[0] in str(caught.value)


def test_parts_that_would_be_copied_are_refused(toy):
    copying = CandidateGenerator(toy, system(copies="made"))
    with pytest.raises(PlanError, match="copied"):
        pipelines.make(copying, BLOCK)
    assert pipelines.candidates(copying) == []


def test_lanes_of_a_part_are_added_by_the_gpu(toy):
    hbm = CandidateGenerator(toy, system(pim="hbm-pim"))
    tasks = pipelines.make(hbm, BLOCK).tasks
    lanes = [task for task in tasks if "lanes" in task.label]
    assert len(lanes) == 6 and not any(task.launched for task in lanes)
    assert PimSpec.load("hbm-pim").result_lanes > 1


@pytest.mark.long
def test_a_plan_file_can_name_any_stages(toy):
    apart = system(channel_sharing="partitioned")
    search_result = search(toy, apart)
    run = pipelines.make(search_result.generator, BLOCK)
    schedule = str(search_result.costs.pim_target.schedules(toy.region(EXPAND).geometry)[-1])
    text = search_result.plan.to_json()
    choices = [choice for choice in Plan.from_json(text).choices if choice.region not in BLOCK.regions]
    assert len(choices) == len(toy.regions) - 3, "the search left the block's regions by themselves"
    rewrite = PipelineRewrite(cuts=BLOCK.cuts, modes=BLOCK.modes, schedules=(schedule, "", ""))
    choice = Choice(regions=BLOCK.regions, rewrite=rewrite)
    position = next(i for i, region in enumerate(toy.regions) if region.name == EXPAND)
    plan = replace(search_result.plan, choices=(*choices[:position], choice, *choices[position:]))
    reapplied = apply(toy, apart, Plan.from_json(plan.to_json()))
    assert reapplied.plan.choice(PROJECT).rewrite.cuts == BLOCK.cuts
    assert reapplied.plan.choice(PROJECT).rewrite.schedules == (schedule, "", run.rewrite.schedules[2])
    assert set(reapplied.programs()) >= {stage_name(EXPAND, stage) for stage in range(3)}
    assert reapplied.pipelines() == (BLOCK,)
    assert "PIPELINE PIM-GPU-PIM at 4,10" in explain(reapplied, toy.region(EXPAND)).text()
    for changes, says in [
        ({"gpu_share": 0.5}, "gpu_share null"),
        ({"schedules": ("sideways", "", "")}, "schedule 'sideways' is none of"),
        ({"schedules": ("",)}, "a schedule for each"),
    ]:
        with pytest.raises(PlanError, match=says):
            wrong = edited(choice, **changes)
            apply(toy, system(), replace(plan, choices=(*choices[:position], wrong, *choices[position:])))
