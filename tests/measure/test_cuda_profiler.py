"""Are the kernels that get measured those that a network's build has, and are all answers there, in order?

No GPU is needed: what is compiled and timed here runs on the CPU, and kernels for a GPU are compiled only.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from measure_gpu import kernel_rows

from pimflow import frontend
from pimflow.commands.main import main
from pimflow.compiler.measurement import cuda_profiler, single_kernels
from pimflow.compiler.measurement.cuda_profiler import CudaProfiler
from pimflow.compiler.phases import lower
from pimflow.core.blocks import SMALLEST_GPU, KernelLimits
from pimflow.core.candidate import Provenance
from pimflow.core.kernel import EMPTY_KERNEL, ConvGeometry, Kernel, convolution_kernel
from pimflow.core.product_tiles import BlockTile
from pimflow.errors import ProfilerError, UnknownNameError, UsageError
from pimflow.hardware import GpuSpec, system
from pimflow.pim_backend.runtime import targets
from pimflow.pim_backend.runtime.cuda_binary import cuda_compiler
from pimflow.primitives import PRIMITIVES
from pimflow.primitives.launches import launches
from pimflow.relay_passes.regions.extract_regions import extract_regions
from pimflow.relay_passes.schedules.loops import nodes
from pimflow.relay_passes.schedules.schedule_tensor_cores import PRODUCT_TILE
from pimflow.simulators.gpu.learned_model import Learned
from pimflow.simulators.gpu.model import KernelRequest, kernel_cost
from pimflow.simulators.gpu.region_kernels import gpu_kernel
from pimflow.simulators.profiler import Analytic

CPU = targets.target_by_name("llvm+pim")
CUDA = targets.target_by_name("cuda+pim")
GPU = GpuSpec.load("rtx-2060-pim32")
CONV = ConvGeometry(n=1, h=8, w=8, c=16, oc=32, kh=3, kw=3, padding=(1, 1, 1, 1))
DEPTHWISE = ConvGeometry(n=1, h=8, w=8, c=16, oc=16, kh=3, kw=3, padding=(1, 1, 1, 1), groups=16)
GROUPED = ConvGeometry(n=1, h=8, w=8, c=32, oc=32, kh=3, kw=3, stride=(2, 2), padding=(1, 1, 1, 1), groups=4)
FC = ConvGeometry(n=2, h=1, w=1, c=64, oc=40)
STREAM = Kernel(kind="stream", input_bytes=4096, output_bytes=4096)


def reference(g: ConvGeometry, x: np.ndarray, filters: np.ndarray) -> np.ndarray:
    """A convolution of NHWC by OHWI, sum by sum."""
    (pad_top, pad_left, pad_bottom, pad_right), (sh, sw), (dh, dw) = g.padding, g.stride, g.dilation
    x = np.pad(x, ((0, 0), (pad_top, pad_bottom), (pad_left, pad_right), (0, 0)))
    out = np.zeros((g.n, g.oh, g.ow, g.oc))
    inner, outer = g.c // g.groups, g.oc // g.groups
    for i in range(g.oh):
        for j in range(g.ow):
            window = x[:, i * sh : i * sh + g.kh * dh : dh, j * sw : j * sw + g.kw * dw : dw]
            for group in range(g.groups):
                part = window[..., group * inner : (group + 1) * inner]
                outputs = slice(group * outer, (group + 1) * outer)
                out[:, i, j, outputs] = np.einsum("nhwc,ohwc->no", part, filters[outputs])
    return out


def run(kernel: Kernel) -> tuple[list[np.ndarray], np.ndarray]:
    func = single_kernels.primitive(kernel, "fp32", CPU, KernelLimits(multiprocessors=4))
    tensors = single_kernels.arguments(func, tvm.cpu())
    single_kernels.compile_primitives({"k": func}, CPU)["k"](*tensors)
    *operands, result = [tensor.numpy().astype(np.float64) for tensor in tensors]
    return operands, result


@st.composite
def geometries(draw) -> ConvGeometry:
    groups = draw(st.sampled_from((1, 1, 2, 4)))
    inner, outer = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    kh, kw = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return ConvGeometry(
        n=draw(st.integers(1, 2)),
        h=draw(st.integers(3, 7)),
        w=draw(st.integers(3, 7)),
        c=groups * inner,
        oc=groups * outer,
        kh=kh,
        kw=kw,
        stride=draw(st.sampled_from(((1, 1), (2, 2), (2, 1)))),
        padding=draw(st.sampled_from(((0, 0, 0, 0), (1, 1, 1, 1), (0, 1, 1, 0)))),
        groups=groups,
    )


@settings(max_examples=examples(8), deadline=None)
@given(geometry=geometries(), added=st.integers(0, 1))
def test_a_convolution_is_that_convolution(geometry, added):
    """With the residual that it is charged for, its bias and ReLU."""
    alone = convolution_kernel(geometry, "fp32")
    operands, result = run(convolution_kernel(geometry, "fp32", added * alone.output_bytes))
    x, filters = operands[0], operands[1]
    rest = sum(operands[2:], np.zeros(result.shape))
    assert len(operands) == 3 + added
    expected = np.maximum(reference(geometry, x, filters) + rest, 0)
    np.testing.assert_allclose(result, expected, atol=1e-4 * max(1.0, np.abs(expected).max()))


def test_an_fc_is_a_product_of_matrices():
    (x, matrix, bias), result = run(convolution_kernel(FC, "fp32"))
    assert x.shape == (2, 64) and matrix.shape == (64, 40)
    np.testing.assert_allclose(result, np.maximum(x @ matrix + bias, 0), atol=1e-4)


@settings(max_examples=examples(15), deadline=None)
@given(operands=st.integers(0, 3000), results=st.integers(1, 300))
def test_a_stream_touches_the_bytes_it_is_charged_for(operands, results):
    kernel = Kernel(kind="stream", input_bytes=4 * operands, output_bytes=4 * results)
    read, result = run(kernel)
    assert result.size == results
    size = sum(array.size for array in read)
    assert abs(size - operands) <= operands / 16 if operands > 8 * results else size == operands
    if not operands:
        assert not result.any()
    elif operands == results:
        np.testing.assert_allclose(result, np.maximum(read[0], 0), rtol=1e-6)
    elif operands > 9 * results:
        np.testing.assert_allclose(result, read[0].sum(axis=0), atol=1e-3)
    else:
        flat = read[0]
        sums = [flat[i : operands - operands % results : results].sum() for i in range(results)]
        rest = operands % results
        over = flat[operands - rest :]
        sums = [s + (over[i % rest] if rest else 0.0) for i, s in enumerate(sums)]
        np.testing.assert_allclose(result, np.maximum(sums, 0), atol=1e-4)


def test_a_kernel_that_only_reads_writes_next_to_nothing():
    (read,), result = run(Kernel(kind="stream", input_bytes=1 << 20, output_bytes=0))
    assert read.nbytes / 2 == 1 << 20 and result.size <= single_kernels.READ_RESULTS  # float64 here


def script_without_name(func) -> str:
    return func.without_attr("global_symbol").script() if "global_symbol" in func.attrs else func.script()


@pytest.mark.long
def test_measured_kernels_are_those_of_a_build():
    """The toy's convolutions with a ReLU behind them, fp16 on both sides, loop for loop."""
    network = frontend.load("toy")
    with CUDA:
        built = lower(network.module, CUDA, system())
    kernels = [script_without_name(f) for _, f in built.functions_items() if isinstance(f, tvm.tirx.PrimFunc)]
    regions = {r.name: r for r in extract_regions(network.module, "toy").regions}
    depthwise = gpu_kernel(regions["block.depthwise.conv"], "fp16")
    func = single_kernels.primitive(depthwise, "fp16", CUDA, system().gpu.kernel_limits("fp16"))
    types = [str(param.dtype) for param in func.params]
    assert types == ["float16", "float16", "float32", "float16"]
    grids = [thread_extents(text) for text in kernels]
    assert thread_extents(script_without_name(func)) in grids


