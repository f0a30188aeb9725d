"""Files of measured kernels: what is read, what counts where, what is scored, and the fit of a transfer."""

import csv
import dataclasses
import io
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from calibration.fit_record import unseen_samples
from calibration.gpu_fit import fit_launch, launch_source, write_launch
from calibration.samples import (
    PREDICTIONS,
    SIZES,
    analytic_ns,
    convolution_classes,
    format_accuracy,
    read_samples,
    validate,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples, long_but
from scipy.stats import kendalltau

from pimflow.core.kernel import ConvGeometry, Kernel, convolution_kernel
from pimflow.errors import SpecError, TraceError
from pimflow.hardware import GpuSpec
from pimflow.simulators.gpu.model import kernel_cost

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parent / "data"
TENSORRT = DATA / "v100_tensorrt_conv_excerpt.csv"
DEEPBENCH = DATA / "deepbench_conv_excerpt.csv"
MEASURED = DATA / "h200_measured.csv"
V100, P100 = GpuSpec.load("v100"), GpuSpec.load("p100")
PASCALS = ("p100", "titan-xp", "gtx-1080-ti")


def rows_of(path: Path) -> list[dict]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def text_of(rows: list[dict], columns) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


# --- reading ---


def only(folder: Path, text: str, gpu: GpuSpec):
    path = folder / "rows.csv"
    path.write_text(text)
    (sample,) = read_samples(path, gpu)
    return sample


@pytest.mark.parametrize(("path", "gpu"), [(TENSORRT, V100), (DEEPBENCH, P100)])
def test_the_order_of_columns_and_others_do_not_matter(tmp_path, path, gpu):
    rows = rows_of(path)
    columns = [*rows[0], "comment"]
    random.Random(0).shuffle(columns)
    shuffled = tmp_path / "rows.csv"
    shuffled.write_text(text_of([{**row, "comment": "a, b"} for row in rows], columns))
    assert read_samples(shuffled, gpu) == read_samples(path, gpu)


def test_kernels_that_a_card_ran():
    gpu, rows = GpuSpec.load("h200"), rows_of(MEASURED)
    samples = read_samples(MEASURED, gpu)
    assert len(samples) == len(rows) > 100 and {row["gpu"] for row in rows} == {gpu.name}
    for row, sample in zip(rows, samples):
        assert sample.measured_ns == float(row["cold_ns"]) + float(row["launch_ns"])
        assert sample.kernel == Kernel(kind=row["kind"], **{size: int(row[size]) for size in SIZES})
    assert {sample.classes[1] for sample in samples} >= {"1x1", "3x3_s1", "depthwise", "stream"}


def test_the_page_is_of_the_stored_times():
    gpu, page = GpuSpec.load("h200"), (ROOT / "docs/validation.md").read_text(encoding="utf-8")
    table = page.partition("<!-- h200 begin")[2].partition("<!-- h200 end -->")[0]
    for name, row in validate(read_samples(MEASURED, gpu), gpu)["fp16"].items():
        assert f"\n| fp16 | {name} | {row['count']} | {row['median_ape']:.1%} | {row['bias']:+.1%} |" in table


def test_one_that_failed_is_left_out(tmp_path):
    rows = rows_of(MEASURED)[:2]
    rows[0] |= dict.fromkeys(("cold_ns", "warm_ns", "launch_ns"), "")
    sample = only(tmp_path, text_of(rows, rows[0]), GpuSpec.load("h200"))
    assert sample.shape == rows[1]["kernel"]


def test_a_row_of_deepbench(tmp_path):
    header = "gpu,suite,dtype,n,ic,ih,iw,oc,kh,kw,pad_h,pad_w,stride_h,stride_w,ms,algo"
    row = "P100,train,fp32,4,32,79,341,32,5,10,0,1,2,3,0.402,IMPLICIT_PRECOMP_GEMM"
    sample = only(tmp_path, f"{header}\n{row}\n", P100)
    geometry = sample.kernel.geometry
    assert (geometry.oh, geometry.ow) == ((79 - 5) // 2 + 1, (341 + 2 - 10) // 3 + 1)
    assert sample.kernel.k == 32 * 5 * 10
    assert sample.kernel.m == 4 * geometry.oh * geometry.ow
    assert (sample.dtype, sample.measured_ns) == ("fp32", 402_000)


@pytest.mark.parametrize("fused", ["0", "1", ""])
@pytest.mark.parametrize("kind", ["Depthwise", "depthwise"])
def test_a_row_of_tensorrt(tmp_path, kind, fused):
    header = "gpu,library,type,n,ic,ih,iw,oc,k,stride,elmt_fused,dtype,ms"
    sample = only(tmp_path, f"{header}\nV100,TensorRT,{kind},1,96,56,56,96,3,2,{fused},fp16,0.02\n", V100)
    layer = ConvGeometry(n=1, h=56, w=56, c=96, oc=96, kh=3, kw=3, stride=(2, 2), padding=(1,) * 4, groups=96)
    expected = convolution_kernel(layer, "fp16")
    assert sample.kernel.geometry == layer
    reads = expected.input_bytes + (expected.output_bytes if fused == "1" else 0)
    assert sample.kernel.input_bytes == reads
    assert sample.classes == ("all", "depthwise", "small") + ("fused",) * (fused == "1")


def test_of_several_gpus_one_is_read():
    rows = rows_of(DEEPBENCH)
    for name, label in (("p100", "P100"), ("titan-xp", "TITANXp"), ("gtx-1080-ti", "GTX1080Ti")):
        gpu_rows = [row for row in rows if row["gpu"] == label]
        samples = read_samples(DEEPBENCH, GpuSpec.load(name))
        assert [s.measured_ns for s in samples] == pytest.approx([float(row["ms"]) * 1e6 for row in gpu_rows])
    with pytest.raises(TraceError, match=r"no rows of gpu 't4'; there are .*P100"):
        read_samples(DEEPBENCH, GpuSpec.load("t4"))


def test_rows_of_one_gpu_are_taken_for_the_one_asked_for():
    """A GPU's file may have any name."""
    gpu = dataclasses.replace(V100, name="mine")
    assert len(read_samples(TENSORRT, gpu)) == len(rows_of(TENSORRT))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ms": "0"}, "positive"),
        ({"ms": "nan"}, "positive"),
        ({"ms": "-1"}, "positive"),
        ({"ih": "0"}, "positive"),
        ({"stride": "0"}, "zero"),
        ({"dtype": "fp8"}, "fp8"),
        ({"oc": "many"}, "many"),
    ],
)
def test_rows_that_make_no_sense(tmp_path, change, message):
    rows = rows_of(TENSORRT)[:3]
    rows[1] |= change
    path = tmp_path / "rows.csv"
    path.write_text(text_of(rows, rows[0]))
    with pytest.raises(TraceError, match=rf"rows.csv:3: malformed row: .*{message}"):
        read_samples(path, V100)


