"""Multi-device data-parallel execution: a convolution as two, along output rows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import tvm
from tvm import relax

from pimflow.core.ranges import Range, RangeMap
from pimflow.core.split import GPU_SUFFIX, PIM_SUFFIX
from pimflow.errors import PlanError
from pimflow.relay_passes.flat import layer_name, operator, rebuild, shape, with_padding
from pimflow.relay_passes.regions.padded_inputs import input_copy_reasons


@tvm.transform.module_pass(opt_level=0, name="SplitMdDp")
class SplitMdDp:
    """Split convolutions so that two devices share one (PIMFlow, "MD-DP").

    Parameters
    ----------
    gpu_rows : mapping of str to int
        By layer, how many output rows, the first ones, go to the GPU.
    symmetric : bool
        Whether the GPU's convolutions pad both ends of the rows equally, as some libraries do. If its part
        needs other padding, it reads rows of zeros around the input.
    views : bool
        See `kernel_groups`.

    Rewrite: ``conv2d(x, w) -> concat(conv2d(x[a0:a1], w), conv2d(x[b0:b1], w), axis=H)``, parts named
    ``*__gpu`` and ``*__pim``, each with the rest of the padding. If `symmetric`, the GPU's part is
    ``conv2d(concat(zeros, x)[a0:a1], w)``, where ``x`` lies inside the concatenation if `input_copy_reasons`
    gives no reason against it. PIM gathers from ``x``, and needs no zeros.
    Preserves: values bit by bit, names of all else.

    Raises
    ------
    PlanError
        If a part would have no rows, or read only padding.
    """

    def __init__(self, gpu_rows: Mapping[str, int], symmetric: bool = False, views: bool = True):
        self.gpu_rows, self.symmetric, self.views = dict(gpu_rows), symmetric, views

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        copied = input_copy_reasons(mod, views=self.views) if self.symmetric else {}

        def rewrite(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
            """The new value of `var`; None if `value` stays."""
            rows = self.gpu_rows.get(layer_name(mod, var))
            if rows is None or operator(value) != "nn.conv2d":
                return None
            attrs = value.attrs
            axis = str(attrs.data_layout).index("H")
            window = row_map(value, axis)
            problem = window.split_obstacle(rows)
            if problem:
                raise PlanError(f"region '{layer_name(mod, var)}': {problem}")
            on_gpu, on_pim = window.inputs(0, rows), window.inputs(rows, window.output_extent)
            x, gpu_name, pim_name = value.args[0], f"{var.name}{GPU_SUFFIX}", f"{var.name}{PIM_SUFFIX}"
            if self.symmetric and on_gpu.pad_before != on_gpu.pad_after:
                x = _pad_rows(builder, x, axis, on_gpu, gpu_name, bool(copied[var]))
                on_gpu = Range(begin=0, end=on_gpu.pad_before + on_gpu.end + on_gpu.pad_after)
            # Sliced even if it reads all rows: their producer must not fuse with a kernel that PIM waits for.
            rows_in = _slice(builder, x, axis, on_gpu, gpu_name)
            parts = [builder.emit(convolution_rows(value, rows_in, on_gpu), name_hint=gpu_name)]
            x = value.args[0]
            if len(on_pim) < window.extent:
                x = _slice(builder, x, axis, on_pim, pim_name)
            parts.append(builder.emit(convolution_rows(value, x, on_pim), name_hint=pim_name))
            return builder.emit(relax.op.concat(parts, axis=axis), name_hint=var.name)

        return rebuild(mod, rewrite)


def row_map(call: relax.Call, axis: int) -> RangeMap:
    """Map from output rows to input rows of convolution `call`, whose rows are `axis` of its operand."""
    attrs = call.attrs
    return RangeMap(
        extent=shape(call.args[0])[axis],
        window=shape(call.args[1])[str(attrs.kernel_layout).index("H")],
        stride=int(attrs.strides[0]),
        dilation=int(attrs.dilation[0]),
        pad_before=int(attrs.padding[0]),
        pad_after=int(attrs.padding[2]),
    )


def convolution_rows(call: relax.Call, x: relax.Expr, reads: Range) -> relax.Call:
    """Convolution `call` of `x`, the input rows `reads`: the output rows that need no others."""
    _, left, _, right = (int(p) for p in call.attrs.padding)
    return with_padding(call, x, [reads.pad_before, left, reads.pad_after, right])


def _pad_rows(
    builder: relax.BlockBuilder, x: relax.Expr, axis: int, part: Range, name: str, copied: bool
) -> relax.Var:
    """Emit `x` with the rows of zeros that `part` needs; they are constants if `x` is copied anyway."""
    parts = [x]
    for rows, position in ((part.pad_before, 0), (part.pad_after, 2)):
        dims = [rows if index == axis else extent for index, extent in enumerate(shape(x))]
        if rows and copied:
            parts.insert(position, relax.const(np.zeros(dims, str(x.ty.dtype))))
        elif rows:
            zeros = relax.op.zeros(relax.ShapeExpr(dims), str(x.ty.dtype))
            parts.insert(position, builder.emit(zeros, name_hint=f"{name}_zeros"))
    return builder.emit(relax.op.concat(parts, axis=axis), name_hint=f"{name}_padded")


def _slice(builder: relax.BlockBuilder, x: relax.Expr, axis: int, part: Range, name: str) -> relax.Var:
    rows = relax.op.strided_slice(x, [axis], [part.begin], [part.end], assume_inbound=True)
    return builder.emit(rows, name_hint=f"{name}_in")
