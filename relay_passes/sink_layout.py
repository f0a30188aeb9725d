"""Layout transforms moved to where they vanish."""

from __future__ import annotations

import tvm
from tvm import relax

from pimflow.relay_passes.flat import operator, rebuild

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


@tvm.transform.module_pass(opt_level=0, name="SinkLayout")
class SinkLayout:
    """One layout kept through operators that are between transforms to the other and back.

    Parameters
    ----------
    kept : str
        ``NHWC``, for what `ConvertLayout` leaves in NCHW; ``NCHW``, for primitives of that layout.

    Rewrite, keeping NHWC: ``op(permute(x, NHWC -> NCHW)) -> permute(op'(x))`` for elementwise operators,
    spatial reductions and concatenations; ``permute(permute(x)) -> x``.
    Preserves: values exactly (sums over channels and space together up to their order), names, interface.
    """

    def __init__(self, kept: str = "NHWC"):
        self.into, self.out = (TO_NHWC, TO_NCHW) if kept == "NHWC" else (TO_NCHW, TO_NHWC)

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        into, out = self.into, self.out
        twins: dict[relax.Var, relax.Expr] = {}  # a variable in the other layout to the same tensor in ours

        def twin(builder: relax.BlockBuilder, value: relax.Expr, name: str) -> relax.Var | None:
            kind = operator(value)
            if kind == "nn.prelu" and value.args[0] in twins:
                axis = out[int(value.attrs.axis) % 4]
                new = relax.op.nn.prelu(twins[value.args[0]], value.args[1], axis)
                return builder.emit(new, name_hint=name)
            if kind in UNARY and value.args[0] in twins:
                args = [twins[value.args[0]], *value.args[1:]]
            elif kind in BINARY and any(a in twins for a in value.args if isinstance(a, relax.Var)):
                args = [_operand(a, twins, into) for a in value.args]
                if None in args:
                    return None
            elif kind in REDUCE and value.args[0] in twins and value.attrs.keepdims:
                axes = value.attrs.axis and [out[int(a) % 4] for a in value.attrs.axis]
                reduce = getattr(relax.op, kind)
                return builder.emit(reduce(twins[value.args[0]], axis=axes, keepdims=True), name_hint=name)
            elif kind == "concat" and all(f in twins for f in getattr(value.args[0], "fields", (None,))):
                fields = [twins[f] for f in value.args[0].fields]
                axis = out[int(value.attrs.axis) % 4]
                return builder.emit(relax.op.concat(fields, axis=axis), name_hint=name)
            else:
                return None
            return builder.emit(relax.Call(value.op, args, value.attrs, value.ty_args), name_hint=name)

        def rewrite(builder, var, value):
            if operator(value) == "permute_dims" and value.attrs.axes is not None:
                axes = tuple(int(a) for a in value.attrs.axes)
                if axes == into and value.args[0] in twins:
                    return twins[value.args[0]]
                new = builder.emit(value, name_hint=var.name)
                if axes == out:
                    twins[new] = value.args[0]
                return new
            new = twin(builder, value, var.name)
            if new is None:
                return None
            back = builder.emit(relax.op.permute_dims(new, out), name_hint=f"{var.name}.nchw")
            twins[back] = new
            return back

        return rebuild(mod, rewrite)


def _operand(
    expr: relax.Expr, twins: dict[relax.Var, relax.Expr], into: tuple[int, ...]
) -> relax.Expr | None:
    """A binary operator's operand in the layout that is kept; None if it would need a transform."""
    if isinstance(expr, relax.Var):
        return twins.get(expr)
    if not isinstance(expr, tvm.ir.GenericConst):
        return None
    array = expr.value.numpy()
    if array.ndim == 0:
        return expr
    return relax.const(array.transpose(into)) if array.ndim == 4 else None
