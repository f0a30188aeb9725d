"""Layers whose epilogue PIM does: which they are, what they cost, and that nobody has to take them."""

import json
from dataclasses import replace

import pytest
from edited_plans import edited
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples

from pimflow.commands.compile.explain import explain
from pimflow.core.kernel import ConvGeometry
from pimflow.core.plan import Choice, Plan
from pimflow.core.region import Epilogue, KernelShape, Region
from pimflow.core.region_graph import RegionGraph
from pimflow.core.rewrite import PimRewrite, SplitRewrite
from pimflow.errors import PlanError
from pimflow.hardware import PimSpec, system
from pimflow.placement import Costs, Goal, Profiling, apply, search
from pimflow.placement.candidates import channel_modes, pim_epilogue
from pimflow.placement.candidates.candidates import CandidateGenerator
from pimflow.placement.costs.pim_runs import LatchUse

AIM = PimSpec.load("aim-gddr6")
PLAIN = replace(AIM, name="plain-aim", latch_initial_value=False)
BARE = replace(AIM, name="bare-aim", activation_unit=False)
ON_AIM, ON_PLAIN, ON_BARE, ON_NEWTON = system(pim=AIM), system(pim=PLAIN), system(pim=BARE), system()
# Shared by all searches of this file.
COSTS = {s.pim.name: Costs(s, Profiling()) for s in (ON_AIM, ON_PLAIN, ON_BARE, ON_NEWTON)}


def layer(name, epilogue: tuple[str, ...], inputs, oc: int = 32, clip_bounds=(), **changes) -> Region:
    g = ConvGeometry(n=1, h=8, w=8, c=32, oc=oc)
    shapes = ((1, 8, 8, 32), *((1, 8, 8, oc),) * (len(inputs) - 1))
    return Region(
        **dict(
            name=name,
            operator="conv2d",
            operators=("nn.conv2d", *epilogue),
            geometry=g,
            epilogue=Epilogue(operators=epilogue, clip_bounds=clip_bounds),
            inputs=inputs,
            input_shapes=shapes,
            output_shape=(1, 8, 8, oc),
            kernel=KernelShape(weight_elements=g.oc * g.reduction),
        )
        | changes
    )


def network(*regions: Region) -> RegionGraph:
    return RegionGraph(name="layers", regions=regions, outputs=(regions[-1].name,))


RESIDUAL = network(
    layer("first", ("bias",), ("%x",)),
    layer("second", ("add",), ("first", "first")),
    layer("third", ("bias", "nn.relu"), ("second",)),
)


BIASED = network(layer("first", ("bias",), ("%x",)), layer("second", ("bias", "add"), ("first", "first")))


def test_what_pim_finishes():
    generator = CandidateGenerator(RESIDUAL, ON_AIM, COSTS["aim-gddr6"], modes=("GPU", "PIM"))
    names = {
        r.name: [c.name for c in generator.candidates(r) if c.rewrite.mode == "PIM"] for r in RESIDUAL.regions
    }
    second = ["PIM", "PIM add", "PIM add, joined"]
    assert names == {"first": ["PIM", "PIM bias"], "second": second, "third": ["PIM", "PIM bias+nn.relu"]}
    for region in RESIDUAL.regions[:2]:
        operators = (), region.epilogue.operators
        unfinished, done = (generator.make(region, PimRewrite(device_epilogue=names)) for names in operators)
        assert (done.deferred_epilogue, done.keeps_submission_open) == ((), True)
        assert unfinished.deferred_epilogue == region.epilogue.operators
        assert [task.resource for task in done.tasks] == ["pim", "crossbar"]
        # 64 pixels by 2 tiles, a burst of 32 bytes each.
        moved = [next(t for t in c.tasks if t.resource == "crossbar").moved_bytes for c in (unfinished, done)]
        assert moved[1] - moved[0] == 64 * 2 * 32
        pim = [next(t for t in c.tasks if t.resource == "pim") for c in (unfinished, done)]
        assert pim[0].execution_ns < pim[1].execution_ns < 1.5 * pim[0].execution_ns
        written = pim[1].energies_pj["pim_wrbias"]
        assert written == pytest.approx(64 * 2 * AIM.energy["latch_write_pj"])
        assert generator.pim_program(region, done.rewrite, 0).initial == region.epilogue.operators[0]


def program_task(candidate):
    """That of the program, not of refreshes ahead of it."""
    return next(t for t in candidate.tasks if t.resource == "pim" and not t.readies_channels)


