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
    """NHWC kept through operators that `ConvertLayout` leaves in NCHW.

    Rewrite: ``op(permute(x, NHWC -> NCHW)) -> permute(op'(x))`` for elementwise operators, spatial
    reductions and concatenations; ``permute(permute(x)) -> x``.
    Preserves: values exactly (sums over channels and space together up to their order), names, interface.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        nhwc: dict[relax.Var, relax.Expr] = {}  # an NCHW variable to the same tensor in NHWC

        def twin(builder: relax.BlockBuilder, value: relax.Expr, name: str) -> relax.Var | None:
            kind = operator(value)
            if kind == "nn.prelu" and value.args[0] in nhwc:
                axis = TO_NCHW[int(value.attrs.axis) % 4]
                new = relax.op.nn.prelu(nhwc[value.args[0]], value.args[1], axis)
                return builder.emit(new, name_hint=name)
            if kind in UNARY and value.args[0] in nhwc:
                args = [nhwc[value.args[0]], *value.args[1:]]
            elif kind in BINARY and any(a in nhwc for a in value.args if isinstance(a, relax.Var)):
                args = [_operand(a, nhwc) for a in value.args]
                if None in args:
                    return None
            elif kind in REDUCE and value.args[0] in nhwc and value.attrs.keepdims:
                axes = value.attrs.axis and [TO_NCHW[int(a) % 4] for a in value.attrs.axis]
                reduce = getattr(relax.op, kind)
                return builder.emit(reduce(nhwc[value.args[0]], axis=axes, keepdims=True), name_hint=name)
            elif kind == "concat" and all(f in nhwc for f in getattr(value.args[0], "fields", (None,))):
                fields = [nhwc[f] for f in value.args[0].fields]
                axis = TO_NCHW[int(value.attrs.axis) % 4]
                return builder.emit(relax.op.concat(fields, axis=axis), name_hint=name)
            else:
                return None
            return builder.emit(relax.Call(value.op, args, value.attrs, value.ty_args), name_hint=name)

        def rewrite(builder, var, value):
            if operator(value) == "permute_dims" and value.attrs.axes is not None:
                axes = tuple(int(a) for a in value.attrs.axes)
                if axes == TO_NHWC and value.args[0] in nhwc:
                    return nhwc[value.args[0]]
                new = builder.emit(value, name_hint=var.name)
                if axes == TO_NCHW:
                    nhwc[new] = value.args[0]
                return new
            new = twin(builder, value, var.name)
            if new is None:
                return None
            back = builder.emit(relax.op.permute_dims(new, TO_NCHW), name_hint=f"{var.name}.nchw")
            nhwc[back] = new
            return back

        return rebuild(mod, rewrite)


def _operand(expr: relax.Expr, nhwc: dict[relax.Var, relax.Expr]) -> relax.Expr | None:
    """A binary operator's operand in NHWC, or None if it would need a transform of its own."""
    if isinstance(expr, relax.Var):
        return nhwc.get(expr)
    if not isinstance(expr, tvm.ir.GenericConst):
        return None
    array = expr.value.numpy()
    if array.ndim == 0:
        return expr
    return relax.const(array.transpose(TO_NHWC)) if array.ndim == 4 else None
