"""Does a real card's measurement make sense: more work takes longer, the L2 matters, results repeat?"""

from dataclasses import replace

import pytest
import tvm

from pimflow.compiler.measurement.cuda_profiler import CudaProfiler
from pimflow.core.candidate import Provenance
from pimflow.core.kernel import ConvGeometry, Kernel, convolution_kernel
from pimflow.hardware import GpuSpec, spec_names
from pimflow.simulators.gpu.model import KernelRequest

needs_card = pytest.mark.skipif(not tvm.cuda().exist, reason="needs a CUDA device")
pytestmark = [pytest.mark.alone, pytest.mark.gpu, needs_card]
POINTWISE = ConvGeometry(n=1, h=28, w=28, c=192, oc=64)
DEPTHWISE = ConvGeometry(n=1, h=56, w=56, c=144, oc=144, kh=3, kw=3, padding=(1, 1, 1, 1), groups=144)


@pytest.fixture(scope="module")
def profiler():
    return CudaProfiler()


@pytest.fixture(scope="module")
def gpu(profiler):
    """The card's preset, or one that says it is the card."""
    presets = [GpuSpec.load(name) for name in spec_names("gpu")]
    fitting = [spec for spec in presets if profiler.card in spec.cuda_names]
    return fitting[0] if fitting else replace(presets[0], cuda_names=(profiler.card,))


def test_measured_costs(profiler, gpu):
    copy = Kernel(kind="stream", input_bytes=1 << 28, output_bytes=1 << 28)
    kernels = [convolution_kernel(g, "fp16") for g in (POINTWISE, DEPTHWISE)] + [copy]
    requests = [KernelRequest(kernel, gpu.memory_channels) for kernel in kernels]
    costs = profiler.costs(requests, gpu, "fp16")
    assert not profiler.failures
    assert all(c.provenance is Provenance.MEASURED and c.device == profiler.device for c in costs)
    assert all(c.execution_ns > 0 and 0 < c.launch_ns < 1e5 for c in costs)
    bandwidth = (copy.input_bytes + copy.output_bytes) / costs[2].execution_ns
    assert bandwidth < 1.1 * gpu.memory_channels * gpu.channel_bytes_per_ns or gpu.name == "a100"
    repeated = CudaProfiler().costs(requests, gpu, "fp16")
    assert repeated[2].execution_ns == pytest.approx(costs[2].execution_ns, rel=0.1)


def test_a_cold_l2_is_no_faster(profiler, gpu):
    (measured,) = profiler.measure([convolution_kernel(DEPTHWISE, "fp16")], gpu, "fp16")
    assert measured.cold_ns >= 0.9 * measured.warm_ns
