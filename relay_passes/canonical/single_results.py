"""Operators with several results, as several operators with one result."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import tvm
from tvm import relax

from pimflow.relay_passes.flat import BindingPass, operator, shape


@tvm.transform.module_pass(opt_level=0, name="SingleResults")
class SingleResults(BindingPass):
    """Make one operator for each result, since a kernel has one; a result without readers is not computed.

    Rewrite: ``split(x, …) -> (strided_slice(x, …), …)``, ``topk(x) -> (topk(x, "values"), topk(x,
    "indices"))``; a tuple's element is the element itself.
    Preserves: values exactly, names.
    """

    def rewrite(self, builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
        """The new value of `var`; None if `value` stays."""
        kind = operator(value)
        if kind == "split":
            results = _slices(value, var.ty.fields)
        elif kind == "topk" and value.attrs.ret_type == "both":
            results = [_topk(value, "values"), _topk(value, "indices")]
        else:
            return None
        names = (f"{var.name}_{index}" for index in range(len(results)))
        return relax.Tuple([builder.emit(r, name_hint=name) for r, name in zip(results, names)])


def _slices(call: relax.Call, parts: Sequence[relax.TensorType]) -> list[relax.Expr]:
    x, axis = call.args[0], int(call.attrs.axis) % len(shape(call.args[0]))
    ends = list(itertools.accumulate(int(part.shape[axis]) for part in parts))
    return [
        relax.op.strided_slice(x, [axis], [begin], [end], assume_inbound=True)
        for begin, end in zip([0, *ends], ends)
    ]


def _topk(call: relax.Call, result: str) -> relax.Expr:
    attrs = call.attrs
    return relax.op.topk(call.args[0], int(attrs.k), int(attrs.axis), result, attrs.largest, attrs.dtype)
