"""Biases of linear layers, moved to where they cost nothing."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax

from pimflow.relay_passes.flat import main_bindings, operator, rebuild, shape


@tvm.transform.module_pass(opt_level=0, name="PushBias")
class PushBias:
    """Push biases through convolutions without padding, products and additions.

    A linear layer without activation, such as the projection of an inverted residual, then ends with
    its convolution, and PIM computes all of it. A bias is pushed only if every reader can take it, so no
    tensor is needed both with and without it. The kernel that finally adds it adds a bias anyway.

    Parameters
    ----------
    pushed_biases : dict of str to ndarray, optional
        Filled with the biases that were pushed through convolutions and products: by name of their
        variable, the bias of the operand, by channel.

    Rewrite: ``conv2d(x + b, w) + c -> conv2d(x, w) + (w*b + c)``,
    ``(x + b) + (y + c) -> (x + y) + (b + c)``.
    Preserves: values up to rounding, names.
    """

    def __init__(self, pushed_biases: dict[str, np.ndarray] | None = None):
        self.pushed_biases = {} if pushed_biases is None else pushed_biases

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        fixed = set(relax.analysis.free_vars(mod["main"].body.body))  # a reader cannot take a bias
        for binding in main_bindings(mod):
            if not _linear(binding.value):
                fixed |= set(relax.analysis.free_vars(binding.value))
        offsets: dict[relax.Var, np.ndarray] = {}  # by variable, the bias still to be added

        def rewrite(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
            """The new value of `var`; None if `value` stays."""
            if not _linear(value):
                return None
            base, offset = _extract_bias(value, offsets)
            if operator(value) != "add" and value.args[0] in offsets:
                self.pushed_biases[var.name] = offsets[value.args[0]]
            if offset is None or (var in fixed and not offsets.keys() & set(value.args)):
                return None
            # A separate variable: the base may have other readers, to which the bias does not belong.
            new = builder.emit(base, name_hint=var.name)
            if var not in fixed:
                offsets[new] = offset
                return new
            bias = relax.const(offset.reshape((1,) * (len(shape(var)) - 1) + (-1,)))
            return builder.emit(relax.op.add(new, bias), name_hint=f"{var.name}_out")

        return rebuild(mod, rewrite)


def _linear(value: relax.Expr) -> bool:
    """Whether a bias of an operand becomes a bias of the result."""
    kind = operator(value)
    if kind == "add":
        x, y = value.args
        if isinstance(x, relax.Var) and isinstance(y, relax.Var):
            return shape(x) == shape(y)
        return isinstance(x, relax.Var) and _is_per_channel(y, shape(x))
    if kind == "matmul":
        x, matrix = value.args
        return isinstance(x, relax.Var) and isinstance(matrix, tvm.ir.GenericConst) and matrix.value.ndim == 2
    return (
        kind == "nn.conv2d"
        and int(value.attrs.groups) == 1
        and not any(int(p) for p in value.attrs.padding)
        and (value.attrs.data_layout, value.attrs.kernel_layout) == ("NHWC", "OHWI")
        and isinstance(value.args[1], tvm.ir.GenericConst)
    )


def _is_per_channel(expr: relax.Expr, like: tuple[int, ...]) -> bool:
    """Whether `expr` is a constant with one element for each entry of the last axis of `from_attention`."""
    if not isinstance(expr, tvm.ir.GenericConst) or not like:
        return False
    size = [int(d) for d in expr.value.shape]
    return len(size) <= len(like) and size[-1:] == [like[-1]] and int(np.prod(size)) == like[-1]


def _extract_bias(
    value: relax.Call, offsets: dict[relax.Var, np.ndarray]
) -> tuple[relax.Expr, np.ndarray | None]:
    """A linear `value` without the biases of its operands, and the bias by channel to add to its result."""
    x, y = value.args
    bias_of_x = offsets.get(x)
    if operator(value) == "add" and isinstance(y, relax.Var):
        biases = [o for o in (bias_of_x, offsets.get(y)) if o is not None]
        return value, sum(biases) if biases else None
    if operator(value) == "add":
        bias = y.value.numpy().reshape(-1)
        return x, bias if bias_of_x is None else bias_of_x + bias
    if bias_of_x is None:
        return value, None
    filters = y.value.numpy()
    matrix = filters if operator(value) == "matmul" else filters.sum(axis=(1, 2)).T
    return value, (bias_of_x.astype(np.float64) @ matrix).astype(bias_of_x.dtype)
