"""The GPU model against Accel-Sim, against what more work or fewer channels must cost, and its presets."""

import csv
import dataclasses
import re
import statistics
from pathlib import Path

import pytest
from calibration.gpu_fit import efficiency_sources, write_efficiency
from calibration.samples import read_samples, validate
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from length import examples

from pimflow.core.kernel import ELEMENT_BYTES, ConvGeometry, Kernel, convolution_kernel
from pimflow.errors import SpecError, TraceError, UsageError
from pimflow.hardware import GpuSpec, spec_names
from pimflow.simulators.gpu.machine import TILES, family
from pimflow.simulators.gpu.model import kernel_cost, kernel_energy_pj

GPUS = {name: GpuSpec.load(name) for name in spec_names("gpu")}
SIMULATED = GPUS["rtx-2060-pim32"]
ACCELSIM = Path(__file__).parent / "data" / "accelsim_rtx2060.csv"
EMITTED = ACCELSIM.with_name("accelsim_emitted.csv")
ROUNDING = 1 + 1e-9  # two sums of the same terms may differ in the last bits
FAST = settings(max_examples=examples(200), derandomize=True, deadline=None)

SAMPLES = read_samples(ACCELSIM, SIMULATED)
FITTED = [sample for sample in read_samples(EMITTED, SIMULATED) if sample.is_fit_sample]
FITTED += [sample for sample in SAMPLES if sample.tile]
LAYERS = {
    "pointwise": ConvGeometry(n=1, h=56, w=56, c=24, oc=144),
    "3x3": ConvGeometry(n=1, h=28, w=28, c=128, oc=128, kh=3, kw=3, padding=(1,) * 4),
    "image": ConvGeometry(n=1, h=224, w=224, c=3, oc=32, kh=3, kw=3, stride=(2, 2), padding=(1,) * 4),
    "grouped": ConvGeometry(n=1, h=28, w=28, c=128, oc=128, kh=3, kw=3, padding=(1,) * 4, groups=32),
    "depthwise": ConvGeometry(n=1, h=56, w=56, c=144, oc=144, kh=3, kw=3, padding=(1,) * 4, groups=144),
    "fc": ConvGeometry(n=1, h=1, w=1, c=1280, oc=1000),
}
KERNELS = {name: convolution_kernel(layer, "fp16") for name, layer in LAYERS.items()}
KERNELS["stream"] = Kernel(kind="stream", macs=100352, input_bytes=401408, output_bytes=200704)

every_gpu = pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
every_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)


def is_emitted(gpu: GpuSpec) -> bool:
    """Whether its kernels are as `simulators.gpu.emitted` says."""
    return "step_cycles" in gpu.efficiency


def total_ns(kernel: Kernel, gpu: GpuSpec, **options) -> float:
    return kernel_cost(kernel, gpu, **{"dtype": "fp16", **options}).total_ns


# --- presets ---


@every_gpu
def test_every_value_of_a_preset_has_a_source(gpu):
    sourced = {f.name for f in dataclasses.fields(gpu)} - {"name", "description", "sources"}
    sourced -= {"max_block_threads"}  # no preset has fewer than CUDA allows
    sourced -= set() if gpu.cuda_names else {"cuda_names"}  # no card is the simulated part
    sourced -= set() if gpu.decode_bandwidth_share else {"decode_bandwidth_share"}  # none is published
    assert sourced == {field.partition(".")[0] for field in gpu.sources}
    for section in ("energy", "efficiency", "decode_bandwidth_share"):
        assert {f"{section}.{key}" for key in getattr(gpu, section)} <= set(gpu.sources)
    assert all(source.strip() for source in gpu.sources.values())


@pytest.mark.parametrize(
    ("name", "bandwidth_gb_s", "fp16_tflops", "l2_mib"),
    [
        ("rtx-2060", 336, 25.8, 3),
        ("rtx-2060-pim32", 896, 21.0, 8),
        ("v100", 900, 125.3, 6),
        ("h200", 4800, 989, 50),
    ],
)
def test_presets_have_the_peaks_of_their_data_sheets(name, bandwidth_gb_s, fp16_tflops, l2_mib):
    gpu = GPUS[name]
    assert gpu.channel_bytes_per_ns * gpu.memory_channels == pytest.approx(bandwidth_gb_s, rel=1e-3)
    peak_tflops = 2 * gpu.sms * gpu.fma_per_sm_cycle["fp16"] * gpu.clock_mhz / 1e6
    assert peak_tflops == pytest.approx(fp16_tflops, rel=2e-3)
    assert gpu.l2_bytes_per_channel * gpu.memory_channels == pytest.approx(l2_mib * 2**20, rel=1e-4)


