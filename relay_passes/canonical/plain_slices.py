"""Elements at constant places along an axis as slices, which need no kernel of their own."""

from __future__ import annotations

import numpy as np
import tvm
import tvm_ffi
from tvm import relax

from pimflow.relay_passes.flat import operator, rebuild, shape


@tvm.transform.module_pass(opt_level=0, name="PlainSlices")
class PlainSlices:
    """Make ``take`` at one constant index a slice: a kernel reads it in place, or it is a view.

    Indices in one or two runs of neighbours are slices too: that is how exporters write a rolled axis, or a
    tensor with other strides. A concatenation of one tensor is that tensor, and equal slices are one.

    Rewrite: ``concat((x,)) -> x``,
    ``take(x, i, axis) -> squeeze(strided_slice(x, [axis], [i], [i + 1]), [axis])``,
    ``take(x, [i, …, n - 1, 0, …, i - 1], axis) -> concat((strided_slice(x, …), strided_slice(x, …)), axis)``.
    Preserves: values exactly, names. Constant indices out of bounds stay.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""

        slices: dict[tuple[relax.Var, tvm_ffi.StructuralKey], relax.Var] = {}

        def rewrite(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
            """The new value of `var`; None if `value` stays."""
            if operator(value) == "strided_slice" and isinstance(value.args[0], relax.Var):
                key = (value.args[0], tvm_ffi.StructuralKey(relax.Tuple([*value.args[1:]])))
                if key not in slices:
                    slices[key] = builder.emit(value, name_hint=var.name)
                return slices[key]
            if operator(value) == "concat" and len(getattr(value.args[0], "fields", ())) == 1:
                return value.args[0].fields[0]
            if operator(value) != "take" or value.attrs.axis is None:
                return None
            x, index = value.args
            if not isinstance(index, tvm.ir.GenericConst) or isinstance(x, tvm.ir.GenericConst):
                return None
            dims, axis, places = shape(x), int(value.attrs.axis) % len(shape(x)), index.value.numpy()
            first = 0 if value.attrs.mode == "clip" else -dims[axis]  # PyTorch's importer counts from the end
            if not places.size or places.min() < first or places.max() >= dims[axis]:
                return None
            runs = _runs(places.reshape(-1) % dims[axis])
            if len(runs) > (2 if places.ndim == 1 else 1):
                return None
            parts = [
                x
                if (begin, end) == (0, dims[axis])
                else builder.emit(
                    relax.op.strided_slice(x, [axis], [begin], [end], assume_inbound=True),
                    name_hint=f"{var.name}_part",
                )
                for begin, end in runs
            ]
            if places.ndim == 0:
                return relax.op.squeeze(parts[0], [axis])
            if len(parts) > 1:
                return relax.op.concat(parts, axis)
            return parts[0] if places.ndim == 1 else relax.op.reshape(parts[0], shape(var))

        return rebuild(mod, rewrite)


def _runs(places: np.ndarray) -> list[tuple[int, int]]:
    """First index, and that behind the last, of each run of neighbours."""
    breaks = np.flatnonzero(np.diff(places) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(places, breaks)]
