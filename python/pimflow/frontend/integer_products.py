"""Products of 8-bit tensors with constant weights, in the form that PIM and kernels multiply: int8 by int8.

ONNX subtracts zero points from both operands. Those of weights are subtracted at import. An input of uint8
is shifted into int8. What its zero point and this shift add to a sum does not depend on the input: the sum
of the weights of the output times their difference, which is added to the product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from tvm import relax

from pimflow.relay_passes.flat import shape

_BOUNDS = np.iinfo(np.int8)


class IntegerProduct:
    """A product of an 8-bit tensor `x` with constant 8-bit weights.

    Parameters
    ----------
    x : Expr
        Of uint8 or int8.
    weights : ndarray
        Of uint8 or int8: filters ``[oc, c, kh, kw]``, or a matrix ``[k, n]``.
    x_zero : Expr or ndarray, optional
        A number of the type of `x`, computed or not; 0 if None.
    weights_zero : ndarray, optional
        A number, or one for each output; 0 if None.
    emit : callable
        Normalises an expression.
    """

    def __init__(
        self,
        x: relax.Expr,
        weights: np.ndarray,
        x_zero: relax.Expr | np.ndarray | None,
        weights_zero: np.ndarray | None,
        emit: Callable[[relax.Expr], relax.Expr],
    ):
        self.x, self.emit = x, emit
        self._is_convolution = weights.ndim > 2
        zero = np.zeros((), np.int32) if weights_zero is None else weights_zero.astype(np.int32)
        if zero.ndim == 1 and self._is_convolution:
            zero = zero.reshape(-1, *[1] * (weights.ndim - 1))
        self._weights = weights.astype(np.int32) - zero
        self._shift = 128 if str(x.ty.dtype) == "uint8" else 0
        self._x_zero = np.int32(0) if x_zero is None else x_zero
        if isinstance(self._x_zero, np.ndarray):
            self._x_zero = self._x_zero.astype(np.int32).reshape(())

    @property
    def is_narrow(self) -> bool:
        """Whether the weights fit int8 without their zero points."""
        return bool(_BOUNDS.min <= self._weights.min() and self._weights.max() <= _BOUNDS.max)

    @property
    def has_known_zero(self) -> bool:
        """Whether the zero point of `x` is a constant, with which its borders can be padded."""
        return not isinstance(self._x_zero, relax.Expr)

    def product(self) -> relax.Expr:
        """``(x - x_zero) @ (weights - weights_zero)``, int32."""
        total = relax.op.matmul(self._narrow_input(), self._narrow_weights(), out_dtype="int32")
        return self._with_offset(self.emit(total), self._weights.sum(axis=0))

    def convolution(
        self, strides: list[int], pads: list[int], dilation: list[int], groups: int
    ) -> relax.Expr:
        """The convolution of the same, NCHW, int32; `pads` as in ONNX, (top, left, bottom, right)."""
        x, top_left, bottom_right = self._narrow_input(), pads[:2], pads[2:]
        border = 0 if isinstance(self._x_zero, relax.Expr) else int(self._x_zero) - self._shift
        if any(pads) and border:
            widths = [0, 0, 0, 0, *(width for axis in zip(top_left, bottom_right) for width in axis)]
            x, pads = self.emit(relax.op.nn.pad(x, widths, pad_value=border)), [0, 0, 0, 0]
        total = relax.op.nn.conv2d(
            x, self._narrow_weights(), strides, pads, dilation, groups, out_dtype="int32"
        )
        sums = self._weights.reshape(len(self._weights), -1).sum(axis=1)
        return self._with_offset(self.emit(total), sums.reshape(-1, 1, 1))

    def _narrow_weights(self) -> relax.Constant:
        return relax.const(self._weights.astype(np.int8))

    def _narrow_input(self) -> relax.Expr:
        if not self._shift:
            return self.x
        wide = self.emit(relax.op.astype(self.x, "int32"))
        shifted = self.emit(relax.op.subtract(wide, relax.const(self._shift, "int32")))
        return self.emit(relax.op.astype(shifted, "int8"))

    def _with_offset(self, total: relax.Expr, weight_sums: np.ndarray) -> relax.Expr:
        """`total`, of the narrow input, plus what its zero point less its shift adds to it."""
        sums = weight_sums.astype(np.int32)
        if self.has_known_zero:
            offset = (np.int32(self._shift) - self._x_zero) * sums
            return self.emit(relax.op.add(total, relax.const(offset))) if offset.any() else total
        zero = self.emit(relax.op.astype(self._x_zero, "int32"))
        difference = self.emit(relax.op.subtract(relax.const(self._shift, "int32"), zero))
        return self.emit(relax.op.add(total, self.emit(relax.op.multiply(difference, relax.const(sums)))))


def convert_integer_product(
    op_name: str,
    operands: Sequence[relax.Expr | None],
    values: Sequence[np.ndarray | relax.Expr | None],
    attrs: dict,
    emit: Callable[[relax.Expr], relax.Expr],
) -> relax.Expr | None:
    """Convert a ConvInteger over two axes, or a MatMulInteger, whose weights are constant; None for others.

    Others have computed weights, a zero point for each row, weights that do not fit int8 without their zero
    points, or borders of a zero point that is computed.

    Parameters
    ----------
    values : sequence of ndarray or Expr
        Of those operands that are constants, their values; of others themselves.
    """
    x = operands[0]
    weights, x_zero, weights_zero = (*values[1:], None, None)[:3]
    rank = 4 if op_name == "ConvInteger" else 2
    if not isinstance(weights, np.ndarray) or weights.ndim != rank or len(shape(x)) < 2:
        return None
    if isinstance(weights_zero, relax.Expr) or math.prod(_dims(x_zero)) != 1:
        return None
    product = IntegerProduct(x, weights, x_zero, weights_zero, emit)
    if not product.is_narrow:
        return None
    if op_name == "MatMulInteger":
        return product.product()
    pads = [int(width) for width in attrs.get("pads", [0] * 4)]
    is_explicit = attrs.get("auto_pad", b"NOTSET") in (b"NOTSET", b"VALID")
    if not is_explicit or (any(pads) and not product.has_known_zero):
        return None
    strides, dilation = (list(attrs.get(name, [1, 1])) for name in ("strides", "dilations"))
    return product.convolution(strides, pads, dilation, int(attrs.get("group", 1)))


def _dims(value: np.ndarray | relax.Expr | None) -> tuple[int, ...]:
    return () if value is None else value.shape if isinstance(value, np.ndarray) else shape(value)
