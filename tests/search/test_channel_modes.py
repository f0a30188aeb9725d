"""May the GPU use the channels that have PIM only while no PIM program runs, and is that charged?"""

import functools
import itertools
import json
import re
from dataclasses import replace

import pytest
from edited_plans import edited
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from length import examples
from problems import graph_of
from test_modes import networks, slow_system

import pimflow
from pimflow.commands.compile.timeline import PlanTrace
from pimflow.commands.profile.profile import region_graph
from pimflow.commands.shared.options import NetworkOptions
from pimflow.core.candidate import Task, makespan_ns, overlap_first_launch
from pimflow.core.kernel import ConvGeometry, convolution_kernel
from pimflow.core.plan import Plan
from pimflow.core.region_graph import RegionGraph
from pimflow.core.tensor_placement import IN_ALL_CHANNELS, IN_GPU_CHANNELS, IN_PIM_CHANNELS, ChannelSet
from pimflow.errors import InfeasibleError, PlanError, UsageError
from pimflow.hardware import system
from pimflow.placement import CandidateGenerator, Costs, Profiling, apply, reevaluate, search
from pimflow.placement.best_plan import profile
from pimflow.placement.solvers.capacity import bank_rows
from pimflow.placement.solvers.plan_memory import PlanMemory
from pimflow.simulators.gpu.machine import RooflineMachine, family
from pimflow.simulators.gpu.model import kernel_cost
from pimflow.simulators.gpu.traffic import TrafficShares

SWITCHES_NS = (0.0, 200.0, 1000.0)


def sharing(switch_ns: float, **changes):
    shared = {"channel_sharing": "time-shared", "channel_mode_switch_ns": switch_ns}
    return replace(slow_system(splits="grid"), **shared, **changes)


@functools.cache
def costs(channels: int) -> Costs:
    return Costs(sharing(0.0, pim_channels=channels), Profiling())


def search_shared(graph, switch_ns: float, channels: int = 4):
    return search(graph, sharing(switch_ns, pim_channels=channels), costs(channels))


def channel_events(search_result) -> tuple[list, list]:
    """Events of kernels at all channels, and those of PIM."""
    events = search_result.evaluation.timeline.events
    wide = [(e.begun_ps, e.end_ps) for e in events if "pim" in e.also]
    return wide, [(e.start_ps, e.end_ps) for e in events if e.resource == "pim"]


@given(networks(), st.sampled_from(SWITCHES_NS), st.sampled_from([4, 16, 24, 32]))
@settings(max_examples=examples(30))
def test_no_kernel_at_all_channels_runs_beside_pim(graph, switch_ns, channels):
    plan = search_shared(graph, switch_ns, channels)
    wide, pim = channel_events(plan)
    for (begin, end), (other_begin, other_end) in itertools.product(wide, pim):
        assert end <= other_begin or other_end <= begin
    if channels == 32 and pim:
        assert wide or all(c.rewrite.mode == "PIM" for c in plan.candidates)


@pytest.mark.long
@given(networks(), st.sampled_from([4, 16, 24]))
@settings(max_examples=examples(20))
def test_sharing_never_loses_and_dear_switches_never_gain(graph, channels):
    apart = search(graph, replace(slow_system(splits="grid"), pim_channels=channels), costs(channels))
    shared = [search_shared(graph, switch_ns, channels) for switch_ns in SWITCHES_NS]
    assert all(result.baseline.latency_ns == apart.baseline.latency_ns for result in shared)
    times = [result.evaluation.latency_ns for result in (*shared, apart)]
    assert times == pytest.approx(sorted(times), rel=1e-9)
    assert apart.plan.system == search(graph, apart.system, costs(channels)).plan.system
    assert shared[0].plan.system != apart.plan.system


@given(networks(), st.sampled_from(SWITCHES_NS), st.sampled_from([4, 24, 32]))
@settings(max_examples=examples(20))
def test_a_stored_plan_gives_the_same_times(graph, switch_ns, channels):
    plan = search_shared(graph, switch_ns, channels)
    read = Plan.from_json(plan.plan.to_json())
    reapplied = apply(graph, plan.system, read, costs(channels))
    assert reapplied.evaluation.latency_ns == pytest.approx(plan.evaluation.latency_ns, rel=1e-12)
    assert reapplied.evaluation.timeline == plan.evaluation.timeline
    if any(str(choice.channels) for choice in read.choices):
        with pytest.raises(PlanError, match="time-shared"):
            apply(graph, replace(slow_system(splits="grid"), pim_channels=channels % 32), read)


