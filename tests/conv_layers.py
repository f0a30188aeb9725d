"""Convolutions by a formula that shares nothing with the primitives, and layers that each one takes."""

import numpy as np
import tvm
from tvm import relax, tirx

from pimflow.core.kernel import ConvGeometry
from pimflow.primitives import PRIMITIVES, Primitive
from pimflow.primitives.layer import filter_shape

ON_CPU = [name for name, primitive in PRIMITIVES.items() if primitive.target == "cpu"]
ON_CUDA = [name for name, primitive in PRIMITIVES.items() if primitive.target == "cuda"]


def convolve(layer: ConvGeometry, x: np.ndarray, filters: np.ndarray) -> np.ndarray:
    """Float64, NHWC; `filters` as ONNX has them."""
    pad_top, pad_left, pad_bottom, pad_right = layer.padding
    padded = np.pad(x.astype(np.float64), ((0, 0), (pad_top, pad_bottom), (pad_left, pad_right), (0, 0)))
    (sh, sw), (dh, dw) = layer.stride, layer.dilation
    outer, inner = layer.oc // layer.groups, layer.c // layer.groups
    y = np.zeros((layer.n, layer.oh, layer.ow, layer.oc))
    for tap_row in range(layer.kh):
        for tap_column in range(layer.kw):
            rows = padded[:, tap_row * dh :][:, : (layer.oh - 1) * sh + 1 : sh]
            part = rows[:, :, tap_column * dw :][:, :, : (layer.ow - 1) * sw + 1 : sw]
            for group in range(layer.groups):
                outputs = slice(group * outer, (group + 1) * outer)
                read = part[..., group * inner : (group + 1) * inner]
                y[..., outputs] += read @ filters[outputs, :, tap_row, tap_column].T
    return y


def kernel_network(function: tirx.PrimFunc) -> tvm.IRModule:
    """The network that calls a primitive's kernel, with its first two operands as inputs."""
    builder = relax.BlockBuilder()
    gv = builder.add_func(function.without_attr("global_symbol"), "kernel")
    shapes = [tuple(int(extent) for extent in param.shape) for param in function.params]
    params = [relax.Var(f"p{i}", relax.TensorType(shape, "float32")) for i, shape in enumerate(shapes[:2])]
    with builder.function("main", params):
        with builder.dataflow():
            y = builder.emit_output(relax.call_tir(gv, params, relax.TensorType(shapes[2], "float32")))
        builder.emit_func_output(y)
    return builder.get()


def operands(layer: ConvGeometry, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Input (NHWC) and filters."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((layer.n, layer.h, layer.w, layer.c), np.float32)
    return x, rng.standard_normal(filter_shape(layer), np.float32)


def to_layout(layout: str, x: np.ndarray) -> np.ndarray:
    """An NHWC tensor in `layout`."""
    if layout == "HWC":
        return x
    if layout == "CHW":
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    n, h, w, c = x.shape
    return np.ascontiguousarray(x.reshape(n, h, w, c // 16, 16).transpose(0, 3, 1, 2, 4))


def layers_for(primitive: Primitive, count: int) -> list[ConvGeometry]:
    """Layers that `primitive` takes, drawn from its name: any sizes, strides, padding, dilation."""
    rng = np.random.default_rng(list(primitive.name.encode()))
    layers: list[ConvGeometry] = []
    while len(layers) < count:
        kh, kw = (int(k) for k in rng.choice([1, 2, 3, 3, 5], 2))
        if rng.random() < 0.4:
            kh = kw = 3 if rng.random() < 0.7 else 1
        c, oc = (int(n) for n in rng.choice([1, 3, 8, 16, 20, 32, 48], 2))
        groups = 1
        if rng.random() < 0.3:
            groups = oc = c
        layer = ConvGeometry(
            n=int(rng.integers(1, 3)), h=int(rng.integers(6, 17)), w=int(rng.integers(6, 17)),
            c=c, oc=oc, kh=kh, kw=kw,
            stride=tuple(int(s) for s in rng.choice([1, 1, 2], 2)),
            dilation=tuple(int(d) for d in rng.choice([1, 1, 1, 2], 2)),
            padding=tuple(int(p) for p in rng.integers(0, 3, 4) * (rng.random() < 0.7)),
            groups=groups,
        )  # fmt: skip
        if min(layer.oh, layer.ow) > 0 and primitive.applies(layer):
            layers.append(layer)
    return layers
