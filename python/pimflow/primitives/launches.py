"""Kernel launches of primitives on a GPU, as input of GPU models."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from pimflow.core.kernel import ConvGeometry, Kernel, convolution_kernel
from pimflow.core.region import GATHERS, Region
from pimflow.primitives.catalogue import PRIMITIVES, get_primitive
from pimflow.primitives.families import output_shape, windows_shape
from pimflow.primitives.layer import FP32_BYTES, has_choice, input_bytes
from pimflow.primitives.primitive import Primitive


def launches(primitive: Primitive, layer: ConvGeometry) -> list[Kernel]:
    """The launches of `primitive`, in order, in fp32.

    Supported are primitives whose operands go through shared memory, and the operator itself. A partly filled
    tile counts as a full one.
    """
    if primitive.family == "operator":
        return [convolution_kernel(layer, "fp32")]
    return [
        replace(kernel, geometry=layer, primitive=primitive.name)
        for kernel in _family_launches(primitive, layer)
    ]


def region_launches(primitive: Primitive, region: Region) -> list[Kernel]:
    """The launches for a whole region; the last one also reads the operands of the epilogue."""
    # `unsupported_primitive_reason` refuses regions without one
    assert region.geometry is not None, region.name
    *before, last = launches(primitive, region.geometry)
    residual_bytes = FP32_BYTES * sum(region.input_elements[1:])
    result_bytes = FP32_BYTES * region.output_elements
    return [*before, replace(last, input_bytes=last.input_bytes + residual_bytes, output_bytes=result_bytes)]


def unsupported_primitive_reason(primitive: Primitive, region: Region) -> str:
    """Why a GPU cannot compute `region` by `primitive`; empty if it can."""
    if primitive.target != "cuda":
        return "it is for a CPU"
    if primitive.family == "operator":
        return "it is the operator, which a GPU computes where no primitive is named"
    if not primitive.shared:
        return "nothing says how long it takes"
    if region.geometry is None or not has_choice(region) or not primitive.applies(region.geometry):
        return "it does not apply to the layer"
    if region.kernel.extra_output_elements or {*GATHERS}.intersection(region.prologue):
        return "the kernel of the region also joins, or stores, what others read"
    return ""


def can_compute(name: str, region: Region) -> bool:
    """Whether a GPU can compute `region` by the primitive of that `name`.

    Raises
    ------
    UnknownNameError
        If there is no primitive of that name.
    """
    return not unsupported_primitive_reason(get_primitive(name), region)


def usable_primitives(region: Region) -> list[Primitive]:
    """The primitives by which a GPU can compute `region`."""
    return [
        primitive for primitive in PRIMITIVES.values() if not unsupported_primitive_reason(primitive, region)
    ]


def _family_launches(primitive: Primitive, layer: ConvGeometry) -> list[Kernel]:
    extents, result = primitive.extents(layer), FP32_BYTES * prod(output_shape(primitive, layer))
    tile = (extents.places, extents.lanes)
    workspaces = {name: FP32_BYTES * prod(shape) for name, shape in primitive.stages(layer).items()}
    filters = primitive.filter_bytes(layer)
    if primitive.family == "winograd":
        outer = prod(primitive.stages(layer)["products"][:2])
        product = _gemm(extents.pixels, extents.channels, layer.c, outer, tile)
        product = _with_bytes(product, workspaces["transformed"], filters, workspaces["products"])
        forward = _stream(input_bytes(layer), workspaces["transformed"])
        return [forward, product, _stream(workspaces["products"], result)]
    if primitive.family == "pointwise":
        product = _gemm(layer.n * extents.pixels, extents.channels, layer.c, 1, tile)
        return [_with_bytes(product, input_bytes(layer), filters, result)]
    dense = convolution_kernel(layer, "fp32")
    product = _gemm(layer.n * extents.pixels, extents.channels, dense.k, 1, tile)
    if "windows" in workspaces:
        windows = FP32_BYTES * prod(windows_shape(primitive, layer))
        product = _with_bytes(product, windows, filters, result)
        return [_stream(input_bytes(layer), windows), product]
    product = replace(product, window=dense.window, stride=dense.stride)
    return [_with_bytes(product, dense.input_bytes, filters, result)]


def _gemm(m: int, n: int, k: int, groups: int, tile: tuple[int, int]) -> Kernel:
    macs = groups * m * n * k
    return Kernel(
        kind="gemm", m=m, n=n, k=k, groups=groups, macs=macs, input_bytes=0, output_bytes=0, tile=tile
    )


def _with_bytes(kernel: Kernel, read: int, filters: int, written: int) -> Kernel:
    return replace(kernel, input_bytes=read, weight_bytes=filters, output_bytes=written)


def _stream(read: int, written: int) -> Kernel:
    return Kernel(kind="stream", input_bytes=read, output_bytes=written)
