"""Biases of convolutions, merged into the normalisation behind them."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax

from pimflow.relay_passes.flat import constant, main_bindings, operator, rebuild, shape, use_counts


@tvm.transform.module_pass(opt_level=0, name="MergeBias")
class MergeBias:
    """Subtract the bias of a convolution from the mean of the normalisation that is its only reader.

    `FoldNormalisation` folds a normalisation directly behind a convolution, and no other.

    Rewrite: ``batch_norm(conv2d(x, w) + b, mean) -> batch_norm(conv2d(x, w), mean - b)``.
    Preserves: values up to rounding, names.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        kinds = {binding.var: operator(binding.value) for binding in main_bindings(mod)}
        if "nn.batch_norm" not in kinds.values():
            return mod
        counts = use_counts(mod)

        def rewrite(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
            """The new value of `var`; None if `value` stays."""
            if kinds[var] != "nn.batch_norm" or not isinstance(value.args[3], tvm.ir.GenericConst):
                return None
            added = builder.lookup_binding(value.args[0]) if isinstance(value.args[0], relax.Var) else None
            if operator(added) != "add" or counts.get(value.args[0], 0) != 1 or int(value.attrs.axis) != 1:
                return None
            convolution, bias = added.args
            if not isinstance(bias, tvm.ir.GenericConst) or not isinstance(convolution, relax.Var):
                return None
            array, channels = bias.value.numpy(), shape(convolution)[1]
            is_by_channel = array.ndim == 4 and array.shape == (1, channels, 1, 1)
            if operator(builder.lookup_binding(convolution)) != "nn.conv2d" or not is_by_channel:
                return None
            mean = constant((value.args[3].value.numpy() - array.reshape(-1)).astype(np.float32))
            arguments = [convolution, *value.args[1:3], mean, value.args[4]]
            return relax.Call(value.op, arguments, value.attrs, value.ty_args)

        return rebuild(mod, rewrite)