def test_pim_activates_what_it_finishes():
    """As a bias does, with a change of rows more for the results of each two sums of the busiest channel."""
    generator = CandidateGenerator(RESIDUAL, ON_AIM, COSTS["aim-gddr6"], modes=("GPU", "PIM"))
    region = RESIDUAL.regions[2]
    operators = (), region.epilogue.operators
    unfinished, done = (generator.make(region, PimRewrite(device_epilogue=names)) for names in operators)
    # Nothing reads its result, so a kernel of its own would finish it.
    assert [[task.resource for task in item.tasks][-1] for item in (unfinished, done)] == ["gpu", "crossbar"]
    assert done.keeps_submission_open and not unfinished.keeps_submission_open
    program = generator.pim_program(region, done.rewrite, 0)
    assert (program.initial, program.activation) == ("bias", "relu")
    pim = program_task(done)
    # 64 pixels by 2 tiles.
    assert pim.energies_pj["pim_af"] == pytest.approx(64 * 2 * AIM.energy["activation_pj"])
    bare = layer("bare", ("bias",), ("%x",))
    bias_generator = CandidateGenerator(network(bare), ON_AIM, COSTS["aim-gddr6"], modes=("GPU", "PIM"))
    plain = program_task(bias_generator.make(bare, PimRewrite(device_epilogue=("bias",))))
    # 8 sums on each channel; after each two of them the row of the table is opened.
    assert pim.execution_ns >= plain.execution_ns + 4 * AIM.row_switch_cycles * 0.5
    # No loop order is faster with the activation.
    orders = map(str, generator.costs.pim_target.schedules(region.layer))
    operators = region.epilogue.operators
    item = [generator.make(region, PimRewrite(schedule=order, device_epilogue=operators)) for order in orders]
    times = [program_task(c).execution_ns for c in item]
    assert min(times) == pim.execution_ns < max(times)


@pytest.mark.parametrize(
    ("epilogue", "clip_bounds", "ways"),
    [
        (("nn.relu",), (), [("", False, "relu")]),
        (("clip",), ((0.0, 6.0),), [("", False, "relu6")]),
        (("bias", "clip"), ((0.0, 6.0),), [("bias", False, "relu6")]),
        (("add", "nn.relu"), (), [("add", False, "relu"), ("", True, "relu")]),
        (("bias", "add", "nn.relu"), (), [("bias", True, "relu")]),
        (("bias", "clip"), ((-1.0, 1.0),), []),
        (("clip", "clip"), ((0.0, 6.0), (0.0, 6.0)), []),
        (("nn.relu", "bias"), (), []),
        (("bias", "sigmoid"), (), []),
        ((), (), []),
    ],
)
def test_which_activations_end_a_layer(epilogue, clip_bounds, ways):
    inputs = ("%x", "%y") if "add" in epilogue else ("%x",)
    region = layer("layer", epilogue, inputs, clip_bounds=clip_bounds)
    uses = [(e, pim_epilogue.latch_use(region, e)) for e in pim_epilogue.device_epilogues(region, ON_AIM)]
    assert [(use.initial, e.accumulates_residual, use.activation) for e, use in uses] == ways
    assert not any(way[2] for way in ways) or pim_epilogue.device_epilogues(region, ON_NEWTON) == ()
    # Where epilogues are free, nothing is gained.
    free = replace(ON_AIM, accounting="paper+pim-launch+crossbar+layout")
    profitable = pim_epilogue.profitable_epilogues(region, free)
    assert not any(pim_epilogue.latch_use(region, rewrite).activation for rewrite in profitable)
    # Without latches that can be set, an activation alone.
    bare = [pim_epilogue.latch_use(region, e) for e in pim_epilogue.device_epilogues(region, ON_PLAIN)]
    assert bare == [LatchUse(activation=activation) for initial, _, activation in ways if not initial]


