"""Are registers, shared and local memory of kernels read from their binaries, and limits kept?"""

import kernel_cases
import pytest

from pimflow.compiler.kernel_checks.elf import CompiledKernel, compiled_kernels
from pimflow.compiler.kernel_checks.launch import KernelLaunch, launch_extents, launch_statements
from pimflow.compiler.kernel_checks.resources import LaunchResources, launch_resources
from pimflow.hardware import GpuSpec, spec_names
from pimflow.pim_backend.runtime.cuda_binary import cubin, cuda_compiler
from pimflow.relay_passes.schedules.launch_limits import launch_problem

GPUS = [GpuSpec.load(name) for name in spec_names("gpu")]
needs_compiler = pytest.mark.skipif(not cuda_compiler(), reason="needs nvcc or NVRTC")
SOURCE = """
extern "C" __global__ void __launch_bounds__(64) spread(float* y, int n) {
  __shared__ float part[96];
  volatile float own[32];
  for (int i = 0; i < 32; ++i) own[i * n & 31] = y[i + n];
  part[threadIdx.x] = own[(n + threadIdx.x) & 31];
  __syncthreads();
  y[threadIdx.x] = part[63 - threadIdx.x];
}
"""


@pytest.mark.long
@needs_compiler
def test_a_binary_tells_its_resources():
    kernel = compiled_kernels(cubin(SOURCE, "sm_75"))["spread"]
    assert kernel.local_bytes == 128 and 8 <= kernel.registers <= 255


@pytest.mark.long
@needs_compiler
def test_kernels_keep_all_limits():
    launches = launch_resources(kernel_cases.product_kernels(129, 129, 129, "fp16"), ["sm_75"])
    assert launches and [launch.problems(GPUS) for launch in launches] == [[]] * len(launches)
    assert all(launch.shared_bytes and not launch.kernel.local_bytes for launch in launches)


def test_what_does_not_fit_is_named():
    launch = KernelLaunch(extents={"threadIdx.x": 1024, "blockIdx.y": 70000})
    kernel = CompiledKernel(name="large", registers=255)
    needed = LaunchResources(architecture="sm_75", kernel=kernel, launch=launch, shared_bytes=50000)
    problems = needed.problems(GPUS)
    assert problems[0] == "blockIdx.y is 70000, and CUDA allows 65535"
    assert problems[1].startswith("50000 bytes of shared memory")
    assert {problem.rpartition(" ")[2] for problem in problems[2:]} == {gpu.name for gpu in GPUS}


def test_another_rule_schedules_what_breaks_a_limit():
    """As 70,000 blocks along z, which the first rules would make of the batch, it could not be launched."""
    (kernel,) = kernel_cases.product_kernels(16, 16, 16, "fp16", batch=70000).schedule()
    launches = launch_statements(kernel.lowered.body)
    assert [launch_problem(launch_extents(launch)) for launch in launches] == [""]
