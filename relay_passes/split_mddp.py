"""Multi-device data-parallel execution: a convolution as two, along output rows."""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm import relax

from pimflow.core.ranges import Range, RangeMap
from pimflow.errors import PlanError
from pimflow.relay_passes.flat import layer_name, operator, rebuild, shape

GPU_SUFFIX, PIM_SUFFIX = "__gpu", "__pim"


@tvm.transform.module_pass(opt_level=0, name="SplitMdDp")
class SplitMdDp:
    """Split convolutions so that two devices share one (PIMFlow, "MD-DP").

    Parameters
    ----------
    gpu_rows : mapping of str to int
        By layer, how many output rows, the first ones, go to the GPU.

    Rewrite: ``conv2d(x, w) -> concat(conv2d(x[a0:a1], w), conv2d(x[b0:b1], w), axis=H)``, parts named
    ``*__gpu`` and ``*__pim``, with the padding that each part has left.
    Preserves: values bit by bit, names of all else.

    Raises
    ------
    PlanError
        If a part would have no rows, or read only padding.
    """

    def __init__(self, gpu_rows: Mapping[str, int]):
        self.gpu_rows = dict(gpu_rows)

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        def rewrite(builder, var, value):
            rows = self.gpu_rows.get(layer_name(mod, var))
            if rows is None or operator(value) != "nn.conv2d":
                return None
            attrs = value.attrs
            axis = str(attrs.data_layout).index("H")
            window = row_map(value, axis)
            problem = window.unsplittable(rows)
            if problem:
                raise PlanError(f"region '{layer_name(mod, var)}': {problem}")
            parts = [
                _rows(builder, value, axis, window, begin, end, f"{var.name}{suffix}")
                for begin, end, suffix in (
                    (0, rows, GPU_SUFFIX),
                    (rows, window.output_extent, PIM_SUFFIX),
                )
            ]
            return builder.emit(relax.op.concat(parts, axis=axis), name_hint=var.name)

        return rebuild(mod, rewrite)


def row_map(call: relax.Call, axis: int) -> RangeMap:
    """Output rows to input rows of convolution `call`, whose rows are `axis` of its operand."""
    attrs = call.attrs
    return RangeMap(
        extent=shape(call.args[0])[axis],
        window=shape(call.args[1])[str(attrs.kernel_layout).index("H")],
        stride=int(attrs.strides[0]),
        dilation=int(attrs.dilation[0]),
        pad_before=int(attrs.padding[0]),
        pad_after=int(attrs.padding[2]),
    )


def rows_of(call: relax.Call, x: relax.Expr, reads: Range) -> relax.Call:
    """Output rows of convolution `call` that read just `x`, the input rows `reads`."""
    attrs = call.attrs
    _, left, _, right = (int(p) for p in attrs.padding)
    return relax.op.nn.conv2d(
        x,
        call.args[1],
        strides=list(attrs.strides),
        padding=[reads.pad_before, left, reads.pad_after, right],
        dilation=list(attrs.dilation),
        groups=int(attrs.groups),
        data_layout=attrs.data_layout,
        kernel_layout=attrs.kernel_layout,
        out_layout=attrs.out_layout,
        out_dtype=attrs.out_dtype,
    )


def _rows(
    builder: relax.BlockBuilder,
    call: relax.Call,
    axis: int,
    window: RangeMap,
    begin: int,
    end: int,
    name: str,
) -> relax.Var:
    """Output rows ``[begin, end)`` of convolution `call`."""
    x, part = call.args[0], window.inputs(begin, end)
    if len(part) < window.extent:
        x = builder.emit(
            relax.op.strided_slice(x, [axis], [part.begin], [part.end], assume_inbound=True),
            name_hint=f"{name}_in",
        )
    return builder.emit(rows_of(call, x, part), name_hint=name)
