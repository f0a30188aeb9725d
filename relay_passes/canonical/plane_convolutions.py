"""Convolutions along one axis, and those in space that planes can do, as convolutions of planes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import tvm
from tvm import relax

from pimflow.relay_passes.flat import main_bindings, operator, rebuild, shape
from pimflow.relay_passes.operators import BINARY, UNARY

LIFTED = ("nn.conv1d", "nn.conv1d_transpose", "nn.conv3d")
_POOLS = {"nn.max_pool1d": relax.op.nn.max_pool2d, "nn.avg_pool1d": relax.op.nn.avg_pool2d}
_TO_FRAMES = (0, 2, 1, 3, 4)  # NCDHW to NDCHW, and back


class _Planes(NamedTuple):
    """How a tensor lies in planes, [N, C, H, W], by the rank of the tensor.

    A line, [N, C, W], is a plane of height 1. Of space, [N, C, D, H, W], each frame is a plane of its own, or
    all rows of a frame are one row of a plane.
    """

    rank: int
    by_frame: bool = False

    def to_planes(self, builder: relax.BlockBuilder, x: relax.Var) -> relax.Var:
        """Emit a tensor in planes."""
        op, name, dims = relax.op, f"{x.name}.planes", shape(x)
        if self.by_frame:
            x = builder.emit(op.permute_dims(x, _TO_FRAMES), name_hint=f"{x.name}.frames")
            return builder.emit(op.reshape(x, (dims[0] * dims[2], dims[1], *dims[3:])), name_hint=name)
        height, width = (1, dims[2]) if self.rank == 3 else (dims[2], math.prod(dims[3:]))
        return builder.emit(op.reshape(x, (*dims[:2], height, width)), name_hint=name)

    def from_planes(self, builder: relax.BlockBuilder, planes: relax.Var, dims: tuple[int, ...]) -> relax.Var:
        """Emit the tensor of `dims` of which `planes` are the planes."""
        op, name = relax.op, f"{planes.name}.{'line' if self.rank == 3 else 'space'}"
        if not self.by_frame:
            return builder.emit(op.reshape(planes, dims), name_hint=name)
        frames = builder.emit(
            op.reshape(planes, [dims[axis] for axis in _TO_FRAMES]), name_hint=f"{planes.name}.frames"
        )
        return builder.emit(op.permute_dims(frames, _TO_FRAMES), name_hint=name)

    def constant(self, array: np.ndarray) -> np.ndarray | None:
        """A constant that is broadcast over a tensor, for its planes; None if it varies along other axes."""
        if array.ndim == 0:
            return array
        padded = array.reshape((1,) * (self.rank - array.ndim) + array.shape)
        if self.rank == 3:
            return padded[:, :, None]
        return padded.reshape(1, -1, 1, 1) if padded.size == padded.shape[1] else None


LINE, FRAMES, ROWS = _Planes(3), _Planes(5, by_frame=True), _Planes(5)


@dataclass(frozen=True, kw_only=True)
class _Twin:
    """A tensor that also exists in planes."""

    planes: relax.Var
    form: _Planes


@tvm.transform.module_pass(opt_level=0, name="PlaneConvolutions")
class PlaneConvolutions:
    """Make convolutions along one axis, and separable ones in space, convolutions of planes.

    A convolution of a line is one of a plane of height 1. In space, windows of depth 1 are convolutions of
    frames, and windows that are only deep are those of a plane whose rows are frames. What lies between them,
    elementwise operators, pools and padding, is done in planes too, so that nothing is moved. Windows that
    are wide and deep stay.

    Rewrite: ``conv1d(x, w) -> reshape(conv2d(reshape(x), reshape(w)))``, ``conv3d`` and the operators
    between them likewise.
    Preserves: values bit by bit, names.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        padded = _padding_vars(mod)
        if padded is None:
            return mod
        twins: dict[relax.Var, _Twin] = {}

        def rewrite(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
            """The new value of `var`; None if `value` stays."""
            if operator(value) == "squeeze":
                return _line_of_plane(builder, var, value, twins)
            if operator(value) == "expand_dims":
                return _plane_of_line(value, twins)
            if isinstance(value, relax.TupleGetItem):
                return _plane_element(builder, value, twins)
            if operator(value) == "nn.batch_norm":
                return _batch_norm(builder, var, value, twins)
            form = _form(value, twins, lift=var in padded)
            new = None if form is None else _in_planes(builder, var, value, form, twins)
            if form is None or new is None:
                return None
            planes = builder.emit(new, name_hint=var.name)
            back = form.from_planes(builder, planes, shape(var))
            twins[back] = _Twin(planes=planes, form=form)
            return back

        return rebuild(mod, rewrite)


def _padding_vars(mod: tvm.IRModule) -> set[relax.Var] | None:
    """Variables of padding in front of convolutions to be lifted; None if there is no such convolution."""
    values = {binding.var: binding.value for binding in main_bindings(mod)}
    lifted = [value for value in values.values() if _convolution_form(value)]
    inputs = {value.args[0] for value in lifted}
    return {v for v in inputs if operator(values.get(v)) == "nn.pad"} if lifted else None


def _convolution_form(value: relax.Expr) -> _Planes | None:
    """The planes in which a convolution with constant filters is done; None if it is none, or stays."""
    kind = operator(value)
    if kind not in LIFTED or not isinstance(value.args[1], tvm.ir.GenericConst):
        return None
    attrs, filters = value.attrs, value.args[1].value.shape
    rank = len(filters)
    layouts = ("NCW", "OIW" if kind == "nn.conv1d" else "IOW") if rank == 3 else ("NCDHW", "OIDHW")
    if (str(attrs.data_layout), str(attrs.kernel_layout)) != layouts:
        return None
    if str(attrs.out_dtype) not in ("None", "", "void", str(value.args[0].ty.dtype)):
        return None
    if rank == 3:
        return LINE
    # By axis: the window takes one element at a time, each of them
    front, top, left, back, bottom, right = (int(width) for width in attrs.padding)
    padding = (front + back, top + bottom, left + right)
    single = [
        int(size) == 1 and int(stride) == 1 and widths == 0
        for size, stride, widths in zip(filters[2:], attrs.strides, padding)
    ]
    return ROWS if all(single[1:]) else FRAMES if single[0] else None


def _form(value: relax.Expr, twins: dict[relax.Var, _Twin], *, lift: bool) -> _Planes | None:
    """The planes in which `value` is computed; None if it stays as it is."""
    form = _convolution_form(value)
    if form is not None:
        twin = twins.get(value.args[0])
        window = [int(size) for size in value.args[1].value.shape[2:]] + [int(s) for s in value.attrs.strides]
        is_point = form is ROWS and set(window) == {1} and not any(map(int, value.attrs.padding))
        return twin.form if twin is not None and is_point else form
    args = [arg for arg in getattr(value, "args", ()) if isinstance(arg, relax.Var)]
    fields = (
        value.args[0].fields if operator(value) == "concat" and isinstance(value.args[0], relax.Tuple) else ()
    )
    forms = [twins[arg].form for arg in (*args, *fields) if arg in twins]
    if not forms and lift and len(value.attrs.pad_width) == 6:
        return LINE
    return forms[0] if forms else None


def _in_planes(
    builder: relax.BlockBuilder,
    var: relax.Var,
    value: relax.Expr,
    form: _Planes,
    twins: dict[relax.Var, _Twin],
) -> relax.Call | None:
    """`value`, which is bound to `var`, in planes; None if it cannot be computed there."""

    def planes(x: relax.Expr) -> relax.Var:
        """A tensor in planes."""
        twin = twins.get(x)
        return twin.planes if twin is not None and twin.form == form else form.to_planes(builder, x)

    kind = operator(value)
    if kind in LIFTED:
        return _convolution(value, planes(value.args[0]), form) if _convolution_form(value) else None
    if kind in UNARY and kind != "nn.prelu":
        return relax.Call(value.op, [planes(value.args[0]), *value.args[1:]], value.attrs, value.ty_args)
    if kind in BINARY:
        return _binary(value, shape(var), form, planes)
    if kind == "concat" and int(value.attrs.axis) == 1:
        return relax.op.concat([planes(field) for field in value.args[0].fields], axis=1)
    if form is not LINE:
        return None
    if kind == "nn.pad":
        widths = [int(width) for width in value.attrs.pad_width]
        around = [*widths[:4], 0, 0, *widths[4:]]
        attrs = value.attrs
        return relax.op.nn.pad(planes(value.args[0]), around, str(attrs.pad_mode), float(attrs.pad_value))
    if kind in _POOLS and str(value.attrs.layout) == str(value.attrs.out_layout) == "NCW":
        attrs = value.attrs
        (window,), (stride,), (dilation,) = attrs.pool_size, attrs.strides, attrs.dilation
        left, right = (int(width) for width in attrs.padding)
        places = ([1, int(window)], [1, int(stride)], [0, left, 0, right], [1, int(dilation)])
        return _POOLS[kind](planes(value.args[0]), *places, attrs.ceil_mode, attrs.count_include_pad)
    return None


def _binary(
    value: relax.Call, dims: tuple[int, ...], form: _Planes, planes: Callable[[relax.Expr], relax.Var]
) -> relax.Call | None:
    """An elementwise operator of tensors of equal shapes, or of one and a constant, in planes."""
    args: list[relax.Expr] = []
    for arg in value.args:
        if isinstance(arg, tvm.ir.GenericConst):
            array = form.constant(arg.value.numpy())
            if array is None:
                return None
            args.append(relax.const(np.ascontiguousarray(array), str(arg.ty.dtype)))
        elif isinstance(arg, relax.Var) and shape(arg) == dims:
            args.append(planes(arg))
        else:
            return None
    return relax.Call(value.op, args, value.attrs, value.ty_args)


def _convolution(value: relax.Call, x: relax.Var, form: _Planes) -> relax.Call:
    """The convolution of `x`, planes, that `value` is."""
    attrs, array = value.attrs, value.args[1].value.numpy()
    strides, dilation, padding = (
        [int(number) for number in numbers] for numbers in (attrs.strides, attrs.dilation, attrs.padding)
    )
    axes = {LINE: (None, 0), FRAMES: (1, 2), ROWS: (0, None)}[form]  # of the window, by axis of the planes

    def of_planes(numbers: list[int], absent: int) -> list[int]:
        return [absent if axis is None else numbers[axis] for axis in axes]

    half = len(padding) // 2
    window = of_planes([int(size) for size in array.shape[2:]], 1)
    filters = relax.const(array.reshape(*array.shape[:2], *window), str(value.args[1].ty.dtype))
    around = of_planes(padding[:half], 0) + of_planes(padding[half:], 0)
    places = (of_planes(strides, 1), around)
    if operator(value) == "nn.conv1d_transpose":
        extra = of_planes([int(number) for number in attrs.output_padding], 0)
        return relax.op.nn.conv2d_transpose(
            x, filters, *places, extra, of_planes(dilation, 1), int(attrs.groups), "NCHW", "IOHW"
        )
    return relax.op.nn.conv2d(x, filters, *places, of_planes(dilation, 1), int(attrs.groups))


def _line_of_plane(
    builder: relax.BlockBuilder, var: relax.Var, value: relax.Call, twins: dict[relax.Var, _Twin]
) -> relax.Expr | None:
    """A plane of height 1 as a line, which importers make of pools along lines."""
    x = value.args[0]
    axes = value.attrs.axis and [int(axis) % len(shape(x)) for axis in value.attrs.axis]
    if len(shape(x)) != 4 or axes != [2]:
        return None
    line = builder.emit(value, name_hint=var.name)
    twins[line] = _Twin(planes=x, form=LINE)
    return line


def _plane_of_line(value: relax.Call, twins: dict[relax.Var, _Twin]) -> relax.Expr | None:
    """The plane that a line is, if it exists; None if it does not."""
    twin = twins.get(value.args[0])
    axes = [int(axis) % (len(shape(value.args[0])) + 1) for axis in value.attrs.axis]
    return twin.planes if twin is not None and twin.form == LINE and axes == [2] else None


def _batch_norm(
    builder: relax.BlockBuilder, var: relax.Var, value: relax.Call, twins: dict[relax.Var, _Twin]
) -> relax.Expr | None:
    """A normalisation of channels in planes, as the tuple of its results; None if it stays."""
    twin = twins.get(value.args[0])
    if twin is None or int(value.attrs.axis) != 1:
        return None
    arguments = [twin.planes, *value.args[1:]]
    results = builder.emit(relax.Call(value.op, arguments, value.attrs, value.ty_args), name_hint=var.name)
    planes = builder.emit(relax.TupleGetItem(results, 0), name_hint=f"{var.name}.normalised")
    tensor = twin.form.from_planes(builder, planes, shape(value.args[0]))
    twins[tensor] = _Twin(planes=planes, form=twin.form)
    return relax.Tuple([tensor, *(builder.emit(relax.TupleGetItem(results, index)) for index in (1, 2))])


def _plane_element(
    builder: relax.BlockBuilder, value: relax.TupleGetItem, twins: dict[relax.Var, _Twin]
) -> relax.Expr | None:
    """The element of a tuple, if it also exists in planes; else None."""
    source = builder.lookup_binding(value.tuple_value) if isinstance(value.tuple_value, relax.Var) else None
    element = source.fields[value.index] if isinstance(source, relax.Tuple) else None
    return element if element in twins else None