@pytest.mark.parametrize("charged", ["full", "paper+epilogue"])
def test_a_product_adds_a_tensor_as_a_layer_of_more_channels(charged):
    """64 pixels of 32 channels and 32 that are added, for 2 tiles; no latch starts from anything."""
    target = replace(ON_NEWTON, accounting=charged)
    generator, region = CandidateGenerator(RESIDUAL, target, modes=("GPU", "PIM")), RESIDUAL.regions[1]
    raw, done = [c for c in generator.candidates(region) if c.rewrite.mode == "PIM"]
    assert (raw.name, done.name) == ("PIM", "PIM add, joined")
    assert (raw.deferred_epilogue, done.deferred_epilogue, done.keeps_submission_open) == (("add",), (), True)
    wide = layer("wide", (), ("%x",), geometry=replace(region.layer, c=64), input_shapes=((1, 8, 8, 64),))
    same_shape = CandidateGenerator(network(wide), target, modes=("GPU", "PIM")).make(wide, PimRewrite())
    assert [replace(t, label="") for t in done.tasks] == [replace(t, label="") for t in same_shape.tasks]
    assert done.footprint.bank_rows == same_shape.footprint.bank_rows
    assert done.rewrite.schedule == same_shape.rewrite.schedule
    pim, before = (next(t for t in c.tasks if t.resource == "pim") for c in (done, raw))
    assert pim.execution_ns > before.execution_ns and "pim_wrbias" not in pim.energies_pj
    if charged == "full":
        moved, less = (next(t for t in c.tasks if t.resource == "crossbar") for c in (done, raw))
        assert moved.moved_bytes > less.moved_bytes
        # DRAM is read once for each element of both operands.
        more_pj = moved.energies_pj["gpu_dram"] - less.energies_pj["gpu_dram"]
        assert more_pj == pytest.approx(generator.task_builder.dram_pj(64 * 32, 0))
    program = generator.pim_program(region, done.rewrite, 0)
    assert (program.initial, program.added_channels, program.geometry.c) == ("", 32, 64)


@pytest.mark.parametrize("accounting", ["paper", "paper+pim-launch+crossbar+layout"])
def test_where_epilogues_are_free_no_product_adds(accounting):
    generator = CandidateGenerator(RESIDUAL, replace(ON_NEWTON, accounting=accounting), modes=("GPU", "PIM"))
    assert [c.name for c in generator.candidates(RESIDUAL.regions[1]) if c.rewrite.mode == "PIM"] == ["PIM"]
    # A plan of a system that charges them can be applied.
    rewrite = PimRewrite(device_epilogue=("add",), accumulates_residual=True)
    assert generator.make(RESIDUAL.regions[1], rewrite).rewrite.accumulates_residual


def test_a_bias_and_a_tensor_are_added_by_a_latch_and_the_product():
    generator = CandidateGenerator(BIASED, ON_AIM, COSTS["aim-gddr6"], modes=("GPU", "PIM"))
    region = BIASED.regions[1]
    names = [c.name for c in generator.candidates(region) if c.rewrite.mode == "PIM"]
    assert names == ["PIM", "PIM bias+add, joined"]
    candidate = generator.make(region, PimRewrite(device_epilogue=region.epilogue.operators))
    program = generator.pim_program(region, candidate.rewrite, 0)
    assert (program.initial, program.added_channels) == ("bias", 32)


