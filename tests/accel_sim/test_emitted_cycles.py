"""Are the stored cycles of emitted kernels what they say, and what does the model make of them?"""

import csv
import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from calibration.accel_sim_accuracy import half_split_table, ratio_errors
from calibration.gpu_fit import EMITTED_CONSTANTS, efficiency_sources, fit, sample_groups, write_efficiency
from calibration.samples import SIZES, analytic_ns, read_samples

from pimflow.core.kernel import Kernel
from pimflow.hardware import GpuSpec
from pimflow.hardware.reader import SPECS
from pimflow.simulators.accel_sim.kernels import launches, parse_kernel_name
from pimflow.simulators.gpu.emitted import has_map_scaling
from pimflow.simulators.gpu.machine import GemmTilings, KernelBatch, RooflineMachine, family
from pimflow.simulators.gpu.model import kernel_cost
from pimflow.simulators.gpu.roofline import demands

ROOT = Path(__file__).parents[2]
CYCLES = ROOT / "tests/gpu_model/data/accelsim_emitted.csv"
GPU = GpuSpec.load("rtx-2060-pim32")
LAUNCH_CYCLES = 5008
UNSEEN = CYCLES.with_name("accelsim_unseen.csv")


def rows_of(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


ROWS = rows_of(CYCLES)
SAMPLES = read_samples(CYCLES, GPU)


@pytest.mark.parametrize("rows", [ROWS, rows_of(UNSEEN)], ids=["emitted", "unseen"])
def test_rows_are_kernels_that_pimflow_names(rows):
    """Every size follows from the name; every run names its tool, and takes a launch at least, or two."""
    assert len({(row["kernel"], row["n_mem"]) for row in rows}) == len(rows)
    for row in rows:
        kernel = parse_kernel_name(row["kernel"], "fp16")
        assert kernel is not None and kernel.kind == row["kind"]
        assert [getattr(kernel, name) for name in SIZES] == [int(row[name]) for name in SIZES]
        launched = 1 + (int(row["split"] or 1) > 1 or has_map_scaling(KernelBatch([kernel]), 2).item())
        assert int(row["gpu_sim_cycle"]) > launched * LAUNCH_CYCLES
        assert row["build"] == "Accel-Sim 2260456, GPGPU-Sim 4.2.0 9e4a0aa"


def test_what_nobody_had_seen_is_of_other_kernels():
    assert not {row["kernel"] for row in rows_of(UNSEEN)} & {row["kernel"] for row in ROWS}


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
        assert np.exp(group.log_errors(GPU)) * measured == pytest.approx(
            np.array(analytic_ns(group.samples, GPU))
        )


def test_half_of_the_kernels_is_not_fitted_to():
    halves = {}
    for sample in SAMPLES:
        halves.setdefault(sample.shape, set()).add(sample.is_fit_sample)
    assert all(len(half) == 1 for half in halves.values())
    share = sum(sample.is_fit_sample for sample in SAMPLES) / len(SAMPLES)
    assert 0.4 < share < 0.6


def gpu_with_constants(**constants):
    """`GPU` with constants of kernels as they are emitted: what a thread waits for alone, unless given."""
    defaults = {"step_cycles": 1e6, "exposed": 0.0, "channel_spread": 32.0, "kernel_cycles": 1.0}
    defaults |= {"overlap": 8.0, "overlap_row": 8.0}
    return dataclasses.replace(GPU, efficiency=GPU.efficiency | defaults | constants)


def demand_of(sample, gpu):
    machine = RooflineMachine(gpu, "fp16", sample.channels, family(sample.kernel))
    tilings = GemmTilings([sample.tile]) if sample.tile else None
    (demand,) = demands(sample.kind, KernelBatch([sample.kernel]), machine, tilings)
    return demand


def test_threads_wait_for_each_step_of_each_wave():
    """Iterations, taps by fives, or parts of a row, and two; waves by the registers of the emitted launch."""
    gpu = gpu_with_constants()
    for sample, row in zip(SAMPLES, ROWS):
        if sample.kind == "stream":
            assert demand_of(sample, gpu).compute < 1e5
            continue
        kernel = parse_kernel_name(row["kernel"], "fp16")
        first, *_ = launches(dataclasses.replace(kernel, tile=sample.tile), GPU, "fp16", sample.channels)
        resident = GPU.registers_bytes // (4 * first.registers * first.threads)
        waves = max(1.0, math.ceil(math.prod(first.grid) / GPU.sms) / resident)
        steps = {"depthwise": math.ceil(kernel.window / 5), "row": math.ceil(kernel.k / 256)}.get(sample.kind)
        if sample.tile:
            padded = kernel.window * 8 * math.ceil(kernel.k / kernel.window / 8)
            steps = math.ceil(math.ceil(padded / 32) / sample.tile[2])
        product = kernel.m * kernel.n
        residual = max(0, kernel.input_bytes / 2 - kernel.m * kernel.k) if kernel.window == 1 else 0
        if sample.tile and residual:
            steps += math.ceil(math.prod(sample.tile[:2]) / first.threads / 8) * residual / product
        assert demand_of(sample, gpu).compute == pytest.approx(waves * (steps + 2) * 1e6)


def test_dram_moves_what_was_simulated():
    """Bytes of a row's results are sectors; outputs go through the L2."""
    demands = [demand_of(sample, gpu_with_constants()) for sample in SAMPLES]
    errors = [float(d.dram_bytes.item()) / float(row["dram_bytes"]) - 1 for d, row in zip(demands, ROWS)]
    assert np.median(np.abs(errors)) < 1e-3 and np.quantile(np.abs(errors), 0.95) < 0.03


@pytest.mark.parametrize("size, share", [(384, 16), (512, 4), (2048, 1), (480, 32)])
def test_rows_a_power_of_two_apart_meet_in_few_slices(size, share):
    """256 bytes go to a channel, 128 to a slice of its L2: rows of `size` elements meet in `share` of 32."""
    kernel = Kernel(
        kind="gemm", m=64, n=640, k=size, macs=1, input_bytes=0, weight_bytes=1 << 28, output_bytes=0
    )
    run = {"dtype": "fp16", "channels": 16, "tile": (64, 64)}
    gpus = [gpu_with_constants(channel_spread=spread) for spread in (1.0, 32.0)]
    met, all_slices = (kernel_cost(kernel, gpu, **run).dram_ns for gpu in gpus)
    assert met == pytest.approx(all_slices * 32 / share)


def test_split_k_takes_a_second_launch():
    kernel = next(sample.kernel for sample in SAMPLES if sample.tile and sample.kernel.k > 600)
    gpu = gpu_with_constants(step_cycles=1e-3)
    tiles = (32, 32, 1), (32, 32, 2)
    one_part, split = (kernel_cost(kernel, gpu, dtype="fp16", tile=tile).execution_ns for tile in tiles)
    assert split - one_part > GPU.launch_ns


@pytest.mark.parametrize("tile", [None, (32, 32, 1), (32, 32, 2)], ids=str)
def test_a_map_that_is_scaled_takes_a_stream_of_its_own(tile):
    """Two launches, one after the other, as they are emitted; split-K has a second one in any case."""
    gpu = gpu_with_constants(step_cycles=300.0, overlap=1.3, kernel_cycles=1000.0)
    unscaled = parse_kernel_name("gemm_m1_n240_k64_h1w1c64o240_fp16", "fp16")
    of_map = 196 * unscaled.output_bytes
    scaled = dataclasses.replace(unscaled, input_bytes=unscaled.input_bytes + of_map, output_bytes=of_map)
    stream = Kernel(kind="stream", input_bytes=of_map + 240 * 4, output_bytes=of_map, macs=of_map // 2)
    run = {"dtype": "fp16", "channels": 16}
    first, scaled_cost = (kernel_cost(kernel, gpu, **run, tile=tile) for kernel in (unscaled, scaled))
    second = kernel_cost(stream, gpu, **run)
    shared = tile and tile[2] > 1 and gpu.launch_ns + 1000 / gpu.clock_mhz * 1e3
    assert scaled_cost.total_ns == pytest.approx(first.total_ns + second.total_ns - (shared or 0))
    assert scaled_cost.dram_bytes == pytest.approx(first.dram_bytes + second.dram_bytes)
    assert len(launches(scaled, GPU, "fp16", 16)) == 2
    # A residual, or one more tensor that is stored, is no map.
    for extra_inputs, extra_outputs in ((480, 0), (128, 128)):
        sizes = {"input_bytes": unscaled.input_bytes + extra_inputs}
        sizes |= {"output_bytes": unscaled.output_bytes + extra_outputs}
        assert len(launches(dataclasses.replace(unscaled, **sizes), GPU, "fp16")) == 1


@pytest.mark.long
def test_constants_are_found_again():
    """Times that the model gives under other constants are fitted to 2 %."""
    told_by = {"step_cycles": 450.0, "kernel_cycles": 900.0, "exposed": 0.6, "channel_spread": 5.0}
    changed_gpu = gpu_with_constants(**told_by, overlap=1.5)
    samples = [sample for sample in SAMPLES if sample.kind != "row"]
    pairs = zip(samples, analytic_ns(samples, changed_gpu))
    measured_samples = [dataclasses.replace(sample, measured_ns=time_ns) for sample, time_ns in pairs]
    fitted = fit(GPU, measured_samples)
    errors = np.array(analytic_ns(measured_samples, fitted)) / [s.measured_ns for s in measured_samples] - 1
    assert np.median(abs(errors)) < 0.02


@pytest.mark.long
def test_a_gpu_of_ones_own_takes_them(tmp_path):
    """A file that is fitted to emitted kernels has what `emitted` reads, and is read."""
    path = tmp_path / "mine.toml"
    path.write_bytes((SPECS / "gpu" / f"{GPU.name}.toml").read_bytes())
    fitted = fit(GPU, [sample for sample in SAMPLES if sample.is_fit_sample])
    write_efficiency(path, fitted, efficiency_sources(fitted, SAMPLES, CYCLES.name, "hash"))
    loaded = GpuSpec.load(path)
    assert loaded.efficiency == fitted.efficiency and {*EMITTED_CONSTANTS} <= loaded.efficiency.keys()
    sources = {key for key, value in loaded.sources.items() if value.startswith("fitted to Accel-Sim runs")}
    assert sources == {f"efficiency.{name}" for name in EMITTED_CONSTANTS}
    assert analytic_ns(SAMPLES, loaded) == analytic_ns(SAMPLES, fitted)


def test_ratios():
    """Of the times with 16 and 32 channels; a kernel that ran with one of them has none."""
    pair = [sample for sample in SAMPLES if sample.shape == SAMPLES[0].shape]
    assert sorted(sample.channels for sample in pair) == [16, 32]
    predicted = analytic_ns(pair, GPU)
    model_samples = [dataclasses.replace(s, measured_ns=ns) for s, ns in zip(pair, predicted)]
    assert ratio_errors(model_samples, GPU) == pytest.approx([0.0])
    longer = [dataclasses.replace(s, measured_ns=s.measured_ns * (32 / s.channels)) for s in model_samples]
    assert ratio_errors(longer, GPU) == pytest.approx([-0.5])
    assert ratio_errors(model_samples[:1], GPU) == []


def test_the_page_is_of_the_stored_runs():
    page = (ROOT / "docs/validation.md").read_text(encoding="utf-8")
    table = page.partition("<!-- emitted begin")[2].partition("<!-- emitted end -->")[0]
    judged = [sample for sample in SAMPLES if not sample.is_fit_sample]
    assert f"\n| all | {len(judged)} | " in table
    assert f"\nThe other half, {len(judged)} of {len(SAMPLES)} runs:" in table
    assert f"\nKernels that nobody had seen, {len(rows_of(UNSEEN))} runs:" in table


@pytest.mark.long
def test_the_table_judges_the_other_half_and_what_nobody_saw():
    few = [sample for sample in SAMPLES if sample.kind == "stream"]
    unseen = [sample for sample in SAMPLES if sample.kind == "depthwise"]
    table, fitted = half_split_table(few, GPU, unseen=unseen)
    assert fitted.efficiency["step_cycles"] > 0 and "kernel_cycles_stream" not in fitted.efficiency
    judged = sum(not sample.is_fit_sample for sample in few)
    assert f"| stream | {judged} | " in table and f"The other half, {judged} of {len(few)} runs" in table
    assert f"| depthwise | {len(unseen)} | " in table and f"had seen, {len(unseen)} runs" in table
    assert f"Fitted to {len(few) - judged} runs: " in table
