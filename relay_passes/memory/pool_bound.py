"""A lower bound of the pool of a module that is not lowered yet."""

from __future__ import annotations

import itertools

import tvm
from tvm import relax

from pimflow.relay_passes.flat import RESHAPING, operator, tensor_bytes
from pimflow.relay_passes.regions.kernel_groups import KernelGroup, free_variables, kernel_groups


def stored_bytes(mod: tvm.IRModule, *, views: bool = True) -> int:
    """The most bytes of results that are stored between two kernels of ``main``, in the types of `mod`.

    A pool cannot be smaller, even if results overwrite operands: what one kernel has written and a later one
    reads lies there between them. Views add nothing, and keep what they are views of; workspaces, inputs and
    what is stored while a kernel runs do not count. `views` is as for `kernel_groups`.
    """
    groups = kernel_groups(mod, views=views)
    begins: dict[relax.Var, int] = {}
    ends: dict[relax.Var, int] = {}  # by stored result, the last kernel that reads it
    stored: dict[relax.Var, set[relax.Var]] = {}  # by variable, the stored results in whose memory it lies
    for place, group in enumerate(groups):
        sources = {root for var in free_variables(group.bindings) for root in stored.get(var, ())}
        ends.update(dict.fromkeys(sources, place))
        for var in (*group.extra_outputs, group.result):
            if group.view:
                stored[var] = sources
            elif _is_stored(var, group):
                begins[var], stored[var] = place, {var}
    changes = [0] * (len(groups) + 1)
    for var, end in ends.items():
        changes[begins[var]] += tensor_bytes(var)
        changes[end] -= tensor_bytes(var)
    return max(itertools.accumulate(changes))


def _is_stored(var: relax.Var, group: KernelGroup) -> bool:
    """Whether a kernel surely writes `var` to memory of its own: other operators may make it an alias."""
    calls = isinstance(getattr(group.bindings[-1].value, "op", None), tvm.ir.GlobalVar)
    computes = group.fusible and not all(operator(binding.value) in RESHAPING for binding in group.bindings)
    return isinstance(var.ty, relax.TensorType) and (calls or computes)