def thread_extents(text: str) -> list[str]:
    return [line.split("in ")[-1].strip() for line in text.splitlines() if "thread_binding" in line]


@pytest.mark.skipif(not cuda_compiler(), reason="needs nvcc or NVRTC")
def test_kernels_compile_for_a_gpu():
    kernels = [convolution_kernel(g, "fp16") for g in (CONV, DEPTHWISE, GROUPED, FC)]
    kernels += [STREAM, EMPTY_KERNEL, Kernel(kind="stream", input_bytes=1 << 16, output_bytes=128)]
    functions = {
        f"k{i}": single_kernels.primitive(kernel, "fp16", CUDA, SMALLEST_GPU)
        for i, kernel in enumerate(kernels)
    }
    module = single_kernels.compile_primitives(functions, CUDA)
    assert all(module.implements_function(name) for name in functions)


# What TVM's CUDA runtime calls of the driver, whose library it needs to be loaded at all.
DRIVER = (
    *("cuDeviceGetName", "cuFuncSetAttribute", "cuGetErrorName", "cuGetErrorString", "cuLaunchKernelEx"),
    *("cuModuleGetFunction", "cuModuleLoadData", "cuModuleUnload", "cuTensorMapEncodeTiled"),
)
BESIDE_A_DRIVER = """
import tvm, tvm_ffi
from pimflow.compiler.measurement.single_kernels import compile_primitives, primitive
from pimflow.core.blocks import KernelLimits
from pimflow.core.kernel import ConvGeometry, convolution_kernel
from pimflow.pim_backend.runtime.targets import target_by_name
target = target_by_name("cuda+pim")
kernel = convolution_kernel(ConvGeometry(n=1, h=8, w=8, c=32, oc=32), "fp16")
module = compile_primitives({"k": primitive(kernel, "fp16", target, KernelLimits())}, target)
stored = [bytes(tvm_ffi.get_global_func("pimflow.runtime.save_module")(m)) for m in module.imports]
created = tvm_ffi.get_global_func("ffi.Module.create.cuda", allow_missing=True) is not None
print(created, len(module.imports), b"k_kernel" in stored[0], stored[0][8:14])
"""


