"""A layer as two of its kind, the GPU's first, along any axis but rows (`split_mddp.py`)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import tvm
from tvm import relax

from pimflow.core.liveness import ALIGNMENT_BYTES
from pimflow.core.split import GPU_SUFFIX, INPUT_SUFFIX, PIM_SUFFIX, Axis, Split
from pimflow.errors import PlanError
from pimflow.relay_passes.flat import constant, layer_name, operator, rebuild, shape
from pimflow.relay_passes.regions.extract_regions import layer_geometry


@tvm.transform.module_pass(opt_level=0, name="SplitAxis")
class SplitAxis:
    """Split convolutions and fully connected layers along an axis, so that each device has a part.

    The kernel that reads the result of a split reduction adds the two parts (`kernel_groups`): in the kernel
    of the GPU's part, the addition would wait for PIM.

    Parameters
    ----------
    axis : Axis
        ``batch``, ``channels`` or ``reduction``; of the last two, only dense layers are split.
    gpu : mapping of str to int
        By layer, how many inferences, output channels or input channels, the first ones, go to the GPU.

    Rewrite: ``conv2d(x, w) -> concat(conv2d(x[:g], w), conv2d(x[g:], w), axis=N)``,
    ``concat(conv2d(x, w[:g]), conv2d(x, w[g:]), axis=C)`` or
    ``add(conv2d(x[..., :g], w[..., :g]), conv2d(x[..., g:], w[..., g:]))``, the same for ``matmul``, parts
    named ``*__gpu`` and ``*__pim``.
    Preserves: values bit by bit, of a reduction up to the order of sums; names of all else.

    Raises
    ------
    PlanError
        If a part would be empty, or a layer cannot be split so.
    """

    def __init__(self, axis: Axis, gpu: Mapping[str, int]):
        self.axis, self.gpu = axis, dict(gpu)

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""

        def rewrite(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
            """The new value of `var`; None if `value` stays."""
            name = layer_name(mod, var)
            geometry = layer_geometry(name, value) if name in self.gpu else None
            if geometry is None:
                return None
            split = Split(self.axis, self.gpu[name])
            problem = split.obstacle(geometry)
            if problem:
                raise PlanError(f"region '{name}': {problem}")
            bounds = (
                (split.gpu, split.extent(geometry), f"{var.name}{PIM_SUFFIX}"),
                (0, split.gpu, f"{var.name}{GPU_SUFFIX}"),
            )
            parts = []
            # PIM first: then the producer of a shared operand is a separate kernel, and PIM need not wait.
            for begin, end, part in bounds:
                x, filters = _part_operands(self.axis, value, begin, end)
                if not x.same_as(value.args[0]):
                    x = builder.emit(x, name_hint=part + INPUT_SUFFIX)
                call = relax.Call(value.op, [x, filters], value.attrs, value.ty_args)
                parts.insert(0, builder.emit(call, name_hint=part))
            if self.axis == "reduction":
                result = relax.op.add(*parts)
            else:
                result = relax.op.concat(parts, axis=0 if self.axis == "batch" else -1)
            return builder.emit(result, name_hint=var.name)

        return rebuild(mod, rewrite)


def _part_operands(axis: Axis, call: relax.Call, begin: int, end: int) -> tuple[relax.Expr, relax.Expr]:
    """Input and filters of the part [begin, end) of a layer along `axis`."""
    x, filters = call.args
    is_product = operator(call) == "matmul"
    if axis == "batch":
        return _slice(x, 0, begin, end), filters
    if axis == "channels":
        return x, _slice(filters, 1 if is_product else 0, begin, end)
    return _slice(x, -1, begin, end), _slice(filters, 0 if is_product else -1, begin, end)


def _slice(x: relax.Expr, axis: int, begin: int, end: int) -> relax.Expr:
    """Part [begin, end) of `x` along `axis`: a slice of a variable, a constant of a constant."""
    axis %= len(shape(x))
    if isinstance(x, tvm.ir.GenericConst):
        array = np.from_dlpack(x.value)
        part = array[(slice(None),) * axis + (slice(begin, end),)]
        # Kernels rely on the alignment of tensors.
        inside = part.flags.c_contiguous and part.ctypes.data % ALIGNMENT_BYTES == 0
        return relax.const(tvm.runtime.from_dlpack(part)) if inside else constant(part)
    return relax.op.strided_slice(x, [axis], [begin], [end], assume_inbound=True)
