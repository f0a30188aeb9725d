"""Transposed convolutions as convolutions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax

from pimflow.errors import UnsupportedOpError
from pimflow.relay_passes.flat import operator, rebuild, shape


@tvm.transform.module_pass(opt_level=0, name="SubpixelConvolution")
class SubpixelConvolution:
    """Transposed convolutions as what PIM runs.

    A transposed convolution of stride s has s*s phases, each a convolution with every s-th tap. One
    convolution computes them all, as s*s times the channels; moving them between the pixels is all that
    is left. A filter whose size is no multiple of s is padded with zeros.

    Rewrite: ``conv2d_transpose(x, w) -> strided_slice(depth_to_space(conv2d(x, w')))``, NHWC.
    Preserves: values up to the order of sums, names.

    Raises
    ------
    UnsupportedOpError
        If a filter is computed.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        def rewrite(builder, var, value):
            if operator(value) != "nn.conv2d_transpose":
                return None
            x, filters = value.args
            if not isinstance(filters, tvm.ir.GenericConst):
                raise UnsupportedOpError(
                    "ConvTranspose is supported with a constant filter only; make it an initializer"
                )
            groups = int(value.attrs.groups)
            axes = _axes(value, shape(x)[1:3], shape(var)[1:3])
            conv = relax.op.nn.conv2d(
                x,
                relax.const(_phases(filters.value.numpy(), groups, axes)),
                padding=[a.before for a in axes] + [a.after for a in axes],
                groups=groups,
                data_layout="NHWC",
                kernel_layout="OHWI",
                out_layout="NHWC",
            )
            y = builder.emit(conv, name_hint=var.name)
            n, h, w, channels = shape(y)
            (sh, sw), oc = (a.stride for a in axes), shape(var)[3]
            if sh * sw > 1:
                y = relax.op.reshape(y, (n, h, w, groups, sh, sw, channels // (groups * sh * sw)))
                y = builder.emit(relax.op.permute_dims(builder.emit(y), [0, 1, 4, 2, 5, 3, 6]))
                y = builder.emit(relax.op.reshape(y, (n, h * sh, w * sw, oc)), name_hint=f"{var.name}_up")
            if shape(y) == shape(var):
                return y
            begin, end = [a.skip for a in axes], [a.skip + a.extent for a in axes]
            return relax.op.strided_slice(y, [1, 2], begin, end, assume_inbound=True)

        return rebuild(mod, rewrite)


@dataclass(frozen=True, kw_only=True)
class _Axis:
    """One direction: `taps` of the convolution, its padding, and the `extent` of the result after `skip`."""

    stride: int
    dilation: int
    taps: int
    before: int
    after: int
    skip: int
    extent: int


def _axes(call: relax.Call, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> list[_Axis]:
    """Of the convolution over `inputs` pixels whose phases make up `outputs`.

    Output u of the unpadded transposed convolution sums ``x[u // s - t] * w[u % s + s * t]`` over t.
    """
    axes = []
    for i in range(2):
        stride, dilation = int(call.attrs.strides[i]), int(call.attrs.dilation[i])
        reach = (shape(call.args[1])[2 + i] - 1) * dilation + 1
        taps = math.ceil(reach / stride)
        dropped = min(int(call.attrs.padding[i]) // stride, taps - 1)  # whole pixels that padding cuts off
        skip = int(call.attrs.padding[i]) - dropped * stride
        wanted = math.ceil((skip + outputs[i]) / stride)
        axes.append(
            _Axis(
                stride=stride,
                dilation=dilation,
                taps=taps,
                before=taps - 1 - dropped,
                after=max(0, wanted + dropped - inputs[i]),
                skip=skip,
                extent=outputs[i],
            )
        )
    return axes


def _phases(filters: np.ndarray, groups: int, axes: list[_Axis]) -> np.ndarray:
    """IOHW filters of a transposed convolution as OHWI ones, O being (group, phase row, phase column, o)."""
    c, oc, *_ = filters.shape
    (th, sh), (tw, sw) = ((a.taps, a.stride) for a in axes)
    padded = np.zeros((c, oc, th * sh, tw * sw), filters.dtype)
    rows, columns = ((n - 1) * a.dilation + 1 for n, a in zip(filters.shape[2:], axes))
    padded[:, :, : rows : axes[0].dilation, : columns : axes[1].dilation] = filters
    split = padded.reshape(groups, c // groups, oc, th, sh, tw, sw)[:, :, :, ::-1, :, ::-1]
    return np.ascontiguousarray(split.transpose(0, 4, 6, 2, 3, 5, 1).reshape(-1, th, tw, c // groups))
