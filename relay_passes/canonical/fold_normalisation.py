"""Normalisations behind convolutions, folded into their filters."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax

from pimflow.relay_passes.flat import constant, main_bindings, operator, rebuild


@tvm.transform.module_pass(opt_level=0, name="FoldNormalisation")
class FoldNormalisation:
    """Multiply the filters of a convolution by the scales of the normalisation behind it.

    TVM's `FoldBatchnormToConv2D` does the same, but visits the whole network for each normalisation.

    Rewrite: ``batch_norm(conv2d(x, w)) -> conv2d(x, w') + b``, for constants and filters in OIHW.
    Preserves: values up to rounding, names.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        if all(operator(binding.value) != "nn.batch_norm" for binding in main_bindings(mod)):
            return mod
        mod = rebuild(mod, _fold)
        mod["main"] = relax.analysis.remove_all_unused(mod["main"])
        return mod


def _fold(builder: relax.BlockBuilder, _: relax.Var, value: relax.Expr) -> relax.Expr | None:
    """The folded convolution and its bias in place of the result of a normalisation; None for others."""
    if not isinstance(value, relax.TupleGetItem) or value.index != 0:
        return None
    norm = _definition(builder, value.tuple_value)
    if operator(norm) != "nn.batch_norm" or int(norm.attrs.axis) != 1:
        return None
    convolution = _definition(builder, norm.args[0])
    if operator(convolution) != "nn.conv2d" or str(convolution.attrs.kernel_layout) != "OIHW":
        return None
    constants = [convolution.args[1], *norm.args[1:]]
    if not all(isinstance(argument, tvm.ir.GenericConst) for argument in constants):
        return None
    filters, scale, shift, mean, variance = (np.from_dlpack(argument.value) for argument in constants)
    scale = scale / np.sqrt(variance + np.asarray(norm.attrs.epsilon, variance.dtype))
    bias = (shift - mean * scale).reshape(1, -1, 1, 1)
    arguments = [convolution.args[0], constant(filters * scale.reshape(-1, 1, 1, 1))]
    folded = builder.emit(relax.Call(convolution.op, arguments, convolution.attrs))
    return relax.op.add(folded, constant(bias))


def _definition(builder: relax.BlockBuilder, expr: relax.Expr) -> relax.Expr | None:
    """The value that a variable is bound to; None if it is bound to none."""
    return builder.lookup_binding(expr) if isinstance(expr, relax.Var) else None
