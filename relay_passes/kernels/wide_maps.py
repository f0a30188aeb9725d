"""Maps of a fused run widened to whole vectors, so that no window reaches beyond them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tvm import relax
from tvm.relax import op

from pimflow.core.fused_tile import wide_width
from pimflow.relay_passes.flat import operator, shape, substitute
from pimflow.relay_passes.operators import POOL

WINDOWED = ("nn.conv2d", *POOL)


@dataclass(frozen=True)
class Margins:
    """Places beside a map, in the order top, left, bottom, right."""

    top: int = 0
    left: int = 0
    bottom: int = 0
    right: int = 0

    def __bool__(self) -> bool:
        return any((self.top, self.left, self.bottom, self.right))


def margins(run: list[relax.VarBinding]) -> tuple[Margins, dict[relax.Var, Margins]]:
    """By how much to widen the map that a run reads, so that its result has `wide_width`.

    Parameters
    ----------
    run : list of VarBinding
        As `fuse_groups.activation_chains` finds them: one pooling at most has a window.

    Returns
    -------
    Margins
        By how much to widen the operand of the first.
    dict of Var to Margins
        By pooling, places outside of the map that its windows reach, for results of the network: what a
        widened map holds there has to be what the pooling takes padding for.
    """
    wanted_height, wanted_width = shape(run[-1].var)[1], wide_width(shape(run[-1].var)[2])
    top = left = 0
    reached: dict[relax.Var, Margins] = {}
    for binding in reversed(run):
        kind, attrs = operator(binding.value), binding.value.attrs
        if kind not in WINDOWED:
            continue
        _, height, width, _ = shape(binding.value.args[0])
        _, result_height, result_width, _ = shape(binding.var)
        window = shape(binding.value.args[1])[1:3] if kind == "nn.conv2d" else attrs.pool_size
        axes = list(zip(window, attrs.strides, attrs.dilation, strict=True))
        (span_y, stride_y), (span_x, stride_x) = ((1 + (int(k) - 1) * int(d), int(s)) for k, s, d in axes)
        wanted_height = (wanted_height - 1) * stride_y + span_y
        wanted_width = (wanted_width - 1) * stride_x + span_x
        before_y, before_x, *_ = (int(p) for p in attrs.padding)
        behind_y = (result_height - 1) * stride_y + span_y - before_y - height
        behind_x = (result_width - 1) * stride_x + span_x - before_x - width
        if kind in POOL:
            reached[binding.var] = Margins(before_y, before_x, max(0, behind_y), max(0, behind_x))
            top, left = before_y, before_x
    _, height, width, _ = shape(run[0].value.args[0])
    widened = Margins(top, left, max(0, wanted_height - top - height), max(0, wanted_width - left - width))
    return widened, {var: outside for var, outside in reached.items() if outside}


def wide_maps(bindings: list[relax.VarBinding], run: list[relax.VarBinding]) -> list[relax.VarBinding]:
    """`bindings` with wider maps in `run`, a part of them: padded before its first, cut behind its last.

    The results of all others keep their shapes; the last binding stands for the last of `bindings`.
    """
    widened, reached = margins(run)
    if not widened:
        return bindings
    builder, new = relax.BlockBuilder(), list[relax.VarBinding]()
    env: dict[relax.Var, relax.Expr] = {}
    inside = {b.var for b in run}

    def bind(value: relax.Expr) -> relax.Var:
        value = builder.normalize(value)
        new.append(relax.VarBinding(relax.Var(f"wide{len(new)}", value.ty), value))
        return new[-1].var

    for binding in bindings:
        call, kind = binding.value, operator(binding.value)
        args = [substitute(arg, env) for arg in call.args]
        if binding is run[0]:
            args[0] = bind(
                op.nn.pad(args[0], [0, 0, widened.top, widened.bottom, widened.left, widened.right, 0, 0])
            )
        if binding.var in reached:
            _, height, width, _ = shape(call.args[0])
            args[0] = bind(_outside(kind, args[0], height, width, widened))
        value = relax.Call(call.op, args, call.attrs, call.ty_args)
        if kind in POOL and binding.var in inside:
            value = _without_padding(call, args[0])
        env[binding.var] = bind(value)
        if binding is run[-1]:
            _, height, width, _ = shape(binding.var)
            narrow = op.strided_slice(env[binding.var], [1, 2], [0, 0], [height, width], assume_inbound=True)
            env[binding.var] = bind(narrow)
    return new


def _outside(kind: str, x: relax.Expr, height: int, width: int, widened: Margins) -> relax.Expr:
    """The widened `x` with a pooling's padding value outside of the map of `height` and `width`."""
    largest = kind == "nn.max_pool2d"
    mask = np.full((1, height, width, 1), 0 if largest else 1, np.float32)
    beside = [(0, 0), (widened.top, widened.bottom), (widened.left, widened.right), (0, 0)]
    mask = np.pad(mask, beside, constant_values=-np.inf if largest else 0)
    return (op.add if largest else op.multiply)(x, relax.const(mask, x.ty.dtype))


def _without_padding(pooling: relax.Call, x: relax.Expr) -> relax.Expr:
    attrs = pooling.attrs
    pool = op.nn.max_pool2d if operator(pooling) == "nn.max_pool2d" else op.nn.avg_pool2d
    window = {"pool_size": attrs.pool_size, "strides": attrs.strides, "dilation": attrs.dilation}
    return pool(x, **window, layout="NHWC", out_layout="NHWC")
