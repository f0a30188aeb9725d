"""1x1 convolutions with the per-channel operators behind them, which passes move as one unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import tvm
from tvm import relax

from pimflow.relay_passes.flat import operator, shape
from pimflow.relay_passes.operators import BINARY, UNARY


@dataclass(frozen=True, eq=False)
class ChannelwiseOperator:
    """An elementwise operator on a map, with at most one constant, which has one value or one a channel.

    Attributes
    ----------
    call : Call
        With the map as operand `position`.
    constant : ndarray, optional
        By channel, or of one element; None for operators whose only operand is the map.
    """

    call: relax.Call
    position: int = 0
    constant: np.ndarray | None = None

    @classmethod
    def from_call(cls, value: relax.Expr, channels: int) -> ChannelwiseOperator | None:
        """`value` as such an operator; None for other operators."""
        kind = operator(value)
        if kind in UNARY and kind != "nn.prelu":
            return cls(value)
        if kind not in BINARY:
            return None
        constants = [isinstance(arg, tvm.ir.GenericConst) for arg in value.args]
        if sum(constants) != 1:
            return None
        array = value.args[constants.index(True)].value.numpy()
        if array.size not in (1, array.shape[-1] if array.ndim else 1) or array.size not in (1, channels):
            return None
        return cls(value, constants.index(False), array.reshape(-1))

    @property
    def operand(self) -> relax.Expr:
        return self.call.args[self.position]

    @property
    def signature(self) -> tuple:
        """Equal for operators that differ only in their constants by channel."""
        scalars = [str(arg) for arg in self.call.args[1:]] if self.constant is None else []
        return operator(self.call), self.position, self.constant is None, *scalars, str(self.call.attrs)

    def call_on(self, x: relax.Expr, constant: relax.Expr | None = None) -> relax.Call:
        """The call on `x`, with `constant` in place of its own if it is given."""
        args = self.call.args[:]
        args[self.position] = x
        if constant is not None:
            args[1 - self.position] = constant
        return relax.Call(self.call.op, args, self.call.attrs)

    def channel_constants(self, channels: int) -> np.ndarray:
        """The constant with one element for each channel."""
        return np.broadcast_to(self.constant, (channels,))


@dataclass(frozen=True, eq=False)
class Branch:
    """A 1x1 convolution, and the per-channel operators behind it.

    Attributes
    ----------
    filters : ndarray, [OC, C]
    inputs : tuple of Expr
        The tensors that it reads, concatenated along the channels.
    epilogue : tuple of ChannelwiseOperator
        In order.
    """

    conv: relax.Call
    filters: np.ndarray
    inputs: tuple[relax.Expr, ...]
    epilogue: tuple[ChannelwiseOperator, ...] = ()

    @classmethod
    def from_call(cls, value: relax.Expr) -> Branch | None:
        """The branch of a dense 1x1 convolution of stride 1 with constant filters; None for other values."""
        if not is_pointwise(value) or any(int(s) != 1 for s in value.attrs.strides):
            return None
        return cls(value, value.args[1].value.numpy()[:, 0, 0], (value.args[0],))

    @property
    def channels(self) -> int:
        return len(self.filters)

    @property
    def with_bias(self) -> Branch:
        """The branch with a bias, which is zero if it had none."""
        if (
            self.epilogue
            and operator(self.epilogue[0].call) == "add"
            and self.epilogue[0].constant is not None
        ):
            return self
        zeros = relax.const(np.zeros((1, 1, 1, self.channels), self.filters.dtype))
        bias = ChannelwiseOperator(
            relax.op.add(self.conv, zeros), 0, np.zeros(self.channels, self.filters.dtype)
        )
        return replace(self, epilogue=(bias, *self.epilogue))

    @property
    def signature(self) -> tuple:
        """Equal for branches whose operators differ only in their constants by channel."""
        return tuple(operation.signature for operation in self.with_bias.epilogue)


def is_pointwise(value: relax.Expr) -> bool:
    """Whether `value` is a dense 1x1 convolution with constant filters, of any stride."""
    if operator(value) != "nn.conv2d" or not isinstance(value.args[1], tvm.ir.GenericConst):
        return False
    attrs = value.attrs
    return (
        (attrs.data_layout, attrs.kernel_layout) == ("NHWC", "OHWI")
        and shape(value.args[1])[1:3] == (1, 1)
        and int(attrs.groups) == 1
        and not any(int(p) for p in attrs.padding)
    )


def emit(builder: relax.BlockBuilder, branch: Branch, name: str, result: str) -> tuple[relax.Var, relax.Var]:
    """Emit `branch` without a zero bias; returns the variables of its convolution and its last operator."""
    inputs = list(dict.fromkeys(branch.inputs))
    x = inputs[0] if len(inputs) == 1 else builder.emit(relax.op.concat(inputs, axis=3))
    filters = relax.const(branch.filters[:, None, None, :], x.ty.dtype)
    conv = relax.Call(branch.conv.op, [x, filters], branch.conv.attrs)
    value = first = builder.emit(conv, name_hint=name)
    epilogue = [op for op in branch.epilogue if operator(op.call) != "add" or np.any(op.constant)]
    for operation in epilogue:
        hint = result if operation is epilogue[-1] else f"{name}_out"
        value = builder.emit(operation.call_on(value), name_hint=hint)
    return first, value


def concat_branches(branches: Sequence[Branch]) -> Branch:
    """One branch with the channels of all, whose signatures are equal; its filters are block-diagonal.

    Branches with the same input share its columns.
    """
    branches = [branch.with_bias for branch in branches]
    filters, inputs = _stack_filters(branches, rows=True)
    epilogue = []
    for operations in zip(*(branch.epilogue for branch in branches)):
        first = operations[0]
        if first.constant is not None:
            constants = [op.channel_constants(b.channels) for op, b in zip(operations, branches)]
            first = _with_constant(first, np.concatenate(constants))
        epilogue.append(first)
    return Branch(branches[0].conv, filters, inputs, tuple(epilogue))


def sum_branches(branches: Sequence[Branch]) -> Branch:
    """One branch that computes the sum of `branches`, which have only biases behind them."""
    branches = [branch.with_bias for branch in branches]
    filters, inputs = _stack_filters(branches, rows=False)
    channels = branches[0].channels
    bias = sum(branch.epilogue[0].channel_constants(channels) for branch in branches)
    epilogue = _with_constant(branches[0].epilogue[0], bias.astype(filters.dtype))
    return Branch(branches[0].conv, filters, inputs, (epilogue,))


def _with_constant(operation: ChannelwiseOperator, constant: np.ndarray) -> ChannelwiseOperator:
    dtype = operation.call.args[1 - operation.position].ty.dtype
    call = operation.call_on(operation.operand, relax.const(constant.reshape(1, 1, 1, -1), dtype))
    return ChannelwiseOperator(call, operation.position, constant)


def _stack_filters(branches: Sequence[Branch], *, rows: bool) -> tuple[np.ndarray, tuple[relax.Expr, ...]]:
    """Filters of all branches over all inputs: stacked along output channels if `rows`, else added."""
    columns: dict[relax.Expr, int] = {}
    for branch in branches:
        for x in branch.inputs:
            columns.setdefault(x, sum(shape(earlier_input)[3] for earlier_input in columns))
    total = sum(shape(x)[3] for x in columns)
    heights = [branch.channels for branch in branches]
    filters = np.zeros((sum(heights) if rows else heights[0], total), branches[0].filters.dtype)
    top = 0
    for branch, height in zip(branches, heights):
        begin = 0
        for x in branch.inputs:
            c = shape(x)[3]
            filters[top : top + height, columns[x] : columns[x] + c] += branch.filters[:, begin : begin + c]
            begin += c
        top += height if rows else 0
    return filters, tuple(columns)
