"""Are groups of regions counted as Deep Fusion counts them, priced by the one model, and never a loss?"""

import itertools
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from conv_chains import chains, convolution
from edited_plans import edited_plan
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples

from pimflow import frontend, fusion
from pimflow.commands.shared import prepare
from pimflow.core.blocks import BLOCK_SHARED_BYTES
from pimflow.core.kernel import ELEMENT_BYTES, Kernel
from pimflow.core.region_graph import RegionGraph
from pimflow.core.rewrite import FusedGroupRewrite
from pimflow.errors import PlanError
from pimflow.fusion import GroupTiling, place
from pimflow.fusion.default_tilings import TileMemory, default_tilings
from pimflow.fusion.tilings import TilingSearch
from pimflow.hardware import spec_names, system
from pimflow.hardware.gpu import GpuSpec
from pimflow.placement import Goal, apply, search
from pimflow.placement.candidates import fused_groups
from pimflow.placement.candidates.candidates import CandidateGenerator
from pimflow.primitives.launches import can_compute
from pimflow.simulators.gpu.model import kernel_cost, kernel_energy_pj
from pimflow.simulators.gpu.region_kernels import gpu_kernel

SYSTEM = system(channel_sharing="partitioned")
GPU = SYSTEM.gpu


def graphs(most=5):
    """Convolutions in a row, any of which may be in one kernel with others."""
    shapes = st.tuples(st.just(1), st.integers(4, 30), st.integers(4, 30), st.sampled_from((8, 24, 96)))
    drawn = chains(shapes, st.integers(2, most), (8, 24, 96), (1, 3, 5), depthwise=True)
    return drawn.map(lambda graph: replace(graph, fusible=tuple(region.name for region in graph.regions)))


def price(kernel: Kernel, channels: int) -> float:
    return kernel_cost(kernel, GPU, dtype="fp16", channels=channels).total_ns


def tilings_of(dims):
    return (GroupTiling(h=h, w=w) for h, w in itertools.product(range(1, dims[1] + 1), range(1, dims[2] + 1)))


@settings(max_examples=examples(24))
@given(graphs(), st.data())
def test_a_group_moves_and_computes_what_deep_fusion_counts(graph, data):
    tilings = TilingSearch(graph, SYSTEM)
    covers = tuple(region.name for region in graph.regions)
    _, h, w, _ = graph.regions[-1].output_shape
    tiling = GroupTiling(h=data.draw(st.integers(1, h)), w=data.draw(st.integers(1, w)))
    counted = fusion.Group(graph=fusion.layers_from_regions(graph), begin=0, end=len(covers), tiling=tiling)
    kernel = tilings.kernel(covers, tiling)
    assert 0 <= kernel.tensor_macs <= kernel.macs and kernel.tensor_macs <= kernel.fragments * 16**3
    cost = kernel_cost(kernel, GPU, dtype="fp16", channels=16)
    assert cost.l2_bytes == 2 * counted.traffic_elements
    assert kernel.blocks == tiling.tiles and kernel.layers == len(covers)
    assert abs(kernel.macs - counted.macs) <= len(covers), "each layer is rounded up there, down here"
    once = sum(counted.graph.elements(name) for name in counted.input_names)
    assert kernel.input_bytes <= 2 * once and kernel.output_bytes == 2 * np.prod(
        graph.regions[-1].output_shape
    )
    assert cost.dram_bytes <= cost.l2_bytes + kernel.output_bytes * (GPU.write_factor - 1)
    energies = kernel_energy_pj(kernel, cost, GPU, "fp16")
    assert energies["gpu_l2"] == cost.l2_bytes * GPU.energy["l2_pj_per_byte"]


