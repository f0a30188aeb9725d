"""Is the split that the search finds the best of all?"""

from dataclasses import replace
from typing import ClassVar

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from length import examples

from pimflow.core.candidate import makespan_ns
from pimflow.core.kernel import ConvGeometry
from pimflow.core.rewrite import SplitRewrite
from pimflow.core.split import Split
from pimflow.hardware import PimSpec, system
from pimflow.pim_backend.programs.lowering import ProgramRequest
from pimflow.placement import CandidateGenerator, Costs, Profiling
from pimflow.placement.costs.pim_runs import LayerPimCost, PimCost, PimTarget
from pimflow.placement.costs.splits import NEAR, NonPimTimes, SplitCharges, SplitLayer, all_splits, grid
from pimflow.simulators.pim.bound import min_work_ns
from pimflow.simulators.profiler import Analytic, BuiltIn

# Launches would hide the differences of splits.
FREE = system(channel_sharing="partitioned").with_launches(gpu_ns=0.0, pim_ns=0.0)


def slow_system(pim):
    """Clocks that make each row of a small layer count, on both devices."""
    pim = PimSpec.load(pim)
    gpu = replace(FREE.gpu, sms=1, clock_mhz=FREE.gpu.clock_mhz / 200)
    return replace(FREE, gpu=gpu, pim=replace(pim, tCK_ps=300 * pim.tCK_ps), pim_channels=2)


SLOW = slow_system("newton-gddr6")
SYSTEMS = {
    "full": system(),
    "free launches": FREE,
    "slow": SLOW,
    "paper": replace(SLOW, accounting="paper", timing="ramulator-pimflow"),
    "copies made": replace(SLOW, copies="made"),
    "lanes": slow_system("hbm-pim"),
}


def split_candidates(generator, region):
    """Every split with its candidate, whatever the search finds."""
    splits = all_splits(region.geometry, generator.system.pim)
    return {s: generator.make(region, SplitRewrite.from_split(s, region.geometry)) for s in splits}


@pytest.mark.long
@pytest.mark.parametrize("name", SYSTEMS)
def test_no_split_is_faster(toy, name):
    """Of those that leave the same pending, by the tasks of every candidate there is."""
    generator = CandidateGenerator(toy, SYSTEMS[name])
    layers, inner = 0, 0
    for region in toy.regions:
        if generator.unsupported_reason(region) or region.operator not in ("conv2d", "fc"):
            continue
        layers += 1
        offered = set(generator.splits(region))
        groups = {}
        for split, candidate in split_candidates(generator, region).items():
            groups.setdefault(candidate.deferred_epilogue, []).append((makespan_ns(candidate.tasks), split))
        for group in groups.values():
            best_ns = min(time_ns for time_ns, _ in group)
            assert best_ns == min(time_ns for time_ns, split in group if split in offered)
            inner += min(group)[1].gpu not in (1, region.geometry.oh - 1)
    assert layers >= 5 and (inner or name in ("full", "free launches"))


@pytest.mark.long
@pytest.mark.parametrize("name", SYSTEMS)
def test_what_is_compared_is_what_is_charged(toy, name):
    """`SplitCharges.total_ns` against the makespan of the tasks, but for what is the same for all splits."""
    generator = CandidateGenerator(toy, SYSTEMS[name])
    layers = {generator._key(r): r for r in toy.regions if not generator.unsupported_reason(r)}
    for region, layer in zip(layers.values(), generator.layers(), strict=True):
        if layer.geometry != region.geometry or region.prologue:
            continue
        for beside in layer.besides:
            candidate = generator.make(region, SplitRewrite.from_split(beside.split, region.geometry))
            run = generator.pim_cost(region, candidate.rewrite)
            deferred = beside.deferred_epilogue + region.epilogue.operators
            settles = deferred and not generator.defers_epilogue(region)
            same_ns = generator.epilogue_cost(region).latency_ns if settles else 0.0
            compared_ns = layer.terms.total_ns(beside, run) + same_ns
            assert makespan_ns(candidate.tasks) == pytest.approx(compared_ns, rel=1e-12)


