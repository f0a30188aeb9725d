"""Does a search take only the modes that it may, and never lose by having more?"""

import functools
import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples, long_but

from pimflow import frontend
from pimflow.api.report import Estimate
from pimflow.core.candidate import Cost
from pimflow.core.plan import MODES
from pimflow.core.region import ConvGeometry, Region, RegionGraph
from pimflow.errors import UnknownNameError, UsageError
from pimflow.hardware import System, system
from pimflow.placement import Candidates, Costs, Goal, Profiling, search
from pimflow.relay_passes.regions.extract_regions import extract_regions

# Every set of modes, the GPU's in each.
SETS = [("GPU", *more) for count in range(4) for more in itertools.combinations(MODES[1:], count)]


def slowed(**changes) -> System:
    """Launches are free and the GPU is slow, so that small layers are worth every mode."""
    found = system(pim_channels=4, channel_sharing="partitioned", **changes)
    found = found.with_launches(gpu_ns=0.0, pim_ns=0.0)
    return replace(found, gpu=replace(found.gpu, sms=1, clock_mhz=found.gpu.clock_mhz / 3))


SYSTEMS = {
    "full": slowed(splits="grid"),
    "paper": slowed(splits="grid", accounting="paper", timing="ramulator-pimflow"),
    "exact": slowed(),
}


@functools.cache
def costs(name: str) -> Costs:
    return Costs(SYSTEMS[name], Profiling())


@st.composite
def networks(draw) -> RegionGraph:
    """Chains of pointwise and depthwise convolutions, some with a shortcut around one of them."""
    count, height, channels = draw(st.integers(1, 5)), draw(st.sampled_from([7, 28])), 64
    regions: list[Region] = []
    for i in range(count):
        depthwise = draw(st.booleans())
        filters = {"kh": 3, "kw": 3, "padding": (1, 1, 1, 1), "groups": channels} if depthwise else {}
        added = (f"r{i - 2}",) if i > 1 and draw(st.booleans()) else ()
        shape = (1, height, height, channels)
        regions.append(
            Region(
                name=f"r{i}",
                operator="depthwise" if depthwise else "conv2d",
                operators=("conv2d", *["add"] * len(added)),
                inputs=(f"r{i - 1}" if i else "%x", *added),
                input_shapes=(shape,) * (1 + len(added)),
                output_shape=shape,
                geometry=ConvGeometry(n=1, h=height, w=height, c=channels, oc=channels, **filters),
                epilogue=("add",) * len(added),
            )
        )
    return RegionGraph(name="drawn", regions=tuple(regions), outputs=(regions[-1].name,))


@settings(max_examples=examples(30), deadline=None)
@given(networks(), st.sampled_from(sorted(SYSTEMS)), st.data())
def test_more_modes_are_never_slower(graph, name, data):
    """And none but those that were asked for, nor anything slower than the GPU with all channels."""
    chosen = sorted(data.draw(st.lists(st.sampled_from(SETS), min_size=2, max_size=2, unique=True)), key=len)
    fewer, more = chosen[0], tuple(m for m in MODES if m in {*chosen[0], *chosen[1]})
    found = {}
    for modes in (fewer, more):
        searched = search(graph, SYSTEMS[name], costs(name), Goal(modes=modes))
        assert {candidate.rewrite.mode for candidate in searched.candidates} <= set(modes)
        assert searched.evaluation.latency_ns <= searched.gpu_only.latency_ns
        found[modes] = searched.evaluation.latency_ns
    assert found[more] <= found[fewer] * (1 + 1e-9)


@pytest.mark.parametrize("modes", long_but([SETS[0], SETS[-1]], SETS), ids=",".join)
def test_candidates_are_those_of_the_modes(modes):
    """Independently of the search: all that there are with all modes, but for the others."""
    graph = extract_regions(frontend.load("toy").module, "toy")
    every, some = (Candidates(graph, SYSTEMS["full"], costs("full"), wanted) for wanted in (MODES, modes))
    for maker in (every, some):
        maker.prepare()
    for region in graph.regions:
        wanted = [c for c in every.all(region) if c.rewrite.mode in modes]
        assert some.all(region) == wanted


def test_nothing_is_timed_in_vain():
    graph = extract_regions(frontend.load("toy").module, "toy")
    timed = {}
    for modes in (("GPU",), ("GPU", "PIM"), ("GPU", "SPLIT")):
        fresh = Costs(SYSTEMS["full"], Profiling())
        search(graph, SYSTEMS["full"], fresh, Goal(modes=modes))
        timed[modes] = len(fresh._pim)
    assert timed["GPU",] == 0 < timed["GPU", "PIM"] < timed["GPU", "SPLIT"]


def test_what_a_plan_adds_up_to():
    """The regions' shares of the timeline make its end, and what each takes alone where nothing overlaps."""
    graph = extract_regions(frontend.load("toy").module, "toy")
    searched = search(graph, SYSTEMS["full"], costs("full"))
    for evaluation in (searched.evaluation, searched.gpu_only):
        assert sum(evaluation.added_ns.values()) == pytest.approx(evaluation.latency_ns, abs=0.001)
    alone = searched.gpu_only.added_ns
    for region in graph.regions:
        gpu = searched.maker.make(region, "GPU", gpu_channels=SYSTEMS["full"].gpu.memory_channels)
        assert alone.get(region.name, 0.0) == pytest.approx(Cost.of(gpu).latency_ns, abs=0.002)


def test_modes_are_named_as_on_the_command_line():
    goal = Goal(modes="split, gpu")
    assert goal.modes == ("GPU", "SPLIT") == Goal(modes=["gpu", "split"]).modes
    assert Goal().modes == MODES
    with pytest.raises(UnknownNameError, match="did you mean pipeline"):
        Goal(modes="gpu,pipelin")
    with pytest.raises(UsageError, match="gpu,pim,split"):
        Goal(modes="pim,split")


def test_the_report_says_the_modes():
    graph = extract_regions(frontend.load("toy").module, "toy")
    searched = search(graph, SYSTEMS["full"], costs("full"), Goal(modes="gpu,pipeline"))
    assert Estimate.of(searched).modes == ("gpu", "pipeline")
    reasons = [choice.reason for choice in searched.plan.choices if choice.mode == "GPU"]
    assert reasons and all(reasons)