@given(networks())
@settings(max_examples=examples(20))
def test_a_kernel_is_no_faster_than_with_all_it_touches_over_all_channels(graph):
    """Nor slower than at the channels left; and what PIM or a kernel beside it reads lies there."""
    generator = CandidateGenerator(graph, sharing(200.0, pim_channels=16), costs(16))
    table = profile(graph, generator)
    for name, candidates in table.candidates.items():
        narrow = {c.primitive: c for c in candidates if c.name == "GPU"}[""]
        fastest = generator.make(graph.region(name), narrow.rewrite, 32).tasks[0].execution_ns
        for c in candidates:
            if not c.uses_pim and str(c.channels):
                task = c.tasks[-1]
                assert fastest <= task.execution_ns <= narrow.tasks[0].execution_ns * (1 + 1e-12)
                assert task.also == ("pim",)
                if str(c.channels) == "all-all":
                    assert task.execution_ns == fastest
            elif not str(c.channels):
                read = [n for n in graph.region(name).inputs if n in table.candidates]
                assert c.input == c.output == IN_GPU_CHANNELS
                placements = (IN_ALL_CHANNELS, IN_PIM_CHANNELS)
                edges = [table.transform(n, far, IN_GPU_CHANNELS) for n in read for far in placements]
                assert not any(edge.possible for edge in edges)
            else:
                result_kept = c.channels.result_in_l2
                assert result_kept == (c.output != IN_GPU_CHANNELS) == c.leaves_open.startswith("result kept")


def test_a_plan_in_which_pim_cannot_read_its_operand_is_refused():
    graph = chain(2)
    target = sharing(0.0, pim_channels=16)
    plan = search(graph, target, costs(16)).plan
    first, second = (edited(choice, gpu_share=1.0, mode="GPU", schedule="") for choice in plan.choices)
    on_pim = edited(second, mode="PIM", gpu_share=0.0, channels="")
    broken = replace(plan, choices=(edited(first, channels="all-all"), on_pim))
    with pytest.raises(PlanError, match="'r1' reads a tensor that lies in channels") as refused:
        apply(graph, target, broken, costs(16))
    with pytest.raises(PlanError, match="cannot be PIM at channels 'all-all'"):
        apply(graph, target, replace(broken, choices=(first, edited(on_pim, channels="all-all"))), costs(16))
    named = re.findall("'([^']*)'", re.search("of it may be (.*); or", str(refused.value))[1])
    assert "staged" in named
    for channels in named:
        mended = replace(broken, choices=(broken.choices[0], edited(on_pim, channels=channels)))
        assert apply(graph, target, mended, costs(16)).evaluation.latency_ns > 0


@pytest.mark.parametrize(
    ("before_ns", "after", "latency_ns"),
    [
        ((200.0,), (), 1000 + 50),  # the launch takes longer than the change
        ((700.0, 200.0), (1,), 1000 + 50),  # also longer than the staging of operands and the change
        ((1500.0, 200.0), (1,), 1700 + 50),
        ((200.0,), (1,), 300 + 1000 + 50),  # the launch waits for a kernel beside the change
    ],
)
def test_a_submission_is_on_its_way_while_its_channels_are_made_ready(before_ns, after, latency_ns):
    ready = [Task(label="", resource="pim", execution_ns=ns, readies_channels=True) for ns in before_ns]
    beside = Task(label="", resource="gpu", execution_ns=300.0)
    program = Task(label="", resource="pim", launch_ns=1000.0, execution_ns=50.0, after=after)
    tasks = (*ready, beside, program)
    assert makespan_ns(overlap_first_launch(tasks)) == latency_ns


@pytest.mark.long
@pytest.mark.parametrize("inputs", [[(), (0,), (0,), (1, 2)], [(), *[(0,)] * 4, (1, 2, 3, 4)]])
def test_branches_with_many_result_layouts_are_searched_to_the_end(inputs):
    search_result = search(pointwise(inputs), sharing(200.0, pim_channels=16), costs(16))
    assert search_result.gap < 1e-9
    assert search_result.plan.lower_bound_ns == pytest.approx(search_result.plan.latency_ns, rel=1e-9)


@pytest.mark.parametrize("readers", [8, 9])
def test_what_many_regions_read_lies_where_inputs_do(readers):
    """And not in three ways, each of which all parts behind it would have to be solved for."""
    graph = pointwise([(), *[(0,)] * readers])
    search_result = search(graph, sharing(0.0, pim_channels=16))
    first = graph.regions[0].name
    assert len(graph.readers[first]) == readers
    layouts = {candidate.output for candidate in search_result.table.candidates[first]}
    assert (layouts == {IN_GPU_CHANNELS}) == (readers > 8)


def chain(count: int) -> RegionGraph:
    return pointwise([(i - 1,) if i else () for i in range(count)])


