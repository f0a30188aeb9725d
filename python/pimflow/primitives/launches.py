"""What a GPU's primitives launch, as kernels that a model of the GPU takes."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from pimflow.core.region import ConvGeometry, Kernel, convolution_kernel
from pimflow.primitives.families import output_shape, windows_shape
from pimflow.primitives.layer import FP32_BYTES, input_bytes
from pimflow.primitives.primitive import Primitive

Launch = tuple[Kernel, tuple[int, int] | None]  # with the tile of a block, where the primitive fixes it


def launches(primitive: Primitive, layer: ConvGeometry) -> list[Launch]:
    """The launches of `primitive`, in order, in fp32.

    Of those whose operands come through shared memory, and of the operator itself. Tiles that are not full
    count as full.
    """
    if primitive.family == "operator":
        return [(convolution_kernel(layer, "fp32"), None)]
    extents, result = primitive.extents(layer), FP32_BYTES * prod(output_shape(primitive, layer))
    tile = (extents.places, extents.lanes)
    workspaces = {name: FP32_BYTES * prod(shape) for name, shape in primitive.stages(layer).items()}
    if primitive.family == "winograd":
        outer = prod(primitive.stages(layer)["products"][:2])
        product = _gemm(extents.pixels, extents.channels, layer.c, outer)
        product = _moved(
            product, workspaces["transformed"], primitive.filter_bytes(layer), workspaces["products"]
        )
        forward = _stream(input_bytes(layer), workspaces["transformed"])
        return [(forward, None), (product, tile), (_stream(workspaces["products"], result), None)]
    if primitive.family == "pointwise":
        product = _gemm(layer.n * extents.pixels, extents.channels, layer.c, 1)
        return [(_moved(product, input_bytes(layer), primitive.filter_bytes(layer), result), tile)]
    dense = convolution_kernel(layer, "fp32")
    product = _gemm(layer.n * layer.oh * extents.pixels, extents.channels, dense.k, 1)
    if "windows" in workspaces:
        windows = FP32_BYTES * prod(windows_shape(primitive, layer))
        product = _moved(product, windows, primitive.filter_bytes(layer), result)
        return [(_stream(input_bytes(layer), windows), None), (product, tile)]
    product = replace(product, window=dense.window, stride=dense.stride)
    return [(_moved(product, dense.input_bytes, primitive.filter_bytes(layer), result), tile)]


def _gemm(m: int, n: int, k: int, groups: int) -> Kernel:
    return Kernel(
        kind="gemm", m=m, n=n, k=k, groups=groups, macs=groups * m * n * k, input_bytes=0, output_bytes=0
    )


def _moved(kernel: Kernel, read: int, filters: int, written: int) -> Kernel:
    return replace(kernel, input_bytes=read, weight_bytes=filters, output_bytes=written)


def _stream(read: int, written: int) -> Kernel:
    return Kernel(kind="stream", input_bytes=read, output_bytes=written)
