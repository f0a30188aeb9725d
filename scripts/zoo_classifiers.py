"""Classifiers of the zoo written by hand, after their papers."""

from __future__ import annotations

import itertools

import onnx
from zoo_graphs import ZooGraphBuilder

# Channels and number of convolutions before each pool: arXiv 1409.1556, table 1, configurations A, B and E.
VGG = {
    "vgg-11": ((64, 1), (128, 1), (256, 2), (512, 2), (512, 2)),
    "vgg-13": ((64, 2), (128, 2), (256, 2), (512, 2), (512, 2)),
    "vgg-19": ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)),
}


def _dense(graph: ZooGraphBuilder, hidden: str, widths: tuple[int, ...], classes: int = 1000) -> str:
    """Two hidden layers and the scores; `widths` begins with the size of the flattened map."""
    hidden = graph.add("Flatten", "flatten", [hidden], axis=1)
    for index, (inputs, outputs) in enumerate(itertools.pairwise(widths), 1):
        hidden = graph.add("Gemm", f"fc{index}", [hidden], (outputs, inputs), (outputs,), transB=1)
        hidden = graph.add("Relu", f"relu_fc{index}", [hidden])
    name = f"fc{len(widths)}" if len(widths) > 1 else "fc"
    return graph.add("Gemm", name, [hidden], (classes, widths[-1]), (classes,), transB=1)


def alexnet() -> onnx.ModelProto:
    """AlexNet at 224 x 224 as one tower: arXiv 1404.5997, section 5, as torchvision has it."""
    graph = ZooGraphBuilder({"input": (1, 3, 224, 224)})
    layers = [(64, 11, 4, 2), (192, 5, 1, 2), (384, 3, 1, 1), (256, 3, 1, 1), (256, 3, 1, 1)]
    hidden, channels = "input", 3
    for index, (width, kernel, stride, padding) in enumerate(layers, 1):
        window = dict(stride=stride, padding=padding)
        hidden = graph.conv(f"conv{index}", hidden, (width, channels), kernel, **window)
        hidden, channels = graph.add("Relu", f"relu{index}", [hidden]), width
        if index in (1, 2, 5):
            hidden = graph.add("MaxPool", f"pool{index}", [hidden], kernel_shape=[3, 3], strides=[2, 2])
    hidden = _dense(graph, hidden, (256 * 6 * 6, 4096, 4096))
    return graph.model("alexnet", {"output": (hidden, (1, 1000))})


def glyphs() -> onnx.ModelProto:
    """A small network with a residual, which `train_small_network.py` trains on pictures of `zoo.glyphs`."""
    graph = ZooGraphBuilder({"input": (1, 3, 24, 24)})

    def conv(name: str, source: str, channels: tuple[int, int]) -> str:
        return graph.add("Relu", f"{name}.relu", [graph.conv(name, source, channels, 3)])

    hidden, channels = "input", 3
    for index, (width, pooled) in enumerate(((16, 1), (32, 0), (48, 1), (64, 0)), 1):
        hidden, channels = conv(f"conv{index}", hidden, (width, channels)), width
        if pooled:
            hidden = graph.add("MaxPool", f"pool{index}", [hidden], kernel_shape=[2, 2], strides=[2, 2])
    inner = graph.conv("conv6", conv("conv5", hidden, (48, 64)), (64, 48), 3)
    hidden = graph.add("Relu", "relu6", [graph.add("Add", "add6", [inner, hidden])])
    hidden = graph.add("MaxPool", "pool6", [hidden], kernel_shape=[2, 2], strides=[2, 2])
    hidden = conv("conv7", hidden, (64, 64))
    hidden = _dense(graph, graph.add("GlobalAveragePool", "pool", [hidden]), (64,), 16)
    return graph.model("glyphs", {"output": (hidden, (1, 16))})