def pointwise(inputs: list[tuple[int, ...]]) -> RegionGraph:
    """Pointwise convolutions that read one another."""
    graph = graph_of(inputs)
    shape, geometry = (1, 28, 28, 64), ConvGeometry(n=1, h=28, w=28, c=64, oc=64)
    regions = (
        replace(region, geometry=geometry, input_shapes=(shape,) * len(region.inputs), output_shape=shape)
        for region in graph.regions
    )
    return replace(graph, regions=tuple(regions))


placed = st.sampled_from([(1.0, 0.0), (0.5, 0.5), (0.0, 1.0), (0.75, 0.25)])
layers = st.builds(
    ConvGeometry,
    n=st.just(1),
    h=st.integers(1, 60),
    w=st.integers(1, 60),
    c=st.sampled_from([16, 96, 512]),
    oc=st.sampled_from([40, 96, 1000]),
    kh=st.sampled_from([1, 3]),
    padding=st.just((1, 1, 1, 1)),
)


@given(layers, st.booleans(), placed, placed)
@settings(max_examples=examples(80))
def test_a_kernel_is_charged_at_least_what_its_busiest_channels_take(layer, depthwise, read_in, result_in):
    """Channel by channel, for every place of the weights, at one tiling; of 32, half have PIM."""
    layer = replace(layer, oc=layer.c, groups=layer.c) if depthwise else layer
    kernel, gpu = convolution_kernel(layer, "fp16"), system().gpu
    cost = kernel_cost(kernel, gpu, dtype="fp16")
    assume(not cost.tile or cost.tile[2] == 1)  # partial sums are tested with whole kernels
    run = {"dtype": "fp16", "tile": cost.tile and cost.tile[:2]}
    wide_ns, narrow_ns = (kernel_cost(kernel, gpu, channels=n, **run).execution_ns for n in (32, 16))
    sets = {ChannelSet.GPU: 0.5, ChannelSet.PIM: 0.5}
    places = [dict(zip(sets, value)) for value in (read_in, result_in)]
    balance = TrafficShares.from_cost(kernel, cost, gpu, "fp16").balance(sets, *places)
    charged_ns = wide_ns + (balance - 1) * (narrow_ns - wide_ns)

    machine = RooflineMachine(gpu, "fp16", family=family(kernel))
    cycles, p = machine.cycles_per_ns, machine["overlap"]
    once = kernel.input_bytes + kernel.weight_bytes + kernel.output_bytes * gpu.write_factor
    reread_bytes = cost.dram_bytes - once
    written = kernel.output_bytes * gpu.write_factor / machine["dram_write"]
    loads = cost.l2_bytes - kernel.output_bytes
    rows, columns = cost.tile[:2] if cost.tile else (kernel.input_bytes, kernel.weight_bytes)
    of_read, of_weights = (loads * value / (rows + columns) for value in (rows, columns))
    port = cost.l2_ns if cost.l2_ns * cycles * machine.l2_rate > cost.l2_bytes * (1 + 1e-9) else 0.0
    fixed_ns = wide_ns - sum(value**p for value in (cost.compute_ns, cost.l2_ns, cost.dram_ns)) ** (1 / p)

    def busiest(read: float, weights: float, result: float, weights_in: float) -> float:
        halves = zip(read_in, (weights_in, 1 - weights_in), result_in)
        channels = [(read * a + weights * b + result * c) / 16 for a, b, c in halves for _ in range(16)]
        return max(channels) * 32

    def takes_ns(weights_in: float) -> float:
        dram = busiest(kernel.input_bytes + reread_bytes, kernel.weight_bytes, written, weights_in)
        l2 = busiest(of_read, of_weights, kernel.output_bytes, weights_in)
        l2_ns = max(l2 / machine.l2_rate / cycles, port)
        demands = (cost.compute_ns, l2_ns, dram / machine.dram_rate / cycles)
        return fixed_ns + sum(value**p for value in demands) ** (1 / p)

    assert charged_ns >= min(takes_ns(step / 64) for step in range(65)) * (1 - 1e-9)


