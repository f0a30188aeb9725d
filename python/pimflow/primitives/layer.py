"""Properties of a convolution's geometry that primitives depend on."""

from __future__ import annotations

from pimflow.core.kernel import ConvGeometry
from pimflow.core.region import Region

FP32_BYTES = 4
LAYOUTS = ("HWC", "CHW", "CHWc16")  # of a primitive's input and output
BLOCK = 16  # contiguous channels in the layout CHWc16
VECTOR = 8  # lanes are multiples of this
Shape = tuple[int, ...]


def has_choice(region: Region) -> bool:
    """Whether primitives can compute `region`: a convolution, or a product of one row with a matrix.

    Primitives do not compute integers.
    """
    layer = region.geometry
    if layer is None or region.kernel.integers:
        return False
    return region.operator != "fc" or layer.n == 1


def reach(layer: ConvGeometry) -> tuple[int, int]:
    """Height and width of the part of the input that a window spans, dilation included."""
    return (layer.kh - 1) * layer.dilation[0] + 1, (layer.kw - 1) * layer.dilation[1] + 1


def is_depthwise(layer: ConvGeometry) -> bool:
    """Whether every output channel reads an input channel of its own."""
    return layer.groups > 1 and layer.groups == layer.c == layer.oc


def filter_shape(layer: ConvGeometry) -> tuple[int, int, int, int]:
    """Shape of the filters in ONNX: output channels, input channels of a group, height, width."""
    return layer.oc, layer.c // layer.groups, layer.kh, layer.kw


def input_bytes(layer: ConvGeometry) -> int:
    """Bytes of the input in fp32."""
    return FP32_BYTES * layer.n * layer.h * layer.w * layer.c