@pytest.mark.parametrize("name", ["rtx-2060", "h200"])
def test_constants_that_are_only_transferred_say_so(name):
    gpu = GPUS[name]
    assert all(gpu.sources[f"efficiency.{key}"].startswith("assumed: ") for key in gpu.efficiency)


# --- Accel-Sim ---


def test_accelsim_cycles_are_met():
    """Of rows that were fitted to; these bounds say how well the form fits, not how well it predicts."""
    errors = {}
    for sample in FITTED:
        predicted = total_ns(sample.kernel, SIMULATED, channels=sample.channels, tile=sample.tile)
        errors[sample.shape, sample.channels] = abs(predicted / sample.measured_ns - 1)
    assert len(errors) == len(FITTED) > 100
    assert {key: error for key, error in errors.items() if error > 0.17} == {}
    assert statistics.median(errors.values()) < 0.03
    assert statistics.mean(errors.values()) < 0.04


def test_the_sources_are_those_that_the_fit_writes():
    """A constant that was not fitted keeps the reason that the file gives, or says that it is assumed."""
    files = {"data": EMITTED.name, "split": "hash", "extra_data": ACCELSIM.name}
    right = {key: SIMULATED.sources[f"efficiency.{key}"] for key in SIMULATED.efficiency}
    assert efficiency_sources(SIMULATED, FITTED, **files) == right
    bare = dataclasses.replace(SIMULATED, sources={})
    for key, source in efficiency_sources(bare, FITTED, **files).items():
        assert source.startswith("assumed: not fitted") if "assumed" in right[key] else source == right[key]


def test_a_source_of_another_fit_is_kept():
    """A constant that this fit leaves alone was fitted before."""
    sources = {"efficiency.mma": "fitted to something else"}
    result = efficiency_sources(dataclasses.replace(SIMULATED, sources=sources), FITTED, EMITTED.name, "hash")
    assert result["mma"] == "assumed: as it was, fitted to something else"


def test_accelsim_kernels_are_ranked_as_measured():
    accuracy = validate(SAMPLES, SIMULATED)["fp16"]
    assert accuracy["all"]["kendall_tau"] > 0.93
    assert accuracy["1x1"]["count"] + accuracy["stream"]["count"] == accuracy["all"]["count"] == 30


def test_launch_is_accelsims_empty_kernel():
    with open(ACCELSIM, encoding="utf-8", newline="") as file:
        (cycles,) = (int(row["gpu_sim_cycle"]) for row in csv.DictReader(file) if row["kernel"] == "empty")
    assert pytest.approx(cycles / SIMULATED.clock_mhz * 1e3, abs=0.1) == SIMULATED.launch_ns


@pytest.mark.parametrize(
    ("shape", "least", "most"),
    [
        ("read1m", 1.4, 1.7),
        ("copy4m_r", 1.4, 1.9),
        ("copy4m", 1.8, 2.0),
        ("pw_12544x96x16", 1.4, 1.6),
        ("pw_3136x144x24", 1.3, 1.6),
        ("c3_196x256x2304", 1.0, 1.15),
        ("pw_196x64x384", 1.0, 1.1),
        ("pw_49x320x960", 1.0, 1.1),
        ("fc_1x1000x1280", 1.0, 1.2),
    ],
)
def test_cost_of_half_the_channels(shape, least, most):
    """Streams and large 1x1 convolutions feel it; kernels of small M and long K wait for latency anyway."""
    sample = next(sample for sample in SAMPLES if sample.shape == shape)
    run = {"dtype": "fp16", "tile": sample.tile}
    full, half = (kernel_cost(sample.kernel, SIMULATED, channels=channels, **run) for channels in (32, 16))
    assert least <= half.execution_ns / full.execution_ns <= most
    assert half.total_ns / full.total_ns <= half.execution_ns / full.execution_ns


# --- monotonicity ---


@st.composite
def kernels(draw) -> tuple[Kernel, GpuSpec, dict]:
    """A kernel, whose footprints need not belong together, and where and how it runs."""
    size = st.integers(0, 1 << 26)
    kind = draw(st.sampled_from(("gemm", "gemm", "depthwise", "stream")))
    gpu = GPUS[draw(st.sampled_from(sorted(GPUS)))]
    options = {"dtype": draw(st.sampled_from(("fp16", "fp32")))}
    sizes = {}
    if kind == "gemm":
        window = draw(st.sampled_from((1, 9, 25, 49)))
        sizes = {
            "m": draw(st.sampled_from((1, 1, 49, 196, 784, 3136, 12544)) | st.integers(1, 1 << 16)),
            "n": draw(st.integers(1, 2048)),
            "k": window * draw(st.integers(1, 2048)),
            "groups": draw(st.sampled_from((1, 1, 1, 4, 32))),
            "window": window,
        }
        options["tile"] = draw(st.none() | st.sampled_from(TILES))
    elif kind == "depthwise":
        sizes["window"] = draw(st.sampled_from((1, 9, 25, 49)))
    kernel = Kernel(
        kind=kind,
        stride=1 if kind == "stream" else draw(st.sampled_from((1, 2))),
        macs=draw(st.integers(0, 1 << 34)),
        input_bytes=draw(size),
        weight_bytes=draw(size),
        output_bytes=draw(size),
        **sizes,
    )
    return kernel, gpu, options


