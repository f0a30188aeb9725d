"""ResNet-18 and VGG-19 of the zoo, written by hand after their papers."""

from __future__ import annotations

import onnx
from zoo_graphs import GraphBuilder


def resnet18() -> onnx.ModelProto:
    """ResNet-18 at 224 x 224: arXiv 1512.03385, table 1, with projections where channels grow (option B)."""
    graph = GraphBuilder({"input": (1, 3, 224, 224)})
    hidden = graph.add("Relu", "stem.relu", [graph.conv_norm("stem", "input", (64, 3), 7, stride=2)])
    window = dict(kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    hidden, channels = graph.add("MaxPool", "stem.pool", [hidden], **window), 64
    for stage, width in enumerate((64, 128, 256, 512), 2):
        for block in (1, 2):
            name, shortcut = f"conv{stage}.{block}", hidden
            stride = 2 if width > channels else 1
            inner = graph.conv_norm(f"{name}.first", hidden, (width, channels), 3, stride=stride)
            inner = graph.add("Relu", f"{name}.first.relu", [inner])
            inner = graph.conv_norm(f"{name}.second", inner, (width, width), 3)
            if width > channels:
                shortcut = graph.conv_norm(f"{name}.shortcut", hidden, (width, channels), 1, stride=stride)
            hidden = graph.add("Relu", f"{name}.relu", [graph.add("Add", f"{name}.add", [inner, shortcut])])
            channels = width
    hidden = graph.add("GlobalAveragePool", "pool", [hidden])
    hidden = graph.add("Flatten", "flatten", [hidden], axis=1)
    hidden = graph.add("Gemm", "fc", [hidden], (1000, 512), (1000,), transB=1)
    return graph.model("resnet-18", {"output": (hidden, (1, 1000))})


def vgg19() -> onnx.ModelProto:
    """VGG-19 at 224 x 224: arXiv 1409.1556, table 1, configuration E; no batch norms."""
    graph = GraphBuilder({"input": (1, 3, 224, 224)})
    hidden, channels = "input", 3
    for stage, (width, layers) in enumerate(((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)), 1):
        for index in range(1, layers + 1):
            hidden = graph.conv(f"conv{stage}.{index}", hidden, (width, channels), 3)
            hidden = graph.add("Relu", f"relu{stage}.{index}", [hidden])
            channels = width
        hidden = graph.add("MaxPool", f"pool{stage}", [hidden], kernel_shape=[2, 2], strides=[2, 2])
    hidden = graph.add("Flatten", "flatten", [hidden], axis=1)
    for index, (outputs, inputs) in enumerate(((4096, 512 * 7 * 7), (4096, 4096)), 1):
        hidden = graph.add("Gemm", f"fc{index}", [hidden], (outputs, inputs), (outputs,), transB=1)
        hidden = graph.add("Relu", f"relu_fc{index}", [hidden])
    hidden = graph.add("Gemm", "fc3", [hidden], (1000, 4096), (1000,), transB=1)
    return graph.model("vgg-19", {"output": (hidden, (1, 1000))})