@pytest.mark.long
@pytest.mark.skipif(not cuda_compiler() or not shutil.which("cc"), reason="needs nvcc or NVRTC, and cc")
def test_kernels_compile_beside_a_cuda_driver(tmp_path):
    """TVM has its CUDA runtime then, and would compile them itself."""
    (tmp_path / "driver.c").write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in DRIVER))
    build = ["cc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", tmp_path / "driver.c"]
    subprocess.run(build, check=True)
    libraries = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("LD_LIBRARY_PATH")]))
    environment = os.environ | {"LD_LIBRARY_PATH": libraries}
    command = [sys.executable, "-c", BESIDE_A_DRIVER]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    created, *kernel_lines = done.stdout.split(maxsplit=1)
    if created != "True":
        pytest.skip("TVM's CUDA runtime is not loaded: there is no libcudart")
    kind = "fatbin" if cuda_compiler() == "nvcc" else "ptx"
    assert kernel_lines[0].startswith("1 True") and kind in kernel_lines[0]


# ---- the profiler ----


@pytest.fixture(scope="module")
def cpu():
    return CudaProfiler(target=CPU, repeats=5)


def requests(*kernels: Kernel, channels: int = 32) -> list[KernelRequest]:
    return [KernelRequest(kernel, channels) for kernel in kernels]


SMALL = convolution_kernel(replace(CONV, h=2, w=2), "fp32")
LARGE = convolution_kernel(replace(CONV, h=32, w=32, c=64, oc=64), "fp32")


@pytest.mark.long
def test_costs_come_in_order_and_equal_kernels_are_built_once(cpu, monkeypatch):
    built = []
    real = cuda_profiler.primitive
    monkeypatch.setattr(cuda_profiler, "primitive", lambda *args: built.append(args[0]) or real(*args))
    costs = cpu.costs(requests(SMALL, LARGE, SMALL, replace(STREAM, macs=7), STREAM), GPU, "fp32")
    assert [k for k in built if k != EMPTY_KERNEL] == [SMALL, LARGE, STREAM]
    assert costs[0] == costs[2] and costs[1].execution_ns > 20 * costs[0].execution_ns
    assert all(cost.provenance is Provenance.MEASURED and cost.device == "CPU" for cost in costs)
    assert all(cost.launch_ns == costs[0].launch_ns > 0 and cost.execution_ns >= 0 for cost in costs)
    before = len(built)
    assert cpu.costs(requests(LARGE), GPU, "fp32") == [costs[1]] and len(built) == before


