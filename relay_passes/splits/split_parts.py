"""A layer as two of its kind, the GPU's first; used by all splits except those along rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import tvm
from tvm import relax

from pimflow.core.liveness import ALIGNMENT_BYTES
from pimflow.core.split import GPU_SUFFIX, INPUT_SUFFIX, PIM_SUFFIX, Split
from pimflow.errors import PlanError
from pimflow.relay_passes.flat import constant, layer_name, rebuild, shape
from pimflow.relay_passes.regions.extract_regions import layer_geometry

# Input and filters of the part [begin, end) of a layer.
Operands = Callable[[relax.Call, int, int], tuple[relax.Expr, relax.Expr]]
# One result of the two parts.
Join = Callable[[relax.BlockBuilder, list[relax.Var], str], relax.Expr]


def split_layers(
    mod: tvm.IRModule, axis: str, gpu: Mapping[str, int], operands: Operands, join: Join
) -> tvm.IRModule:
    """`mod` with each layer that `gpu` names in two parts along `axis`; `gpu` has the GPU's share of each.

    Raises
    ------
    PlanError
        If a layer cannot be split so.
    """

    def rewrite(builder, var, value):
        """The new value of `var`; None if `value` stays."""
        name = layer_name(mod, var)
        geometry = layer_geometry(name, value) if name in gpu else None
        if geometry is None:
            return None
        split = Split(axis, gpu[name])
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
            x, filters = operands(value, begin, end)
            if not x.same_as(value.args[0]):
                x = builder.emit(x, name_hint=part + INPUT_SUFFIX)
            parts.insert(
                0,
                builder.emit(relax.Call(value.op, [x, filters], value.attrs, value.ty_args), name_hint=part),
            )
        return builder.emit(join(builder, parts, var.name), name_hint=var.name)

    return rebuild(mod, rewrite)


def slice_axis(x: relax.Expr, axis: int, begin: int, end: int) -> relax.Expr:
    """Part [begin, end) of `x` along `axis`: a slice of a variable, a constant of a constant."""
    axis %= len(shape(x))
    if isinstance(x, tvm.ir.GenericConst):
        array = np.from_dlpack(x.value)
        part = array[(slice(None),) * axis + (slice(begin, end),)]
        # Kernels rely on the alignment of tensors.
        inside = part.flags.c_contiguous and part.ctypes.data % ALIGNMENT_BYTES == 0
        return relax.const(tvm.runtime.from_dlpack(part)) if inside else constant(part)
    return relax.op.strided_slice(x, [axis], [begin], [end], assume_inbound=True)
