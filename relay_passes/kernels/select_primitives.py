"""Convolutions as calls of the primitives that were selected for them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import tvm
from tvm import relax

from pimflow.core.kernel import ConvGeometry
from pimflow.errors import UsageError
from pimflow.primitives import Primitive
from pimflow.primitives.families import output_shape
from pimflow.primitives.filters import transform_filters
from pimflow.primitives.kernels.prim_func import kernel
from pimflow.primitives.layer import BLOCK
from pimflow.relay_passes.flat import layer_name, operator, rebuild, shape
from pimflow.relay_passes.regions.extract_regions import layer_geometry


@tvm.transform.module_pass(opt_level=0, name="SelectPrimitives")
class SelectPrimitives:
    """Replace convolutions, and products of one row with a constant matrix, by calls of primitives' kernels.

    Parameters
    ----------
    choices : mapping of str to Primitive
        By layer name; layers that it does not name stay, and so do those of the family ``operator``.

    Rewrite: ``conv2d(x, w) -> back(call_tir(primitive, layout(x), transformed(w)))``; filters are transformed
    here, and `SinkLayout` removes transforms that undo one another.
    Preserves: values up to the rounding of the primitives, shapes, names.

    Raises
    ------
    UsageError
        If a primitive does not apply to its layer.
    """

    def __init__(self, choices: Mapping[str, Primitive]):
        self.choices = dict(choices)

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""

        def rewrite(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
            """The new value of `var`; None if `value` stays."""
            layer = layer_name(mod, var)
            if operator(value) not in ("nn.conv2d", "matmul") or layer not in self.choices:
                return None
            if self.choices[layer].family == "operator":
                return None
            geometry, primitive = layer_geometry(var.name, value), self.choices[layer]
            if geometry is None or not primitive.applies(geometry):
                raise UsageError(f"primitive '{primitive.name}' does not apply to layer '{layer}'")
            x = value.args[0]
            if operator(value) == "matmul":
                pixels = relax.op.reshape(x, (geometry.n, 1, 1, geometry.c))
                x = builder.emit(pixels, name_hint=f"{var.name}.pixels")
            filters = transform_filters(primitive, geometry, _filters(value))
            function = builder.add_func(kernel(primitive, geometry), primitive.name.replace("-", "_"))
            output_type = relax.TensorType(output_shape(primitive, geometry), "float32")
            called = relax.call_tir(
                function,
                [_to_primitive_layout(builder, primitive, x, var.name), relax.const(filters)],
                output_type,
            )
            result = _to_nhwc(
                builder, primitive, geometry, builder.emit(called, name_hint=var.name), var.name
            )
            return relax.op.reshape(result, shape(var)) if operator(value) == "matmul" else result

        return rebuild(mod, rewrite)


def _filters(value: relax.Call) -> np.ndarray:
    """Filters of `value`, [output channels, input channels of a group, height, width]."""
    weights = np.from_dlpack(value.args[1].value)
    return weights.T[:, :, None, None] if operator(value) == "matmul" else weights.transpose(0, 3, 1, 2)


def _to_primitive_layout(
    builder: relax.BlockBuilder, primitive: Primitive, x: relax.Expr, name: str
) -> relax.Expr:
    """Emit `x`, which is NHWC, in the primitive's layout."""
    if primitive.layout == "HWC":
        return x
    if primitive.layout == "CHW":
        return builder.emit(relax.op.permute_dims(x, (0, 3, 1, 2)), name_hint=f"{name}.chw")
    n, h, w, c = shape(x)
    blocks = builder.emit(relax.op.reshape(x, (n, h, w, c // BLOCK, BLOCK)), name_hint=f"{name}.cut")
    return builder.emit(relax.op.permute_dims(blocks, (0, 3, 1, 2, 4)), name_hint=f"{name}.blocks")


def _to_nhwc(
    builder: relax.BlockBuilder, primitive: Primitive, layer: ConvGeometry, y: relax.Var, name: str
) -> relax.Var:
    """Emit `y`, which has the primitive's layout, in NHWC."""
    if primitive.layout == "HWC":
        return y
    if primitive.layout == "CHW":
        return builder.emit(relax.op.permute_dims(y, (0, 2, 3, 1)), name_hint=f"{name}.nhwc")
    pixels = builder.emit(relax.op.permute_dims(y, (0, 2, 3, 1, 4)), name_hint=f"{name}.joined")
    unblocked = relax.op.reshape(pixels, (layer.n, layer.oh, layer.ow, layer.oc))
    return builder.emit(unblocked, name_hint=f"{name}.nhwc")
