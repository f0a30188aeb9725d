"""Activations as single operators, which can be fused."""

from __future__ import annotations

import math

import numpy as np
import tvm
from tvm import relax

from pimflow.relay_passes.flat import main_bindings, number, operator, rebuild, use_counts


@tvm.transform.module_pass(opt_level=0, name="PlainActivations")
class PlainActivations:
    """Make GELU, SiLU and PReLU with one slope single operators, which fuse with the layer before.

    As several operators, GELU and SiLU read their operand twice, so they would be computed in the kernels of
    the layers behind them: repeatedly, for each tile, and in a separate kernel if PIM does such a layer.

    Rewrite: ``x * (1 + erf(x / sqrt(2))) * 0.5 -> gelu(x)``, ``x * sigmoid(x) -> silu(x)``,
    ``prelu(x, s) -> leakyrelu(x, s)``.
    Preserves: values (those of GELU up to rounding), names.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        values = {binding.var: binding.value for binding in main_bindings(mod)}
        counts = use_counts(mod)
        gelus = {var: x for var in values if (x := _gelu_operand(var, values, counts)) is not None}
        silus = {var: x for var in values if (x := _silu_operand(var, values, counts)) is not None}
        var_remap: dict[relax.Var, relax.Expr] = {var: var for var in mod["main"].params}

        def rewrite(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
            """The new value of `var`; None if `value` stays."""
            if var in gelus:
                return relax.op.nn.gelu(var_remap[gelus[var]])
            if var in silus:
                return relax.op.nn.silu(var_remap[silus[var]])
            if operator(value) == "nn.prelu" and isinstance(value.args[1], tvm.ir.GenericConst):
                slopes = np.unique(value.args[1].value.numpy())
                if slopes.size == 1:
                    return relax.op.nn.leakyrelu(value.args[0], float(slopes[0]))
            return None

        return rebuild(mod, rewrite, var_remap)


Bindings = dict[relax.Var, relax.Expr]


def _gelu_operand(var: relax.Var, values: Bindings, counts: dict[relax.Var, int]) -> relax.Var | None:
    """x, if `var` is 0.5 * x * (1 + erf(x / sqrt(2))) with its factors in any order; else None."""
    factors = _factors(var, values, counts)
    numbers = [number(f) for f in factors]
    others = [f for f, value in zip(factors, numbers) if value is None]
    scale = math.prod(value for value in numbers if value is not None)
    if len(factors) == len(others) or len(others) != 2 or not math.isclose(scale, 0.5, rel_tol=1e-6):
        return None
    for x, curve in (others, others[::-1]):
        for erf, addend in _operands(curve, "add", values, counts):
            if number(addend) != 1 or operator(values.get(erf)) != "erf" or counts[erf] > 1:
                continue
            inner = values[erf].args[0]
            scaled = [(a, number(b)) for a, b in _operands(inner, "multiply", values, counts)]
            value = values.get(inner)
            if operator(value) == "divide" and (divisor := number(value.args[1])):
                scaled = [(value.args[0], 1 / divisor)]
            if any(a.same_as(x) and b and math.isclose(b, math.sqrt(0.5), rel_tol=1e-6) for a, b in scaled):
                return x
    return None


def _silu_operand(var: relax.Var, values: Bindings, counts: dict[relax.Var, int]) -> relax.Var | None:
    """x, if `var` is x * sigmoid(x), whose sigmoid nothing else reads; else None."""
    value = values[var]
    if operator(value) != "multiply":
        return None
    for x, curve in (value.args, value.args[::-1]):
        if (
            operator(values.get(curve)) == "sigmoid"
            and counts[curve] == 1
            and values[curve].args[0].same_as(x)
        ):
            return x
    return None


def _factors(expr: relax.Expr, values: Bindings, counts: dict[relax.Var, int], root: bool = True) -> list:
    """Leaves of a tree of multiplications whose inner results have no other reader."""
    value = values.get(expr) if isinstance(expr, relax.Var) else None
    if operator(value) == "multiply" and (root or counts[expr] == 1):
        return [f for arg in value.args for f in _factors(arg, values, counts, root=False)]
    return [expr]


def _operands(expr: relax.Expr, kind: str, values: Bindings, counts: dict[relax.Var, int]) -> list:
    """Both orders of the operands of `expr`, if it is a `kind` with a single reader; else an empty list."""
    value = values.get(expr) if isinstance(expr, relax.Var) else None
    if operator(value) != kind or counts[expr] > 1:
        return []
    first, second = value.args
    return [(first, second), (second, first)]