def test_what_a_product_adds_goes_through_the_l2_too():
    """Where all channels have PIM, they read both operands into it; it has to hold these and the result."""
    target = system(pim_channels=32, channel_sharing="time-shared")
    generator, region = CandidateGenerator(RESIDUAL, target, modes=("GPU", "PIM")), RESIDUAL.regions[1]
    tensor_bytes = 64 * 32 * 2
    for resident_tensors, fits in ((3, True), (2, False)):
        gpu = replace(target.gpu, l2_bytes_per_channel=resident_tensors * tensor_bytes // 32)
        generator = CandidateGenerator(RESIDUAL, replace(target, gpu=gpu), modes=("GPU", "PIM"))
        candidate = generator.make(region, PimRewrite(device_epilogue=("add",)))
        alternatives = channel_modes.channel_variants(generator, [candidate])
        assert bool(alternatives) == fits
        for alternative in alternatives:
            moved = [task.moved_bytes for task in alternative.tasks if "operands to the L2" in task.label]
            assert moved == [2 * tensor_bytes]
        # reads one and gives one
        assert channel_modes.channel_variants(generator, [generator.make(region, PimRewrite())])


LEFT = {
    "latches": ({}, system(pim=PLAIN), "the latches of 'plain-aim' always start from zero"),
    "lanes": ({}, system(pim="hbm-pim"), "'hbm-pim' leaves the sums of its lanes to a kernel of the GPU"),
    "unit of lanes": ({}, system(pim="hbm-pim"), "its activation unit acts on lanes before they are added"),
    "sigmoid": (
        {"epilogue": ("bias", "sigmoid")},
        ON_AIM,
        "what a table of 'aim-gddr6' makes of sigmoid is not known",
    ),
    "clip": (
        {"epilogue": ("bias", "clip"), "clip_bounds": ((0.0, 1.0),)},
        ON_AIM,
        "what a table of 'aim-gddr6' makes of clip is not known",
    ),
    "first": ({"epilogue": ("nn.relu", "bias")}, ON_AIM, "the activation unit of 'aim-gddr6' comes last"),
    "no unit": (
        {"epilogue": ("bias", "nn.relu")},
        ON_BARE,
        "'bare-aim' does nothing more after a sum: nn.relu",
    ),
    "divide": ({"epilogue": ("bias", "divide")}, ON_AIM, "'aim-gddr6' does nothing more after a sum: divide"),
    "taps": (
        {
            "epilogue": ("add",),
            "geometry": ConvGeometry(n=1, h=8, w=8, c=32, oc=32, kh=3, kw=3, padding=(1,) * 4),
        },
        ON_NEWTON,
        "start from zero, and only a product of one tap adds a tensor itself",
    ),
    "stride": (
        {"epilogue": ("add", "bias"), "geometry": ConvGeometry(n=1, h=16, w=16, c=32, oc=32, stride=(2, 2))},
        ON_AIM,
        "starts from one value, and only a product of one tap adds a tensor itself",
    ),
    # What is added is no tensor of the result's shape: broadcast, or two tensors.
    "broadcast": (
        {"epilogue": ("add",), "input_shapes": ((1, 8, 8, 32), (1, 1, 1, 32))},
        ON_AIM,
        "after a sum: add",
    ),
    "two": ({"epilogue": ("add", "add")}, ON_AIM, "after a sum: add"),
}


@pytest.mark.parametrize(("changed", "on", "why"), LEFT.values(), ids=LEFT)
def test_why_it_leaves_what_follows(changed, on, why):
    region = layer("layer", **({"epilogue": ("bias",), "inputs": ("%x", "%y")} | changed))
    generator = CandidateGenerator(network(region), on, modes=("GPU", "PIM"))
    assert why in pim_epilogue.unsupported_epilogue_reason(region, generator.system)
    options = {getattr(c.rewrite, "device_epilogue", ()) for c in generator.candidates(region)}
    assert region.epilogue.operators not in options
    with pytest.raises(PlanError, match="cannot be finished on PIM"):
        generator.make(region, PimRewrite(device_epilogue=region.epilogue.operators))


def test_a_layer_is_finished_wholly_and_on_pim_alone():
    generator, region = CandidateGenerator(RESIDUAL, ON_AIM, COSTS["aim-gddr6"]), RESIDUAL.regions[1]
    with pytest.raises(PlanError, match="PIM does add of what follows a layer that is wholly its own, or"):
        generator.make(region, PimRewrite(device_epilogue=("bias",)))
    split = Choice(regions=(region.name,), rewrite=SplitRewrite(gpu_share=0.5))
    with pytest.raises(PlanError, match="a layer that is wholly its own"):
        edited(split, finishes=("add",))


def test_a_plan_says_what_pim_finishes():
    search_result = search(RESIDUAL, ON_AIM, COSTS["aim-gddr6"])
    names = {name: c.name for name, c in search_result.candidate_by_region.items()}
    assert names["second"] == "PIM add, joined"
    plan = Plan.from_json(search_result.plan.to_json())
    rewrite = plan.choice("second").rewrite
    assert plan == search_result.plan
    assert rewrite.device_epilogue == ("add",) and rewrite.accumulates_residual
    biased_plan = json.loads(search(BIASED, ON_PLAIN, COSTS["plain-aim"]).plan.to_json())
    assert all("finishes" not in choice for choice in biased_plan["choices"])
    reapplied = apply(RESIDUAL, ON_AIM, plan)
    assert {name: c.name for name, c in reapplied.candidate_by_region.items()} == names
    assert reapplied.evaluation.latency_ns == search_result.evaluation.latency_ns
    # Without, the GPU adds.
    gpu_choices = tuple(edited(choice, finishes=()) for choice in plan.choices)
    assert apply(RESIDUAL, ON_AIM, replace(plan, choices=gpu_choices)).evaluation.latency_ns > plan.latency_ns


def test_the_price_of_an_activation_that_no_program_applies():
    graph = network(layer("gate", ("bias", "sigmoid"), ("%x",)), layer("next", ("nn.relu",), ("gate",)))
    text = explain(search(graph, ON_AIM, COSTS["aim-gddr6"]), graph.regions[0]).text()
    assert "not finished on PIM: what a table of 'aim-gddr6' makes of sigmoid is not known" in text
    # 64 pixels by 2 tiles on 16 channels: 8 sums, 2 of them with a table's row; 12 + 32 + 1 + 32 + 56 clocks.
    assert 4 * AIM.row_switch_cycles * 0.5 == pim_epilogue.min_activation_ns(graph.regions[0], ON_AIM)
    assert "its activation unit changes rows for every result: 0.2" in text
    assert pim_epilogue.min_activation_ns(graph.regions[1], ON_AIM) == 0
    assert pim_epilogue.min_activation_ns(graph.regions[0], system(pim="hbm-pim")) == 0


def test_a_plan_says_what_pim_activates():
    """Applied, explained, and refused where the device cannot do it."""
    # a kernel costs more than changes of rows
    target = replace(ON_AIM, gpu=replace(ON_AIM.gpu, launch_ns=50e3))
    search_result = search(RESIDUAL, target, Costs(target, Profiling()), Goal(modes=("GPU", "PIM")))
    assert search_result.candidate_by_region["third"].name == "PIM bias+nn.relu"
    plan = Plan.from_json(search_result.plan.to_json())
    assert plan.choice("third").rewrite.device_epilogue == ("bias", "nn.relu")
    assert apply(RESIDUAL, target, plan).evaluation.latency_ns == search_result.evaluation.latency_ns
    assert "not finished on PIM" not in explain(search_result, RESIDUAL.regions[2]).text()
    choices = tuple(edited(choice, schedule="") for choice in plan.choices)
    with pytest.raises(PlanError, match="cannot be finished on PIM"):
        apply(RESIDUAL, replace(ON_BARE, gpu=target.gpu), replace(plan, choices=choices))


@st.composite
def chains(draw, max_layers: int = 5) -> RegionGraph:
    """Layers one behind the other, some with a bias, an activation, or an earlier result added."""
    regions: list[Region] = []
    for index in range(draw(st.integers(1, max_layers))):
        before = regions[-1].name if regions else "%x"
        kinds = ((), ("bias",), ("bias", "nn.relu"), *((("add",), ("add", "nn.relu")) if regions else ()))
        epilogue = draw(st.sampled_from(kinds))
        added = (draw(st.sampled_from(regions)).name,) if epilogue[:1] == ("add",) else ()
        regions.append(layer(f"layer{index}", epilogue, (before, *added)))
    return network(*regions)


LAUNCHES_NS = (0.0, 500.0, 3670.0)


@pytest.mark.long
@given(chains(3), st.sampled_from((*LAUNCHES_NS, 30e3)), st.sampled_from(LAUNCHES_NS), st.booleans())
@settings(max_examples=examples(60))
def test_latches_and_an_activation_unit_never_slow_the_best_plan(graph, gpu_ns, pim_ns, exhaustive):
    """Whatever a launch costs; by the search as by all covers."""
    goal, best = Goal(modes=("GPU", "PIM"), solver="exhaustive" if exhaustive else "label"), {}
    for base in (ON_AIM, ON_PLAIN, ON_BARE):
        target = base.with_launches(gpu_ns=gpu_ns, pim_ns=pim_ns)
        best[base.pim.name] = search(graph, target, COSTS[base.pim.name], goal).evaluation.latency_ns
    assert best["aim-gddr6"] == min(best.values())


@given(chains(3), st.sampled_from(LAUNCHES_NS))
@settings(max_examples=examples(30))
def test_products_that_add_never_slow_the_best_plan(graph, pim_launch_ns):
    """By the search as by all covers; what they gain is never taken by another."""
    target, best = replace(ON_NEWTON, pim_launch_ns=pim_launch_ns), {}
    for solver in ("label", "exhaustive"):
        goal = Goal(modes=("GPU", "PIM"), solver=solver)
        best[solver] = search(graph, target, COSTS[target.pim.name], goal).evaluation.latency_ns
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pim_epilogue, "device_epilogues", lambda region, system: ())
        without = search(graph, target, COSTS[target.pim.name], Goal(modes=("GPU", "PIM")))
    assert best["label"] == pytest.approx(best["exhaustive"], rel=1e-9)
    assert best["label"] <= without.evaluation.latency_ns * (1 + 1e-9)


def test_one_submission_carries_layers_with_a_residual():
    """Project, residual and the next expansion: the GPU adds nothing between."""
    target = replace(ON_NEWTON, pim_launch_ns=3670.0, channel_sharing="partitioned")
    search_result = search(RESIDUAL, target, COSTS[target.pim.name], Goal(modes=("GPU", "PIM")))
    choices = search_result.candidate_by_region
    assert choices["second"].name == "PIM add, joined" and choices["third"].name == "PIM"
    events = search_result.evaluation.timeline.events
    launched = [event.label for event in events if event.resource == "pim" and event.launched]
    assert launched == ["second (PIM)"]
