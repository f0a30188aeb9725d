"""Rows of zeros around the input of a convolution, for libraries that pad both ends of an axis equally."""

from __future__ import annotations

from collections.abc import Iterable

import tvm
from tvm import relax

from pimflow.core.kernel import STORED_BYTES
from pimflow.core.liveness import view_obstacle
from pimflow.core.region import GATHERS
from pimflow.relay_passes.flat import layer_name, main_bindings, operator, shape
from pimflow.relay_passes.regions.kernel_groups import MOVES, KernelGroup, kernel_groups


def input_copy_reasons(
    mod: tvm.IRModule, groups: Iterable[KernelGroup] | None = None, *, views: bool = True
) -> dict[relax.Var, str]:
    """By convolution that pads rows, why its input cannot lie between rows of zeros; empty if it can.

    The input can lie there if a kernel or PIM writes it, under every plan. A tensor has one place: if several
    convolutions pad it, the first by name gets the place, in any order of execution.

    Parameters
    ----------
    mod : IRModule
        In canonical form, before a plan is applied.
    groups : iterable of KernelGroup, optional
        Its `kernel_groups`, if they are known.
    views : bool
        See `kernel_groups`.
    """
    values = {b.var: b.value for b in main_bindings(mod)}
    concats = [value for value in values.values() if operator(value) == "concat"]
    concat_parts = {part for value in concats for part in relax.analysis.free_vars(value)}
    groups = kernel_groups(mod, views=views) if groups is None else groups
    view = {group.result for group in groups if group.view}
    padding = {var: value for var, value in values.items() if _pads_rows(value)}
    first = {padding[var].args[0]: var for var in sorted(padding, key=lambda var: var.name, reverse=True)}
    reasons: dict[relax.Var, str] = {}
    for var, value in padding.items():
        x = value.args[0]
        kind = operator(values[x]) if x in values else ""
        if not views:
            reasons[var] = "copies are made"
        elif not kind:
            reasons[var] = "it is an input of the network"
        elif kind in MOVES + GATHERS and not (kind == "concat" and x in view):
            reasons[var] = f"it is what {kind} moves"
        elif x in concat_parts:
            reasons[var] = "it lies in a concatenation"
        elif first[x] is not var:
            reasons[var] = f"it lies between the zeros of '{layer_name(mod, first[x])}'"
        else:
            reasons[var] = _alignment_obstacle(value)
    return reasons


def _pads_rows(value: relax.Expr) -> bool:
    return operator(value) == "nn.conv2d" and any(int(value.attrs.padding[end]) for end in (0, 2))


def _alignment_obstacle(call: relax.Call) -> str:
    """Why the input of `call`, or the rows of zeros after it, would begin at an unaligned address."""
    axis = str(call.attrs.data_layout).index("H")
    top, _, bottom, _ = (int(p) for p in call.attrs.padding)
    rows = list(shape(call.args[0]))
    begins = [top] * bool(top) + [top + rows[axis]] * bool(bottom)
    rows[axis] += top + bottom
    return next(filter(None, (view_obstacle(rows, axis, begin, STORED_BYTES) for begin in begins)), "")
