"""ONNX models run operator by operator in PyTorch, to measure its memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from pimflow.errors import UnsupportedOpError, UsageError
from pimflow.zoo.nodes import attributes

if TYPE_CHECKING:
    import torch

Operator = Callable[..., Any]
Sizes = Sequence[int]


def run(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Outputs of `model`; see `peak_bytes`."""
    with import_torch().inference_mode():
        return [output.numpy() for output in outputs(model.graph, weight_tensors(model), tensors(inputs))]


def peak_bytes(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray]) -> int:
    """Peak bytes of PyTorch's CPU allocator while it runs `model`, including weights.

    A tensor is freed as soon as no later operator reads it. Memory that libraries below PyTorch allocate is
    not counted.

    Parameters
    ----------
    model : ModelProto
        A result of `zoo.load_model`.

    Raises
    ------
    UsageError
        If PyTorch is not installed.
    UnsupportedOpError
        For an operator that is not implemented here.
    """
    torch = import_torch()
    from torch.profiler import ProfilerActivity, profile

    weights, input_tensors = weight_tensors(model), tensors(inputs)
    resident_bytes: int = sum(tensor.nbytes for tensor in (*weights.values(), *input_tensors.values()))
    with torch.inference_mode():
        outputs(model.graph, weights, input_tensors)  # warms up: PyTorch allocates some memory once
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            outputs(model.graph, weights, input_tensors)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += int(event.nbytes())
        peak = max(peak, live)
    return resident_bytes + peak


def import_torch() -> Any:
    """Import PyTorch; raises `UsageError` if it is not installed."""
    try:
        import torch
    except ImportError:
        raise UsageError("PyTorch is not installed: pip install 'pimflow[torch]'") from None
    return torch


def tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Copies of arrays as tensors of PyTorch."""
    torch = import_torch()
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}


def weight_tensors(model: onnx.ModelProto) -> dict[str, torch.Tensor]:
    """Weights of `model` as tensors of PyTorch, by name."""
    return tensors(
        {initializer.name: numpy_helper.to_array(initializer) for initializer in model.graph.initializer}
    )


def outputs(
    graph: onnx.GraphProto, weights: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    """Run all nodes of `graph`, and free each tensor after its last reader."""
    operators = _operators()
    last = {name: index for index, node in enumerate(graph.node) for name in node.input}
    output_names = {output.name for output in graph.output}
    values: dict[str, Any] = {"": None, **inputs}
    for index, node in enumerate(graph.node):
        if node.op_type not in operators:
            supported = ", ".join(sorted(operators))
            raise UnsupportedOpError(f"{node.name}: {node.op_type} is none of {supported}")
        operands = [weights[name] if name in weights else values[name] for name in node.input]
        values[node.output[0]] = operators[node.op_type](*operands, **attributes(node))
        del operands
        for name in set(node.input) - output_names - {""}:
            if last[name] == index:
                values.pop(name, None)
    return [values[output.name] for output in graph.output]


def _operators() -> dict[str, Operator]:
    """The operators of the zoo, by ONNX name, with the attributes that they take."""
    torch = import_torch()
    call = torch.nn.functional
    return {
        **_windows(torch),
        **_moves(torch),
        "Add": torch.add,
        "BatchNormalization": lambda x, scale, bias, mean, variance, epsilon=1e-5, **_: call.batch_norm(
            x, mean, variance, scale, bias, eps=epsilon
        ),
        "Cast": lambda x, to: x.to(torch.from_numpy(np.zeros(1, helper.tensor_dtype_to_np_dtype(to))).dtype),
        "Clip": torch.clip,
        "Div": torch.div,
        "Erf": torch.erf,
        "Gemm": lambda a, b, c=None, alpha=1.0, beta=1.0, transA=0, transB=0: _gemm(
            torch, a.T if transA else a, b.T if transB else b, c, alpha, beta
        ),
        "LayerNormalization": lambda x, scale, bias=None, axis=-1, epsilon=1e-5: call.layer_norm(
            x, x.shape[axis:], scale, bias, epsilon
        ),
        "LeakyRelu": lambda x, alpha=0.01: call.leaky_relu(x, alpha),
        "MatMul": torch.matmul,
        "Mul": torch.mul,
        "PRelu": lambda x, slope: torch.where(x < 0, x * slope, x),
        "Relu": torch.relu,
        "Sigmoid": torch.sigmoid,
        "Softmax": lambda x, axis=-1: torch.softmax(x, axis),
        "Tanh": torch.tanh,
        "Where": torch.where,
    }


def _gemm(torch: Any, a: Any, b: Any, c: Any, alpha: float, beta: float) -> Any:
    return torch.addmm(c, a, b, beta=beta, alpha=alpha) if c is not None else alpha * (a @ b)


def _windows(torch: Any) -> dict[str, Operator]:
    """Convolutions and poolings, by ONNX name."""
    call = torch.nn.functional

    def pad(x: Any, pads: list[int], value: float = 0.0) -> tuple[Any, tuple[int, ...]]:
        """Pad `x` if the two sides differ; also returns the padding that remains for both sides."""
        half = len(pads) // 2
        if pads[:half] == pads[half:]:
            return x, tuple(pads[:half])
        ends = [size for axis in reversed(range(half)) for size in (pads[axis], pads[axis + half])]
        return call.pad(x, ends, value=value), (0,) * half

    def conv(
        x: Any, w: Any, b: Any = None, group: int = 1, strides: Sizes = (1, 1), pads: Sizes = (0,) * 4,
        dilations: Sizes = (1, 1), **_: Any,
    ) -> Any:  # fmt: skip
        """A convolution in NCHW; parameters are the operands and attributes of ONNX."""
        x, padding = pad(x, list(pads))
        return call.conv2d(x, w, b, tuple(strides), padding, tuple(dilations), group)

    def conv_transpose(
        x: Any, w: Any, b: Any = None, group: int = 1, strides: Sizes = (1, 1), pads: Sizes = (0,) * 4,
        output_padding: Sizes = (0, 0), dilations: Sizes = (1, 1), **_: Any,
    ) -> Any:  # fmt: skip
        """A transposed convolution in NCHW, of the same padding on both sides; parameters as of `conv`."""
        half = tuple(pads[: len(pads) // 2])
        return call.conv_transpose2d(
            x, w, b, tuple(strides), half, tuple(output_padding), group, tuple(dilations)
        )

    def max_pool(
        x: Any, kernel_shape: Sizes, strides: Sizes = (1, 1), pads: Sizes = (0,) * 4, ceil_mode: int = 0,
        **_: Any,
    ) -> Any:  # fmt: skip
        """The maximum of each window."""
        x, padding = pad(x, list(pads), float("-inf"))
        return call.max_pool2d(x, kernel_shape, tuple(strides), padding, ceil_mode=bool(ceil_mode))

    def average_pool(
        x: Any, kernel_shape: Sizes, strides: Sizes = (1, 1), pads: Sizes = (0,) * 4, ceil_mode: int = 0,
        count_include_pad: int = 0, **_: Any,
    ) -> Any:  # fmt: skip
        """The mean of each window."""
        x, padding = pad(x, list(pads))
        return call.avg_pool2d(
            x, kernel_shape, tuple(strides), padding, bool(ceil_mode), bool(count_include_pad)
        )

    return {
        "AveragePool": average_pool,
        "Conv": conv,
        "ConvTranspose": conv_transpose,
        "GlobalAveragePool": lambda x: call.adaptive_avg_pool2d(x, 1),
        "MaxPool": max_pool,
    }


def _moves(torch: Any) -> dict[str, Operator]:
    """Operators that only move elements, by ONNX name."""

    def cut(x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Any:
        """A slice, by ranges of axes."""
        names = range(len(starts)) if axes is None else axes.tolist()
        pace = [1] * len(starts) if steps is None else steps.tolist()
        window = [slice(None)] * x.ndim
        for axis, begin, end, step in zip(names, starts.tolist(), ends.tolist(), pace, strict=True):
            window[axis] = slice(begin, end, step)
        return x[tuple(window)]

    def reshape(x: Any, dims: Any, **_: Any) -> Any:
        return x.reshape([x.shape[i] if dim == 0 else dim for i, dim in enumerate(dims.tolist())])

    def shuffle(x: Any, blocksize: int, mode: bytes = b"DCR") -> Any:
        """Channels moved into blocks of pixels."""
        n, c, h, w = x.shape
        deep = c // blocksize**2
        if mode == b"CRD":
            return torch.nn.functional.pixel_shuffle(x, blocksize)
        parts = x.reshape(n, blocksize, blocksize, deep, h, w).permute(0, 3, 4, 1, 5, 2)
        return parts.reshape(n, deep, h * blocksize, w * blocksize)

    return {
        "Concat": lambda *parts, axis: torch.cat(parts, axis),
        "DepthToSpace": shuffle,
        "Flatten": lambda x, axis=1: x.reshape(int(np.prod(x.shape[:axis])), -1),
        "Gather": lambda x, index, axis=0: x.index_select(axis, index.reshape(-1)).reshape(
            *x.shape[:axis], *index.shape, *x.shape[axis + 1 :]
        ),
        "ReduceMean": lambda x, axes, keepdims=1: x.mean(
            axes.tolist() if hasattr(axes, "tolist") else axes, keepdim=bool(keepdims)
        ),
        "Reshape": reshape,
        "Slice": cut,
        "Transpose": lambda x, perm: x.permute(perm),
        "Unsqueeze": lambda x, axes: x.reshape(np.expand_dims(np.empty(x.shape, bool), axes.tolist()).shape),
    }
