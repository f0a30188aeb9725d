"""Which arguments of kernels may come from a caller of the network."""

from __future__ import annotations

import tvm
from tvm import relax

from pimflow.relay_passes.flat import main_bindings, operator
from pimflow.relay_passes.schedules.drop_checks import CHECKED


@tvm.transform.module_pass(opt_level=0, name="MarkChecked")
class MarkChecked:
    """Mark which arguments of kernels may come from a caller: inputs of the network, and views of them.

    All others are constants, or tensors that kernels of the network wrote. They always have the shapes, types
    and strides for which the kernel was made.

    Rewrite: kernels that ``main`` calls get the attribute `CHECKED`.
    Preserves: ``main``, bodies.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        inputs = set(mod["main"].params)
        checked: dict[str, set[int]] = {}
        for binding in main_bindings(mod):
            value, kind = binding.value, operator(binding.value)
            if kind in ("call_tir", "call_tir_inplace"):
                positions = checked.setdefault(value.args[0].name_hint, set())
                positions.update(i for i, operand in enumerate(value.args[1]) if operand in inputs)
            elif kind != "call_dps_packed" and not inputs.isdisjoint(relax.analysis.free_vars(value)):
                inputs.add(binding.var)  # a view or an alias of an input
        functions = {
            gv: function.with_attr(CHECKED, sorted(checked[gv.name_hint]))
            if gv.name_hint in checked
            else function
            for gv, function in mod.functions_items()
        }
        return tvm.IRModule(functions, attrs=mod.attrs)