@settings(max_examples=examples(9))
@given(graphs(most=3), st.sampled_from((16, 32)))
def test_the_best_tiling_is_the_fastest_of_all_that_fit(graph, channels):
    """Every cut of the result that is tried, priced and placed one by one, is no faster."""
    tilings = TilingSearch(graph, SYSTEM)
    alone = {r.name: price(gpu_kernel(r, "fp16"), channels) for r in graph.regions}
    best = {group.covers: group.tiling for group in tilings.best(channels)}
    shapes = {region.name: region.output_shape for region in graph.regions}
    cuts = fusion.TilingCandidates.from_graph(tilings.layers, "recompute")
    for covers, tiling in best.items():
        assert not tilings.unsupported_reason(covers, tiling)
        assert price(tilings.kernel(covers, tiling), channels) < sum(alone[name] for name in covers)
        rows, columns = (set(axis.parts.tolist()) for axis in cuts.axes[1:])
        tried = [t for t in tilings_of(shapes[covers[-1]]) if t.h in rows and t.w in columns]
        assert tiling in tried
        price_ns = price(tilings.kernel(covers, tiling), channels)
        for rival in tried:
            faster = price(tilings.kernel(covers, rival), channels) < price_ns - 1e-6
            assert not faster or tilings.unsupported_reason(covers, rival)


@pytest.mark.long
@settings(max_examples=examples(9))
@given(graphs(), graphs(), st.booleans())
def test_what_is_known_of_other_networks_changes_nothing(graph, other_graph, forwards):
    """Of others whose regions have the same names, as parts, as given runs, and without launches."""
    part = replace(graph, regions=graph.regions[:-1], outputs=(graph.regions[-2].name,))
    runs = (tuple(region.name for region in graph.regions[:2]),)
    stored = CandidateGenerator(graph, SYSTEM).costs.tiling_cache
    free, chained = SYSTEM.with_launches(gpu_ns=0.0, pim_ns=0.0), replace(graph, runs=runs)
    cases = [(other_graph, SYSTEM), (part, SYSTEM), (graph, free), (graph, SYSTEM), (chained, SYSTEM)]
    for network, target in cases if forwards else cases[::-1]:
        for channels in (1, 32):
            best = TilingSearch(network, target).best(channels)
            assert TilingSearch(network, target, stored).best(channels) == best


def test_no_run_is_timed_twice(toy):
    """Neither for another network that has it, nor where another search shares the costs.

    On other channels, and without launches, it is.
    """
    generator = CandidateGenerator(toy, SYSTEM)
    assert generator.tilings.best(16)
    for shared_generator in (generator.with_graph(toy), CandidateGenerator(toy, SYSTEM, generator.costs)):
        with mock.patch.object(shared_generator.tilings, "_fastest", side_effect=AssertionError):
            assert shared_generator.tilings.best(16) == generator.tilings.best(16)
    free = CandidateGenerator(toy, SYSTEM.with_launches(gpu_ns=0.0, pim_ns=0.0), generator.costs)
    for new, channels in ((generator, 32), (free, 16)):
        with (
            mock.patch.object(new.tilings, "_fastest", side_effect=AssertionError),
            pytest.raises(AssertionError),
        ):
            new.tilings.best(channels)


@pytest.fixture(scope="module")
def toy():
    return prepare.regions(frontend.load("toy"), fuse=True)


@settings(max_examples=examples(9))
@given(graphs(most=3), st.sampled_from((0, 16)))
def test_more_candidates_are_never_a_loss(graph, channels):
    target = system(pim_channels=channels, splits="grid")
    goal = Goal(modes=("gpu", "pim"))
    apart, together = (search(g, target, goal=goal) for g in (replace(graph, fusible=()), graph))
    slack = 1 + 1e-6  # of the integer program
    assert together.evaluation.latency_ns <= apart.evaluation.latency_ns * slack
    assert together.gpu_only.latency_ns <= apart.gpu_only.latency_ns
    for name, candidates in apart.table.candidates.items():
        assert {c.name for c in candidates} <= {c.name for c in together.table.candidates[name]}
    done = [name for candidate in together.candidates for name in candidate.covers]
    assert done == [region.name for region in graph.regions]
    exhaustive = search(graph, target, goal=replace(goal, solver="exhaustive"))
    assert exhaustive.evaluation.latency_ns == pytest.approx(together.evaluation.latency_ns, rel=1e-5)


def test_a_group_crosses_no_branch():
    """Of a network with two ways from one region to another, groups are in one way, or have all of both."""
    shape = (1, 14, 14, 24)
    regions = [
        convolution("before", "%x", shape, 24),
        convolution("a1", "before", shape, 24, 3, 1, 24),
        convolution("b1", "before", shape, 24, 3, 1, 24),
        convolution("join", "a1", shape, 24, residual="b1"),
        convolution("behind", "join", shape, 24),
    ]
    names = tuple(region.name for region in regions)
    graph = RegionGraph(name="branches", regions=tuple(regions), outputs=("behind",), fusible=names)
    groups = {group.covers for group in TilingSearch(graph, SYSTEM).best(16)}
    assert groups <= {names, names[:4], names[1:4], names[1:], names[2:4], names[3:]}
    assert names[1:4] in groups and names in groups
    assert not {c for c in groups if c[0] == "before" and "join" not in c}


