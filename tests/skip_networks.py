"""A network with a skip connection."""

import numpy as np
import onnx
from onnx import helper
from onnx_models import onnx_model


def hourglass() -> onnx.ModelProto:
    """A small U-Net: one level down, one up by a transposed convolution, and a concatenation."""
    rng = np.random.default_rng(0)
    sizes = {
        "w1": (32, 3, 3, 3), "w2": (32, 32, 3, 3), "w3": (48, 32, 3, 3), "w4": (48, 32, 2, 2),
        "w5": (24, 64, 3, 3), "w6": (4, 24, 1, 1),
    }  # fmt: skip
    scales = {name: np.sqrt(np.prod(size[1:])) for name, size in sizes.items()}
    weights = {n: (rng.standard_normal(d) / scales[n]).astype(np.float32) for n, d in sizes.items()}
    same = dict(kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    steps = [
        ("Conv", ["x", "w1"], "a", same), ("Relu", ["a"], "ra", {}),
        ("Conv", ["ra", "w2"], "b", same), ("Relu", ["b"], "skip", {}),
        ("MaxPool", ["skip"], "down", dict(kernel_shape=[2, 2], strides=[2, 2])),
        ("Conv", ["down", "w3"], "c", same), ("Relu", ["c"], "rc", {}),
        ("ConvTranspose", ["rc", "w4"], "up", dict(kernel_shape=[2, 2], strides=[2, 2])),
        ("Concat", ["skip", "up"], "both", dict(axis=1)),
        ("Conv", ["both", "w5"], "d", same), ("Relu", ["d"], "rd", {}),
        ("Conv", ["rd", "w6"], "y", dict(kernel_shape=[1, 1])),
    ]  # fmt: skip
    nodes = [helper.make_node(kind, ins, [out], out, **attrs) for kind, ins, out, attrs in steps]
    return onnx_model(nodes, {"x": (1, 3, 32, 32)}, {"y": (1, 4, 32, 32)}, weights, name="hourglass")
