"""U-Nets of the zoo, written by hand."""

from __future__ import annotations

import onnx
from zoo_graphs import ZooGraphBuilder

WIDTHS = (64, 128, 256, 512, 1024)


def unet() -> onnx.ModelProto:
    """U-Net at 256 x 256 for two classes: arXiv 1505.04597, figure 1.

    As the implementation most used for the Carvana images has it (github.com/milesial/Pytorch-UNet):
    three colours, "same" padding so that no map is cropped, a batch norm behind every 3x3 convolution.
    """
    graph = ZooGraphBuilder({"input": (1, 3, 256, 256)})

    def double(name: str, source: str, width: int, channels: int) -> str:
        """Two convolutions with batch normalisation and ReLU."""
        for part, inputs in (("first", channels), ("second", width)):
            normed = graph.conv_norm(f"{name}.{part}", source, (width, inputs), 3)
            source = graph.add("Relu", f"{name}.{part}.relu", [normed])
        return source

    hidden, channels, skips = "input", 3, []
    for level, width in enumerate(WIDTHS, 1):
        if level > 1:
            hidden = graph.add("MaxPool", f"down{level}.pool", [hidden], kernel_shape=[2, 2], strides=[2, 2])
        hidden, channels = double(f"down{level}", hidden, width, channels), width
        skips.append(hidden)
    for level in range(len(WIDTHS) - 1, 0, -1):
        width = WIDTHS[level - 1]
        hidden = graph.conv_transpose(f"up{level}.transposed", hidden, (width, channels), 2)
        hidden = graph.add("Concat", f"up{level}.concat", [skips[level - 1], hidden], axis=1)
        hidden, channels = double(f"up{level}", hidden, width, channels), width
    hidden = graph.conv("head", hidden, (2, channels), 1)
    return graph.model("unet", {"output": (hidden, (1, 2, 256, 256))})


def glyphs_unet() -> onnx.ModelProto:
    """A small U-Net, which `train_small_network.py` trains to tell signs of `zoo.glyphs` from the rest."""
    graph = ZooGraphBuilder({"input": (1, 3, 24, 24)})

    def double(name: str, source: str, width: int, channels: int) -> str:
        """Two convolutions with ReLU."""
        for part, inputs in (("first", channels), ("second", width)):
            hidden = graph.conv(f"{name}.{part}", source, (width, inputs), 3)
            source = graph.add("Relu", f"{name}.{part}.relu", [hidden])
        return source

    first = double("down1", "input", 16, 3)
    hidden = graph.add("MaxPool", "down2.pool", [first], kernel_shape=[2, 2], strides=[2, 2])
    second = double("down2", hidden, 32, 16)
    hidden = graph.add("MaxPool", "down3.pool", [second], kernel_shape=[2, 2], strides=[2, 2])
    hidden = double("down3", hidden, 64, 32)
    for name, skip, width in (("up2", second, 32), ("up1", first, 16)):
        hidden = graph.conv_transpose(f"{name}.transposed", hidden, (width, 2 * width), 2)
        hidden = graph.add("Concat", f"{name}.concat", [skip, hidden], axis=1)
        hidden = double(name, hidden, width, 2 * width)
    return graph.model("glyphs-unet", {"output": (graph.conv("head", hidden, (2, 16), 1), (1, 2, 24, 24))})
