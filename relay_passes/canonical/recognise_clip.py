"""Recognition of clip in clamp kernels."""

from __future__ import annotations

import tvm
from tvm import relax, tirx

from pimflow.relay_passes.flat import main_bindings, rebuild


@tvm.transform.module_pass(opt_level=0, name="RecogniseClip")
class RecogniseClip:
    """Turn clamp kernels back into ``clip``, which other passes understand.

    The ONNX importer writes ReLU6 (Clip) as two opaque kernels behind NaN tests of its bounds. Run
    `EvaluateConstants` first, which folds these tests.

    Rewrite: ``call_tir(minimum, call_tir(maximum, x, lo), hi) -> clip(x, lo, hi)``; with lo = 0 and
    hi = infinity, ``relu(x)``.
    Preserves: values (except results for NaN), names, shapes.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        clamps = {b.var: _clamp(mod, b.value) for b in main_bindings(mod)}
        bounds: dict[relax.Var, tuple[relax.Expr, float, float]] = {}

        def rewrite(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
            """The new value of `var`; None if `value` stays."""
            clamp_bound = clamps[var]
            if clamp_bound is None:
                return None
            kind, bound = clamp_bound
            operand = value.args[1][0]
            source, low, high = bounds.get(operand, (operand, -float("inf"), float("inf")))
            clamp = max if kind == "max" else min
            low, high = clamp(low, bound), clamp(high, bound)  # both: the later clamp wins a crossed pair
            new = relax.op.clip(source, low, high)
            if (low, high) == (0.0, float("inf")):
                new = relax.op.nn.relu(source)
            emitted = builder.emit(new, name_hint=var.name)
            bounds[emitted] = (source, low, high)
            return emitted

        return rebuild(mod, rewrite) if any(clamps.values()) else mod


def _clamp(mod: tvm.IRModule, value: relax.Expr) -> tuple[str, float] | None:
    """("max" or "min", bound) if `value` calls a kernel that clamps a float tensor by a constant scalar.

    Integers are excluded: they have no infinity for the missing bound of a one-sided clip.
    """
    if not isinstance(value, relax.Call) or value.op != tvm.ir.Op.get("relax.call_tir"):
        return None
    statement = mod[value.args[0]].body
    while not isinstance(statement, tirx.BufferStore):
        statement = getattr(statement, "block", None) or getattr(statement, "body", None)
        if statement is None:
            return None
    clamp = statement.value
    if not isinstance(clamp, tirx.Max | tirx.Min):
        return None
    read, written = getattr(clamp.a, "indices", ()), statement.indices
    if len(read) != len(written) or not all(r.same_as(w) for r, w in zip(read, written)):
        return None  # the first operand is not the element itself
    bound = _bound(clamp.b, value.args[1])
    return None if bound is None else ("max" if isinstance(clamp, tirx.Max) else "min", bound)


def _bound(operand: tirx.Expr, args: relax.Tuple) -> float | None:
    """The constant that a clamp of ``args[0]`` has as second operand; None if it is no constant float."""
    if len(args) == 1 and isinstance(operand, tirx.FloatImm):  # ONNX opset 6 to 10
        return float(operand.value)
    if len(args) != 2 or not isinstance(args[1], tvm.ir.GenericConst) or args[1].value.ndim:
        return None
    scalar = not len(getattr(operand, "indices", (None,)))
    return float(args[1].value.numpy()) if scalar and str(args[1].value.dtype).startswith("float") else None
