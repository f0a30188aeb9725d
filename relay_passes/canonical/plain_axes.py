"""Axes in a form that TVM's layout pass handles correctly."""

from __future__ import annotations

import tvm
from tvm import relax

from pimflow.relay_passes.flat import BindingPass, operator, shape


@tvm.transform.module_pass(opt_level=0, name="PlainAxes")
class PlainAxes(BindingPass):
    """Work around two faults of `ConvertLayout`.

    It uses a negative axis of ``squeeze`` as a size of memory, and permutes several axes of ``layer_norm``
    without permuting the scale and bias along them.

    Rewrite: ``squeeze(x, [-1]) -> squeeze(x, [rank - 1])``,
    ``layer_norm(x, s, b, [-2, -1]) -> reshape(layer_norm(reshape(x), reshape(s), reshape(b), [-1]))``.
    Preserves: values exactly, names.
    """

    def rewrite(self, builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
        """The new value of `var`; None if `value` stays."""
        kind = operator(value)
        if kind == "squeeze" and value.attrs.axis is not None:
            rank = len(shape(value.args[0]))
            return relax.op.squeeze(value.args[0], [int(a) % rank for a in value.attrs.axis])
        if kind == "nn.layer_norm" and len(value.attrs.axes) > 1:
            dims = shape(value.args[0])
            flat = (*dims[: len(dims) - len(value.attrs.axes)], -1)
            x, scale, bias = (
                builder.emit(relax.op.reshape(arg, to)) for arg, to in zip(value.args, (flat, (-1,), (-1,)))
            )
            attrs = value.attrs
            normed = relax.op.nn.layer_norm(x, scale, bias, [-1], attrs.epsilon, attrs.center, attrs.scale)
            return relax.op.reshape(builder.emit(normed, name_hint=f"{var.name}_flat"), dims)
        return None
