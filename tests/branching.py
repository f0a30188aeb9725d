"""Networks whose layers come in an order that takes more memory than it has to."""

import random

import numpy as np
import onnx
from onnx import helper
from onnx_models import onnx_model


def convolution(name: str, source: str, channels: tuple[int, int], kernel: int, weights: dict) -> list:
    """Of `channels`, in and out, with padding that keeps the size, and ReLU; the result is called `name`."""
    draw = np.random.default_rng(len(weights))
    scale = np.sqrt(2 / (channels[0] * kernel * kernel))
    filters = draw.standard_normal((channels[1], channels[0], kernel, kernel)) * scale
    weights[f"{name}.w"] = filters.astype(np.float32)
    pads = [kernel // 2] * 4
    conv = helper.make_node("Conv", [source, f"{name}.w"], [f"{name}.c"], f"{name}.conv", pads=pads)
    return [conv, helper.make_node("Relu", [f"{name}.c"], [name], f"{name}.relu")]


def model(nodes: list, weights: dict, channels: int, rows: int = 16) -> onnx.ModelProto:
    network = onnx_model(nodes, {"x": [1, channels, rows, rows]}, {"y": None}, weights, name="branching")
    return onnx.shape_inference.infer_shapes(network)


def wide_branches(branches: int = 4) -> onnx.ModelProto:
    """Every branch widens and narrows again; all widen before the first narrows."""
    weights: dict[str, np.ndarray] = {}
    nodes = convolution("stem", "x", (16, 16), 3, weights)
    for index in range(branches):
        nodes += convolution(f"wide{index}", "stem", (16, 128), 1, weights)
    for index in range(branches):
        nodes += convolution(f"thin{index}", f"wide{index}", (128, 16), 1, weights)
    thin = [f"thin{index}" for index in range(branches)]
    nodes += [helper.make_node("Concat", thin, ["all"], "all", axis=1)]
    nodes += convolution("head", "all", (16 * branches, 32), 1, weights)
    nodes += [helper.make_node("GlobalAveragePool", ["head"], ["y"], "pool")]
    return model(nodes, weights, 16)


def randomly_wired(nodes: int, seed: int) -> onnx.ModelProto:
    """Every node sums up to three of the ten before it and convolves; the unread ones are summed."""
    draw, weights = random.Random(seed), {}
    layers = convolution("n0", "x", (16, 32), 3, weights)
    unread = {"n0"}
    for index in range(1, nodes):
        candidates = [f"n{earlier}" for earlier in range(max(index - 10, 0), index)]
        reads = draw.sample(candidates, min(len(candidates), draw.choice([1, 1, 2, 3])))
        unread = (unread - set(reads)) | {f"n{index}"}
        source = reads[0]
        if len(reads) > 1:
            source = f"s{index}"
            layers.append(helper.make_node("Sum", reads, [source], f"{source}.sum"))
        layers += convolution(f"n{index}", source, (32, 32), draw.choice([1, 3]), weights)
    layers.append(helper.make_node("Sum", sorted(unread), ["last"], "last.sum"))
    layers.append(helper.make_node("GlobalAveragePool", ["last"], ["y"], "pool"))
    return model(layers, weights, 16)


def network_with_padding(rows: int = 16, channels: int = 16) -> onnx.ModelProto:
    """3x3 convolutions of what others pad, keep, join along rows or read besides."""
    weights: dict[str, np.ndarray] = {}
    same = (channels, channels)
    nodes = convolution("a", "x", (16, channels), 3, weights)
    nodes += convolution("b", "a", same, 3, weights) + convolution("c", "a", same, 3, weights)
    nodes.append(helper.make_node("Add", ["b", "c"], ["s"], "s"))
    nodes += convolution("d", "s", same, 1, weights) + convolution("e", "s", same, 3, weights)
    nodes.append(helper.make_node("Concat", ["d", "e"], ["j"], "j", axis=2))
    nodes += convolution("f", "j", same, 5, weights)
    weights["bare.w"] = weights["e.w"]
    nodes.append(helper.make_node("Conv", ["f", "bare.w"], ["g"], "bare.conv", pads=[1, 1, 1, 1]))
    nodes += convolution("h", "g", same, 3, weights)
    nodes.append(helper.make_node("GlobalAveragePool", ["h"], ["y"], "pool"))
    return model(nodes, weights, 16, rows)