def test_tiles_take_what_a_block_has(toy):
    tilings = TilingSearch(toy, SYSTEM)
    assert tilings.best(16)
    for group in tilings.best(16):
        placed = place(tilings.group(group.covers, group.tiling), ELEMENT_BYTES["fp16"], BLOCK_SHARED_BYTES)
        assert placed.on_chip_bytes <= BLOCK_SHARED_BYTES
        assert all("weights" not in life.name for life in placed.lifetimes)


def test_work_is_dealt_to_whole_blocks():
    """31 blocks on 30 SMs take as long as 60; twice the layers wait twice as often."""
    plain = Kernel(kind="stream", macs=10**8, input_bytes=1000, output_bytes=1000, blocks=60)
    costs = {n: kernel_cost(replace(plain, blocks=n), GPU, dtype="fp16") for n in (1, 30, 31, 60)}
    assert GPU.sms == 30
    assert costs[30].compute_ns == pytest.approx(costs[60].compute_ns)
    assert costs[31].compute_ns == pytest.approx(costs[30].compute_ns * 60 / 31)
    assert costs[1].compute_ns == pytest.approx(costs[30].compute_ns * 30)
    free = kernel_cost(replace(plain, blocks=0), GPU, dtype="fp16")
    assert free.l2_ns == costs[30].l2_ns and free.dram_ns == costs[30].dram_ns
    twice = kernel_cost(replace(plain, blocks=30, layers=3), GPU, dtype="fp16")
    cycles_per_ns = GPU.clock_mhz / 1000
    waits = twice.execution_ns - costs[30].execution_ns
    assert waits == pytest.approx(2 * GPU.efficiency["kernel_cycles"] / cycles_per_ns)


@pytest.mark.parametrize("name", ["rtx-2060", "v100", "h200"])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_products_in_tiles_read_both_operands(name, dtype):
    """32 banks, a word for each lane: two cycles for what a warp multiplies, on every SM."""
    gpu = GpuSpec.load(name)
    tiled = Kernel(kind="stream", macs=10**9, blocks=gpu.sms, input_bytes=10, output_bytes=10)
    cycles = kernel_cost(tiled, gpu, dtype=dtype).compute_ns * gpu.clock_mhz / 1000
    assert cycles == pytest.approx(10**9 / gpu.sms / 32 * 2)


def test_tensor_cores_take_the_longest_of_three():
    """What they multiply, what is moved on chip for it, and steps one after the other."""
    plain = Kernel(kind="stream", macs=10**6, blocks=GPU.sms, input_bytes=10, output_bytes=10)
    cycles_per_ns = GPU.clock_mhz / 1000

    def cycles(**fields):
        kernels = replace(plain, tensor_macs=10**6, **fields), plain
        times_ns = [kernel_cost(kernel, GPU, dtype="fp16").compute_ns for kernel in kernels]
        tensor_cycles, plain_cycles = (time_ns * cycles_per_ns for time_ns in times_ns)
        return tensor_cycles, plain_cycles

    peak = GPU.fma_per_sm_cycle["fp16"] * GPU.efficiency["mma"]
    assert cycles(fragments=1000 * GPU.sms)[0] == pytest.approx(1000 * 16**3 / peak)
    moved = cycles(fragments=1, moved_fragments=10**5 * GPU.sms)[0]
    assert moved == pytest.approx(10**5 * 512 / 128)
    step = GPU.efficiency["iteration_cycles"] / 2
    assert cycles(fragments=1, steps=50)[0] == pytest.approx(50 * step)