# --- classes ---


@pytest.mark.parametrize(
    ("kernel", "stride", "groups", "h", "c", "classes"),
    [
        (1, 1, 1, 112, 1024, ("all", "1x1", "small")),
        (1, 2, 1, 113, 64, ("all", "1x1")),
        (3, 1, 1, 56, 1025, ("all", "3x3_s1")),
        (3, 2, 1, 56, 64, ("all", "3x3_s2", "small")),
        (5, 1, 1, 56, 64, ("all", "other", "small")),
        (3, 1, 64, 56, 64, ("all", "depthwise", "small")),
    ],
)
def test_classes_of_convolutions(kernel, stride, groups, h, c, classes):
    g = ConvGeometry(n=1, h=h, w=h, c=c, oc=c, kh=kernel, kw=kernel, stride=(stride, stride), groups=groups)
    assert convolution_classes(g) == classes


def test_errors_against_their_definitions():
    samples = [s for s in read_samples(TENSORRT, V100) if s.dtype == "fp16"]
    predicted = np.array(analytic_ns(samples, V100))
    measured = np.array([s.measured_ns for s in samples])
    small = np.array([s.kernel.geometry.h <= 112 and s.kernel.geometry.c <= 1024 for s in samples])
    for name, chosen in (("all", small | True), ("small", small)):
        errors = validate(samples, V100)["fp16"][name]
        assert errors["count"] == chosen.sum()
        ape = abs(predicted - measured)[chosen] / measured[chosen]
        assert errors["median_ape"] == pytest.approx(sorted(ape)[len(ape) // 2], rel=0.05)
        assert errors["mape"] == pytest.approx(sum(ape) / len(ape))
        assert errors["bias"] == pytest.approx((predicted[chosen] / measured[chosen]).mean() - 1)
        assert errors["kendall_tau"] == pytest.approx(kendalltau(predicted[chosen], measured[chosen])[0])


def test_dtypes_without_a_rate_are_left_out_and_one_row_has_no_rank():
    samples = read_samples(TENSORRT, V100)[:1]
    unknown = dataclasses.replace(samples[0], dtype="int8")
    accuracy = validate([*samples, unknown], V100)
    assert list(accuracy) == ["fp16"]
    assert accuracy["fp16"]["all"]["count"] == 1 and accuracy["fp16"]["all"]["kendall_tau"] is None
    assert " - " not in format_accuracy(accuracy).splitlines()[0]
    assert format_accuracy(accuracy).splitlines()[1].endswith("-")


# --- halves ---


def test_both_dtypes_of_a_shape_are_in_one_half():
    halves: dict[str, set[bool]] = {}
    for sample in read_samples(TENSORRT, V100):
        halves.setdefault(sample.shape, set()).add(sample.is_fit_sample)
    assert halves and all(len(half) == 1 for half in halves.values())


# --- the script ---


@pytest.mark.long
@pytest.mark.parametrize("profiler", long_but(["analytic"], list(PREDICTIONS)))
def test_the_script_prints_what_it_should(profiler):
    script = ROOT / "scripts" / "validate_gpu_model.py"
    command = [sys.executable, script, TENSORRT, "--gpu", "v100", "--profiler", profiler, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    accuracy = json.loads(done.stdout)
    assert set(accuracy) == {"fp16", "fp32"}
    for classes in accuracy.values():
        assert {"all", "1x1", "3x3_s1", "3x3_s2", "other", "depthwise", "small"} <= set(classes)
        for errors in classes.values():
            assert set(errors) == {"count", "median_ape", "mape", "largest_ape", "bias", "kendall_tau"}
        assert 0 < classes["all"]["median_ape"] < 0.2


# --- another GPU: published specification, one constant fitted ---


@given(launch_ns=st.integers(0, 499).map(lambda step: step * 100.0))
@settings(max_examples=examples(20), deadline=None, derandomize=True)
def test_a_launch_that_is_there_is_found(launch_ns):
    samples = [s for s in read_samples(DEEPBENCH, P100) if s.dtype == "fp32"]
    gpu = dataclasses.replace(P100, launch_ns=launch_ns)
    exact = [dataclasses.replace(s, measured_ns=ns) for s, ns in zip(samples, analytic_ns(samples, gpu))]
    assert fit_launch(P100, exact).launch_ns == launch_ns


def test_nothing_to_fit_a_launch_to():
    with pytest.raises(SpecError, match="no kernels of 'fp32'"):
        fit_launch(P100, [])


def test_a_fitted_launch_replaces_only_its_line(tmp_path):
    text = (ROOT / "python/pimflow/hardware/specs/gpu/p100.toml").read_text()
    path = tmp_path / "p100.toml"
    path.write_text(text)
    changed = dataclasses.replace(P100, launch_ns=1234.5)
    samples = read_samples(DEEPBENCH, P100)
    write_launch(path, changed, launch_source(samples, "rows.csv", "hash"))
    spec = GpuSpec.load(path)
    assert spec.launch_ns == 1234.5
    assert "rows.csv (half of its shapes, by hash)" in spec.sources["launch_ns"]
    assert dataclasses.replace(spec, launch_ns=P100.launch_ns, sources=P100.sources) == P100
    path.write_text(text.replace("launch_ns", "launch"))
    with pytest.raises(SpecError, match="no field 'launch_ns'"):
        write_launch(path, changed, "")


@pytest.mark.parametrize("name", PASCALS)
def test_a_transfer_holds_on_rows_it_was_not_fitted_to(name):
    gpu = GpuSpec.load(name)
    assert gpu.efficiency == V100.efficiency
    sources = {gpu.sources[f"efficiency.{key}"] for key in gpu.efficiency}
    assert len(sources) > 1 and all(source.startswith("assumed: as v100; ") for source in sources)
    samples = unseen_samples(read_samples(DEEPBENCH, gpu), gpu)
    accuracy = validate(samples, gpu)["fp32"]["all"]
    assert accuracy["count"] == 20
    assert accuracy["median_ape"] < 0.25 and accuracy["kendall_tau"] > 0.7


# --- kinds of kernels ---


def test_without_tensor_cores_fp16_is_fp32_on_fewer_bytes():
    layer = ConvGeometry(n=1, h=28, w=28, c=12, oc=128, kh=3, kw=3, padding=(1,) * 4)
    half, full = (kernel_cost(convolution_kernel(layer, d), P100, dtype=d) for d in ("fp16", "fp32"))
    assert half.compute_ns <= full.compute_ns * (1 + 1e-9)
    assert half.dram_bytes < full.dram_bytes
    assert kernel_cost(
        convolution_kernel(layer, "fp16"), P100, dtype="fp16", tile=(64, 64)
    ).compute_ns == pytest.approx(
        kernel_cost(convolution_kernel(layer, "fp32"), P100, dtype="fp32", tile=(64, 64)).compute_ns
    )


def test_winograd_makes_fp32_3x3_s1_beat_the_peak_of_products():
    """The fitted rate of a large 3x3 convolution is above one product a lane and cycle; others' is not."""
    peak_macs_per_ns = V100.sms * V100.fma_per_sm_cycle["fp32"] * V100.clock_mhz / 1e3
    for side, stride, faster in ((3, 1, True), (3, 2, False), (5, 1, False)):
        layer = ConvGeometry(
            n=8, h=112, w=112, c=512, oc=512, kh=side, kw=side, stride=(stride,) * 2, padding=(side // 2,) * 4
        )
        cost = kernel_cost(convolution_kernel(layer, "fp32"), V100, dtype="fp32")
        assert (layer.macs / cost.execution_ns > peak_macs_per_ns) == faster


def test_groups_cost_what_their_parts_do():
    """Blocks and L2 traffic of a grouped convolution are those of its groups, in one launch."""
    layer = ConvGeometry(n=1, h=28, w=28, c=256, oc=256, kh=3, kw=3, padding=(1,) * 4, groups=4)
    part = dataclasses.replace(layer, c=64, oc=64, groups=1)
    kernels = [convolution_kernel(g, "fp16") for g in (layer, part)]
    grouped, single = (kernel_cost(kernel, V100, dtype="fp16", tile=(64, 64)) for kernel in kernels)
    assert grouped.blocks == 4 * single.blocks
    assert grouped.l2_bytes == pytest.approx(4 * single.l2_bytes)
    assert single.total_ns <= grouped.total_ns <= 4 * single.total_ns


def test_a_matrix_vector_product_is_bound_by_its_weights():
    layer = ConvGeometry(n=1, h=1, w=1, c=4096, oc=4096)
    cost = kernel_cost(convolution_kernel(layer, "fp16"), V100, dtype="fp16")
    bandwidth = V100.channel_bytes_per_ns * V100.memory_channels
    assert cost.execution_ns >= 0.99 * (layer.c * layer.oc * 2 - 6 * 2**20) / bandwidth
    half = kernel_cost(convolution_kernel(layer, "fp16"), V100, dtype="fp16", channels=16)
    assert half.execution_ns > 1.4 * cost.execution_ns


def test_pooling_and_reduction_pass_their_bytes_once():
    pool = Kernel(
        kind="stream", macs=112 * 112 * 64 * 9, input_bytes=112 * 112 * 128, output_bytes=56 * 56 * 128
    )
    reduction = Kernel(kind="stream", macs=7 * 7 * 1280, input_bytes=7 * 7 * 2560, output_bytes=2560)
    for kernel in (pool, reduction):
        cost = kernel_cost(kernel, V100, dtype="fp16")
        assert cost.l2_bytes == kernel.input_bytes + kernel.output_bytes
        heavier = dataclasses.replace(kernel, macs=kernel.macs * 1000)
        assert kernel_cost(heavier, V100, dtype="fp16").execution_ns > cost.execution_ns
