"""The TIR function of a convolution primitive; `relay_passes.schedules.schedule_primitives` schedules it."""

from __future__ import annotations

from tvm import te, tirx

from pimflow.core.kernel import ConvGeometry
from pimflow.errors import UsageError
from pimflow.primitives import Primitive
from pimflow.primitives.kernels import direct, products, tiles

_FAMILIES = {
    "loops": direct.loops,
    "direct": direct.direct,
    "depthwise": direct.depthwise,
    "windows": products.windows,
    "mec": products.mec,
    "shifted": products.kn2,
    "pointwise": products.pointwise,
    "winograd": tiles.winograd,
    "fft": tiles.fft,
}


def kernel(primitive: Primitive, layer: ConvGeometry) -> tirx.PrimFunc:
    """The unscheduled kernel that computes `layer` by `primitive`.

    Its parameters are input, filters and output. Input and output have the primitive's layout
    (`families.tensor_shape`); filters are those of `filters.transform_filters`.

    Raises
    ------
    UsageError
        If the primitive does not apply, or is the operator itself.
    """
    if not primitive.applies(layer):
        raise UsageError(f"primitive '{primitive.name}' does not apply to {layer}")
    if primitive.family not in _FAMILIES:
        raise UsageError(f"primitive '{primitive.name}' is the operator as it is, not a kernel of its own")
    tensors = _FAMILIES[primitive.family](primitive, layer)
    function = te.create_prim_func(list(tensors), index_dtype_override="int64")
    return function.without_attr("global_symbol")
