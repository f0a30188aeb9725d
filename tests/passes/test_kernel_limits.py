"""Do kernels keep the limits of any GPU, and their values?"""

from dataclasses import replace
from pathlib import Path

import kernel_cases
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from tvm import ir

import pimflow
from pimflow import hardware
from pimflow.compiler.kernel_checks.check import check_kernel
from pimflow.compiler.kernel_checks.kernels import PlainKernels, ScheduledKernel
from pimflow.compiler.kernel_checks.launch import nodes
from pimflow.compiler.kernel_checks.resources import launches_by_name
from pimflow.core.blocks import SMALLEST_GPU, KernelLimits
from pimflow.hardware import GpuSpec
from pimflow.relay_passes.schedules.launch_limits import launch_problem, with_limits

LIMITS = st.builds(
    KernelLimits,
    multiprocessors=st.sampled_from([1, 30, 132]),
    threads=st.sampled_from([32, 48, 96, 128, 256, 768, 1024]),
    shared_bytes=st.sampled_from([2, 3, 5, 8, 16, 48]).map(lambda kib: kib * 1024),
    multiprocessor_shared_bytes=st.sampled_from([48, 96, 228]).map(lambda kib: kib * 1024),
    register_bytes=st.sampled_from([32, 64, 128, 256]).map(lambda kib: kib * 1024),
    tensor_cores=st.booleans(),
)
LIMIT_EXAMPLES = 3
PLAINS = {
    "a product": lambda dtype: kernel_cases.product_kernels(33, 17, 65, dtype),
    "products with an odd batch": lambda dtype: kernel_cases.product_kernels(3, 65, 17, dtype, batch=3),
    "a convolution": lambda dtype: kernel_cases.convolution_kernels(7, (17, 40), dtype),
    "a deep convolution": lambda dtype: kernel_cases.convolution_kernels(5, (64, 24), dtype),
    "a depthwise convolution": lambda dtype: kernel_cases.convolution_kernels(9, (24, 24), dtype, groups=24),
    "reductions": lambda dtype: kernel_cases.reduction_kernels(5, 129, dtype),
    "a Winograd primitive": lambda _: kernel_cases.primitive_kernels(
        "winograd-2d-f2-cuda-hwc-32x32", kernel_cases.LAYERS[2:3]
    ),
}


def limited(plain: PlainKernels, limits: KernelLimits) -> list[ScheduledKernel]:
    return replace(plain, limits=limits, target=with_limits(plain.target, limits)).schedule()


def uses_tensor_cores(kernel: ScheduledKernel) -> bool:
    return any("mma" in str(call.op) for call in nodes(kernel.lowered.body, ir.Call))


@settings(max_examples=examples(LIMIT_EXAMPLES))
@given(LIMITS, st.sampled_from(list(PLAINS)), st.sampled_from(["fp16", "fp32"]))
def test_blocks_keep_all_limits_and_values(limits, name, dtype):
    for kernel in limited(PLAINS[name](dtype), limits):
        for launch, shared_bytes in launches_by_name(kernel).values():
            assert launch_problem(dict(launch.extents), limits.threads) == ""
            assert shared_bytes <= limits.shared_bytes
        assert limits.tensor_cores or not uses_tensor_cores(kernel)
        check = check_kernel(kernel, work=20_000)
        assert check.compared and check.findings == ()


def test_a_small_map_has_its_channels_in_several_blocks():
    """Their sums are added in a fixed order by a second launch: no two blocks write one element."""
    (kernel,) = limited(kernel_cases.convolution_kernels(5, (192, 24), "fp16"), SMALLEST_GPU)
    parts, sums = [launch for launch, _ in launches_by_name(kernel).values()]
    assert parts.extent("blockIdx.z") > 1 and sums.extent("blockIdx.z") == 1
    assert not any("atomic" in str(call.op) for call in nodes(kernel.lowered.body, ir.Call))
    assert check_kernel(kernel, work=50_000).holds


def test_the_file_of_a_gpu_has_its_limits(tmp_path):
    text = (Path(hardware.__file__).parent / "specs/gpu/t4.toml").read_text()
    text = text.replace("shared_memory_bytes = { value = 65536", "shared_memory_bytes = { value = 16384")
    (tmp_path / "small.toml").write_text('max_block_threads = { value = 256, source = "drawn" }\n' + text)
    limits = GpuSpec.load(tmp_path / "small.toml").kernel_limits("fp32")
    assert (limits.threads, limits.shared_bytes, limits.tensor_cores) == (256, 16384, False)
    assert GpuSpec.load("p100").kernel_limits("fp16").tensor_cores is False


def test_fused_groups_keep_the_limits_of_a_small_gpu(monkeypatch):
    """Tiles that are searched for 16 KiB fit there; a GPU whose blocks have few threads has no groups."""
    system = pimflow.system(dtype="fp16")
    small = replace(system, gpu=replace(system.gpu, shared_memory_bytes=16384))
    monkeypatch.setattr(pimflow, "system", lambda **_: small)
    plain = kernel_cases.planned_kernels("toy", "fp16", fuse=True, modes="gpu")
    for kernel in plain.schedule():
        assert all(shared <= 16384 for _, shared in launches_by_name(kernel).values())
    few = replace(small, gpu=replace(small.gpu, max_block_threads=128))
    monkeypatch.setattr(pimflow, "system", lambda **_: few)
    assert not kernel_cases.planned_kernels("toy", "fp16", fuse=True, modes="gpu").groups
