"""Layout transforms moved behind operators until they cancel."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import numpy as np
import tvm
from tvm import relax

from pimflow.primitives.layer import BLOCK
from pimflow.relay_passes.flat import operator, rebuild, shape
from pimflow.relay_passes.operators import BINARY, POOL, REDUCE, UNARY

_QUANTISERS = ("quantize", "dequantize")  # of one scale, or of one for each index along an axis
TO_NHWC, TO_NCHW = (0, 2, 3, 1), (0, 3, 1, 2)


class _PermutedLayout:
    """A target layout that is one transpose away from the source layout."""

    def __init__(self, into: tuple[int, ...], out: tuple[int, ...], name: str, source_layout: str):
        self.into, self.out, self.name, self.source_layout = into, out, name, source_layout

    def axes(self, source_axes: Sequence[int]) -> list[int] | None:
        """Axes of the source layout as axes of the target layout; None if one has no counterpart."""
        return [self.out[axis % 4] for axis in source_axes]

    def constant(self, array: np.ndarray) -> np.ndarray | None:
        """`array` in the target layout."""
        return array.transpose(self.into)

    def step_of(self, value: relax.Call) -> tuple[str, ...]:
        """Direction of a transform (``into`` or ``out``) and which step `value` is; empty if none."""
        axes = _permutation(value)
        return ("into",) if axes == self.into else ("out",) if axes == self.out else ()

    steps = 1

    def fits(self, dims: tuple[int, ...]) -> bool:
        """Whether a tensor of the source layout can have the target layout."""
        return len(dims) == 4

    def to_target(self, builder: relax.BlockBuilder, tensor: relax.Var, name: str) -> relax.Var:
        """Emit `tensor` in the target layout."""
        return builder.emit(relax.op.permute_dims(tensor, self.into), name_hint=f"{name}.kept")

    def to_source(self, builder: relax.BlockBuilder, tensor: relax.Var, name: str) -> relax.Var:
        """Emit `tensor` in the source layout."""
        return builder.emit(relax.op.permute_dims(tensor, self.out), name_hint=f"{name}.nchw")


class _BlockedLayout:
    """NCHW16c as target layout, with NHWC as source layout: a transform is a reshape and a transpose."""

    INTO, OUT = (0, 3, 1, 2, 4), (0, 2, 3, 1, 4)
    steps, name, source_layout = 2, "NCHW16c", "NHWC"

    def axes(self, source_axes: Sequence[int]) -> list[int] | None:
        """See `_PermutedLayout.axes`."""
        target_axes = {0: 0, 1: 2, 2: 3}
        return None if any(a % 4 == 3 for a in source_axes) else [target_axes[a % 4] for a in source_axes]

    def constant(self, array: np.ndarray) -> np.ndarray | None:
        """`array` in the target layout; None if its channels do not fill blocks."""
        n, h, w, c = array.shape
        if c == 1:
            return array.reshape(n, 1, h, w, 1)
        blocks = array.reshape(n, h, w, c // BLOCK, BLOCK) if c % BLOCK == 0 else None
        return None if blocks is None else blocks.transpose(self.INTO)

    def step_of(self, value: relax.Call) -> tuple[str, ...]:
        """See `_PermutedLayout.step_of`; the steps of a transform are ``first`` and ``last``."""
        if operator(value) == "reshape":
            before, after = shape(value.args[0]), tuple(map(int, getattr(value.args[1], "values", ())))
            if len(before) == 4 and after == (*before[:3], before[3] // BLOCK, BLOCK):
                return ("into", "first")
            joined = len(before) == 5 and before[4] == BLOCK and after == (*before[:3], before[3] * BLOCK)
            return ("out", "last") if joined else ()
        axes = _permutation(value)
        return ("into", "last") if axes == self.INTO else ("out", "first") if axes == self.OUT else ()

    def fits(self, dims: tuple[int, ...]) -> bool:
        return len(dims) == 4 and dims[3] % BLOCK == 0

    def to_target(self, builder: relax.BlockBuilder, tensor: relax.Var, name: str) -> relax.Var:
        """Emit `tensor` in the target layout."""
        n, h, w, c = shape(tensor)
        blocks = builder.emit(relax.op.reshape(tensor, (n, h, w, c // BLOCK, BLOCK)), name_hint=f"{name}.cut")
        return builder.emit(relax.op.permute_dims(blocks, self.INTO), name_hint=f"{name}.kept")

    def to_source(self, builder: relax.BlockBuilder, tensor: relax.Var, name: str) -> relax.Var:
        """Emit `tensor` in the source layout."""
        n, blocks, h, w, c = shape(tensor)
        pixels = builder.emit(relax.op.permute_dims(tensor, self.OUT), name_hint=f"{name}.pixels")
        return builder.emit(relax.op.reshape(pixels, (n, h, w, blocks * c)), name_hint=f"{name}.nhwc")


def _permutation(value: relax.Expr) -> tuple[int, ...]:
    if operator(value) != "permute_dims" or value.attrs.axes is None:
        return ()
    return tuple(int(a) for a in value.attrs.axes)


TARGET_LAYOUTS = {
    "NHWC": lambda: _PermutedLayout(TO_NHWC, TO_NCHW, "NHWC", "NCHW"),
    "NCHW": lambda: _PermutedLayout(TO_NCHW, TO_NHWC, "NCHW", "NHWC"),
    "NCHW16c": _BlockedLayout,
}


@tvm.transform.module_pass(opt_level=0, name="SinkLayout")
class SinkLayout:
    """Compute operators between two inverse layout transforms in the target layout, and drop the transforms.

    Parameters
    ----------
    layout : str
        The target layout: ``NHWC``, for operators that `ConvertLayout` leaves in NCHW; ``NCHW`` and
        ``NCHW16c``, for primitives of those layouts.
    names : container of str, optional
        Names of variables: only their operators are computed in the target layout, and operands are
        transformed to it if needed. By default all operators whose operands already have the target layout.

    Rewrite, target NHWC: ``op(permute(x, NHWC -> NCHW)) -> permute(op'(x))`` for elementwise operators,
    pools, spatial reductions and concatenations; ``permute(permute(x)) -> x``. Target NCHW16c: the same, with
    transforms in two steps, a reshape and a transpose.
    Preserves: values exactly (sums over channels and space together up to their order), names, interface.
    """

    def __init__(self, layout: str = "NHWC", names: Container[str] | None = None):
        self.layout, self.names = TARGET_LAYOUTS[layout](), names

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        layout, names = self.layout, self.names
        twins: dict[relax.Var, relax.Expr] = {}  # source to target layout
        first_steps: dict[relax.Var, relax.Expr] = {}  # result of the first step to that of both

        def twin(builder: relax.BlockBuilder, value: relax.Expr, name: str) -> relax.Var | None:
            """Emit `value` in the target layout; None if that is not possible."""
            if names is not None and name not in names:
                return None

            def to_layout(expr: relax.Expr) -> relax.Expr | None:
                """`expr` in the target layout; None if it has none."""
                if expr in twins or names is None or not isinstance(expr, relax.Var):
                    return twins.get(expr)
                return layout.to_target(builder, expr, expr.name) if layout.fits(shape(expr)) else None

            new = _call_in_layout(layout, value, to_layout)
            return None if new is None else builder.emit(new, name_hint=name)

        def rewrite(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
            """The new value of `var`; None if `value` stays."""
            step = layout.step_of(value)
            if step:
                return _emit_transform(builder, var.name, value, step, twins, first_steps)
            new = twin(builder, value, var.name)
            if new is None:
                return None
            back = layout.to_source(builder, new, var.name)
            twins[back] = new
            return back

        return rebuild(mod, rewrite)


def _call_in_layout(
    layout: _PermutedLayout | _BlockedLayout,
    value: relax.Expr,
    to_layout: Callable[[relax.Expr], relax.Expr | None],
) -> relax.Call | None:
    """`value` on operands in the target layout, as `to_layout` gives them; None if that is not possible."""
    kind = operator(value)
    if kind in BINARY and any(isinstance(a, relax.Var) for a in value.args):
        args = [_operand(a, to_layout, layout) for a in value.args]
        is_complete = None not in args and any(isinstance(a, relax.Var) for a in args)
        return relax.Call(value.op, args, value.attrs, value.ty_args) if is_complete else None
    if kind == "concat" and isinstance(value.args[0], relax.Tuple):
        fields = [to_layout(f) for f in value.args[0].fields]
        if None in fields:
            return None
        axes = layout.axes([int(value.attrs.axis)]) or [1]  # along channels, whole blocks follow one another
        return relax.op.concat(fields, axis=axes[0])
    if kind not in (*UNARY, *REDUCE, *POOL, *_QUANTISERS, "astype", "nn.pad") or not isinstance(
        value.args[0], relax.Var
    ):
        return None
    if kind in POOL:
        x = (
            to_layout(value.args[0])
            if value.attrs.layout == value.attrs.out_layout == layout.source_layout
            else None
        )
        return None if x is None else _pool_in_layout(layout, value, x)
    if kind in REDUCE:
        axes = value.attrs.axis and layout.axes([int(a) for a in value.attrs.axis])
        if not value.attrs.keepdims or (axes is None and (value.attrs.axis or layout.steps > 1)):
            return None
        x = to_layout(value.args[0])
        return None if x is None else getattr(relax.op, kind)(x, axis=axes, keepdims=True)
    if kind == "nn.pad":
        return _pad_in_layout(layout, value, to_layout)
    axes = layout.axes([int(value.attrs.axis)]) if kind in ("nn.prelu", *_QUANTISERS) else []
    x = None if axes is None else to_layout(value.args[0])
    if x is not None and axes and kind in _QUANTISERS:
        return getattr(relax.op, kind)(x, *value.args[1:], axis=axes[0], out_dtype=value.attrs.out_dtype)
    if x is None or kind != "nn.prelu":
        return None if x is None else relax.Call(value.op, [x, *value.args[1:]], value.attrs, value.ty_args)
    return relax.op.nn.prelu(x, value.args[1], axes[0])


def _emit_transform(
    builder: relax.BlockBuilder,
    name: str,
    value: relax.Call,
    step: tuple[str, ...],
    twins: dict[relax.Var, relax.Expr],
    first_steps: dict[relax.Var, relax.Expr],
) -> relax.Expr:
    """Emit a transform, or a step of one, or return the variable that already holds its result."""
    direction, *step = step
    source = value.args[0]
    if direction == "into":
        existing = first_steps.get(source) if step == ["last"] else twins.get(source)
        if existing is not None and step != ["first"]:
            return existing
        new = builder.emit(value, name_hint=name)
        if existing is not None:
            first_steps[new] = existing
        return new
    new = builder.emit(value, name_hint=name)
    if step == ["first"]:
        first_steps[new] = source
    elif not step or source in first_steps:
        twins[new] = first_steps[source] if step else source
    return new


def _pool_in_layout(layout: _PermutedLayout | _BlockedLayout, value: relax.Call, x: relax.Expr) -> relax.Call:
    attrs = value.attrs
    pool = getattr(relax.op.nn, operator(value).removeprefix("nn."))
    window = (attrs.pool_size, attrs.strides, attrs.padding, attrs.dilation)
    return pool(x, *window, attrs.ceil_mode, attrs.count_include_pad, layout.name)


def _pad_in_layout(
    layout: _PermutedLayout | _BlockedLayout,
    value: relax.Call,
    to_layout: Callable[[relax.Expr], relax.Expr | None],
) -> relax.Call | None:
    """A padding by one number in the target layout; None for other paddings, and for blocks of channels."""
    if layout.steps > 1 or str(value.attrs.pad_mode) != "constant":
        return None
    x = to_layout(value.args[0])
    if x is None:
        return None
    ends = [int(width) for width in value.attrs.pad_width]
    widths = [0] * len(ends)
    for axis, target in enumerate(layout.axes(range(4)) or ()):
        widths[2 * target : 2 * target + 2] = ends[2 * axis : 2 * axis + 2]
    return relax.op.nn.pad(x, widths, "constant", float(value.attrs.pad_value))


def _operand(
    expr: relax.Expr,
    to_layout: Callable[[relax.Expr], relax.Expr | None],
    layout: _PermutedLayout | _BlockedLayout,
) -> relax.Expr | None:
    """An operand of a binary operator in the target layout; None if it would need a transform."""
    if isinstance(expr, relax.Var):
        return to_layout(expr)
    if not isinstance(expr, tvm.ir.GenericConst):
        return None
    array = expr.value.numpy()
    if array.ndim == 0:
        return expr
    if array.ndim < 4:  # it broadcasts along the last axes
        array = array.reshape((1,) * (4 - array.ndim) + array.shape)
    converted = layout.constant(array) if array.ndim == 4 else None
    return None if converted is None else relax.const(np.ascontiguousarray(converted))
