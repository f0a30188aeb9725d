"""Logs of some of a network's kernels: is a search with them fair to those that were not simulated?

The oracle is a simulator that takes a known multiple of what the GPU model says.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples

import pimflow
from pimflow.core.candidate import Provenance
from pimflow.core.kernel import ConvGeometry, Kernel, convolution_kernel
from pimflow.hardware import GpuSpec, system
from pimflow.placement import Profiling
from pimflow.simulators.accel_sim.kernels import kernel_name, launches, parse_kernel_name
from pimflow.simulators.accel_sim.profiler import AccelSimLogs
from pimflow.simulators.gpu.model import kernel_cost
from pimflow.simulators.profiler import KernelRequest

GPU = GpuSpec.load("rtx-2060-pim32")
LAYER = ConvGeometry(n=1, h=28, w=28, c=32, oc=192, kh=3, kw=3, padding=(1, 1, 1, 1))
PARTS = {
    "rows": ConvGeometry(n=1, h=12, w=28, c=32, oc=192, kh=3, kw=3, padding=(1, 1, 0, 1)),
    "channels": ConvGeometry(n=1, h=28, w=28, c=32, oc=64, kh=3, kw=3, padding=(1, 1, 1, 1)),
    "reduction": ConvGeometry(n=1, h=28, w=28, c=16, oc=192, kh=3, kw=3, padding=(1, 1, 1, 1)),
}
POINTWISE, WIDE = (ConvGeometry(n=1, h=14, w=14, c=c, oc=96) for c in (64, 96))
DEPTHWISE = ConvGeometry(n=1, h=28, w=28, c=64, oc=64, kh=3, kw=3, padding=(1, 1, 1, 1), groups=64)
KERNELS = [convolution_kernel(g, "fp16") for g in (LAYER, *PARTS.values(), POINTWISE, WIDE, DEPTHWISE)]
KERNELS += [Kernel(kind="stream", input_bytes=1 << 20, output_bytes=1 << 18)]
REQUESTS = [KernelRequest(kernel, channels) for kernel in KERNELS for channels in (16, 32)]


def model_cost(request: KernelRequest):
    return kernel_cost(request.kernel, GPU, dtype="fp16", channels=request.channels)


def log(folder, request: KernelRequest, times: float, watts: float = 0.0) -> None:
    """A run that takes `times` as long as the GPU model says, with as many times the traffic."""
    name, cost = kernel_name(request.kernel, "fp16"), model_cost(request)
    cycles = round((cost.launch_ns + times * cost.execution_ns) * GPU.clock_mhz / 1e3)
    l2_gb_s = times * cost.l2_bytes / (cycles / GPU.clock_mhz * 1e3)
    reads = round(times * cost.dram_bytes / 32)
    (launch,) = launches(request.kernel, GPU, "fp16", request.channels)
    count = launch.instructions()
    path = folder / f"{name}.{request.channels}.log"
    path.write_text(
        f"kernel_name = {name}\nkernel_launch_uid = 1\ngpu_sim_cycle = {cycles}\ngpu_sim_insn = {count}\n"
        f"gpu_ipc = 1.0\ngpu_tot_sim_cycle = {cycles}\ngpu_tot_sim_insn = {count}\ngpu_occupancy = 25.0%\n"
        f"L2_BW = {l2_gb_s} GB/Sec\ntotal dram reads = {reads}\ntotal dram writes = 0\n"
        "GPGPU-Sim: *** exit detected ***\n"
    )
    if watts:
        path.with_suffix(".power").write_text(
            f"kernel_name = {name}\nkernel_avg_power = {watts + 40}\ngpu_avg_CONSTP, = 30\n"
            f"gpu_avg_STATICP, = 10\ngpu_avg_DRAMP, = {watts}\ngpu_tot_avg_power = {watts + 40}\n"
        )


def costs(folder, requests=REQUESTS):
    return AccelSimLogs(str(folder)).costs(requests, GPU, "fp16")


@pytest.mark.long
@given(logged=st.sets(st.sampled_from(range(len(REQUESTS))), min_size=1), times=st.floats(0.3, 8.0))
@settings(max_examples=examples(40), deadline=None, derandomize=True)
def test_which_kernels_were_simulated_does_not_matter(logged, times, tmp_path_factory):
    """If the simulator takes a multiple of what the model says, all kernels do, whichever were simulated."""
    folder = tmp_path_factory.mktemp("logs")
    for index in logged:
        log(folder, REQUESTS[index], times)
    for index, (request, cost) in enumerate(zip(REQUESTS, costs(folder))):
        expected = model_cost(request)
        assert cost.provenance is (Provenance.SIMULATED if index in logged else Provenance.SCALED)
        assert cost.launch_ns == expected.launch_ns
        # Cycles and bursts of logs are whole numbers.
        for field in ("execution_ns", "dram_bytes", "l2_bytes"):
            assert getattr(cost, field) == pytest.approx(times * getattr(expected, field), rel=0.02), field


def ratio(folder, request: KernelRequest) -> float:
    (cost,) = costs(folder, [request])
    return cost.execution_ns / model_cost(request).execution_ns


@pytest.mark.parametrize("part", PARTS)
def test_the_most_alike_kernels_count(part, tmp_path):
    """Logs come one by one, each more like what is asked for than those before; that one alone counts."""
    piece = convolution_kernel(PARTS[part], "fp16")
    request = KernelRequest(piece, 16)
    layer, point, wide, depthwise = (
        convolution_kernel(geometry, "fp16") for geometry in (LAYER, POINTWISE, WIDE, DEPTHWISE)
    )
    logs = [
        ((depthwise, 32), 2.0),
        ((depthwise, 16), 3.0),
        ((point, 32), 4.0),
        ((wide, 16), 5.0),
        ((layer, 32), 6.0),
        ((layer, 16), 7.0),
        ((piece, 32), 8.0),
        ((piece, 16), 9.0),
    ]
    for (kernel, channels), times in logs:
        log(tmp_path, KernelRequest(kernel, channels), times)
        assert ratio(tmp_path, request) == pytest.approx(times, rel=0.02)


def test_neither_the_order_nor_the_company_of_requests_matters(tmp_path):
    for index, times in enumerate((2.0, 3.0, 4.0)):
        log(tmp_path, REQUESTS[5 * index], times)
    together = costs(tmp_path)
    assert [costs(tmp_path, [request])[0] for request in REQUESTS] == together
    assert costs(tmp_path, REQUESTS[::-1]) == together[::-1]


def test_runs_no_longer_than_a_launch_show_nothing(tmp_path):
    log(tmp_path, REQUESTS[0], 0.0)
    assert costs(tmp_path, REQUESTS[1:]) == [model_cost(request) for request in REQUESTS[1:]]


def test_power_of_those_alike_over_the_time(tmp_path):
    log(tmp_path, REQUESTS[0], 2.0, watts=20.0)
    log(tmp_path, REQUESTS[-1], 2.0)
    (cost,) = costs(tmp_path, REQUESTS[1:2])
    energies = cost.energies_pj
    assert energies["gpu_dram"] == pytest.approx(20.0 * cost.total_ns * 1e3)
    assert energies["gpu_leakage"] == pytest.approx(10.0 * cost.total_ns * 1e3)


@pytest.fixture(scope="module")
def toy_requests(tmp_path_factory):
    rows = pimflow.trace("toy", tmp_path_factory.mktemp("traces") / "out", "accel-sim").kernels
    return [KernelRequest(parse_kernel_name(row.kernel, "fp16"), row.gpu_channels) for row in rows]


@pytest.mark.parametrize(
    "kept",
    [
        slice(0, None, 2),
        pytest.param(slice(1, None, 2), marks=pytest.mark.long),
        pytest.param(slice(0, 1), marks=pytest.mark.long),
        slice(0, None),
    ],
)
def test_a_search_finds_the_same_plan_with_some_logs_as_with_all(kept, toy_requests, tmp_path):
    """A simulator four times slower than the model: with half of the logs, what had none was preferred."""
    plans = []
    for name, chosen in (("all", toy_requests), ("some", toy_requests[kept])):
        (tmp_path / name).mkdir()
        for request in chosen:
            log(tmp_path / name, request, 4.0)
        profiling = Profiling(gpu=AccelSimLogs(str(tmp_path / name)))
        plans.append(pimflow.search("toy", system(), profiling=profiling))
    all_logs, some = plans
    assert some.gpu_only.latency_ns == pytest.approx(all_logs.gpu_only.latency_ns, rel=0.005)
    assert some.evaluation.latency_ns == pytest.approx(all_logs.evaluation.latency_ns, rel=0.005)
    assert [c.mode for c in some.plan.choices] == [c.mode for c in all_logs.plan.choices]
