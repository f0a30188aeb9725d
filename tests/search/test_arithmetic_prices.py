"""Is no arithmetic free? What a kernel computes takes at least its time at the GPU's peak, and its energy."""

import dataclasses
import re

import numpy as np
import onnx
import pytest
from drawn_networks import Graph
from length import long_but
from onnx import TensorProto, helper
from onnx_models import onnx_model

from pimflow import zoo
from pimflow.core.kernel import Kernel, Product
from pimflow.core.region import Region
from pimflow.core.region_graph import RegionGraph
from pimflow.frontend import onnx_graph
from pimflow.hardware import system
from pimflow.hardware.gpu import GpuSpec
from pimflow.pim_backend.programs.capability import unsupported_reason
from pimflow.placement import search
from pimflow.relay_passes.regions.extract_regions import extract_regions
from pimflow.simulators.gpu.model import kernel_cost, kernel_energy_pj
from pimflow.simulators.gpu.region_kernels import gpu_kernel, gpu_kernels

DTYPE = "fp16"
SYSTEM = system()
GPUS = ("rtx-2060-pim32", "rtx-2060", "h200")
ROUNDING = 1 + 1e-6
RANDOM = np.random.default_rng(0)


def network(nodes, inputs, weights, output="y") -> onnx.ModelProto:
    """Nodes over `inputs`, by name their shapes, with `weights` of these shapes."""
    stored = {name: RANDOM.standard_normal(dims).astype(np.float32) for name, dims in weights.items()}
    return onnx_model(nodes, inputs, {output: None}, stored)


def layer(kind: str, x: tuple[int, ...], w: tuple[int, ...], **attributes) -> onnx.ModelProto:
    return network([helper.make_node(kind, ["x", "w"], ["y"], "layer", **attributes)], {"x": x}, {"w": w})


def product(*dims: tuple[int, ...]) -> onnx.ModelProto:
    """The product of two inputs, and what follows it."""
    first, second = dims
    nodes = [helper.make_node("MatMul", ["a", "b"], ["p"], "layer"), helper.make_node("Relu", ["p"], ["y"])]
    return network(nodes, {"a": first, "b": second}, {})


def regions(model: onnx.ModelProto) -> RegionGraph:
    return extract_regions(onnx_graph.from_onnx(model), "net")


def layer_of(model: onnx.ModelProto) -> Region:
    """The region with the most multiplications."""
    return max(regions(model).regions, key=lambda region: region.macs)


# The same work over one, two and three axes.
SAME_WORK = {
    "wide": ((64, 1024), (128, 64, 9), {"pads": [4, 4]}),
    "strided": ((64, 512), (128, 64, 3), {"strides": [2], "pads": [1, 1]}),
    "pointwise": ((256, 2048), (256, 256, 1), {}),
    "grouped": ((64, 256), (128, 16, 3), {"group": 4}),
    "depthwise": ((64, 4096), (64, 1, 5), {"group": 64}),
    "image": ((3, 4096), (64, 3, 7), {"pads": [3, 3]}),
}


def along_axes(axes: int, x, w, attributes: dict) -> tuple[tuple, tuple, dict]:
    """A layer over one axis as one over several, of which all but the last have one element."""
    ones = (1,) * (axes - 1)
    new_attributes = dict(attributes)
    if "pads" in attributes:
        before, after = attributes["pads"]
        new_attributes["pads"] = [*([0] * (axes - 1)), before, *([0] * (axes - 1)), after]
    if "strides" in attributes:
        new_attributes["strides"] = [*ones, *attributes["strides"]]
    return (1, x[0], *ones, x[1]), (*w[:2], *ones, w[2]), new_attributes


@pytest.mark.long
@pytest.mark.parametrize("work", SAME_WORK)
def test_the_same_work_at_the_same_price_over_one_two_and_three_axes(work):
    x, w, attributes = SAME_WORK[work]
    prices, energies, macs = [], [], set()
    for axes in (1, 2, 3):
        dims, filters, layer_attributes = along_axes(axes, x, w, attributes)
        region = layer_of(layer("Conv", dims, filters, **layer_attributes))
        macs.add(region.macs)
        for name in GPUS:
            gpu = GpuSpec.load(name)
            kernel = gpu_kernel(region, DTYPE)
            cost = kernel_cost(kernel, gpu, dtype=DTYPE)
            prices.append((name, cost.execution_ns))
            energies.append((name, kernel_energy_pj(kernel, cost, gpu, DTYPE)["gpu_arithmetic"]))
    assert len(macs) == 1
    for figures in (prices, energies):
        for name in GPUS:
            same = [figure for gpu, figure in figures if gpu == name]
            assert max(same) <= 1.1 * min(same), (name, same)