def test_traffic_is_the_models(cpu):
    (cost,) = cpu.costs(requests(LARGE), GPU, "fp32")
    modelled = kernel_cost(LARGE, GPU, dtype="fp32")
    assert (cost.dram_bytes, cost.l2_bytes) == (modelled.dram_bytes, modelled.l2_bytes)
    assert cost.tile is None and cost.blocks == 0


def test_fewer_channels_are_scaled_and_no_measurement(cpu):
    full, half = (cpu.costs(requests(LARGE, channels=c), GPU, "fp32")[0] for c in (32, 4))
    least_ns = kernel_cost(LARGE, GPU, dtype="fp32").execution_ns
    ratio = kernel_cost(LARGE, GPU, dtype="fp32", channels=4).execution_ns / least_ns
    assert ratio > 1 and half.execution_ns == pytest.approx(full.execution_ns * ratio)
    assert half.provenance is Provenance.ANALYTIC and half.device == "CPU"


def test_launches_set_to_zero_stay_zero(cpu):
    (cost,) = cpu.costs(requests(SMALL), replace(GPU, launch_ns=0.0), "fp32")
    assert cost.launch_ns == 0.0 and cost.provenance is Provenance.MEASURED


@pytest.mark.long
@pytest.mark.parametrize("stage", ["primitive", "compile_primitives", "arguments"])
def test_one_kernel_that_fails_does_not_lose_the_others(monkeypatch, stage):
    """Whether it cannot be scheduled, compiled or run."""
    real, broken = getattr(cuda_profiler, stage), replace(LARGE, groups=1, m=1)
    marked = {}

    def failing(first, *args):
        if first == broken or marked.get(stage) in (first.values() if isinstance(first, dict) else [first]):
            raise ValueError("of no account\nthis one is broken")
        return real(first, *args)

    builder = cuda_profiler.primitive

    def noting(kernel, *args):
        built = builder(kernel, *args)
        if kernel == broken:
            marked[stage] = built
        return built

    if stage != "primitive":
        monkeypatch.setattr(cuda_profiler, "primitive", noting)
    monkeypatch.setattr(cuda_profiler, stage, failing)
    told = []
    profiler = CudaProfiler(target=CPU, repeats=3, progress=told.append)
    costs = profiler.costs(requests(SMALL, broken, STREAM), GPU, "fp32")
    expected = [Provenance.MEASURED, Provenance.ANALYTIC, Provenance.MEASURED]
    assert [cost.provenance for cost in costs] == expected
    assert costs[1] == kernel_cost(broken, GPU, dtype="fp32") and not costs[1].device
    assert profiler.failures == {broken: "this one is broken"}
    assert len(told) == 1 and "this one is broken" in told[0] and "\n" not in told[0]


def test_states_of_the_l2():
    assert [CudaProfiler(text, target=CPU).l2 for text in ("", "cold", "warm")] == ["cold", "cold", "warm"]
    assert CudaProfiler("warm", target=CPU).name != CudaProfiler(target=CPU).name
    with pytest.raises(UnknownNameError, match="unknown state of the L2 'wram'; did you mean warm"):
        CudaProfiler("wram", target=CPU)


@pytest.mark.skipif(tvm.cuda().exist, reason="there is a device")
def test_without_a_device_the_other_sources_are_named():
    with pytest.raises(ProfilerError, match="no CUDA device here; use gpu=analytic") as caught:
        CudaProfiler()
    assert len(str(caught.value).splitlines()) == 1 and caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("card", "gpu", "fits"),
    [
        ("NVIDIA H200", "h200", True),
        ("NVIDIA H200", "rtx-2060-pim32", False),
        ("NVIDIA GeForce RTX 2060", "rtx-2060", True),
        ("NVIDIA GeForce RTX 2060 SUPER", "rtx-2060", False),
    ],
)
def test_a_card_that_the_system_does_not_describe(cpu, monkeypatch, card, gpu, fits):
    """Its times in a model of another card's traffic and energy would be believed."""
    monkeypatch.setattr(CudaProfiler, "card", card)
    monkeypatch.setattr(cpu, "on_cuda", True)
    spec = GpuSpec.load(gpu)
    if fits:
        return cpu._require_card(spec)
    with pytest.raises(UsageError, match=f"'{card}', and gpu '{gpu}' is another") as caught:
        cpu._require_card(spec)
    assert ("--gpu h200" in str(caught.value)) == (card == "NVIDIA H200")
    cpu._require_card(replace(spec, cuda_names=(card,)))


