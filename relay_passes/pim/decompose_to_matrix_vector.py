"""Convolutions in the form that PIM runs: a matrix times the im2col vector of every pixel."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import tvm
from tvm import relax

from pimflow.relay_passes.flat import BindingPass, constant, operator, shape


@tvm.transform.module_pass(opt_level=0, name="DecomposeToMatrixVector")
class DecomposeToMatrixVector(BindingPass):
    """Replace dense NHWC convolutions by products with explicit windows.

    A fully connected layer (``matmul``) already has this form. Bias and activation stay operators behind the
    product.

    Parameters
    ----------
    names : collection of str, optional
        Variables to rewrite; every dense convolution with constant filters if None.

    Rewrite: ``conv2d(x, w) -> matmul(concat(pad(x)[taps], axis=C), w')``, one strided slice a tap in
    (kh, kw) order, ``w'`` being ``[K, OC]``.
    Preserves: values up to the order of sums, names.
    """

    def __init__(self, names: Collection[str] | None = None):
        self.names = names

    def rewrite(self, builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
        """The new value of `var`; None if `value` stays."""
        is_selected = self.names is None or var.name in self.names
        if not (is_selected and _is_dense(value)):
            return None
        windows = _windows(builder, value, var.name)
        filters = np.from_dlpack(value.args[1].value)
        matrix = constant(filters.reshape(filters.shape[0], -1).T)
        product = relax.op.matmul(windows, matrix, out_dtype=value.attrs.out_dtype)
        return builder.emit(product, name_hint=var.name)


def _is_dense(value: relax.Expr) -> bool:
    return (
        operator(value) == "nn.conv2d"
        and int(value.attrs.groups) == 1
        and value.attrs.data_layout == "NHWC"
        and value.attrs.kernel_layout == "OHWI"
        and isinstance(value.args[1], tvm.ir.GenericConst)
    )


def _windows(builder: relax.BlockBuilder, call: relax.Call, name: str) -> relax.Expr:
    """Emit the im2col vectors, [n, oh, ow, kh*kw*c]."""
    x, attrs = call.args[0], call.attrs
    _, kh, kw, _ = shape(call.args[1])
    top, left, bottom, right = (int(p) for p in attrs.padding)
    if top or left or bottom or right:
        x = builder.emit(relax.op.nn.pad(x, [0, 0, top, bottom, left, right, 0, 0]), name_hint=f"{name}_pad")
    strides, dilation = [int(s) for s in attrs.strides], [int(d) for d in attrs.dilation]
    if (kh, kw, *strides) == (1, 1, 1, 1):
        return x
    reach = [(extent - 1) * step + 1 for extent, step in zip(shape(builder.normalize(call))[1:3], strides)]
    taps = []
    for i in range(kh):
        for j in range(kw):
            begin = [i * dilation[0], j * dilation[1]]
            end = [b + r for b, r in zip(begin, reach)]
            tap = relax.op.strided_slice(x, [1, 2], begin, end, strides, assume_inbound=True)
            taps.append(builder.emit(tap, name_hint=f"{name}_tap"))
    return (
        taps[0]
        if len(taps) == 1
        else builder.emit(relax.op.concat(taps, axis=3), name_hint=f"{name}_windows")
    )
