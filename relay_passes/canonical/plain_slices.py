"""Single elements along an axis as slices, which need no kernel of their own."""

from __future__ import annotations

import tvm
from tvm import relax

from pimflow.relay_passes.flat import operator, rebuild, shape


@tvm.transform.module_pass(opt_level=0, name="PlainSlices")
class PlainSlices:
    """Make ``take`` at one constant index a slice: a kernel reads it in place, or it is a view.

    A concatenation of one tensor is that tensor.

    Rewrite: ``concat((x,)) -> x``,
    ``take(x, i, axis) -> squeeze(strided_slice(x, [axis], [i], [i + 1]), [axis])``.
    Preserves: values exactly, names. A constant index out of bounds stays.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""

        def rewrite(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
            """The new value of `var`; None if `value` stays."""
            if operator(value) == "concat" and len(getattr(value.args[0], "fields", ())) == 1:
                return value.args[0].fields[0]
            if operator(value) != "take" or value.attrs.axis is None:
                return None
            x, index = value.args
            is_one = isinstance(index, tvm.ir.GenericConst) and index.value.ndim == 0
            if not is_one or isinstance(x, tvm.ir.GenericConst):
                return None
            dims, axis = shape(x), int(value.attrs.axis) % len(shape(x))
            begin = int(index.value.numpy())
            first = 0 if value.attrs.mode == "clip" else -dims[axis]  # PyTorch's importer counts from the end
            if not first <= begin < dims[axis]:
                return None
            begin %= dims[axis]
            part = relax.op.strided_slice(x, [axis], [begin], [begin + 1], assume_inbound=True)
            return relax.op.squeeze(builder.emit(part, name_hint=f"{var.name}_part"), [axis])

        return rebuild(mod, rewrite)
