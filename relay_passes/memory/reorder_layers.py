"""The kernels of a network in another order."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax

from pimflow.errors import UsageError
from pimflow.relay_passes.flat import main_bindings
from pimflow.relay_passes.regions.extract_regions import region_groups


@tvm.transform.module_pass(opt_level=0, name="ReorderLayers")
class ReorderLayers:
    """Bindings of ``main`` kernel by kernel, in a given order of the regions.

    Parameters
    ----------
    names : sequence of str
        Each region of the module once, after the regions that it reads and those that `order_constraints`
        names.
    views : bool
        See `kernel_groups`.

    Rewrite: ``a = f(x); b = g(x); c = add(a, b) -> b = g(x); a = f(x); c = add(a, b)``.
    Preserves: values bit by bit, names, regions.

    Raises
    ------
    UsageError
        If `names` are not the regions, or one comes before what it reads.
    """

    def __init__(self, names: Sequence[str], views: bool = True):
        self.names, self.views = tuple(names), views

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        groups = region_groups(mod, views=self.views)
        if sorted(self.names) != sorted(groups):
            mismatched = sorted(set(self.names) ^ set(groups)) or sorted(self.names)
            raise UsageError(f"the order does not name every layer once: '{mismatched[0]}'")
        moved = [binding for name in self.names for binding in groups[name].bindings]
        vars_moved = {binding.var for binding in moved}
        moved += [binding for binding in main_bindings(mod) if binding.var not in vars_moved]
        _require_data_flow(mod, moved)
        function = mod["main"]
        builder = relax.BlockBuilder()
        body = relax.SeqExpr([relax.DataflowBlock(moved)], function.body.body)
        functions = dict(mod.functions_items())
        functions[mod.get_global_var("main")] = relax.Function(
            function.params, builder.normalize(body), function.ret_ty, function.is_pure, function.attrs
        )
        return tvm.IRModule(functions, attrs=mod.attrs)


def order_constraints(mod: tvm.IRModule, *, views: bool = True) -> dict[str, tuple[str, ...]]:
    """By region, the regions that must stay before it, so that the set of regions does not change.

    Regions whose results it reads are not among them.
    """
    groups = region_groups(mod, views=views)
    layers = {b.var: name for name, group in groups.items() for b in group.bindings}
    earlier = {
        name: dict.fromkeys(
            layers[b.var] for b in main_bindings(mod) if b.var in group.ordered_after and b.var in layers
        )
        for name, group in groups.items()
    }
    return {
        name: tuple(first for first in named if first != name) for name, named in earlier.items() if named
    }


def _require_data_flow(mod: tvm.IRModule, bindings: Sequence[relax.VarBinding]) -> None:
    to_come = {binding.var for binding in bindings}
    for binding in bindings:
        early = [v.name for v in relax.analysis.free_vars(binding.value) if v in to_come]
        if early:
            raise UsageError(f"'{binding.var.name}' would come before '{early[0]}', which it reads")
        to_come.remove(binding.var)
