"""Discrete Fourier transforms of ONNX as products with constant matrices, which PIM can compute."""

from __future__ import annotations

import numpy as np

from pimflow.zoo.foreign.builder import ExpandedNode


def dft(node: ExpandedNode) -> None:
    """Expand DFT: along an axis of a tensor [..., 1] of real, or [..., 2] of complex numbers.

    One-sided and inverse, it takes the first half of a conjugate symmetric spectrum to real numbers.
    """
    attrs, dims = node.attrs, node.shape(0)
    rank, parts = len(dims), dims[-1]
    default_axis = 1 if node.opset < 20 else -2
    axis = int(node.value(2).item()) if node.operand(2) else attrs.get("axis", default_axis)
    axis %= rank
    inverse, onesided = bool(attrs.get("inverse", 0)), bool(attrs.get("onesided", 0))
    length = 2 * (dims[axis] - 1) if inverse and onesided else dims[axis]
    if node.operand(1):
        length = int(node.value(1).item())
    if length < 1 or axis == rank - 1 or not parts:
        raise node.unsupported(f"of length {length} along axis {axis} of {dims} is not supported")
    matrix = _fourier_matrix(dims[axis], parts, length, inverse, onesided)
    order = [*(place for place in range(rank - 1) if place != axis), axis, rank - 1]
    moved = node.builder.move_axes(node.operand(0), order)
    outer = [dims[place] for place in order[:-2]]
    rows = node.builder.reshape(moved, [*outer, dims[axis] * parts])
    result_parts = 1 if inverse and onesided else 2
    product = node.builder.emit("MatMul", [rows, node.builder.constant(matrix)])
    spectrum = node.builder.reshape(product, [*outer, matrix.shape[1] // result_parts, result_parts])
    node.bind(node.builder.move_axes(spectrum, np.argsort(order).tolist()))


def stft(node: ExpandedNode) -> None:
    """Expand STFT: frames of a signal [batch, length, 1 or 2], each times a window, then transformed."""
    batch, length, parts = (*node.shape(0), 1)[:3]
    step = int(node.value(1).item())
    window = node.value(2) if node.operand(2) else None
    width = int(node.value(3).item()) if node.operand(3) else length if window is None else window.size
    if not 0 < width <= length or step < 1:
        raise node.unsupported(f"with frames of {width} every {step} of {length} is not supported")
    starts = np.arange(0, length - width + 1, step)
    matrix = _fourier_matrix(width, parts, width, False, bool(node.attrs.get("onesided", 1)))
    if window is not None:
        matrix = np.repeat(window.astype("float32"), parts)[:, None] * matrix
    places = node.builder.constant(starts[:, None] + np.arange(width))
    frames = node.builder.emit("Gather", [node.operand(0), places], axis=1)
    rows = node.builder.reshape(frames, [batch, len(starts), width * parts])
    product = node.builder.emit("MatMul", [rows, node.builder.constant(matrix)])
    node.bind(node.builder.reshape(product, [batch, len(starts), matrix.shape[1] // 2, 2]))


def _fourier_matrix(count: int, parts: int, length: int, inverse: bool, onesided: bool) -> np.ndarray:
    """The matrix of a transform of `length`, [inputs * parts, outputs * parts of these], in fp32.

    Parameters
    ----------
    count, parts : int
        Inputs, of which those beyond `length` do not count and missing ones are 0; 1 if these are real, 2 for
        their real and imaginary parts side by side.
    inverse, onesided : bool
        Both: inputs are half of a conjugate symmetric spectrum, and outputs are real. Only the second: only
        the first half of the spectrum is computed.
    """
    wave = fourier_waves(count, length, inverse, onesided)
    blocks = [[wave.real, wave.imag], [-wave.imag, wave.real]]
    if inverse and onesided:
        blocks = [[wave.real], [-wave.imag]]
    stacked = np.array(blocks[:parts])  # [parts, parts of outputs, count, outputs]
    return stacked.transpose(2, 0, 3, 1).reshape(count * parts, -1).astype("float32")


def fourier_waves(count: int, length: int, inverse: bool, onesided: bool) -> np.ndarray:
    """The complex matrix of a transform, [count, outputs], in fp64; parameters as of `_fourier_matrix`.

    One-sided and inverse, the real part of a product with it is the result.
    """
    half = length // 2 + 1
    outputs = half if onesided and not inverse else length
    turns = np.arange(count)[:, None] * np.arange(outputs) % length
    angles = 2 * np.pi / length * turns
    wave = np.exp(1j * angles if inverse else -1j * angles)
    wave[length:] = 0
    if inverse:
        wave /= length
    if inverse and onesided:
        wave[half:] = 0
        wave[1 : (length + 1) // 2] *= 2  # with their mirrored partners
    return wave
