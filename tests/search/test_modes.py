"""Does a search take only the modes that it may, and never lose by having more?"""

import functools
import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples, long_but

from pimflow import frontend
from pimflow.commands.shared.plan_report import Estimate
from pimflow.core.candidate import Cost
from pimflow.core.kernel import ConvGeometry
from pimflow.core.region import Epilogue, Region
from pimflow.core.region_graph import RegionGraph
from pimflow.core.rewrite import MODES, OPERATOR_KERNELS
from pimflow.errors import UnknownNameError, UsageError
from pimflow.hardware import System, system
from pimflow.placement import CandidateGenerator, Costs, Goal, Profiling, search
from pimflow.relay_passes.regions.extract_regions import extract_regions

# Every set of modes, the GPU's in each.
SETS = [("GPU", *extra) for count in range(4) for extra in itertools.combinations(MODES[1:], count)]


def slow_system(**changes) -> System:
    """Launches are free and the GPU is slow, so that small layers are worth every mode."""
    base = system(pim_channels=4, channel_sharing="partitioned", **changes)
    base = base.with_launches(gpu_ns=0.0, pim_ns=0.0)
    return replace(base, gpu=replace(base.gpu, sms=1, clock_mhz=base.gpu.clock_mhz / 3))


SYSTEMS = {
    "full": slow_system(splits="grid"),
    "paper": slow_system(splits="grid", accounting="paper", timing="ramulator-pimflow"),
    "exact": slow_system(),
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
                epilogue=Epilogue(operators=("add",) * len(added)),
            )
        )
    return RegionGraph(name="drawn", regions=tuple(regions), outputs=(regions[-1].name,))


@settings(max_examples=examples(30), deadline=None)
@given(networks(), st.sampled_from(sorted(SYSTEMS)), st.data())
def test_more_modes_are_never_slower(graph, name, data):
    """And none but those that were asked for, nor anything slower than the GPU with all channels."""
    chosen = sorted(data.draw(st.lists(st.sampled_from(SETS), min_size=2, max_size=2, unique=True)), key=len)
    fewer_modes, more_modes = chosen[0], tuple(m for m in MODES if m in {*chosen[0], *chosen[1]})
    latencies_ns = {}
    for modes in (fewer_modes, more_modes):
        search_result = search(graph, SYSTEMS[name], costs(name), Goal(modes=modes))
        assert {candidate.rewrite.mode for candidate in search_result.candidates} <= set(modes)
        assert search_result.evaluation.latency_ns <= search_result.gpu_only.latency_ns
        latencies_ns[modes] = search_result.evaluation.latency_ns
    assert latencies_ns[more_modes] <= latencies_ns[fewer_modes] * (1 + 1e-9)


@pytest.mark.parametrize("modes", long_but([SETS[0], SETS[-1]], SETS), ids=",".join)
def test_candidates_are_those_of_the_modes(modes):
    """Independently of the search: all that there are with all modes, but for the others."""
    graph = extract_regions(frontend.load("toy").module, "toy")
    all_modes, some_modes = (
        CandidateGenerator(graph, SYSTEMS["full"], costs("full"), requested) for requested in (MODES, modes)
    )
    for generator in (all_modes, some_modes):
        generator.prepare()
    for region in graph.regions:
        requested = [c for c in all_modes.candidates(region) if c.rewrite.mode in modes]
        assert some_modes.candidates(region) == requested


def test_nothing_is_timed_in_vain():
    graph = extract_regions(frontend.load("toy").module, "toy")
    timed = {}
    for modes in (("GPU",), ("GPU", "PIM"), ("GPU", "SPLIT")):
        fresh = Costs(SYSTEMS["full"], Profiling())
        search(graph, SYSTEMS["full"], fresh, Goal(modes=modes))
        timed[modes] = len(fresh._pim)
    assert timed["GPU",] == 0 < timed["GPU", "PIM"] < timed["GPU", "SPLIT"]


def test_a_layer_of_the_gpu_takes_what_it_takes_alone():
    graph = extract_regions(frontend.load("toy").module, "toy")
    search_result = search(graph, SYSTEMS["full"], costs("full"))
    alone = search_result.gpu_only.region_times
    for region in graph.regions:
        gpu = search_result.generator.make(region, OPERATOR_KERNELS, SYSTEMS["full"].gpu.memory_channels)
        assert alone[region.name].latency_ns == pytest.approx(Cost.from_candidate(gpu).latency_ns, abs=0.002)


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
    search_result = search(graph, SYSTEMS["full"], costs("full"), Goal(modes="gpu,pipeline"))
    assert Estimate.from_search(search_result).modes == ("gpu", "pipeline")
    reasons = [choice.reason for choice in search_result.plan.choices if choice.mode == "GPU"]
    assert reasons and all(reasons)
