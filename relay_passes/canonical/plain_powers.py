"""Powers of which a norm is made, as products and roots."""

from __future__ import annotations

import tvm
from tvm import relax

from pimflow.relay_passes.flat import BindingPass, number, operator


@tvm.transform.module_pass(opt_level=0, name="PlainPowers")
class PlainPowers(BindingPass):
    """Make the powers of an Euclidean norm products and roots, as which ONNX's importer writes ``ReduceL2``.

    Rewrite: ``power(abs(x), 2) -> multiply(x, x)``, ``power(x, 0.5) -> sqrt(x)``.
    Preserves: values up to rounding, names. A negative infinity has no root, while its power is infinite.
    """

    def rewrite(self, builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
        """The new value of `var`; None if `value` stays."""
        if operator(value) != "power" or not str(var.ty.dtype).startswith("float"):
            return None
        base, exponent = value.args[0], number(value.args[1])
        if exponent == 0.5:
            return relax.op.sqrt(base)
        inner = builder.lookup_binding(base) if isinstance(base, relax.Var) else None
        if exponent != 2 or operator(inner) != "abs":
            return None
        return relax.op.multiply(inner.args[0], inner.args[0])
