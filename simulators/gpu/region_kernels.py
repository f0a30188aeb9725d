"""GPU kernels of regions, as the GPU model sees them."""

from __future__ import annotations

import functools
from dataclasses import replace

from pimflow.core.kernel import ELEMENT_BYTES, ConvGeometry, Kernel, convolution_kernel
from pimflow.core.region import APPEND, Region
from pimflow.core.split import WHOLE, Split
from pimflow.weight_types import WEIGHT_TYPES


def gpu_kernels(region: Region, dtype: str) -> list[Kernel]:
    """The kernels of the operators of `region`, in sequence; none if it is a view."""
    return [] if region.is_view else [gpu_kernel(part, dtype) for part in region.kernel.parts or (region,)]


def gpu_kernel(region: Region, dtype: str, split: Split = WHOLE, symmetric: bool = False) -> Kernel:
    """The kernel of `region` with its epilogue, or of the GPU's part of a `split` without it.

    If `symmetric`, kernels pad both ends of the rows alike; a part with other padding reads rows of zeros.
    """
    element = ELEMENT_BYTES[dtype]
    if split.gpu:
        return _part_kernel(region.geometry, dtype, split, symmetric)
    output_bytes = (region.output_elements + region.kernel.extra_output_elements) * element
    if region.geometry is not None:
        kernel = convolution_kernel(region.geometry, dtype, _extra_elements(region) * element)
        return replace(kernel, output_bytes=output_bytes)
    if region.operator == APPEND:
        written = region.kernel.append_elements * element
        return Kernel(kind="stream", input_bytes=written, output_bytes=written)
    if region.kernel.product is not None:
        return _product_kernel(region, element, output_bytes)
    kernel = Kernel(
        kind="stream",
        macs=sum(region.input_elements),
        input_bytes=sum(region.input_elements) * element,
        weight_bytes=region.kernel.read_weight_elements * element,
        output_bytes=output_bytes,
    )
    return _with_operations(kernel, region, counted_macs=kernel.macs)


def _product_kernel(region: Region, element: int, output_bytes: int) -> Kernel:
    """The kernel of a matrix product that is no convolution.

    Its second operand counts as weights, also if it is computed.
    """
    assert region.kernel.product is not None
    product, read = region.kernel.product, sum(region.input_elements)
    second = 0 if product.weighted else min(product.second_elements, read)
    kind = WEIGHT_TYPES.get(product.second_type or "")
    second_share = kind.bits / (8 * element) if kind else 1.0
    kernel = Kernel(
        kind="depthwise" if product.is_depthwise else "gemm",
        m=product.m,
        n=product.n,
        k=product.k,
        groups=product.many,
        window=product.window,
        stride=product.stride,
        macs=product.macs,
        input_bytes=(read - second) * element,
        weight_bytes=round((second * second_share + region.kernel.read_weight_elements) * element),
        weight_share=second_share,
        output_bytes=output_bytes,
    )
    return _with_operations(kernel, region)


def _with_operations(kernel: Kernel, region: Region, counted_macs: int = 0) -> Kernel:
    """`kernel` with its `operations`; `counted_macs` multiplications are among its `macs`."""
    moved_elements = sum(region.input_elements) + region.kernel.read_weight_elements + region.output_elements
    if region.kernel.operations <= moved_elements:  # hidden behind the memory accesses of a stream
        return kernel
    multiplications = max(region.kernel.multiplications - counted_macs, 0)
    return replace(kernel, operations=region.kernel.operations, multiplications=multiplications)


def prologue_elements(region: Region) -> int:
    """Elements that a convolution's prologue reads; of each operand at most as many as the input has."""
    g = region.layer
    return sum(min(read, g.n * g.h * g.w * g.c) for read in region.input_elements[: region.operands])


def _extra_elements(region: Region) -> int:
    """Elements that a convolution's kernel reads beyond those of its input: for prologue and epilogue."""
    g = region.layer
    added = max(prologue_elements(region) - g.n * g.h * g.w * g.c, 0)
    return added + sum(region.input_elements[region.operands :])


# Cached: every search asks for hundreds of splits of a layer.
@functools.lru_cache(maxsize=1 << 16)
def _part_kernel(geometry: ConvGeometry, dtype: str, split: Split, symmetric: bool) -> Kernel:
    part = split.gpu_part(geometry)
    top, left, bottom, right = part.padding
    if symmetric and split.axis == "rows" and top != bottom:
        part = replace(part, h=part.h + top + bottom, padding=(0, left, 0, right))
    return convolution_kernel(part, dtype)
