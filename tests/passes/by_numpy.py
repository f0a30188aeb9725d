"""Networks of convolutions by numpy, in one order of sums, so that equal sums are equal bits."""

import numpy as np
import tvm
from tvm import relax

from pimflow.relay_passes.flat import main_bindings, operator, shape

ELEMENTWISE = {
    "negative": np.negative,
    "sigmoid": lambda x: (1 + np.tanh(x / 2)) / 2,
    "nn.relu": lambda x: np.maximum(x, 0),
    "add": np.add,
    "multiply": np.multiply,
}


def evaluate_by_numpy(mod: tvm.IRModule, *operands: np.ndarray) -> np.ndarray:
    """The result of ``main``, convolutions tap by tap."""
    values = dict(zip(mod["main"].params, operands, strict=True))

    def value_of(expr: relax.Expr) -> np.ndarray:
        return expr.value.numpy() if isinstance(expr, tvm.ir.GenericConst) else values[expr]

    for binding in main_bindings(mod):
        call, kind = binding.value, operator(binding.value)
        if kind == "strided_slice":
            (axis,), (begin,), (end,) = (tuple(int(i) for i in call.args[n]) for n in (1, 2, 3))
            value = np.take(values[call.args[0]], range(begin, end), axis)
        elif kind == "concat":
            value = np.concatenate([value_of(f) for f in call.args[0].fields], int(call.attrs.axis))
        elif kind == "nn.conv2d":
            value = _conv(values[call.args[0]], call)
        elif isinstance(call, relax.Var):
            value = values[call]
        else:
            value = ELEMENTWISE[kind](*(value_of(arg) for arg in call.args))
        assert value.shape == shape(binding.var), f"TVM infers another shape for {binding.var.name}"
        values[binding.var] = value
    return values[main_bindings(mod)[-1].var]


def _conv(x: np.ndarray, call: relax.Call) -> np.ndarray:
    attrs = call.attrs
    data, filters = str(attrs.data_layout), str(attrs.kernel_layout)
    x = np.transpose(x, [data.index(a) for a in "NHWC"])
    weights = np.transpose(call.args[1].value.numpy(), [filters.index(a) for a in "OHWI"])
    top, left, bottom, right = (int(p) for p in attrs.padding)
    (sh, sw), (dh, dw) = ([int(s) for s in pair] for pair in (attrs.strides, attrs.dilation))
    x = np.pad(x, ((0, 0), (top, bottom), (left, right), (0, 0)))
    oc, kh, kw, per_group = weights.shape
    oh, ow = (x.shape[1] - (kh - 1) * dh - 1) // sh + 1, (x.shape[2] - (kw - 1) * dw - 1) // sw + 1
    out = np.zeros((len(x), oh, ow, oc), np.float32)
    group = np.arange(oc) // (oc // int(attrs.groups)) * per_group
    for i, j, c in np.ndindex(kh, kw, per_group):
        tap = x[:, i * dh :, j * dw :][:, : (oh - 1) * sh + 1 : sh, : (ow - 1) * sw + 1 : sw]
        out += tap[..., group + c] * weights[:, i, j, c]
    return np.transpose(out, ["NHWC".index(a) for a in data])
