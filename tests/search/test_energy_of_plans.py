"""Where do a plan's joules go, and what does it save?

The oracle adds up, by hand, the counts of what runs: multiplications, bytes, commands, time.
"""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples

from pimflow import frontend
from pimflow.core.kernel import ConvGeometry, Kernel
from pimflow.core.rewrite import OPERATOR_KERNELS, PimRewrite
from pimflow.core.split import Split
from pimflow.hardware import system
from pimflow.placement import CandidateGenerator, Evaluation, profile
from pimflow.placement.solvers.evaluate import STATIC, evaluate, savings_pj
from pimflow.relay_passes.regions.extract_regions import extract_regions
from pimflow.simulators.gpu.model import kernel_cost
from pimflow.simulators.gpu.region_kernels import gpu_kernel

SYSTEM = system(channel_sharing="partitioned")
PIM_PARTS = {"comp", "gwrite", "readres", "activate", "precharge", "refresh", "io"}


@pytest.fixture(scope="module")
def toy():
    graph = extract_regions(frontend.load("toy").module, "toy")
    return graph, CandidateGenerator(graph, SYSTEM)


@pytest.fixture(scope="module")
def table(toy):
    return profile(*toy)


def gpu_only(toy, table, target=SYSTEM) -> Evaluation:
    graph, generator = toy
    chosen = tuple(generator.make(r, OPERATOR_KERNELS, target.gpu.memory_channels) for r in graph.regions)
    return evaluate(graph, chosen, table, target)


def with_pim(toy, table, target=SYSTEM) -> Evaluation:
    """Every region on PIM that can be there."""
    graph = toy[0]
    chosen = tuple(table.candidates[r.name][:2][-1] for r in graph.regions)
    return evaluate(graph, chosen, table, target)


def test_a_plan_on_the_gpu_has_the_energy_of_its_kernels(toy, table):
    graph, energy = toy[0], SYSTEM.gpu.energy
    kernels: list[Kernel] = [gpu_kernel(region, "fp16") for region in graph.regions]
    costs = [kernel_cost(kernel, SYSTEM.gpu, dtype="fp16") for kernel in kernels]
    evaluation = gpu_only(toy, table)
    latency_ns = sum(cost.total_ns for cost in costs)
    background_w = SYSTEM.pim_channels * SYSTEM.pim.energy["background_mw_per_channel"] / 1000
    assert evaluation.energies_pj == pytest.approx(
        {
            "gpu_arithmetic": sum(kernel.macs for kernel in kernels) * energy["fma_fp16_pj"],
            "gpu_l2": sum(cost.l2_bytes for cost in costs) * energy["l2_pj_per_byte"],
            "gpu_dram": sum(cost.dram_bytes for cost in costs) * 8 * energy["dram_pj_per_bit"],
            "gpu_static": energy["static_w"] * latency_ns * 1e3,
            "pim_static": background_w * latency_ns * 1e3,
        }
    )


def test_parts_add_up_exactly(toy, table):
    for evaluation in (gpu_only(toy, table), with_pim(toy, table)):
        assert evaluation.energy_pj == sum(evaluation.energies_pj.values())
        assert min(evaluation.energies_pj.values()) >= 0


def test_a_plan_with_pim_pays_for_commands_and_the_crossbar(toy, table):
    graph, generator = toy
    evaluation = with_pim(toy, table)
    assert evaluation.energies_pj.keys() >= {f"pim_{part}" for part in PIM_PARTS} | {"crossbar", "gpu_dram"}
    commands = {"COMP": 0, "READRES": 0, "bursts": 0}
    for region in graph.regions:
        if region.name not in table.unsupported_reasons:
            timing = generator.pim_cost(region, PimRewrite())
            commands["COMP"] += timing.commands["COMP"]
            commands["READRES"] += timing.commands["READRES"]
            commands["bursts"] += timing.gwrite_bursts
    moved_bytes = (commands["bursts"] + commands["READRES"]) * 32  # fp16: a burst holds the 16 results
    assert evaluation.energies_pj["crossbar"] == pytest.approx(moved_bytes * 12.5)
    assert evaluation.energies_pj["pim_io"] == pytest.approx(moved_bytes * 8 * 7.5)
    assert evaluation.energies_pj["pim_readres"] == pytest.approx(commands["READRES"] * 175.814)


