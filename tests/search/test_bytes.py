"""Is every byte that a kernel reads one that a kernel was charged for writing?

The oracle knows no kernels: it adds up the tensors that pass between regions.
"""

import math

import pytest
from length import long_but

from pimflow import frontend
from pimflow.commands.shared import prepare
from pimflow.hardware import system
from pimflow.placement import CandidateGenerator
from pimflow.simulators.gpu.region_kernels import gpu_kernel

SYSTEM = system()
NETWORKS = long_but(["toy"], ["toy", "mobilenet-v2", "efficientnet-b0"])


@pytest.fixture(scope="module", params=NETWORKS)
def graph(request):
    return prepare.regions(frontend.load(request.param))


def tensors(graph, region) -> set[tuple[int, ...]]:
    """Shapes of what `region` leaves to others."""
    read = {c.input_shapes[i] for c in graph.regions for i, n in enumerate(c.inputs) if n == region.name}
    return read | ({region.output_shape} if region.name in graph.outputs else set())


@pytest.mark.parametrize(("dtype", "size_bytes"), [("fp16", 2), ("fp32", 4)])
def test_a_kernel_writes_what_others_read(graph, dtype, size_bytes):
    """A squeeze and excite scales a map, which is written; what is read twice is written beside a result."""
    for region in graph.regions:
        elements = sum(math.prod(shape) for shape in tensors(graph, region))
        assert gpu_kernel(region, dtype).output_bytes == elements * size_bytes, region.name


def test_liveness_has_room_for_what_others_read(graph):
    sizes = {life.name: life.size_bytes for life in graph.liveness("fp16").lifetimes}
    for region in graph.regions:
        assert sizes[region.name] == 2 * sum(math.prod(shape) for shape in tensors(graph, region))


def test_what_pim_leaves_undone_moves_each_tensor_once(graph):
    """By a kernel of its own: PIM's result and what is added in, the finished result out. Inside a
    consumer's kernel, which reads the finished result anyway: as much as that reads more, each time it does.
    """
    generator = CandidateGenerator(graph, SYSTEM)
    gpu, count = SYSTEM.gpu, 0
    for region in graph.regions:
        if generator.unsupported_reason(region) or not region.epilogue.operators:
            continue
        returned = 2 * region.geometry.pixels * region.geometry.oc
        added = 2 * sum(map(math.prod, region.input_shapes[region.operands :]))
        finished = 2 * region.output_elements
        epilogue_task = generator.epilogue_cost(region).task
        fused_task = generator.fused_epilogue_cost(region).task
        moved_bytes = epilogue_task.energies_pj["gpu_l2"] / gpu.energy["l2_pj_per_byte"]
        assert moved_bytes == pytest.approx(returned + added + finished), region.name
        needed = len(graph.consumers[region.name]) + (region.name in graph.outputs)
        stored = finished if needed > 1 else 0
        inside = fused_task.energies_pj["gpu_l2"] / gpu.energy["l2_pj_per_byte"] if fused_task else 0
        reader = graph.region(graph.consumers[region.name][0]) if generator.defers_epilogue(region) else None
        times = 1 + generator.task_builder.l2_rereads(reader) if reader else 1
        assert inside == pytest.approx((returned + added - finished) * times + stored), region.name
        count += 1
    assert count > 3
