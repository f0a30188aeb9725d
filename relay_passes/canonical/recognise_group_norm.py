"""Group normalisation as one operator."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import tvm
from tvm import relax

from pimflow.relay_passes.flat import constant, main_bindings, operator, rebuild, shape, use_counts


@dataclass(frozen=True, kw_only=True)
class _GroupNorm:
    """Group normalisation of `x`, [N, C, …], with a scale and a shift by channel, [C]."""

    x: relax.Var
    groups: int
    epsilon: float
    scale: np.ndarray
    shift: np.ndarray

    def call(self, x: relax.Expr) -> relax.Expr:
        """The operator on `x`."""
        axes = list(range(2, len(shape(x))))
        scale, shift = constant(self.scale), constant(self.shift)
        return relax.op.nn.group_norm(x, scale, shift, self.groups, 1, axes, self.epsilon)


@tvm.transform.module_pass(opt_level=0, name="RecogniseGroupNorm")
class RecogniseGroupNorm:
    """Make group normalisation one operator, as which it is one kernel.

    ONNX has no such operator in most opsets: exporters write each group as a channel, normalise channels, and
    scale the result.

    Rewrite: ``reshape(group_norm(reshape(x, [N, G, L]), groups=G), [N, C, …]) * s + b ->
    group_norm(x, s, b, groups=G)``, with constants s and b, either of which may lack.
    Preserves: values up to rounding, names.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        values = {binding.var: binding.value for binding in main_bindings(mod)}
        counts = use_counts(mod)
        norms: dict[relax.Var, _GroupNorm] = {}
        for var, value in values.items():
            norm = _regroup(value, values, counts) or _rescale(value, norms, counts)
            if norm is not None:
                norms[var] = norm
        if not norms:
            return mod
        var_remap: dict[relax.Var, relax.Expr] = {var: var for var in mod["main"].params}

        def rewrite(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
            """The new value of `var`; None if `value` stays."""
            return norms[var].call(var_remap[norms[var].x]) if var in norms else None

        return rebuild(mod, rewrite, var_remap)


def _regroup(
    value: relax.Expr, values: dict[relax.Var, relax.Expr], counts: dict[relax.Var, int]
) -> _GroupNorm | None:
    """The normalisation of which `value` is the second reshape; None if it is none."""
    if operator(value) != "reshape" or counts.get(value.args[0], 0) != 1:
        return None
    inner = values.get(value.args[0])
    if operator(inner) != "nn.group_norm" or counts.get(inner.args[0], 0) != 1:
        return None
    outer = values.get(inner.args[0])
    parts = inner.args[1:3]
    if operator(outer) != "reshape" or not all(isinstance(part, tvm.ir.GenericConst) for part in parts):
        return None
    x, dims, grouped = outer.args[0], shape(outer.args[0]), shape(outer)
    groups, attrs = int(inner.attrs.num_groups), inner.attrs
    is_plain = int(attrs.channel_axis) == 1 and attrs.center and attrs.scale
    if not isinstance(x, relax.Var) or not is_plain or len(dims) < 3 or shape(value) != dims:
        return None
    if grouped[:2] != (dims[0], groups) or dims[1] % groups:
        return None
    scale, shift = (np.repeat(part.value.numpy(), dims[1] // groups) for part in parts)
    return _GroupNorm(x=x, groups=groups, epsilon=float(attrs.epsilon), scale=scale, shift=shift)


def _rescale(
    value: relax.Expr, norms: dict[relax.Var, _GroupNorm], counts: dict[relax.Var, int]
) -> _GroupNorm | None:
    """The normalisation that `value` scales or shifts by a constant of one element a channel; else None."""
    kind = operator(value)
    for operand, part in (value.args, value.args[::-1]) if kind in ("multiply", "add") else ():
        norm = norms.get(operand)
        if norm is None or counts[operand] != 1 or not isinstance(part, tvm.ir.GenericConst):
            continue
        dims, array = shape(operand), part.value.numpy()
        if shape(value) != dims or array.ndim > len(dims):
            return None
        padded = array.reshape((1,) * (len(dims) - array.ndim) + array.shape)
        if padded.shape not in {(1, channels, *(1,) * (len(dims) - 2)) for channels in (1, dims[1])}:
            return None
        by_channel = np.broadcast_to(padded.reshape(-1), (dims[1],))
        if kind == "add":
            return replace(norm, shift=norm.shift + by_channel)
        return replace(norm, scale=norm.scale * by_channel, shift=norm.shift * by_channel)
    return None
