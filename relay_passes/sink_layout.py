"""Layout transforms moved to where they vanish."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tvm
from tvm import relax

from pimflow.relay_passes.flat import operator, rebuild, shape

TO_NHWC, TO_NCHW = (0, 2, 3, 1), (0, 3, 1, 2)
UNARY = (
    *(
        "clip",
        "nn.prelu",
        "nn.relu",
        "nn.silu",
        "nn.gelu",
        "nn.leakyrelu",
        "sigmoid",
        "tanh",
        "exp",
        "negative",
    ),
    *("abs", "ceil", "erf", "floor", "log", "round", "rsqrt", "sign", "sqrt"),
)
BINARY = ("add", "subtract", "multiply", "divide", "maximum", "minimum", "power")
REDUCE = ("mean", "sum", "max", "min")
BLOCK = 16  # channels side by side in NCHW16c


class _Permuted:
    """A layout that is kept, of which one transpose makes the other."""

    def __init__(self, into: tuple[int, ...], out: tuple[int, ...]):
        self.into, self.out = into, out

    def axes(self, others: Sequence[int]) -> list[int] | None:
        """Axes of the other layout as those of ours; None if they have no like here."""
        return [self.out[axis % 4] for axis in others]

    def constant(self, array: np.ndarray) -> np.ndarray | None:
        return array.transpose(self.into)

    def chain(self, value: relax.Call) -> tuple[str, ...]:
        """Of a step of a transform: which way it goes, and which step it is."""
        axes = _permutation(value)
        return ("into",) if axes == self.into else ("out",) if axes == self.out else ()

    steps = 1

    def back(self, builder: relax.BlockBuilder, kept: relax.Var, name: str) -> relax.Var:
        return builder.emit(relax.op.permute_dims(kept, self.out), name_hint=f"{name}.nchw")


class _Blocked:
    """NCHW16c, kept where the other layout is NHWC: a transform is a reshape and a transpose."""

    INTO, OUT = (0, 3, 1, 2, 4), (0, 2, 3, 1, 4)
    steps = 2

    def axes(self, others: Sequence[int]) -> list[int] | None:
        found = {0: 0, 1: 2, 2: 3}
        return None if any(a % 4 == 3 for a in others) else [found[a % 4] for a in others]

    def constant(self, array: np.ndarray) -> np.ndarray | None:
        n, h, w, c = array.shape
        if c == 1:
            return array.reshape(n, 1, h, w, 1)
        blocks = array.reshape(n, h, w, c // BLOCK, BLOCK) if c % BLOCK == 0 else None
        return None if blocks is None else blocks.transpose(self.INTO)

    def chain(self, value: relax.Call) -> tuple[str, ...]:
        if operator(value) == "reshape":
            before, after = shape(value.args[0]), tuple(map(int, getattr(value.args[1], "values", ())))
            if len(before) == 4 and after == (*before[:3], before[3] // BLOCK, BLOCK):
                return ("into", "first")
            joined = len(before) == 5 and before[4] == BLOCK and after == (*before[:3], before[3] * BLOCK)
            return ("out", "last") if joined else ()
        axes = _permutation(value)
        return ("into", "last") if axes == self.INTO else ("out", "first") if axes == self.OUT else ()

    def back(self, builder: relax.BlockBuilder, kept: relax.Var, name: str) -> relax.Var:
        n, blocks, h, w, c = shape(kept)
        pixels = builder.emit(relax.op.permute_dims(kept, self.OUT))
        return builder.emit(relax.op.reshape(pixels, (n, h, w, blocks * c)), name_hint=f"{name}.nhwc")


def _permutation(value: relax.Expr) -> tuple[int, ...]:
    if operator(value) != "permute_dims" or value.attrs.axes is None:
        return ()
    return tuple(int(a) for a in value.attrs.axes)


KEPT = {
    "NHWC": lambda: _Permuted(TO_NHWC, TO_NCHW),
    "NCHW": lambda: _Permuted(TO_NCHW, TO_NHWC),
    "NCHW16c": _Blocked,
}


@tvm.transform.module_pass(opt_level=0, name="SinkLayout")
class SinkLayout:
    """One layout kept through operators that are between transforms to the other and back.

    Parameters
    ----------
    kept : str
        ``NHWC``, for what `ConvertLayout` leaves in NCHW; ``NCHW`` and ``NCHW16c``, for primitives of those
        layouts.

    Rewrite, keeping NHWC: ``op(permute(x, NHWC -> NCHW)) -> permute(op'(x))`` for elementwise operators,
    spatial reductions and concatenations; ``permute(permute(x)) -> x``. Keeping NCHW16c: the same of
    transforms in two steps, a reshape and a transpose.
    Preserves: values exactly (sums over channels and space together up to their order), names, interface.
    """

    def __init__(self, kept: str = "NHWC"):
        self.kept = KEPT[kept]()

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        kept = self.kept
        twins: dict[relax.Var, relax.Expr] = {}  # a variable in the other layout to the same tensor in ours
        begun: dict[relax.Var, relax.Expr] = {}  # half a transform to what it would be whole

        def twin(builder: relax.BlockBuilder, value: relax.Expr, name: str) -> relax.Var | None:
            kind = operator(value)
            if kind == "nn.prelu" and value.args[0] in twins:
                axes = kept.axes([int(value.attrs.axis)])
                if axes is None:
                    return None
                new = relax.op.nn.prelu(twins[value.args[0]], value.args[1], axes[0])
                return builder.emit(new, name_hint=name)
            if kind in UNARY and value.args[0] in twins:
                args = [twins[value.args[0]], *value.args[1:]]
            elif kind in BINARY and any(a in twins for a in value.args if isinstance(a, relax.Var)):
                args = [_operand(a, twins, kept) for a in value.args]
                if None in args:
                    return None
            elif kind in REDUCE and value.args[0] in twins and value.attrs.keepdims:
                return _reduced(builder, kept, value, twins[value.args[0]], name)
            elif kind == "concat" and all(f in twins for f in getattr(value.args[0], "fields", (None,))):
                fields = [twins[f] for f in value.args[0].fields]
                return builder.emit(_joined(kept, fields, int(value.attrs.axis)), name_hint=name)
            else:
                return None
            return builder.emit(relax.Call(value.op, args, value.attrs, value.ty_args), name_hint=name)

        def rewrite(builder, var, value):
            step = kept.chain(value)
            if step:
                return _moved(builder, var.name, value, step, twins, begun)
            new = twin(builder, value, var.name)
            if new is None:
                return None
            back = kept.back(builder, new, var.name)
            twins[back] = new
            return back

        return rebuild(mod, rewrite)


def _moved(
    builder: relax.BlockBuilder,
    name: str,
    value: relax.Call,
    step: tuple[str, ...],
    twins: dict[relax.Var, relax.Expr],
    begun: dict[relax.Var, relax.Expr],
) -> relax.Expr:
    """A transform, or a step of one: what it makes is known already, or will be."""
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


def _reduced(
    builder: relax.BlockBuilder, kept: _Permuted | _Blocked, value: relax.Call, twin: relax.Expr, name: str
) -> relax.Var | None:
    axes = value.attrs.axis and kept.axes([int(a) for a in value.attrs.axis])
    if axes is None and (value.attrs.axis or kept.steps > 1):
        return None
    reduce = getattr(relax.op, operator(value))
    return builder.emit(reduce(twin, axis=axes, keepdims=True), name_hint=name)


def _joined(kept: _Permuted | _Blocked, fields: list[relax.Expr], axis: int) -> relax.Call:
    """A concatenation; of channels, of whole blocks of them."""
    return relax.op.concat(fields, axis=(kept.axes([axis]) or [1])[0])


def _operand(
    expr: relax.Expr, twins: dict[relax.Var, relax.Expr], kept: _Permuted | _Blocked
) -> relax.Expr | None:
    """A binary operator's operand in the layout that is kept; None if it would need a transform."""
    if isinstance(expr, relax.Var):
        return twins.get(expr)
    if not isinstance(expr, tvm.ir.GenericConst):
        return None
    array = expr.value.numpy()
    if array.ndim == 0:
        return expr
    made = kept.constant(array) if array.ndim == 4 else None
    return None if made is None else relax.const(np.ascontiguousarray(made))