@pytest.mark.long
def test_a_plan_names_tiles_that_may_be_edited(toy):
    search_result = search(toy, SYSTEM)
    (covers, tiling), *_ = search_result.group_tilings().items()
    (choice,) = (c for c in search_result.plan.choices if c.regions == covers)
    assert choice.rewrite.tiling == str(tiling) and GroupTiling.parse(str(tiling)) == tiling
    reapplied = apply(toy, SYSTEM, search_result.plan)
    assert reapplied.group_tilings() == search_result.group_tilings()
    assert reapplied.evaluation == search_result.evaluation

    def apply_changed(**changes):
        return apply(toy, SYSTEM, edited_plan(search_result.plan, choice.region, **changes))

    retiled = apply_changed(schedule="tiles 1x8x8")
    assert list(retiled.group_tilings().values()) == [GroupTiling(h=8, w=8)]
    assert retiled.evaluation.latency_ns > search_result.evaluation.latency_ns
    for changes, said in (
        ({"schedule": "tiles 8x8"}, "is no tiling"),
        ({"schedule": "tiles 1x99x1"}, "is no cut of"),
        ({"schedule": "tiles 1x8x2 retained in 3 bands"}, "no 3 equal bands"),
        ({"schedule": "tiles 1x8x2 by 16 channels retained"}, "none can be retained"),
        ({"gpu_share": 0.5}, "gpu_share 1, not 0.5"),
    ):
        with pytest.raises(PlanError, match=said):
            apply_changed(**changes)
    without = replace(toy, fusible=())
    with pytest.raises(PlanError, match="may be part of such a kernel"):
        apply(without, SYSTEM, search_result.plan)
    planned = apply(toy, SYSTEM, search_result.plan.to_graph(toy, can_compute))
    assert planned.group_tilings() == search_result.group_tilings()
    carried = apply(without, SYSTEM, search_result.plan.to_graph(without, can_compute))
    assert not carried.group_tilings() and {carried.candidate_by_region[n].name for n in covers} == {"GPU"}


def test_pending_work_is_settled_before_a_group(toy):
    """A kernel over tiles takes in nothing: what PIM left undone before it is a kernel of its own."""
    generator = CandidateGenerator(toy, SYSTEM)
    group = generator.tilings.best(16)[0]
    candidate = fused_groups.make(generator, group.covers, None, FusedGroupRewrite(tiling=str(group.tiling)))
    assert not candidate.fuses_epilogue
    traffic_elements = generator.tilings.group(group.covers, group.tiling).traffic_elements
    assert candidate.tasks[0].moved_bytes <= 2 * traffic_elements
    assert np.isclose(candidate.tasks[0].launch_ns, GPU.launch_ns)


@pytest.mark.long
@pytest.mark.parametrize("name", spec_names("gpu"))
def test_every_gpu_prices_groups_in_fp16(toy, name):
    """On tensor cores where it has them: Pascal and a phone's GPU have none."""
    target = system(gpu=name, pim_channels=0, dtype="fp16")
    search_result = search(toy, target, goal=Goal(modes="gpu"))
    tilings = TilingSearch(toy, target)
    assert tilings.tensor_cores == (name not in ("gtx-1080-ti", "immortalis-g720", "p100", "titan-xp"))
    assert search_result.group_tilings()
    for covers, tiling in search_result.group_tilings().items():
        assert (tilings.kernel(covers, tiling).fragments > 0) == tilings.tensor_cores


def test_tiles_of_a_core_compute_little_again():
    """The first blocks of MobileNetV2: tiles for the first level of a cache would form each halo anew."""
    shapes = (1, 112, 112, 32), (1, 112, 112, 32), (1, 112, 112, 16), (1, 112, 112, 96), (1, 56, 56, 96)
    regions = (
        convolution("a", "%x", shapes[0], 32, kernel=3, groups=32),
        convolution("b", "a", shapes[1], 16),
        convolution("c", "b", shapes[2], 96),
        convolution("d", "c", shapes[3], 96, kernel=3, stride=2, groups=96),
        convolution("e", "d", shapes[4], 24),
    )
    graph = fusion.layers_from_regions(RegionGraph(name="first", regions=regions, outputs=("e",)))
    terms = {r.name: r.geometry.macs // r.output_elements for r in regions}
    tiling = next(default_tilings(graph, terms, TileMemory()))
    group = fusion.tile_group(graph, 0, len(regions), tiling)
    done = sum(group.elements_over_tiles(name) * count for name, count in terms.items())
    assert done <= 1.2 * sum(graph.elements(name) * count for name, count in terms.items())
    assert tiling.tiles >= 8, "all cores have some"
