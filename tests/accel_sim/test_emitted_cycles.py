"""Are the stored cycles of emitted kernels what they say, and what does the model make of them?"""

import csv
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from pimflow.hardware import GpuSpec
from pimflow.simulators.accel_sim.accuracy import halves_table, ratio_errors
from pimflow.simulators.accel_sim.kernels import named_kernel
from pimflow.simulators.gpu.fit import fit, sample_groups
from pimflow.simulators.gpu.model import kernel_cost
from pimflow.simulators.gpu.samples import SIZES, analytic_ns, read_samples

ROOT = Path(__file__).parents[2]
CYCLES = ROOT / "tests/gpu_model/data/accelsim_emitted.csv"
GPU = GpuSpec.load("rtx-2060-pim32")
LAUNCH_CYCLES = 5008
with CYCLES.open(encoding="utf-8", newline="") as file:
    ROWS = list(csv.DictReader(file))
SAMPLES = read_samples(CYCLES, GPU)


def test_rows_are_kernels_that_pimflow_names():
    """Every size follows from the name; every run names its tool, and takes a launch at least, or two."""
    assert len({(row["kernel"], row["n_mem"]) for row in ROWS}) == len(ROWS)
    for row in ROWS:
        kernel = named_kernel(row["kernel"], "fp16")
        assert kernel is not None and kernel.kind == row["kind"]
        assert [getattr(kernel, name) for name in SIZES] == [int(row[name]) for name in SIZES]
        launches = 2 if int(row["split"] or 1) > 1 else 1
        assert int(row["gpu_sim_cycle"]) > launches * LAUNCH_CYCLES
        assert row["build"] == "Accel-Sim 2260456, GPGPU-Sim 4.2.0 9e4a0aa"


def test_samples_are_the_rows():
    assert [s.shape for s in SAMPLES] == [row["kernel"] for row in ROWS]
    for sample, row in zip(SAMPLES, ROWS):
        assert sample.channels == int(row["n_mem"]) and sample.dtype == "fp16"
        assert sample.measured_ns * GPU.clock_mhz / 1e3 == pytest.approx(int(row["gpu_sim_cycle"]))
        cost = kernel_cost(sample.kernel, GPU, dtype="fp16", channels=sample.channels, tile=sample.tile)
        assert cost.tile == sample.tile or sample.tile is None
        assert sample.kind == ("row" if sample.kernel.kind == "gemm" and not sample.tile else row["kind"])
    assert {s.classes[1] for s in SAMPLES} >= {"1x1", "3x3_s1", "split", "row", "depthwise", "stream"}


def test_groups_predict_what_the_model_does():
    """A fit evaluates kernels of many tiles at once."""
    tiled = [sample for sample in SAMPLES if sample.kind != "row"]
    for group in sample_groups(tiled):
        measured = np.array([sample.measured_ns for sample in group.samples])
        assert np.exp(group.error(GPU)) * measured == pytest.approx(np.array(analytic_ns(group.samples, GPU)))


def test_half_of_the_kernels_is_not_fitted_to():
    halves = {}
    for sample in SAMPLES:
        halves.setdefault(sample.shape, set()).add(sample.fit)
    assert all(len(half) == 1 for half in halves.values())
    share = sum(sample.fit for sample in SAMPLES) / len(SAMPLES)
    assert 0.4 < share < 0.6


def test_steps_are_what_threads_wait_for():
    """A depthwise kernel takes a step for every tap, a row for every 512 bytes of it; others take none."""
    slow = dataclasses.replace(GPU, efficiency=GPU.efficiency | {"step_cycles": 1e5})
    for sample in SAMPLES:
        run = {"dtype": "fp16", "channels": sample.channels, "tile": sample.tile}
        before, after = (kernel_cost(sample.kernel, gpu, **run) for gpu in (GPU, slow))
        if sample.kind == "depthwise":
            assert after.compute_ns * GPU.clock_mhz / 1e3 % (1e5 * sample.kernel.window) == pytest.approx(
                0, abs=1
            )
        elif sample.kind != "row":
            assert after == before


@pytest.mark.long
def test_constants_are_found_again():
    """Times that the model gives under other constants are fitted to 2 %."""
    other = dataclasses.replace(
        GPU,
        efficiency=GPU.efficiency
        | {
            "step_cycles_depthwise": 450.0,
            "kernel_cycles_depthwise": 900.0,
            "split_cycles": 7000.0,
            "dram": 0.8,
        },
    )
    samples = [sample for sample in SAMPLES if sample.kind != "row"]
    told = [
        dataclasses.replace(sample, measured_ns=measured_ns)
        for sample, measured_ns in zip(samples, analytic_ns(samples, other))
    ]
    found = fit(GPU, told)
    errors = np.array(analytic_ns(told, found)) / [sample.measured_ns for sample in told] - 1
    assert np.median(abs(errors)) < 0.02


def test_ratios():
    """Of the times with 16 and 32 channels; a kernel that ran with one of them has none."""
    pair = [sample for sample in SAMPLES if sample.shape == SAMPLES[0].shape]
    assert sorted(sample.channels for sample in pair) == [16, 32]
    predicted = analytic_ns(pair, GPU)
    told = [dataclasses.replace(s, measured_ns=ns) for s, ns in zip(pair, predicted)]
    assert ratio_errors(told, GPU) == pytest.approx([0.0])
    longer = [dataclasses.replace(s, measured_ns=s.measured_ns * (32 / s.channels)) for s in told]
    assert ratio_errors(longer, GPU) == pytest.approx([-0.5])
    assert ratio_errors(told[:1], GPU) == []


def test_the_page_is_of_the_stored_runs():
    page = (ROOT / "docs/validation.md").read_text(encoding="utf-8")
    table = page.partition("<!-- emitted begin")[2].partition("<!-- emitted end -->")[0]
    judged = [sample for sample in SAMPLES if not sample.fit]
    assert f"\n| all | {len(judged)} | " in table
    assert f"\n{len(SAMPLES)} runs, {len(SAMPLES) - len(judged)} of them fitted to." in table


def test_the_table_judges_the_other_half():
    few = [sample for sample in SAMPLES if sample.kind == "stream"]
    table, fitted = halves_table(few, GPU)
    assert fitted.efficiency["kernel_cycles_stream"] != GPU.efficiency["kernel_cycles_stream"]
    judged = sum(not sample.fit for sample in few)
    assert f"| stream | {judged} | " in table and f"{len(few)} runs, {len(few) - judged} of them" in table
