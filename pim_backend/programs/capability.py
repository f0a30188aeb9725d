"""Which regions DRAM-PIM can run, and the reason where it cannot."""

from __future__ import annotations

from pimflow.core.region import Region
from pimflow.hardware.systems import SCHEDULINGS


def unsupported_reason(
    region: Region, level: str = SCHEDULINGS[-1], *, multiplies_integers: bool = False
) -> str:
    """Why PIM cannot run `region` with the loop orders of a level of `SCHEDULINGS`; empty if it can.

    PIM runs layers that have a matrix-vector form with constant weights: convolutions of any kernel, stride,
    padding, dilation and number of groups, and fully connected layers. It runs those of 8-bit integers if its
    multipliers take these (`multiplies_integers`).
    """
    product = region.kernel.product
    if region.kernel.integers and region.geometry is None:
        return f"{region.operator}: a product of integers that is not of 8 bits with constant weights"
    if region.kernel.integers and not multiplies_integers:
        return f"{region.operator}: a product of 8-bit integers, which the PIM device does not multiply"
    if product is not None and not product.weighted:
        return f"{region.operator}: a product of computed tensors; PIM multiplies by constant weights"
    if product is not None:
        return f"{region.operator}: PIM computes convolutions over two axes, and products with one matrix"
    if region.geometry is None:
        return f"{region.operator}: no product with constant weights"
    if region.geometry.groups > 1 and level != SCHEDULINGS[-1]:
        kind = "depthwise" if region.geometry.is_depthwise else "grouped"
        return f"{kind} convolution: the compilers of scheduling '{level}' leave it to the GPU"
    return ""
