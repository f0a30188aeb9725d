"""Can a plan be read, edited and written, and does a mistake in one name its place?"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pimflow.core.plan import Choice, Plan
from pimflow.core.region import Region
from pimflow.core.region_graph import RegionGraph
from pimflow.core.rewrite import (
    AttentionRewrite,
    FusedGroupRewrite,
    GpuRewrite,
    Mode,
    PimRewrite,
    PipelineRewrite,
    SplitRewrite,
    SubstitutionRewrite,
)
from pimflow.core.split import AXES
from pimflow.core.tensor_placement import ChannelUse
from pimflow.errors import PlanError, UnknownNameError
from pimflow.primitives.launches import can_compute

CHANNELS = (
    "",
    "left-all",
    "pim-from12",
    "all-pim, behind kept",
    "staged",
    "staged, result kept",
    "result kept",
)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
nanoseconds = st.floats(0, 1e12)


@st.composite
def choices(draw, region):
    several = draw(st.booleans())
    cuts, modes = draw(st.lists(st.integers(1, 9))), draw(st.lists(st.sampled_from((Mode.GPU, Mode.PIM))))
    rewrites = (
        [
            FusedGroupRewrite(tiling=draw(st.sampled_from(("", "tiles 1x2x2")))),
            SubstitutionRewrite(substitution=draw(texts.filter(lambda name: name and "tiles" not in name))),
            AttentionRewrite(schedule=draw(texts)),
        ]
        if several
        else [
            GpuRewrite(primitive=draw(texts)),
            PimRewrite(
                schedule=draw(texts), device_epilogue=("add",), accumulates_residual=draw(st.booleans())
            ),
            SplitRewrite(axis=draw(st.sampled_from(AXES)), gpu_share=draw(st.floats(0, 1))),
        ]
    )
    pipeline = PipelineRewrite(cuts=tuple(cuts), modes=tuple(modes), schedules=(draw(texts),))
    return Choice(
        regions=(region, f"{region} and more") if several else (region,),
        rewrite=draw(st.sampled_from([*rewrites, *[pipeline] * several])),
        channels=ChannelUse.parse(draw(st.sampled_from(CHANNELS))),
        latency_ns=draw(nanoseconds),
        reason=draw(texts),
    )


@st.composite
def plans(draw):
    regions = draw(st.lists(texts, unique=True, max_size=4))
    return Plan(
        model=draw(texts),
        system=draw(texts),
        gpu_channels=draw(st.integers(1, 64)),
        choices=tuple(draw(choices(region)) for region in regions),
        latency_ns=draw(nanoseconds),
        lower_bound_ns=draw(nanoseconds),
    )


@given(plans())
def test_a_plan_survives_its_file(plan):
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert Plan.from_json(text).to_json() == text
    for choice in plan.choices:
        assert plan.choice(choice.region) == choice


CHOICE = {"region": "conv1", "mode": "SPLIT", "gpu_share": 0.5, "latency_ns": 10.0}
TABLE = {
    "format": "pimflow-plan/1",
    "model": "m",
    "system": "s",
    "gpu_channels": 16,
    "choices": [CHOICE],
    "latency_ns": 10.0,
    "lower_bound_ns": 10.0,
}


def plan_text(**changes: object) -> str:
    """The plan file with top-level fields changed; those set to None are left out."""
    return json.dumps({k: v for k, v in (TABLE | changes).items() if v is not None})


def plan_text_with_choice(**changes: object) -> str:
    return plan_text(choices=[{k: v for k, v in (CHOICE | changes).items() if v is not None}])


def test_what_a_person_may_leave_out():
    (choice,) = Plan.from_json(plan_text_with_choice(latency_ns=None)).choices
    assert choice == Choice(regions=("conv1",), rewrite=SplitRewrite(gpu_share=0.5))


def test_a_run_has_no_share_and_a_region_alone_does_not_say_what_it_covers():
    text = plan_text_with_choice(mode="PIPELINE", covers=["conv1", "conv2"], gpu_share=None)
    (run,) = Plan.from_json(text.replace('"mode"', '"gpu_share": null, "mode"')).choices
    assert (run.rewrite.gpu_share, run.regions) == (None, ("conv1", "conv2"))
    plan = Plan.from_json(plan_text())
    assert plan.choices[0].regions == ("conv1",) and "covers" not in plan.choices[0].to_table()


def test_whole_numbers_are_numbers():
    plan = Plan.from_json(plan_text(latency_ns=10, choices=[CHOICE | {"gpu_share": 1}]))
    assert plan.latency_ns == 10 and plan.choices[0].rewrite.gpu_share == 1


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{\n "format": "pimflow-plan/1",\n oops\n}', ":3:"),
        ("", ":1:"),
        ("[" * 100_000, "nested too deep"),
        ('{"format": ' + "1" * 5000 + "}", "digits"),
        ("[]", "not a pimflow-plan/1 file"),
        (plan_text(format="pimflow-plan/9"), "not a pimflow-plan/1 file"),
        (plan_text(format=None), "not a pimflow-plan/1 file"),
        (plan_text(choices=None), "'choices'"),
        (plan_text(choices={"conv1": CHOICE}), "'choices'"),
        (plan_text(model=None), "field 'model' is missing"),
        (plan_text(speed=3), "unknown field 'speed'; known: choices"),
        (plan_text(model=3), "model 3"),
        (plan_text(system=["s"]), "system"),
        (plan_text(latency_ns="fast"), "latency_ns 'fast'"),
        (plan_text(lower_bound_ns=True), "lower_bound_ns True"),
        (plan_text(gpu_channels=0), "'gpu_channels'"),
        (plan_text(gpu_channels=1.5), "'gpu_channels'"),
        (plan_text(gpu_channels=True), "'gpu_channels'"),
        (plan_text(choices=["conv1"]), "choice 0"),
        (plan_text(choices=[CHOICE, {"mode": "GPU"}]), "choice 1 has no 'region'"),
        (plan_text_with_choice(region=7), "choice 0 has no 'region'"),
        (plan_text_with_choice(mode=None), "region 'conv1': field 'mode' is missing"),
        (plan_text_with_choice(gpu_share=None), "region 'conv1': field 'gpu_share' is missing"),
        (plan_text_with_choice(share=1), "region 'conv1': unknown field 'share'; did you mean gpu_share"),
        (plan_text_with_choice(mode="TPU"), "region 'conv1': mode 'TPU' is none of GPU, PIM, SPLIT"),
        (plan_text_with_choice(mode=["GPU"]), "region 'conv1': mode"),
        (plan_text_with_choice(gpu_share=1.01), "region 'conv1': gpu_share 1.01"),
        (plan_text_with_choice(gpu_share=10**400), "region 'conv1': gpu_share is a number of 401 digits"),
        (plan_text_with_choice(gpu_share=-0.5), "region 'conv1': gpu_share -0.5"),
        (plan_text_with_choice(gpu_share=float("nan")), "NaN is no number"),
        (plan_text_with_choice(gpu_share="half"), "region 'conv1': gpu_share 'half'"),
        (plan_text_with_choice(gpu_share=True), "region 'conv1': gpu_share True"),
        (plan_text_with_choice(schedule=1), "region 'conv1': schedule 1"),
        (plan_text_with_choice(reason=["slow"]), "region 'conv1': reason"),
        (plan_text_with_choice(covers="conv1"), "region 'conv1': covers 'conv1' is not a list"),
        (plan_text_with_choice(covers=["conv1", 2]), "region 'conv1': covers"),
        (plan_text_with_choice(covers=["conv0", "conv1"]), "covers begins with 'conv0'"),
        (plan_text_with_choice(latency_ns="1"), "region 'conv1': latency_ns '1'"),
        (plan_text_with_choice(covers=["conv1", "conv2"]), "mode SPLIT splits one region, not 2"),
        (plan_text_with_choice(mode="GPU"), "mode GPU has gpu_share 1, not 0.5"),
        (plan_text_with_choice(primitive="winograd"), "wholly on the GPU, not SPLIT of 1 regions"),
        (plan_text_with_choice(finishes=["add"]), "a layer that is wholly its own"),
        (plan_text_with_choice(channels="left-from"), "channels 'left-from' is neither 'staged' nor a pair"),
        (plan_text_with_choice(mode="PIPELINE", modes=["CPU"]), r"modes \['CPU'\] of a PIPELINE"),
    ],
)
def test_a_mistake_is_one_line_that_names_its_place(text, named):
    with pytest.raises(PlanError, match=named) as caught:
        Plan.from_json(text, "my.json")
    message = str(caught.value)
    assert message.startswith("my.json:")
    assert len(message.splitlines()) == 1


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(PlanError, match=r"none\.json: cannot be read"):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(PlanError, match="cannot be read"):
        Plan.load(tmp_path)
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="not a text file"):
        Plan.load(binary)
    good = tmp_path / "good.json"
    good.write_text(plan_text(), encoding="utf-8")
    assert Plan.load(good).choice("conv1").rewrite.gpu_share == 0.5


def test_an_unknown_region_lists_near_ones():
    with pytest.raises(UnknownNameError, match=r"unknown region 'conv2'; did you mean conv1\?"):
        Plan.from_json(plan_text()).choice("conv2")


def test_choices_are_carried_to_the_same_network_in_another_form():
    """In another order; regions that are new stay on the GPU."""

    def region(name: str) -> Region:
        return Region(
            name=name, operator="fc", operators=("fc",), inputs=("%x",), input_shapes=((1, 4),),
            output_shape=(1, 4),
        )  # fmt: skip

    graph = RegionGraph(name="n", regions=(region("b"), region("new"), region("a")), outputs=("a",))
    first = Choice(regions=("a",), rewrite=PimRewrite())
    choices = (first, Choice(regions=("b",), rewrite=SplitRewrite(gpu_share=0.5)))
    plan = Plan(model="m", system="s", gpu_channels=1, choices=choices, latency_ns=1.0, lower_bound_ns=1.0)
    carried = plan.to_graph(graph, can_compute)
    assert carried.model == graph.digest
    assert [(c.region, c.mode) for c in carried.choices] == [("b", "SPLIT"), ("new", "GPU"), ("a", "PIM")]
    assert carried.choice("a") == choices[0] and carried.choice("b") == choices[1]