@FAST
@given(case=kernels(), data=st.data())
def test_more_channels_are_never_slower(case, data):
    """Kernels as they are emitted may meet in fewer of 24 channels than of 20; not of twice as many."""
    kernel, gpu, options = case
    few = data.draw(st.integers(1, gpu.memory_channels), label="few")
    channel_counts = range(few, gpu.memory_channels + 1)
    if is_emitted(gpu):
        channel_counts = [few << doubled for doubled in range(6) if few << doubled <= gpu.memory_channels]
    many = data.draw(st.sampled_from(channel_counts), label="many")
    slow, fast = (total_ns(kernel, gpu, channels=channels, **options) for channels in (few, many))
    assert fast <= slow * ROUNDING


@FAST
@given(case=kernels(), data=st.data())
def test_more_work_is_never_faster(case, data):
    kernel, gpu, options = case
    assume(not is_emitted(gpu))
    names = ["macs", "input_bytes", "weight_bytes", "output_bytes"]
    names += ["m", "n", "k", "groups"] if kernel.kind == "gemm" else []
    name = data.draw(st.sampled_from(names), label="grows")
    growth = data.draw(st.sampled_from((1, 8, 64)) | st.integers(1, 1 << 20), label="by")
    larger = dataclasses.replace(kernel, **{name: getattr(kernel, name) + growth})
    # Libraries have other code for a window over an image's few channels, and the model other constants.
    assume(family(larger) == family(kernel))
    options["channels"] = data.draw(st.integers(1, gpu.memory_channels), label="channels")
    assert total_ns(kernel, gpu, **options) <= total_ns(larger, gpu, **options) * ROUNDING


