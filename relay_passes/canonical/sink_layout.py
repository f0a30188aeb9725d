"""Layout transforms moved behind operators until they cancel."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import numpy as np
import tvm
from tvm import relax

from pimflow.primitives.layer import BLOCK
from pimflow.relay_passes.flat import operator, rebuild, shape
from pimflow.relay_passes.operators import BINARY, POOL, REDUCE, UNARY

TO_NHWC, TO_NCHW = (0, 2, 3, 1), (0, 3, 1, 2)


class _Permuted:
    """A target layout that is one transpose away from the source layout."""

    def __init__(self, into: tuple[int, ...], out: tuple[int, ...], name: str, other: str):
        self.into, self.out, self.name, self.other = into, out, name, other

    def axes(self, others: Sequence[int]) -> list[int] | None:
        """Axes of the source layout as axes of the target layout; None if one has no counterpart."""
        return [self.out[axis % 4] for axis in others]

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

    def to_kept(self, builder: relax.BlockBuilder, other: relax.Var, name: str) -> relax.Var:
        """Emit `other` in the target layout."""
        return builder.emit(relax.op.permute_dims(other, self.into), name_hint=f"{name}.kept")

    def to_other(self, builder: relax.BlockBuilder, kept: relax.Var, name: str) -> relax.Var:
        """Emit `kept` in the source layout."""
        return builder.emit(relax.op.permute_dims(kept, self.out), name_hint=f"{name}.nchw")


class _Blocked:
    """NCHW16c as target layout, with NHWC as source layout: a transform is a reshape and a transpose."""

    INTO, OUT = (0, 3, 1, 2, 4), (0, 2, 3, 1, 4)
    steps, name, other = 2, "NCHW16c", "NHWC"

    def axes(self, others: Sequence[int]) -> list[int] | None:
        """See `_Permuted.axes`."""
        kept_axes = {0: 0, 1: 2, 2: 3}
        return None if any(a % 4 == 3 for a in others) else [kept_axes[a % 4] for a in others]

    def constant(self, array: np.ndarray) -> np.ndarray | None:
        """`array` in the target layout; None if its channels do not fill blocks."""
        n, h, w, c = array.shape
        if c == 1:
            return array.reshape(n, 1, h, w, 1)
        blocks = array.reshape(n, h, w, c // BLOCK, BLOCK) if c % BLOCK == 0 else None
        return None if blocks is None else blocks.transpose(self.INTO)

    def step_of(self, value: relax.Call) -> tuple[str, ...]:
        """See `_Permuted.step_of`; the steps of a transform are ``first`` and ``last``."""
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

    def to_kept(self, builder: relax.BlockBuilder, other: relax.Var, name: str) -> relax.Var:
        """Emit `other` in the target layout."""
        n, h, w, c = shape(other)
        blocks = builder.emit(relax.op.reshape(other, (n, h, w, c // BLOCK, BLOCK)), name_hint=f"{name}.cut")
        return builder.emit(relax.op.permute_dims(blocks, self.INTO), name_hint=f"{name}.kept")

    def to_other(self, builder: relax.BlockBuilder, kept: relax.Var, name: str) -> relax.Var:
        """Emit `kept` in the source layout."""
        n, blocks, h, w, c = shape(kept)
        pixels = builder.emit(relax.op.permute_dims(kept, self.OUT), name_hint=f"{name}.pixels")
        return builder.emit(relax.op.reshape(pixels, (n, h, w, blocks * c)), name_hint=f"{name}.nhwc")


def _permutation(value: relax.Expr) -> tuple[int, ...]:
    if operator(value) != "permute_dims" or value.attrs.axes is None:
        return ()
    return tuple(int(a) for a in value.attrs.axes)


KEPT = {
    "NHWC": lambda: _Permuted(TO_NHWC, TO_NCHW, "NHWC", "NCHW"),
    "NCHW": lambda: _Permuted(TO_NCHW, TO_NHWC, "NCHW", "NHWC"),
    "NCHW16c": _Blocked,
}


@tvm.transform.module_pass(opt_level=0, name="SinkLayout")
class SinkLayout:
    """Compute operators between two inverse layout transforms in the target layout, and drop the transforms.

    Parameters
    ----------
    kept : str
        The target layout: ``NHWC``, for operators that `ConvertLayout` leaves in NCHW; ``NCHW`` and
        ``NCHW16c``, for primitives of those layouts.
    at : container of str, optional
        Names of variables: only their operators are computed in the target layout, and operands are
        transformed to it if needed. By default all operators whose operands already have the target layout.

    Rewrite, target NHWC: ``op(permute(x, NHWC -> NCHW)) -> permute(op'(x))`` for elementwise operators,
    pools, spatial reductions and concatenations; ``permute(permute(x)) -> x``. Target NCHW16c: the same, with
    transforms in two steps, a reshape and a transpose.
    Preserves: values exactly (sums over channels and space together up to their order), names, interface.
    """

    def __init__(self, kept: str = "NHWC", at: Container[str] | None = None):
        self.kept, self.at = KEPT[kept](), at

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        kept, at = self.kept, self.at
        twins: dict[relax.Var, relax.Expr] = {}  # source to target layout
        begun: dict[relax.Var, relax.Expr] = {}  # result of the first step to that of both

        def twin(builder: relax.BlockBuilder, value: relax.Expr, name: str) -> relax.Var | None:
            """Emit `value` in the target layout; None if that is not possible."""
            if at is not None and name not in at:
                return None

            def in_kept(expr: relax.Expr) -> relax.Expr | None:
                """`expr` in the target layout; None if it has none."""
                if expr in twins or at is None or not isinstance(expr, relax.Var):
                    return twins.get(expr)
                return kept.to_kept(builder, expr, expr.name) if kept.fits(shape(expr)) else None

            new = _kept(kept, value, in_kept)
            return None if new is None else builder.emit(new, name_hint=name)

        def rewrite(builder, var, value):
            """The new value of `var`; None if `value` stays."""
            step = kept.step_of(value)
            if step:
                return _moved(builder, var.name, value, step, twins, begun)
            new = twin(builder, value, var.name)
            if new is None:
                return None
            back = kept.to_other(builder, new, var.name)
            twins[back] = new
            return back

        return rebuild(mod, rewrite)


def _kept(
    kept: _Permuted | _Blocked, value: relax.Expr, in_kept: Callable[[relax.Expr], relax.Expr | None]
) -> relax.Call | None:
    """`value` on operands in the target layout, as `in_kept` gives them; None if that is not possible."""
    kind = operator(value)
    if kind in BINARY and any(isinstance(a, relax.Var) for a in value.args):
        args = [_operand(a, in_kept, kept) for a in value.args]
        known = None not in args and any(isinstance(a, relax.Var) for a in args)
        return relax.Call(value.op, args, value.attrs, value.ty_args) if known else None
    if kind == "concat" and isinstance(value.args[0], relax.Tuple):
        fields = [in_kept(f) for f in value.args[0].fields]
        return None if None in fields else _joined(kept, fields, int(value.attrs.axis))
    if kind not in (*UNARY, *REDUCE, *POOL) or not isinstance(value.args[0], relax.Var):
        return None
    if kind in POOL:
        x = in_kept(value.args[0]) if value.attrs.layout == value.attrs.out_layout == kept.other else None
        return None if x is None else _pooled(kept, value, x)
    if kind in REDUCE:
        axes = value.attrs.axis and kept.axes([int(a) for a in value.attrs.axis])
        if not value.attrs.keepdims or (axes is None and (value.attrs.axis or kept.steps > 1)):
            return None
        x = in_kept(value.args[0])
        return None if x is None else getattr(relax.op, kind)(x, axis=axes, keepdims=True)
    axes = kept.axes([int(value.attrs.axis)]) if kind == "nn.prelu" else []
    x = None if axes is None else in_kept(value.args[0])
    if x is None or kind != "nn.prelu":
        return None if x is None else relax.Call(value.op, [x, *value.args[1:]], value.attrs, value.ty_args)
    return relax.op.nn.prelu(x, value.args[1], axes[0])


def _moved(
    builder: relax.BlockBuilder,
    name: str,
    value: relax.Call,
    step: tuple[str, ...],
    twins: dict[relax.Var, relax.Expr],
    begun: dict[relax.Var, relax.Expr],
) -> relax.Expr:
    """Emit a transform, or a step of one, or return the variable that already holds its result."""
    way, *step = step
    source = value.args[0]
    if way == "into":
        known = begun.get(source) if step == ["last"] else twins.get(source)
        if known is not None and step != ["first"]:
            return known
        new = builder.emit(value, name_hint=name)
        if known is not None:
            begun[new] = known
        return new
    new = builder.emit(value, name_hint=name)
    if step == ["first"]:
        begun[new] = source
    elif not step or source in begun:
        twins[new] = begun[source] if step else source
    return new


def _pooled(kept: _Permuted | _Blocked, value: relax.Call, x: relax.Expr) -> relax.Call:
    attrs = value.attrs
    pool = getattr(relax.op.nn, operator(value).removeprefix("nn."))
    window = (attrs.pool_size, attrs.strides, attrs.padding, attrs.dilation)
    return pool(x, *window, attrs.ceil_mode, attrs.count_include_pad, kept.name)


def _joined(kept: _Permuted | _Blocked, fields: list[relax.Expr], axis: int) -> relax.Call:
    """A concatenation in the target layout; along channels, it concatenates whole blocks."""
    return relax.op.concat(fields, axis=(kept.axes([axis]) or [1])[0])


def _operand(
    expr: relax.Expr, in_kept: Callable[[relax.Expr], relax.Expr | None], kept: _Permuted | _Blocked
) -> relax.Expr | None:
    """An operand of a binary operator in the target layout; None if it would need a transform."""
    if isinstance(expr, relax.Var):
        return in_kept(expr)
    if not isinstance(expr, tvm.ir.GenericConst):
        return None
    array = expr.value.numpy()
    if array.ndim == 0:
        return expr
    if array.ndim < 4 and kept.other == "NHWC":  # it broadcasts along the last axes of NHWC
        array = array.reshape((1,) * (4 - array.ndim) + array.shape)
    made = kept.constant(array) if array.ndim == 4 else None
    return None if made is None else relax.const(np.ascontiguousarray(made))