@pytest.mark.long
def test_rows_put_models_beside_measurements(cpu):
    v100 = GpuSpec.load("v100")
    rows = kernel_rows([("a", LARGE), ("b", STREAM)], cpu, v100, "fp32", [Analytic(), Learned()])
    assert [row["kernel"] for row in rows] == ["a", "b"] and rows[0].keys() == rows[1].keys()
    assert rows[0]["analytic_ns"] == kernel_cost(LARGE, v100, dtype="fp32").execution_ns
    assert rows[0]["analytic_ratio"] == pytest.approx(rows[0]["analytic_ns"] / rows[0]["cold_ns"])
    (cost,) = Learned().costs(requests(LARGE), v100, "fp32")
    assert rows[0]["learned_ns"] == cost.execution_ns != rows[0]["analytic_ns"]
    assert [rows[0][size] for size in ("kind", "m", "macs")] == [LARGE.kind, LARGE.m, LARGE.macs]


def test_a_product_has_the_tile_that_it_is_timed_with():
    func = single_kernels.primitive(convolution_kernel(CONV, "fp16"), "fp16", CUDA, SMALLEST_GPU)
    text = func.attrs[PRODUCT_TILE]
    tile = BlockTile.from_text(text)
    threads = [loop for loop in nodes(func.body, tvm.tirx.For) if loop.thread_binding is not None]
    warps = [loop.extent for loop in threads if str(loop.thread_binding.thread_tag) == "threadIdx.y"]
    assert tile.to_text() == text and tile.fits(SMALLEST_GPU)
    assert {int(extent) for extent in warps} == {tile.threads // 32}


@pytest.mark.long
def test_a_command_tells_of_kernels_that_are_not_measured(cpu, monkeypatch, capsys, tmp_path):
    """On stderr, one line each, unless it is to be quiet; the costs are then analytic."""
    monkeypatch.setattr(cuda_profiler.targets, "local_cuda", lambda: CPU)

    def broken(*_):
        raise ValueError("no room")

    monkeypatch.setattr(cuda_profiler, "primitive", broken)
    command = ["profile", "toy", "--dtype", "fp32", "--profiler", "gpu=cuda"]
    said = {}
    for quiet in ([], ["--quiet"]):
        cache = ["--cache", str(tmp_path / f"cache{len(quiet)}")]
        assert main([*command, *cache, "--json", "--jobs", "1", *quiet]) == 0
        out, err = capsys.readouterr()
        said[bool(quiet)] = [line for line in err.splitlines() if "not measured, so analytic" in line]
        assert list(json.loads(out)["known"]) == ["analytic"]
    assert said[True] == [] and len(said[False]) > 5
    assert all(line.startswith("pimflow: ") and line.endswith(": no room") for line in said[False])


@pytest.mark.long
def test_launches_of_a_primitive_share_what_they_take_together(cpu):
    """As the model would share it; measured once, whichever of them is asked for."""
    layer = ConvGeometry(n=1, h=12, w=12, c=8, oc=8, kh=3, kw=3, padding=(1, 1, 1, 1))
    kernels = launches(PRIMITIVES["winograd-2d-f2-cuda-hwc-32x32"], layer)
    requests = [KernelRequest(kernel, GPU.memory_channels) for kernel in kernels]
    costs = cpu.costs(requests, GPU, "fp32")
    (measured,) = set(cpu.measure(kernels, GPU, "fp32"))
    together_ns = max(measured.cold_ns - 2 * measured.launch_ns, 0.0)
    assert sum(cost.execution_ns for cost in costs) == pytest.approx(together_ns) and together_ns > 0
    assert {(c.provenance, c.launch_ns) for c in costs} == {(Provenance.MEASURED, measured.launch_ns)}
    modelled = [kernel_cost(kernel, GPU, dtype="fp32").execution_ns for kernel in kernels]
    shares = [cost.execution_ns / ns for cost, ns in zip(costs, modelled)]
    assert shares == pytest.approx([shares[0]] * 3)
    larger = replace(kernels[-1], input_bytes=kernels[-1].input_bytes + (1 << 20))
    (heavier,) = cpu.costs([KernelRequest(larger, GPU.memory_channels)], GPU, "fp32")
    assert heavier.execution_ns > costs[-1].execution_ns
