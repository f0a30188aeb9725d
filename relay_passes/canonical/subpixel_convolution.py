"""Transposed convolutions as convolutions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax

from pimflow.core.chains import Upsampling
from pimflow.errors import UnsupportedOpError
from pimflow.relay_passes.flat import BindingPass, main_bindings, operator, shape, use_counts

# [n, h, w, group, row, column, channel] to [n, h, row, w, column, group, channel].
PHASES_TO_PIXELS = [0, 1, 4, 2, 5, 3, 6]
_MOVES = ("reshape", "permute_dims", "strided_slice")


@tvm.transform.module_pass(opt_level=0, name="SubpixelConvolution")
class SubpixelConvolution(BindingPass):
    """Replace transposed convolutions by convolutions, which PIM runs.

    A transposed convolution with stride s has s*s phases, each a convolution with every s-th tap. One
    convolution with s*s times the channels computes all phases; a depth-to-space transform then moves the
    elements to their pixels. A filter whose size is no multiple of s is padded with zeros.

    Rewrite: ``conv2d_transpose(x, w) -> strided_slice(depth_to_space(conv2d(x, w')))``, NHWC.
    Preserves: values up to the order of sums, names.

    Raises
    ------
    UnsupportedOpError
        If a filter is not constant.
    """

    def rewrite(self, builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
        """The new value of `var`; None if `value` stays."""
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
        y = depth_to_space(builder, y, tuple(a.stride for a in axes), groups, f"{var.name}_up")
        return crop(y, tuple(a.skip for a in axes), tuple(a.extent for a in axes))


def depth_to_space(
    builder: relax.BlockBuilder, y: relax.Expr, scale: tuple[int, int], groups: int, name: str
) -> relax.Expr:
    """Emit depth to space: channels (group, row, column, channel) to pixels of a `scale` times larger map."""
    sh, sw = scale
    if sh * sw == 1:
        return y
    n, h, w, channels = shape(y)
    y = relax.op.reshape(y, (n, h, w, groups, sh, sw, channels // (groups * sh * sw)))
    y = builder.emit(relax.op.permute_dims(builder.emit(y), PHASES_TO_PIXELS))
    return builder.emit(relax.op.reshape(y, (n, h * sh, w * sw, channels // (sh * sw))), name_hint=name)


def crop(y: relax.Expr, begin: tuple[int, int], extent: tuple[int, int]) -> relax.Expr:
    """`extent` rows and columns of `y` from `begin` on."""
    if shape(y)[1:3] == extent:
        return y
    end = [b + e for b, e in zip(begin, extent)]
    return relax.op.strided_slice(y, [1, 2], list(begin), end, assume_inbound=True)


def upsamplings(mod: tvm.IRModule) -> dict[relax.Var, tuple[relax.Var, Upsampling]]:
    """By convolution of a canonical module followed by depth to space, the result and its `Upsampling`.

    The variables between the convolution and the result have no other readers.
    """
    counts, bindings = use_counts(mod), main_bindings(mod)
    readers = {b.value.args[0]: b for b in bindings if operator(b.value) in _MOVES}

    def sole_reader(var: relax.Var, kind: str) -> relax.VarBinding | None:
        """The only reader of `var`, if it is a `kind`; else None."""
        reader = readers.get(var)
        sole = reader is not None and counts[var] == 1 and operator(reader.value) == kind
        return reader if sole else None

    upsampled = {}
    for binding in bindings:
        if operator(binding.value) != "nn.conv2d" or (first := sole_reader(binding.var, "reshape")) is None:
            continue
        order = sole_reader(first.var, "permute_dims")
        last = sole_reader(order.var, "reshape") if order is not None else None
        if last is None or [int(a) for a in order.value.attrs.axes or ()] != PHASES_TO_PIXELS:
            continue
        _, h, w, groups, sh, sw, _ = shape(first.var)
        n, *_, channels = shape(binding.var)
        spread_out = shape(last.var) == (n, h * sh, w * sw, channels // (sh * sw))
        if not spread_out or groups != int(binding.value.attrs.groups):
            continue
        result, begin = last.var, (0, 0)
        slice_binding = sole_reader(result, "strided_slice")
        if slice_binding is not None and [int(a) for a in slice_binding.value.args[1].fields] == [1, 2]:
            result, begin = slice_binding.var, tuple(int(b) for b in slice_binding.value.args[2].fields)
        extent = shape(result)[1:3]
        upsampled[binding.var] = (result, Upsampling(scale=(sh, sw), begin=begin, extent=extent))
    return upsampled


@dataclass(frozen=True, kw_only=True)
class _Axis:
    """A spatial axis: `taps` of the convolution, its padding, and the `extent` of the result after `skip`."""

    stride: int
    dilation: int
    taps: int
    before: int
    after: int
    skip: int
    extent: int


def _axes(call: relax.Call, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> list[_Axis]:
    """Both axes of the convolution over `inputs` pixels whose phases make up `outputs`.

    Output u of the unpadded transposed convolution sums ``x[u // s - t] * w[u % s + s * t]`` over t.
    """
    axes = []
    for i in range(2):
        stride, dilation = int(call.attrs.strides[i]), int(call.attrs.dilation[i])
        reach = (shape(call.args[1])[2 + i] - 1) * dilation + 1
        taps = math.ceil(reach / stride)
        dropped = min(int(call.attrs.padding[i]) // stride, taps - 1)  # whole pixels that padding cuts off
        skip = int(call.attrs.padding[i]) - dropped * stride
        required = math.ceil((skip + outputs[i]) / stride)
        axes.append(
            _Axis(
                stride=stride,
                dilation=dilation,
                taps=taps,
                before=taps - 1 - dropped,
                after=max(0, required + dropped - inputs[i]),
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