@FAST
@given(
    sides=st.tuples(st.integers(1, 64), st.integers(1, 64)),
    c=st.integers(1, 600),
    oc=st.integers(1, 150).map(lambda blocks: 8 * blocks),
    how=st.tuples(st.sampled_from((1, 3, 5)), st.integers(1, 2), st.integers(1, 32)),
    more=st.integers(1, 100),
)
def test_a_larger_layer_is_never_faster(sides, c, oc, how, more):
    """As it is emitted: of more pixels, or more results, by eights, which a block of a row by a matrix has.

    Another K has another pitch, and meets elsewhere. What all blocks read is shared out evenly: a percent.
    """
    kernel, stride, channels = how
    h, w = sides
    layer = {"n": 1, "w": w, "c": c, "kh": kernel, "kw": kernel, "stride": (stride, stride)}
    layer["padding"] = (kernel // 2,) * 4
    time, taller, wider = (
        total_ns(convolution_kernel(ConvGeometry(**layer, h=h, oc=oc), "fp16"), SIMULATED, channels=channels)
        for h, oc in ((h, oc), (h + more, oc), (h, oc + 8 * more))
    )
    assert time <= min(taller, wider) * 1.01


@FAST
@given(case=kernels())
def test_the_choice_of_tile_is_never_worse_than_a_tile(case):
    kernel, gpu, options = case
    given_tile = kernel_cost(kernel, gpu, **options)
    chosen = kernel_cost(kernel, gpu, dtype=options["dtype"])
    assert chosen.execution_ns <= given_tile.execution_ns * ROUNDING


# --- what a cost says ---


@pytest.mark.long
@every_gpu
@every_kernel
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_parts_of_a_cost(kernel, gpu, dtype):
    cost = kernel_cost(kernel, gpu, dtype=dtype)
    assert cost.total_ns == cost.launch_ns + cost.execution_ns
    demands = (cost.compute_ns, cost.l2_ns, cost.dram_ns)
    assert min(demands) >= 0 and max(demands) < cost.execution_ns
    assert cost.l2_bytes >= kernel.input_bytes + kernel.output_bytes
    assert (cost.tile is None) == (cost.blocks == 0)
    assert sum(kernel_energy_pj(kernel, cost, gpu, dtype).values()) > 0


@pytest.mark.long
@every_gpu
@every_kernel
def test_launch_is_explicit_and_apart(kernel, gpu):
    cost = kernel_cost(kernel, gpu, dtype="fp16", tile=(64, 64))  # split-K may have a second launch
    free = kernel_cost(kernel, dataclasses.replace(gpu, launch_ns=0.0), dtype="fp16", tile=(64, 64))
    assert cost.launch_ns == gpu.launch_ns > 0
    assert free.launch_ns == 0
    assert free.total_ns == free.execution_ns == cost.execution_ns


@every_gpu
@every_kernel
def test_every_part_of_the_energy_has_its_price(kernel, gpu):
    cost = kernel_cost(kernel, gpu, dtype="fp16")
    parts = kernel_energy_pj(kernel, cost, gpu, "fp16")
    prices = {"gpu_arithmetic": "fma_fp16_pj", "gpu_l2": "l2_pj_per_byte", "gpu_dram": "dram_pj_per_bit"}
    assert parts.keys() == prices.keys()
    for part, price in prices.items():
        dearer = dataclasses.replace(gpu, energy={**gpu.energy, price: 3 * gpu.energy[price]})
        expected = {**parts, part: pytest.approx(3 * parts[part])}
        assert kernel_energy_pj(kernel, cost, dearer, "fp16") == expected
    assert parts["gpu_arithmetic"] == pytest.approx(kernel.macs * gpu.energy["fma_fp16_pj"])
    assert parts["gpu_dram"] == pytest.approx(cost.dram_bytes * 8 * gpu.energy["dram_pj_per_bit"])


def test_a_write_through_cache_writes_twice():
    write = Kernel(kind="stream", input_bytes=0, output_bytes=1 << 20)
    simulated = kernel_cost(write, SIMULATED, dtype="fp16")
    back = kernel_cost(write, dataclasses.replace(SIMULATED, write_factor=1.0), dtype="fp16")
    assert simulated.dram_bytes == 2 << 20
    assert back.dram_bytes == 1 << 20
    assert simulated.dram_ns == pytest.approx(2 * back.dram_ns)


def test_one_row_is_a_matrix_vector_product():
    cost = kernel_cost(KERNELS["fc"], SIMULATED, dtype="fp16")
    assert cost.tile is None
    assert cost.l2_bytes == pytest.approx((1280 + 1280 * 1000 + 1000) * ELEMENT_BYTES["fp16"])


@pytest.mark.parametrize("channels", [-1, 0, 33])
def test_channels_that_the_gpu_lacks(channels):
    with pytest.raises(UsageError, match=f"{channels} channels requested of 32"):
        kernel_cost(KERNELS["3x3"], SIMULATED, dtype="fp16", channels=channels)


def test_dtype_that_the_gpu_lacks():
    with pytest.raises(SpecError, match="'fma_per_sm_cycle' has no 'bf16'"):
        kernel_cost(KERNELS["3x3"], SIMULATED, dtype="bf16")


def test_missing_constants_are_named():
    gpu = dataclasses.replace(SIMULATED, efficiency={})
    with pytest.raises(SpecError, match="'efficiency' lacks 'l2'"):
        kernel_cost(KERNELS["stream"], gpu, dtype="fp16")
    gpu = dataclasses.replace(SIMULATED, energy={})
    cost = kernel_cost(KERNELS["stream"], SIMULATED, dtype="fp16")
    with pytest.raises(SpecError, match="'energy' lacks 'fma_fp16_pj'"):
        kernel_energy_pj(KERNELS["stream"], cost, gpu, "fp16")


# --- files ---


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "columns are neither"),
        ("n,ic,ih,iw,oc,k,stride,type,dtype,ms\n1,3,224,224,32,three,2,Regular,fp16,0.1\n", ":2: malformed"),
        ("n,ic,ih,iw,oc,k,stride,type,dtype,ms\n1,3,224\n", ":2: malformed"),
    ],
)
def test_malformed_measurements(tmp_path, text, message):
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=re.escape(message)):
        read_samples(path, SIMULATED)


def test_a_fit_replaces_only_its_table(tmp_path):
    embedded = Path(__file__).parents[2] / "python/pimflow/hardware/specs/gpu/rtx-2060-pim32.toml"
    path = tmp_path / "rtx-2060-pim32.toml"
    path.write_text(embedded.read_text())
    changed = dataclasses.replace(SIMULATED, efficiency={**SIMULATED.efficiency, "dram": 0.5})
    new_sources = {key: f"a test of {key}" for key in changed.efficiency}
    write_efficiency(path, changed, new_sources)
    sources = {**SIMULATED.sources, **{f"efficiency.{key}": source for key, source in new_sources.items()}}
    assert GpuSpec.load(path) == dataclasses.replace(changed, sources=sources)
    assert path.read_text().startswith("# The simulated GPU")
    assert list(tmp_path.iterdir()) == [path]