def test_operands_and_results_of_pim_are_read_from_dram_and_written_to_it(toy, table):
    """Each once, as a kernel's: 2 bytes an element at 7.5 pJ a bit, writes twice by a write-through L2."""
    graph, generator = toy
    for region in graph.regions:
        if region.name not in table.unsupported_reasons:
            g = region.geometry
            bytes_moved = 2 * g.n * g.h * g.w * g.c + 2 * 2 * g.n * g.oh * g.ow * g.oc
            (crossing,) = (t for t in generator.make(region, PimRewrite()).tasks if t.resource == "crossbar")
            assert crossing.energies_pj["gpu_dram"] == pytest.approx(bytes_moved * 8 * 7.5)
    free = CandidateGenerator(graph, replace(SYSTEM, accounting="paper+epilogue"))
    assert all(t.resource != "crossbar" for t in free.make(graph.regions[0], PimRewrite()).tasks)


@pytest.mark.parametrize(
    "split, elements",
    [
        (Split("rows", 3), 2 * 6 * 16),  # rows 3..4 of a window of 3, from the one above
        (Split("channels", 8), 5 * 6 * 16),
        (Split("reduction", 4), 5 * 6 * 12),
        (Split(), 5 * 6 * 16),
    ],
)
def test_a_part_on_pim_reads_its_operands(split, elements):
    kernel = 1 if split.axis == "reduction" else 3
    pad = (kernel // 2,) * 4
    layer = ConvGeometry(n=1, h=5, w=6, c=16, oc=32, kh=kernel, kw=kernel, padding=pad)
    above = 6 * 16 if split.axis == "rows" and split.gpu else 0
    assert split.pim_input_elements(layer) == elements + above


def test_what_moves_through_the_l2_is_paid_once():
    """Operands that lie over all channels are read from DRAM once, wherever they lie."""
    graph = extract_regions(frontend.load("toy").module, "toy")
    shared = replace(SYSTEM, channel_sharing="time-shared", channel_mode_switch_ns=200.0)
    table = profile(graph, CandidateGenerator(graph, shared))
    staged = 0
    for name, options in table.candidates.items():
        plain = [c for c in options if isinstance(c.rewrite, PimRewrite) and not c.rewrite.device_epilogue]
        dram = {sum(t.energies_pj.get("gpu_dram", 0.0) for t in c.tasks) for c in plain}
        staged += sum("staged" in c.name for c in options)
        assert len({round(energy_pj) for energy_pj in dram}) <= 1, name
    assert staged


def test_savings_are_the_difference(toy, table):
    plan, base = with_pim(toy, table), gpu_only(toy, table)
    saved = savings_pj(plan, base)
    assert saved["total"] == saved["shorter_runtime"] + saved["cheaper_work"]
    assert saved["total"] == pytest.approx(base.energy_pj - plan.energy_pj, rel=1e-9)
    watts = SYSTEM.gpu.energy["static_w"] + SYSTEM.pim_channels * 0.05
    runtime_pj = watts * (base.latency_ns - plan.latency_ns) * 1e3
    assert saved["shorter_runtime"] == pytest.approx(runtime_pj, rel=1e-9)


def test_without_constant_power_only_the_work_counts(toy, table):
    pim = replace(SYSTEM.pim, energy=SYSTEM.pim.energy | {"background_mw_per_channel": 0.0})
    gpu = replace(SYSTEM.gpu, energy=SYSTEM.gpu.energy | {"static_w": 0.0})
    cold = replace(SYSTEM, gpu=gpu, pim=pim)
    saved = savings_pj(with_pim(toy, table, cold), gpu_only(toy, table, cold))
    assert saved["shorter_runtime"] == 0.0
    warm = savings_pj(with_pim(toy, table), gpu_only(toy, table))
    assert saved["cheaper_work"] == saved["total"] == warm["cheaper_work"] != 0.0


PARTS = ("gpu_dram", "pim_comp", "crossbar", *STATIC)
energies = st.dictionaries(st.sampled_from(PARTS), st.floats(0, 1e12), min_size=1)


@given(plan=energies, base=energies)
@settings(max_examples=examples(30), deadline=None)
def test_savings_name_no_part_twice_and_forget_none(toy, table, plan, base):
    """Whatever the parts of either side are."""
    blank = gpu_only(toy, table)
    saved = savings_pj(replace(blank, energies_pj=plan), replace(blank, energies_pj=base))
    largest = max(*plan.values(), *base.values(), 1.0)
    assert saved["total"] == pytest.approx(sum(base.values()) - sum(plan.values()), abs=1e-9 * largest)
    static = sum(base.get(part, 0.0) for part in STATIC) - sum(plan.get(part, 0.0) for part in STATIC)
    assert saved["shorter_runtime"] == pytest.approx(static, abs=1e-9 * largest)