@pytest.mark.parametrize(("taps", "stride"), [(2, 2), (4, 2), (3, 1), (16, 8)])
def test_a_transposed_convolution_over_one_two_and_three_axes(taps, stride):
    """Over one and two it is a convolution with a column of channels for each pixel of the stride."""
    flat = layer_of(layer("ConvTranspose", (1, 64, 512), (64, 64, taps), strides=[stride]))
    square = layer_of(layer("ConvTranspose", (1, 64, 1, 512), (64, 64, 1, taps), strides=[1, stride]))
    deep = layer_of(layer("ConvTranspose", (1, 64, 1, 1, 512), (64, 64, 1, 1, taps), strides=[1, 1, stride]))
    assert flat.geometry == square.geometry
    assert flat.macs == square.macs
    assert deep.macs == 512 * 64 * 64 * taps
    for name in GPUS:
        gpu = GpuSpec.load(name)
        kernels = [gpu_kernel(region, DTYPE) for region in (flat, square, deep)]
        costs = [kernel_cost(kernel, gpu, dtype=DTYPE).execution_ns for kernel in kernels]
        assert max(costs) <= 1.1 * min(costs), (name, costs)


def test_a_batch_of_products_of_two_inputs():
    """8 products of 1024^3 took 131 us on a part whose tensor cores need 800."""
    region = layer_of(product((8, 1024, 1024), (8, 1024, 1024)))
    kernel = gpu_kernel(region, DTYPE)
    sizes = {"many": 8, "m": 1024, "n": 1024, "k": 1024}
    assert region.kernel.product == Product(**sizes)
    expected = Kernel(
        kind="gemm", m=1024, n=1024, k=1024, groups=8, macs=8 * 1024**3,
        input_bytes=8 * 2**21, weight_bytes=8 * 2**21, output_bytes=8 * 2**21,
    )  # fmt: skip
    assert kernel == expected
    assert kernel_cost(kernel, SYSTEM.gpu, dtype=DTYPE).execution_ns > 800e3
    assert "product of computed tensors" in unsupported_reason(region)


def test_products_of_integers_stay_on_the_gpu():
    """The largest one says why a quantised network has no layer on PIM."""
    node = helper.make_node("MatMulInteger", ["x", "w"], ["y"], "layer")
    weights = {"w": RANDOM.integers(0, 9, (32, 16)).astype(np.int8)}
    net = onnx_model([node], {"x": (TensorProto.INT8, (1, 32))}, {"y": (TensorProto.INT32, (1, 16))}, weights)
    assert "a product of 8-bit integers" in unsupported_reason(layer_of(net))


def test_constant_operands_are_weights():
    region = layer_of(layer("Conv", (1, 8, 4, 8, 8), (16, 8, 3, 3, 3)))
    kernel = gpu_kernel(region, DTYPE)
    assert (kernel.input_bytes, kernel.weight_bytes) == (2 * 8 * 4 * 64, 2 * 16 * 8 * 27)
    assert "two axes" in unsupported_reason(region)


