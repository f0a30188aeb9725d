"""The learned GPU model: what it may never say, what it is stored as, and that it learns what is there."""

import csv
import dataclasses
import math
import statistics
from pathlib import Path

import numpy as np
import pytest
from calibration.fit_record import unseen_samples
from calibration.learned_fit import learn, write_residual
from calibration.samples import analytic_ns, best_ns, read_samples, residual_model_ns, validate
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples

from pimflow.core.kernel import ConvGeometry, Kernel, convolution_kernel
from pimflow.errors import SpecError, UnknownNameError
from pimflow.hardware import GpuSpec
from pimflow.simulators.gpu.learned_model import (
    FEATURES,
    Learned,
    features,
    gpus_with_model,
    load_residual,
    residual_model,
    residual_path,
)
from pimflow.simulators.gpu.model import KernelRequest, kernel_cost

V100 = GpuSpec.load("v100")
EXCERPT = Path(__file__).parent / "data" / "v100_tensorrt_conv_excerpt.csv"
ROUNDING = 1 + 1e-9
FAST = settings(max_examples=examples(60), derandomize=True, deadline=None)
dtypes = st.sampled_from(("fp16", "fp32"))


@st.composite
def layers(draw) -> ConvGeometry:
    side = draw(st.sampled_from((1, 3, 5, 7)))
    stride = draw(st.sampled_from((1, 2)))
    c = draw(st.integers(1, 512))
    depthwise = draw(st.booleans())
    return ConvGeometry(
        n=draw(st.sampled_from((1, 1, 8))),
        h=draw(st.integers(side, 128)),
        w=draw(st.integers(side, 128)),
        c=c,
        oc=c if depthwise else draw(st.integers(1, 512)),
        kh=side,
        kw=side,
        stride=(stride, stride),
        padding=(side // 2,) * 4,
        groups=c if depthwise else 1,
    )


def total_ns(kernel: Kernel, dtype: str, channels: int = 32, gpu: GpuSpec = V100) -> float:
    (cost,) = Learned().costs([KernelRequest(kernel, channels)], gpu, dtype)
    return cost.total_ns


# --- what is never faster ---


@FAST
@given(layer=layers(), dtype=dtypes, data=st.data())
def test_fewer_channels_are_never_faster(layer, dtype, data):
    kernel = convolution_kernel(layer, dtype)
    few = data.draw(st.integers(1, 32), label="few")
    many = data.draw(st.integers(few, 32), label="many")
    assert total_ns(kernel, dtype, many) <= total_ns(kernel, dtype, few) * ROUNDING


@FAST
@given(layer=layers(), dtype=dtypes, data=st.data())
def test_more_rows_are_never_faster(layer, dtype, data):
    rows = data.draw(st.integers(1, layer.oh), label="rows")
    part = layer.first_rows(rows)
    if data.draw(st.booleans(), label="batch"):
        part = dataclasses.replace(layer, n=1)
    small, large = (total_ns(convolution_kernel(g, dtype), dtype) for g in (part, layer))
    assert small <= large * ROUNDING


@FAST
@given(layer=layers(), dtype=dtypes, data=st.data())
def test_more_work_within_a_layer_is_never_faster(layer, dtype, data):
    kernel = convolution_kernel(layer, dtype)
    names = ["macs", "input_bytes", "weight_bytes", "output_bytes"]
    names += ["m"] if kernel.kind == "gemm" else []
    name = data.draw(st.sampled_from(names), label="grows")
    growth = data.draw(st.sampled_from((1, 64)) | st.integers(1, 1 << 22), label="by")
    larger = dataclasses.replace(kernel, **{name: getattr(kernel, name) + growth})
    assert total_ns(kernel, dtype) <= total_ns(larger, dtype) * ROUNDING


@FAST
@given(layer=layers(), dtype=dtypes, launch_ns=st.sampled_from((0.0, 1000.0, 7782.4)))
def test_costs_are_positive_and_launches_apart(layer, dtype, launch_ns):
    gpu = dataclasses.replace(V100, launch_ns=launch_ns)
    (cost,) = Learned().costs([KernelRequest(convolution_kernel(layer, dtype), 32)], gpu, dtype)
    assert cost.launch_ns == launch_ns
    assert 0 < cost.execution_ns < math.inf
    with_launch = total_ns(convolution_kernel(layer, dtype), dtype)
    assert cost.execution_ns == pytest.approx(with_launch - V100.launch_ns)


# --- what is left as it is ---


def test_kernels_that_nothing_was_learned_about_stay_analytic():
    stream = Kernel(kind="stream", macs=100352, input_bytes=401408, output_bytes=200704)
    layer = convolution_kernel(ConvGeometry(n=1, h=56, w=56, c=24, oc=144), "fp16")
    bare = dataclasses.replace(layer, geometry=None)
    requests = [KernelRequest(stream, 16), KernelRequest(layer, 16), KernelRequest(bare, 16)]
    costs = Learned().costs(requests, V100, "fp16")
    expected = [kernel_cost(r.kernel, V100, dtype="fp16", channels=16) for r in requests]
    assert costs[0] == expected[0] and costs[2] == expected[2]
    assert costs[1] != expected[1]
    assert costs[1].dram_bytes == expected[1].dram_bytes


def test_a_class_that_learning_did_not_help_keeps_the_analytic_time():
    residual = residual_model(V100, "fp16")
    kernel = convolution_kernel(ConvGeometry(n=1, h=56, w=56, c=24, oc=144), "fp16")
    assert residual.factors([kernel], V100)[0] != 1
    worse = {"1x1": {"analytic": 0.1, "learned": 0.1}}
    unused = dataclasses.replace(residual, about={**residual.about, "classes": worse})
    assert unused.factors([kernel], V100)[0] == 1


def test_a_batch_is_its_members_one_by_one():
    layers = [ConvGeometry(n=1, h=h, w=h, c=c, oc=64) for h, c in ((56, 24), (7, 320), (1, 1280))]
    kernels = [convolution_kernel(layer, "fp16") for layer in layers]
    residual = residual_model(V100, "fp16")
    assert list(residual.factors(kernels, V100)) == [residual.factors([k], V100)[0] for k in kernels]
    assert features(kernels, V100, "fp16").shape == (3, len(FEATURES))


# --- files ---


def test_a_gpu_without_a_learned_model_lists_those_that_have():
    layer = convolution_kernel(ConvGeometry(n=1, h=7, w=7, c=8, oc=8), "fp16")
    with pytest.raises(UnknownNameError, match=r"GPU with a learned model.*'rtx-2060'.*v100"):
        total_ns(layer, "fp16", 12, GpuSpec.load("rtx-2060"))


def test_other_constants_are_refused():
    gpu = dataclasses.replace(V100, efficiency={**V100.efficiency, "dram": 0.5})
    with pytest.raises(SpecError, match=r"fitted to other constants.*--learned"):
        residual_model(gpu, "fp16")


def test_a_dtype_that_nothing_was_learned_about():
    with pytest.raises(SpecError, match="no learned model of 'bf16'"):
        residual_model(V100, "bf16")


@pytest.mark.parametrize("content", [b"", b"no model", None])
def test_files_that_are_no_model(tmp_path, content):
    path = tmp_path / "x.fp16.ubj.xz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SpecError, match=r"cannot be read|not a learned model"):
        load_residual(path)


def test_embedded_models_say_what_they_are_fitted_to():
    assert gpus_with_model() == ["v100"]
    for dtype in ("fp16", "fp32"):
        about = residual_model(V100, dtype).about
        assert "v100_tensorrt_conv.csv (half of its shapes, by hash)" in about["source"]
        assert residual_path("v100", dtype).stat().st_size < 400_000
        assert min(about["classes"][name]["rows"] for name in about["classes"]) > 100


# --- learning ---


@pytest.mark.long
def test_what_the_analytic_model_lacks_is_learned_and_stored(tmp_path):
    """Times that are the analytic ones, doubled for few output channels: the factor must be found."""
    rng = np.random.default_rng(0)
    samples = []
    for sample in read_samples(EXCERPT, V100) * 3:
        c, oc = (int(rng.integers(8, 512)) for _ in range(2))
        geometry = dataclasses.replace(sample.kernel.geometry, c=c, oc=oc, groups=1)
        kernel = convolution_kernel(geometry, "fp16")
        factor = 2 if geometry.oc < 128 else 1
        ns = factor * kernel_cost(kernel, V100, dtype="fp16").total_ns
        shape = f"{geometry.c},{geometry.oc},{geometry.h}"
        samples.append(dataclasses.replace(sample, kernel=kernel, dtype="fp16", measured_ns=ns, shape=shape))
    seen, unseen = samples[: len(samples) // 2], samples[len(samples) // 2 :]
    write_residual(tmp_path / "v100.fp16.ubj.xz", learn(V100, seen, "a test"))
    assert [path.name for path in tmp_path.iterdir()] == ["v100.fp16.ubj.xz"]
    residual = load_residual(tmp_path / "v100.fp16.ubj.xz")
    truth = np.array([2 if s.kernel.geometry.oc < 128 else 1 for s in unseen])
    factors = residual.factors([s.kernel for s in unseen], V100)
    assert statistics.median(abs(factors / truth - 1)) < 0.1


def test_nothing_to_learn_from():
    with pytest.raises(SpecError, match="no convolutions to learn from"):
        learn(V100, [], "a test")


# --- accuracy, on rows that were not fitted to ---


def test_held_out_rows_are_met():
    samples = unseen_samples(read_samples(EXCERPT, V100), V100)
    with open(EXCERPT, encoding="utf-8", newline="") as file:
        assert len(samples) == sum(1 for _ in csv.reader(file)) - 1
    analytic, learned = (validate(samples, V100, predictor) for predictor in (analytic_ns, residual_model_ns))
    for dtype in ("fp16", "fp32"):
        assert learned[dtype]["all"]["count"] == 150
        assert learned[dtype]["all"]["median_ape"] < min(0.10, analytic[dtype]["all"]["median_ape"])
        assert learned[dtype]["all"]["kendall_tau"] > 0.88
        assert learned[dtype]["small"]["median_ape"] < 0.12
    assert validate(samples, V100, best_ns) == learned


def test_the_best_of_a_gpu_without_a_learned_model_is_analytic():
    gpu = GpuSpec.load("h200")
    samples = read_samples(EXCERPT, gpu)[:4]
    assert best_ns(samples, gpu) == analytic_ns(samples, gpu)
