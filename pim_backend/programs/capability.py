"""What DRAM-PIM can run, and why not."""

from __future__ import annotations

from pimflow.core.region import Region
from pimflow.hardware import PimSpec


def refusal(region: Region, pim: PimSpec) -> str:
    """Why `pim` cannot run `region`; empty if it can.

    It runs what has a matrix-vector form with constant weights: dense convolutions of any kernel,
    stride, padding and dilation, and fully connected layers.
    """
    if region.geometry is None:
        return f"{region.operator}: no product with constant weights"
    if region.geometry.groups > 1:
        kind = "depthwise" if region.geometry.depthwise else "grouped"
        return f"{kind} convolution: every channel has its own vector, so banks would share nothing"
    return ""