def glyphs_densenet() -> onnx.ModelProto:
    """Two small dense blocks, which `train_small_network.py` trains on pictures of `zoo.glyphs`."""
    graph = ZooGraphBuilder({"input": (1, 3, 24, 24)})

    def conv(name: str, source: str, channels: tuple[int, int], kernel: int = 3) -> str:
        return graph.add("Relu", f"{name}.relu", [graph.conv(name, source, channels, kernel)])

    def halve(name: str, source: str) -> str:
        return graph.add("MaxPool", name, [source], kernel_shape=[2, 2], strides=[2, 2])

    hidden, channels = halve("stem.pool", conv("stem", "input", (24, 3))), 24
    for block, growth in ((1, 16), (2, 24)):
        for layer in range(1, 5):
            name = f"dense{block}.{layer}"
            grown = conv(name, hidden, (growth, channels))
            hidden, channels = (
                graph.add("Concat", f"{name}.concat", [hidden, grown], axis=1),
                channels + growth,
            )
        if block == 1:
            hidden = halve("transition.pool", conv("transition", hidden, (channels // 2, channels), 1))
            channels //= 2
    hidden = _dense(graph, graph.add("GlobalAveragePool", "pool", [hidden]), (channels,), 16)
    return graph.model("glyphs-densenet", {"output": (hidden, (1, 16))})


def _resnet(name: str, blocks: tuple[int, ...]) -> onnx.ModelProto:
    """At 224 x 224: arXiv 1512.03385, table 1, with projections where channels grow (option B)."""
    graph = ZooGraphBuilder({"input": (1, 3, 224, 224)})
    hidden = graph.add("Relu", "stem.relu", [graph.conv_norm("stem", "input", (64, 3), 7, stride=2)])
    window = dict(kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    hidden, channels = graph.add("MaxPool", "stem.pool", [hidden], **window), 64
    for stage, (width, count) in enumerate(zip((64, 128, 256, 512), blocks), 2):
        for block in range(1, count + 1):
            prefix, shortcut = f"conv{stage}.{block}", hidden
            stride = 2 if width > channels else 1
            inner = graph.conv_norm(f"{prefix}.first", hidden, (width, channels), 3, stride=stride)
            inner = graph.add("Relu", f"{prefix}.first.relu", [inner])
            inner = graph.conv_norm(f"{prefix}.second", inner, (width, width), 3)
            if width > channels:
                shortcut = graph.conv_norm(f"{prefix}.shortcut", hidden, (width, channels), 1, stride=stride)
            added = graph.add("Add", f"{prefix}.add", [inner, shortcut])
            hidden, channels = graph.add("Relu", f"{prefix}.relu", [added]), width
    hidden = _dense(graph, graph.add("GlobalAveragePool", "pool", [hidden]), (512,))
    return graph.model(name, {"output": (hidden, (1, 1000))})


def resnet18() -> onnx.ModelProto:
    """ResNet-18."""
    return _resnet("resnet-18", (2, 2, 2, 2))


def resnet34() -> onnx.ModelProto:
    """ResNet-34."""
    return _resnet("resnet-34", (3, 4, 6, 3))


def _vgg(name: str) -> onnx.ModelProto:
    """At 224 x 224, without batch norms."""
    graph = ZooGraphBuilder({"input": (1, 3, 224, 224)})
    hidden, channels = "input", 3
    for stage, (width, layers) in enumerate(VGG[name], 1):
        for index in range(1, layers + 1):
            hidden = graph.conv(f"conv{stage}.{index}", hidden, (width, channels), 3)
            hidden = graph.add("Relu", f"relu{stage}.{index}", [hidden])
            channels = width
        hidden = graph.add("MaxPool", f"pool{stage}", [hidden], kernel_shape=[2, 2], strides=[2, 2])
    hidden = _dense(graph, hidden, (512 * 7 * 7, 4096, 4096))
    return graph.model(name, {"output": (hidden, (1, 1000))})


def vgg11() -> onnx.ModelProto:
    """VGG-11, configuration A."""
    return _vgg("vgg-11")


def vgg13() -> onnx.ModelProto:
    """VGG-13, configuration B."""
    return _vgg("vgg-13")


def vgg19() -> onnx.ModelProto:
    """VGG-19, configuration E."""
    return _vgg("vgg-19")


def _densenet(name: str, blocks: tuple[int, ...], growth: int = 32) -> onnx.ModelProto:
    """DenseNet-BC at 224 x 224: arXiv 1608.06993, table 1; a norm and a rectifier before each convolution."""
    graph = ZooGraphBuilder({"input": (1, 3, 224, 224)})

    def norm_relu(prefix: str, source: str, channels: int) -> str:
        return graph.add("Relu", f"{prefix}.relu", [graph.norm(f"{prefix}.norm", source, channels)])

    def conv(prefix: str, source: str, channels: tuple[int, int], kernel: int) -> str:
        return graph.conv(prefix, source, channels, kernel, bias=False)

    channels = 2 * growth
    stem = graph.conv_norm("stem", "input", (channels, 3), 7, stride=2)
    window = dict(kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    hidden = graph.add("MaxPool", "stem.pool", [graph.add("Relu", "stem.relu", [stem])], **window)
    for number, layers in enumerate(blocks, 1):
        features = [hidden]
        for index in range(1, layers + 1):
            prefix, width = f"block{number}.{index}", channels + (index - 1) * growth
            inner = hidden
            if index > 1:
                inner = graph.add("Concat", f"{prefix}.concat", list(features), axis=1)
            inner = norm_relu(f"{prefix}.first", inner, width)
            inner = conv(f"{prefix}.first.conv", inner, (4 * growth, width), 1)
            inner = norm_relu(f"{prefix}.second", inner, 4 * growth)
            features.append(conv(f"{prefix}.second.conv", inner, (growth, 4 * growth), 3))
        hidden = graph.add("Concat", f"block{number}.concat", features, axis=1)
        channels += layers * growth
        if number < len(blocks):
            prefix = f"transition{number}"
            hidden = norm_relu(prefix, hidden, channels)
            hidden = conv(f"{prefix}.conv", hidden, (channels // 2, channels), 1)
            window = dict(kernel_shape=[2, 2], strides=[2, 2])
            hidden, channels = graph.add("AveragePool", f"{prefix}.pool", [hidden], **window), channels // 2
    hidden = graph.add("GlobalAveragePool", "pool", [norm_relu("head", hidden, channels)])
    return graph.model(name, {"output": (_dense(graph, hidden, (channels,)), (1, 1000))})


def densenet121() -> onnx.ModelProto:
    """DenseNet-121."""
    return _densenet("densenet-121", (6, 12, 24, 16))


def densenet169() -> onnx.ModelProto:
    """DenseNet-169."""
    return _densenet("densenet-169", (6, 12, 32, 32))