def test_a_stored_timeline_says_what_else_a_kernel_holds(tmp_path):
    plan = search_shared(chain(3), 0.0, 32)
    trace = PlanTrace.from_search(plan)
    trace.write(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    shown = [e for e in events if (e["ph"], e["pid"]) == ("X", 0)]
    assert [tuple(e["args"].get("also", ())) for e in shown] == [task.also for task in trace.tasks]
    assert {task.also for task in trace.tasks if task.resource == "gpu"} <= {("pim",)}


def test_all_channels_may_have_pim_only_if_they_are_shared():
    with pytest.raises(UsageError, match="channel_sharing time-shared"):
        system(pim_channels=32, channel_sharing="partitioned")
    everywhere = system(pim_channels=32, channel_sharing="time-shared")
    assert everywhere.gpu_channels == 0
    with pytest.raises(UsageError, match="of the GPU's 0"):
        system(pim_channels=33, channel_sharing="time-shared")
    with pytest.raises(UsageError, match="none of time-shared, partitioned"):
        system(channel_sharing="both")


@pytest.mark.parametrize("channels", [pytest.param(16, marks=pytest.mark.long), 32])
def test_where_shared_channels_hold_too_much_pim_has_fewer_layers(channels):
    """Weights on PIM lie in the rows beside all that kernels at all channels touch."""
    shared = system(channel_sharing="time-shared", pim_channels=channels)
    graph = region_graph("toy", NetworkOptions(), None)

    def search_in_rows(rows: int, on=shared):
        pim = replace(on.pim, rows_per_bank=on.pim.row_base + rows)
        return search(graph, replace(on, pim=pim))

    free = search(graph, shared)
    memory = PlanMemory(graph, shared.dtype, free.table)
    needed = bank_rows(shared, free.candidates, memory.pool_bytes(free.candidates))
    assert needed > sum(c.footprint.bank_rows for c in free.candidates) > 0
    for rows in range(1, needed):
        search_result = search_in_rows(rows)
        assert search_result.evaluation.latency_ns >= free.evaluation.latency_ns * (1 - 1e-9)
        assert search_result.evaluation.latency_ns <= search_result.gpu_only.latency_ns
        on_pim = any(c.uses_pim for c in search_result.candidates)
        pool_bytes = memory.pool_bytes(search_result.candidates)
        assert not on_pim or bank_rows(shared, search_result.candidates, pool_bytes) <= rows
        if channels < 32:
            apart = search_in_rows(rows, replace(shared, channel_sharing="partitioned"))
            assert search_result.evaluation.latency_ns <= apart.evaluation.latency_ns * (1 + 1e-9)
    assert on_pim
    assert search_in_rows(needed).evaluation.latency_ns == pytest.approx(free.evaluation.latency_ns)
    with pytest.raises(InfeasibleError, match="beside what they hold as plain memory"):
        apply(graph, search_in_rows(needed - 1).system, free.plan)


def test_the_switch_is_known_by_its_system_where_it_matters():
    apart, shared = (system(channel_sharing=mode) for mode in ("partitioned", "time-shared"))
    assert shared.identity == system().identity
    assert apart.identity == replace(apart, channel_mode_switch_ns=500.0).identity
    assert shared.identity != replace(shared, channel_mode_switch_ns=500.0).identity
    assert not any("channel_mode_switch_ns" in row for row in apart.assumptions())
    assert any("channel_mode_switch_ns" in row for row in shared.assumptions())


@pytest.mark.long
@pytest.mark.parametrize("channels", [4, 16, 24])
def test_a_plan_without_modes_is_charged_with_all_in_the_gpu_channels(channels):
    """The GPU's kernels may leave results where PIM could not read them meanwhile."""
    charged = system(channel_sharing="time-shared", pim_channels=channels)
    graph, costs = region_graph("toy", NetworkOptions(), None), Costs(charged, Profiling())
    lesser = search(graph, replace(charged, accounting="paper"), costs)
    assert any(str(choice.channels) for choice in lesser.plan.choices)
    reapplied = apply(graph, charged, lesser.plan.with_gpu_channels(), costs)
    assert reevaluate(lesser, charged, costs).latency_ns == reapplied.evaluation.latency_ns


def test_a_kept_result_is_not_where_an_uncharged_kernel_finishes_it():
    """HBM-PIM leaves its lanes to a kernel, which comes between the program and who reads the result."""
    target = system(pim="hbm-pim", channel_sharing="time-shared", pim_channels=32, accounting="paper")
    graph, costs = region_graph("toy", NetworkOptions(), None), Costs(target, Profiling())
    lesser = search(graph, target, costs)
    assert any(choice.channels.result_in_l2 for choice in lesser.plan.choices)
    charged = replace(target, accounting="paper+epilogue")
    reapplied = apply(graph, charged, lesser.plan.with_gpu_channels(), costs)
    assert reevaluate(lesser, charged, costs).latency_ns == reapplied.evaluation.latency_ns


@pytest.mark.long
def test_a_plan_with_kept_results_is_compared_under_other_conventions():
    target = system(channel_sharing="time-shared")
    search_result = pimflow.search("toy", target)
    assert any(choice.channels.result_in_l2 for choice in search_result.plan.choices)
    report = pimflow.compile("toy", system=target, plan=search_result.plan).report
    assert report.plan.latency_ns == pytest.approx(search_result.evaluation.latency_ns)