def pool_region(taps: int) -> Region:
    attributes = {"kernel_shape": [taps, taps], "pads": [taps // 2] * 4, "strides": [1, 1]}
    node = helper.make_node("AveragePool", ["x"], ["y"], "pool", **attributes)
    (region,) = (r for r in regions(network([node], {"x": (1, 64, 64, 64)}, {})).regions if not r.is_view)
    return region


def test_operations_that_take_longer_than_their_bytes():
    """A window of 31 x 31 is 961 additions for each pixel; one of 3 x 3 costs what it moves."""
    gpu = SYSTEM.gpu
    wide, narrow = (gpu_kernel(pool_region(taps), DTYPE) for taps in (31, 3))
    least_ns = 961 * 64**3 / (gpu.sms * gpu.simd_fma_per_sm_cycle[DTYPE] * gpu.clock_mhz / 1e3)
    assert kernel_cost(wide, gpu, dtype=DTYPE).execution_ns >= least_ns
    stream = dataclasses.replace(narrow, operations=0, multiplications=0)
    assert kernel_cost(narrow, gpu, dtype=DTYPE) == kernel_cost(stream, gpu, dtype=DTYPE)


def check_peaks(kernel: Kernel, cost, gpu: GpuSpec) -> None:
    """No kernel computes or moves more than the part can while it runs."""
    cycles = cost.execution_ns * gpu.clock_mhz / 1e3
    lanes = gpu.simd_fma_per_sm_cycle[DTYPE]
    rate = lanes if kernel.kind in ("depthwise", "stream") else gpu.fma_per_sm_cycle[DTYPE]
    assert kernel.macs <= ROUNDING * gpu.sms * rate * cycles, kernel
    assert kernel.operations <= ROUNDING * gpu.sms * lanes * cycles, kernel
    dram = gpu.memory_channels * gpu.channel_bytes_per_ns * cost.execution_ns
    assert cost.dram_bytes <= ROUNDING * dram, kernel


def transformer() -> onnx.ModelProto:
    """Attention that is not recognised, since its scores are divided behind a sigmoid, with a layer norm."""
    graph, scores, values = Graph((2, 64, 64)), (2, 4, 64, 64), (2, 4, 64, 16)
    queries, keys, mixed = (
        graph.transpose(graph.reshape(graph.product("x0", 64), 2, 64, 4, 16), *axes)
        for axes in ((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3))
    )
    gates = graph.add("Sigmoid", [graph.add("MatMul", [queries, keys], scores)], scores)
    graph.add("Softmax", [graph.add("MatMul", [gates, mixed], values)], values, axis=-1)
    return graph.model()


def softmax_attention(windows: int = 1, tokens: int = 64, width: int = 64, heads: int = 4) -> onnx.ModelProto:
    """Attention of ViT, or in windows with a bias of places and a mask as Swin has it, with an MLP behind."""
    graph = Graph((windows, tokens, width))
    places = graph.weight(windows, heads, tokens, tokens) if windows > 1 else ""
    inner = graph.product(graph.attention("x0", heads, places), 4 * width)
    graph.product(graph.add("Sigmoid", [inner], graph.shapes[inner]), width)
    return graph.model()


def reduction(kind: str, axes: list[int]) -> onnx.ModelProto:
    """A reduction over long axes."""
    node = helper.make_node(kind, ["x"], ["y"], "layer", axes=axes, keepdims=1)
    return network([node], {"x": (4, 16, 128, 128)}, {})


def deformable_convolution() -> onnx.ModelProto:
    """A deformable convolution as it is spelled out: pixels at computed places, and a product."""
    sample = helper.make_node("GridSample", ["x", "grid"], ["s"], "sample")
    nodes = [sample, helper.make_node("Conv", ["s", "w"], ["y"], "layer", pads=[1, 1, 1, 1])]
    return network(nodes, {"x": (1, 32, 28, 28), "grid": (1, 28, 28, 2)}, {"w": (64, 32, 3, 3)})


def recurrent(kind: str, gates: int) -> onnx.ModelProto:
    node = helper.make_node(kind, ["x", "w", "r"], ["y"], "layer", hidden_size=32)
    return network([node], {"x": (3, 1, 16)}, {"w": (1, gates * 32, 16), "r": (1, gates * 32, 32)})


NETWORKS = {
    "vit": softmax_attention,
    "swin": lambda: softmax_attention(windows=4, tokens=49, width=96, heads=3),
    "grouped1d": lambda: layer("Conv", (1, 64, 512), (128, 16, 5), group=4),
    "grouped3d": lambda: layer("Conv", (1, 64, 4, 14, 14), (64, 16, 3, 3, 3), group=4, pads=[1] * 6),
    "depthwise3d": lambda: layer("Conv", (1, 64, 4, 14, 14), (64, 1, 3, 3, 3), group=64, pads=[1] * 6),
    "dilated1d": lambda: layer("Conv", (1, 64, 512), (64, 64, 3), dilations=[8]),
    "transposed1d": lambda: layer("ConvTranspose", (1, 64, 256), (64, 32, 8), strides=[4]),
    "deformable": deformable_convolution,
    "sum": lambda: reduction("ReduceMean", [2, 3]),
    "norm": lambda: reduction("ReduceL2", [1, 2, 3]),
    "gru": lambda: recurrent("GRU", 3),
    "lstm": lambda: recurrent("LSTM", 4),
    "conv1d": lambda: layer("Conv", (1, 256, 2048), (256, 256, 9)),
    "conv3d": lambda: layer("Conv", (1, 64, 8, 14, 14), (64, 64, 3, 3, 3)),
    "transposed3d": lambda: layer("ConvTranspose", (1, 32, 4, 8, 8), (32, 32, 2, 2, 2), strides=[2] * 3),
    "products": lambda: product((8, 256, 256), (8, 256, 256)),
    "transformer": transformer,
    **{name: lambda name=name: zoo.load(name) for name in zoo.names()},
}


# Multiplications, by hand.
MACS = {
    "conv1d": 2040 * 256 * 256 * 9,
    "conv3d": 6 * 12 * 12 * 64 * 64 * 27,
    "transposed3d": 4 * 8 * 8 * 32 * 32 * 8,
    "products": 8 * 256**3,
    "transformer": 2 * (3 * 64 * 64 * 64 + 2 * 64 * 64 * 64),
    "vit": 4 * 64**3 + 2 * 64**3 + 8 * 64**3,
    "swin": 4 * (4 * 49 * 96**2 + 2 * 49 * 49 * 96 + 8 * 49 * 96**2),
    "grouped1d": 508 * 128 * 16 * 5,
    "grouped3d": 4 * 14 * 14 * 64 * 16 * 27,
    "depthwise3d": 4 * 14 * 14 * 64 * 27,
    "dilated1d": 496 * 64 * 64 * 3,
    "transposed1d": 257 * 64 * (32 * 4) * 2,  # each pixel gives 4, and has a neighbour in half of the window
    "deformable": 28 * 28 * 32 * 64 * 9,
    # The state begins as zeros, so the first step has no product with it, but for a GRU's new state.
    "gru": 3 * 3 * 32 * 16 + 2 * 3 * 32 * 32 + 32 * 32,
    "lstm": 3 * 4 * 32 * 16 + 2 * 4 * 32 * 32,
}


@pytest.mark.long
@pytest.mark.parametrize("name", MACS)
def test_multiplications_are_those_of_the_layers(name):
    assert sum(region.macs for region in regions(NETWORKS[name]()).regions) == MACS[name]


# One size of each network, since the sizes have the same kinds of layers.
SIZES = re.compile(
    r"densenet-169|efficientnet-b[1-9]|mnasnet-(1\.3|2\.0)|mobilenet-v2-.*|resnet-34|vgg-1[369]"
)
KINDS = [name for name in NETWORKS if not SIZES.fullmatch(name)]


@pytest.mark.long
@pytest.mark.parametrize("name", long_but([*(set(NETWORKS) - set(zoo.names())), "toy"], KINDS))
def test_no_kernel_is_above_the_peak(name):
    graph = regions(NETWORKS[name]())
    for region in graph.regions:
        for gpu in map(GpuSpec.load, GPUS):
            kernels = gpu_kernels(region, DTYPE)
            for kernel in kernels:
                check_peaks(kernel, kernel_cost(kernel, gpu, dtype=DTYPE), gpu)
            multiplied = sum(kernel.macs for kernel in kernels if kernel.kind != "stream")
            assert multiplied == (0 if region.is_view else region.macs)


@pytest.mark.parametrize("name", ["conv3d", "transformer", "toy"])
def test_no_candidate_is_above_the_peak(name):
    """Multiplications as their energy says, and bytes, of all tasks of the GPU in all candidates."""
    table = search(regions(NETWORKS[name]()), SYSTEM).table
    gpu = SYSTEM.gpu
    candidates = [candidate for options in table.candidates.values() for candidate in options]
    tasks = [task for c in candidates for task in c.tasks if task.resource == "gpu" and task.launched]
    assert tasks
    for task in tasks:
        macs = task.energies_pj["gpu_arithmetic"] / gpu.energy[f"fma_{DTYPE}_pj"]
        max_macs = gpu.sms * gpu.fma_per_sm_cycle[DTYPE] * gpu.clock_mhz / 1e3 * task.execution_ns
        assert macs <= ROUNDING * max_macs, task
        most_bytes = gpu.memory_channels * gpu.channel_bytes_per_ns * task.execution_ns
        assert task.moved_bytes <= ROUNDING * most_bytes