@st.composite
def convolutions(draw):
    window = draw(st.sampled_from((1, 3)))
    return ConvGeometry(
        n=1,
        h=draw(st.integers(3, 10)),
        w=draw(st.integers(3, 9)),
        c=draw(st.sampled_from((3, 16, 72, 200))),
        oc=draw(st.integers(1, 90)),
        kh=window,
        kw=window,
        stride=(draw(st.integers(1, 2)), 1),
        padding=(window // 2, 0, window // 2, 0),
    )


def side(pim, timing):
    return PimTarget(pim=PimSpec.load(pim), channels=3, dtype="fp16", profiler=BuiltIn(timing))


SIDES = [side("newton-gddr6", "strict"), side("newton-gddr6", "ramulator-pimflow"), side("hbm-pim", "strict")]


@settings(max_examples=examples(15), deadline=None)
@given(convolutions(), st.sampled_from(SIDES), st.data())
def test_whatever_stands_beside_pim(geometry, side, data):
    """Times of the GPU that rise, fall or jump from row to row: nothing is assumed of them."""
    assume(all_splits(geometry, side.pim))
    times_ns = st.floats(0, 4000)
    besides = tuple(
        NonPimTimes(
            split=split,
            gpu_ns=data.draw(times_ns),
            crossbar_ns=data.draw(st.sampled_from((0.0, 300.0))),
            after_ns=data.draw(st.sampled_from((0.0, 100.0))),
            deferred_epilogue=data.draw(st.sampled_from(((), ("concat",)))),
        )
        for split in all_splits(geometry, side.pim)
    )
    terms = SplitCharges(launch_ns=data.draw(times_ns), burst_ns=0.1)
    layer = SplitLayer(pim_target=side, geometry=geometry, name="conv", besides=besides, terms=terms)
    result = layer.costs()
    splits = tuple(all_splits(geometry, side.pim))
    timed = SplitLayer(pim_target=side, geometry=geometry, name="conv", splits=splits).costs()
    assert timed.schedule == result.schedule
    costs = dict(timed.costs[-len(besides) :])
    for deferred in {beside.deferred_epilogue for beside in besides}:
        group = [b for b in besides if b.deferred_epilogue == deferred]
        best_ns = min(terms.total_ns(b, costs[b.split]) for b in group)
        assert best_ns == min(terms.total_ns(b, costs[b.split]) for b in group if b.split in result.splits)
        # The fastest split of the grid is there too, if it takes hardly longer.
        steps = {b.split: terms.total_ns(b, costs[b.split]) for b in group if b.split in grid(geometry)}
        if steps and min(steps.values()) <= NEAR * best_ns:
            assert min(steps.values()) in {ns for split, ns in steps.items() if split in result.splits}
    # With other launches nothing is timed again, and the result is that of a fresh search.
    other_layer = replace(layer, terms=replace(terms, launch_ns=0.0))
    assert replace(other_layer, known=result).costs().splits == other_layer.costs().splits


@settings(max_examples=examples(24), deadline=None)
@given(convolutions(), st.sampled_from(SIDES))
def test_no_program_does_its_work_faster(geometry, side):
    bound_ns = min_work_ns(geometry, side.pim, side.dtype, side.channels)
    for schedule in side.schedules(geometry):
        least_ns, cost = side.busiest_ns(geometry, schedule, "conv"), side.cost(geometry, schedule, "conv")
        assert 0 < bound_ns <= least_ns <= cost.time_ns
        # Costs come from programs without the fields that do not change the time.
        run = side.run(ProgramRequest("conv", geometry, schedule))
        assert cost == LayerPimCost(schedule=schedule, **vars(PimCost.from_run(run, side.pim)))


class Counting:
    """A profiler that counts the programs of all channels that it times."""

    name = identity = "counting"

    def __init__(self):
        self.whole = 0

    def time_program(self, program, pim):
        self.whole += len(program.channels) > 1
        return BuiltIn().time_program(program, pim)


def test_few_splits_are_timed(toy):
    """Fewer than the nine of the grid, whatever the layer."""
    counts = {}
    for splits in ("exact", "grid"):
        counting = Counting()
        target = replace(SLOW, splits=splits)
        generator = CandidateGenerator(toy, target, Costs(target, Profiling(pim=counting)))
        generator.prepare()
        counts[splits] = counting.whole
    assert counts["exact"] < counts["grid"]


class Measuring:
    """A GPU profiler that measures: it is not asked for what no candidate has."""

    name = "measuring"
    computes: ClassVar[bool] = False

    def __init__(self):
        self.asked = set()

    def costs(self, requests, gpu, dtype):
        self.asked.update(request.kernel for request in requests)
        return Analytic().costs(requests, gpu, dtype)


def test_the_papers_grid_is_there_and_what_measurements_get(toy):
    grid = CandidateGenerator(toy, system(splits="grid"))
    region = toy.region("stem.conv")
    tenths = [Split("rows", round(region.geometry.oh * tenth / 10)) for tenth in range(1, 10)]
    assert list(grid.splits(region)) == sorted({split for split in tenths if split.gpu > 0})
    measuring = Measuring()
    measured = CandidateGenerator(toy, system(), Costs(system(), Profiling(gpu=measuring)))
    measured.prepare()
    assert measured.split_policy == "grid" and measured.splits(region) == grid.splits(region)
    exact = CandidateGenerator(toy, system())
    exact.prepare()
    assert exact.split_policy == "exact" and len(measuring.asked) < sum(exact.costs.kernel_counts().values())
