"""A convolution, as primitives see it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class ConvLayer:
    """Shape of a convolution on fp32 tensors.

    Attributes
    ----------
    height, width, in_channels : int
        Of the input.
    out_channels : int
    kernel, stride, dilation : (int, int)
        Along height and width.
    padding : (int, int, int, int)
        Rows and columns of zeros: top, left, bottom, right.
    groups : int
        Groups of channels that do not mix; as many as channels in a depthwise convolution.
    batch : int
    """

    height: int
    width: int
    in_channels: int
    out_channels: int
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    batch: int = 1

    @property
    def reach(self) -> tuple[int, int]:
        """Rows and columns from the first to one past the last that a window reads."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilation))

    @property
    def out_height(self) -> int:
        return (self.height + self.padding[0] + self.padding[2] - self.reach[0]) // self.stride[0] + 1

    @property
    def out_width(self) -> int:
        return (self.width + self.padding[1] + self.padding[3] - self.reach[1]) // self.stride[1] + 1

    @property
    def group_channels(self) -> int:
        """Input channels that an output channel reads."""
        return self.in_channels // self.groups

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.groups == self.in_channels == self.out_channels

    @property
    def unit_stride(self) -> bool:
        return self.stride == (1, 1)

    @property
    def unit_dilation(self) -> bool:
        return self.dilation == (1, 1)

    @property
    def pointwise(self) -> bool:
        """Whether it is one product of matrices, its input being one of them as it lies."""
        return self.kernel == (1, 1) and self.unit_stride and not any(self.padding) and self.groups == 1

    @property
    def multiply_accumulates(self) -> int:
        window = prod(self.kernel) * self.group_channels
        return self.batch * self.out_height * self.out_width * self.out_channels * window

    @property
    def input_bytes(self) -> int:
        return FP32_BYTES * self.batch * self.height * self.width * self.in_channels

    @property
    def output_bytes(self) -> int:
        return FP32_BYTES * self.batch * self.out_height * self.out_width * self.out_channels

    @property
    def filter_shape(self) -> tuple[int, int, int, int]:
        """Output channels, input channels of a group, height, width: as ONNX has them."""
        return (self.out_channels, self.group_channels, *self.kernel)
