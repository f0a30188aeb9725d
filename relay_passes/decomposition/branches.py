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
class ByChannel:
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
    def of(cls, value: relax.Expr, channels: int) -> ByChannel | None:
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

    def applied(self, x: relax.Expr, constant: np.ndarray | None = None) -> relax.Call:
        """The call on `x`, with `constant` in place of its own if it is given."""
        args = list(self.call.args)
        args[self.position] = x
        if constant is not None:
            dtype = args[1 - self.position].ty.dtype
            args[1 - self.position] = relax.const(constant.reshape(1, 1, 1, -1), dtype)
        return relax.Call(self.call.op, args, self.call.attrs)

    def by_channel(self, channels: int) -> np.ndarray:
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
    behind : tuple of ByChannel
        In order.
    """

    conv: relax.Call
    filters: np.ndarray
    inputs: tuple[relax.Expr, ...]
    behind: tuple[ByChannel, ...] = ()

    @classmethod
    def of(cls, value: relax.Expr) -> Branch | None:
        """The branch of a dense 1x1 convolution of stride 1 with constant filters; None for other values."""
        if not is_pointwise(value) or any(int(s) != 1 for s in value.attrs.strides):
            return None
        return cls(value, value.args[1].value.numpy()[:, 0, 0], (value.args[0],))

    @property
    def channels(self) -> int:
        return len(self.filters)

    def then(self, operation: ByChannel) -> Branch:
        return replace(self, behind=(*self.behind, operation))

    @property
    def biased(self) -> Branch:
        """The branch with a bias, which is zero if it had none."""
        if self.behind and operator(self.behind[0].call) == "add" and self.behind[0].constant is not None:
            return self
        zeros = relax.const(np.zeros((1, 1, 1, self.channels), self.filters.dtype))
        bias = ByChannel(relax.op.add(self.conv, zeros), 0, np.zeros(self.channels, self.filters.dtype))
        return replace(self, behind=(bias, *self.behind))

    @property
    def signature(self) -> tuple:
        """Equal for branches whose operators differ only in their constants by channel."""
        return tuple(operation.signature for operation in self.biased.behind)


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
    joined = list(dict.fromkeys(branch.inputs))
    x = joined[0] if len(joined) == 1 else builder.emit(relax.op.concat(joined, axis=3))
    filters = relax.const(branch.filters[:, None, None, :], x.ty.dtype)
    conv = relax.Call(branch.conv.op, [x, filters], branch.conv.attrs)
    value = first = builder.emit(conv, name_hint=name)
    behind = [op for op in branch.behind if operator(op.call) != "add" or np.any(op.constant)]
    for operation in behind:
        hint = result if operation is behind[-1] else f"{name}_out"
        value = builder.emit(operation.applied(value), name_hint=hint)
    return first, value


def side_by_side(branches: Sequence[Branch]) -> Branch:
    """One branch with the channels of all, whose signatures are equal; its filters are block-diagonal.

    Branches with the same input share its columns.
    """
    branches = [branch.biased for branch in branches]
    filters, inputs = _stacked(branches, rows=True)
    behind = []
    for operations in zip(*(branch.behind for branch in branches)):
        first = operations[0]
        if first.constant is not None:
            constants = [op.by_channel(b.channels) for op, b in zip(operations, branches)]
            first = _with_constant(first, np.concatenate(constants))
        behind.append(first)
    return Branch(branches[0].conv, filters, inputs, tuple(behind))


def summed(branches: Sequence[Branch]) -> Branch:
    """One branch that computes the sum of `branches`, which have only biases behind them."""
    branches = [branch.biased for branch in branches]
    filters, inputs = _stacked(branches, rows=False)
    channels = branches[0].channels
    bias = sum(branch.behind[0].by_channel(channels) for branch in branches)
    behind = _with_constant(branches[0].behind[0], bias.astype(filters.dtype))
    return Branch(branches[0].conv, filters, inputs, (behind,))


def _with_constant(operation: ByChannel, constant: np.ndarray) -> ByChannel:
    return ByChannel(operation.applied(operation.operand, constant), operation.position, constant)


def _stacked(branches: Sequence[Branch], *, rows: bool) -> tuple[np.ndarray, tuple[relax.Expr, ...]]:
    """Filters of all branches over all inputs: stacked along output channels if `rows`, else added."""
    columns: dict[relax.Expr, int] = {}
    for branch in branches:
        for x in branch.inputs:
            columns.setdefault(x, sum(shape(other)[3] for other in columns))
    total = sum(shape(x)[3] for x in columns)
    heights = [branch.channels for branch in branches]
    filters = np.zeros((sum(heights) if rows else heights[0], total), branches[0].filters.dtype)
    top = 0
    for branch, height in zip(branches, heights):
        left = 0
        for x in branch.inputs:
            c = shape(x)[3]
            filters[top : top + height, columns[x] : columns[x] + c] += branch.filters[:, left : left + c]
            left += c
        top += height if rows else 0
    return filters, tuple(columns)
