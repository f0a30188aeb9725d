"""What a convolution is, in numpy alone: nothing here comes from the package under test."""

import itertools
from dataclasses import dataclass

import ml_dtypes
import numpy as np

FP32_UNIT = 2.0**-24
STORAGE = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp32": np.float32, "int8": np.int8}
# Smallest exponent of a normal number, and bits behind the point.
FORMATS = {"fp16": (-14, 10), "bf16": (-126, 7), "fp32": (-126, 23)}


@dataclass(frozen=True, kw_only=True)
class Window:
    """Kernel (height, width), stride, dilation, padding (top, left, bottom, right)."""

    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)

    def taps(self, x: np.ndarray) -> list[np.ndarray]:
        """For each tap of the kernel, row-major, what every output pixel sees there: [n, oh, ow, c]."""
        top, left, bottom, right = self.padding
        n, height, width, c = x.shape
        padded = np.zeros((n, top + height + bottom, left + width + right, c), x.dtype)
        padded[:, top : top + height, left : left + width] = x
        (kh, kw), (sh, sw), (dh, dw) = self.kernel, self.stride, self.dilation
        last_row = padded.shape[1] - (kh - 1) * dh
        last_column = padded.shape[2] - (kw - 1) * dw
        corners = ((i * dh, j * dw) for i in range(kh) for j in range(kw))
        return [padded[:, i : i + last_row : sh, j : j + last_column : sw] for i, j in corners]


def storage_values(values: np.ndarray, dtype: str) -> np.ndarray:
    """`values` as the memory holds them, in double precision."""
    with np.errstate(over="ignore"):
        return values.astype(STORAGE[dtype]).astype(np.float64)


def convolve(x: np.ndarray, w: np.ndarray, window: Window, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Sum of x*w and sum of |x*w| over the window, in double precision, of operands rounded to `dtype`.

    Parameters
    ----------
    x : ndarray, [n, h, w, c]
    w : ndarray, [oc, kh, kw, c]

    Returns
    -------
    two ndarrays, [pixels, oc]
        Pixels row-major over (n, oh, ow).
    """
    x64, w64 = storage_values(x, dtype), storage_values(w, dtype)
    filters = w64.reshape(len(w64), -1, w64.shape[-1])
    results = []
    for operand, weights in ((x64, filters), (abs(x64), abs(filters))):
        total = sum(tap @ weights[:, index].T for index, tap in enumerate(window.taps(operand)))
        results.append(total.reshape(-1, len(w64)))
    return results[0], results[1]


def bound(result: np.ndarray, magnitude: np.ndarray, reduction: int, dtype: str) -> np.ndarray:
    """How far fp32 sums of `reduction` products, in any order, rounded to `dtype`, may be from `result`.

    Sums of int8 products are exact.
    """
    if dtype == "int8":
        return np.zeros_like(result)
    gamma = reduction * FP32_UNIT / (1 - reduction * FP32_UNIT)
    error = gamma * magnitude
    if dtype == "fp32":
        return error
    smallest, fraction_bits = FORMATS[dtype]
    _, exponent = np.frexp(abs(result) + error)
    half_ulp = np.exp2(np.maximum(exponent - 1, smallest) - fraction_bits - 1)
    return error + half_ulp


def sum_in_hardware_order(
    x: np.ndarray, w: np.ndarray, window: Window, dtype: str, lanes: int, back: int = 0
) -> np.ndarray:
    """The convolution in fp32 as the device sums it: bit for bit; in int32 for int8.

    The im2col vector, in (kh, kw, c) order, is cut into columns of `lanes` elements. A column's products
    go through an adder tree over the pairs (2i, 2i+1), an odd last one passed on; the columns' sums are
    accumulated one after the other, from zero. With `back`, rows of so many columns are taken from the
    last to the first.

    Returns
    -------
    ndarray, [pixels, oc], float32 or int32
    """
    word = np.int32 if dtype == "int8" else np.float32
    with np.errstate(over="ignore", invalid="ignore"):
        vectors = np.concatenate(window.taps(storage_values(x, dtype)), axis=-1).astype(word)
        vectors = _columns(vectors.reshape(-1, vectors.shape[-1]), lanes)
        filters = _columns(storage_values(w, dtype).reshape(len(w), -1).astype(word), lanes)
        latch = np.zeros((vectors.shape[0], len(w)), word)
        order = range(vectors.shape[1])
        rows = [order[begin : begin + back] for begin in order[::back]][::-1] if back else [order]
        for column in itertools.chain(*rows):
            tree = vectors[:, None, column] * filters[None, :, column]
            while tree.shape[-1] > 1:
                paired = tree.shape[-1] // 2 * 2
                odd = tree[..., paired:]
                tree = np.concatenate((tree[..., 0:paired:2] + tree[..., 1:paired:2], odd), axis=-1)
            latch = latch + tree[..., 0]
        return latch if dtype == "int8" else latch.astype(STORAGE[dtype]).astype(np.float32)


def _columns(rows: np.ndarray, lanes: int) -> np.ndarray:
    short = -rows.shape[1] % lanes
    return np.pad(rows, ((0, 0), (0, short))).reshape(len(rows), -1, lanes)
