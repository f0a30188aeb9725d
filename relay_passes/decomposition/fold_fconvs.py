"""An fconv that reads an input of the network and the core behind it as one layer."""

from __future__ import annotations

import math

import numpy as np
import tvm
from tvm import relax

from pimflow.relay_passes.decomposition.branches import is_pointwise
from pimflow.relay_passes.flat import (
    LAYER_NAMES,
    LAYER_ROLES,
    main_bindings,
    operator,
    rebuild,
    shape,
    use_counts,
)


@tvm.transform.module_pass(opt_level=0, name="FoldFconvs")
class FoldFconvs:
    """Fold an fconv that reads a network input into the core that is its only reader.

    Inputs lie outside the pool, so the reduced map between both layers is all that the fconv takes there. The
    core has as many more products as the input has more channels, a few in a first layer.

    Rewrite: ``core(fconv(x)) -> conv(x)``, its filter ``core @ fconv`` for each tap. The new layer has the
    name and the role of the core. Nothing is lost at the borders: an fconv has no bias.
    Preserves: values up to the order of sums, shapes, names of other layers.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        sites = _sites(mod)
        fconvs = {fconv: core for core, (fconv, _) in sites.items()}
        operands: dict[relax.Var, relax.Expr] = {}  # by core, the operand of its fconv in the new module

        def rewrite(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
            """The new value of `var`; None if `value` stays."""
            if var in fconvs:
                operands[fconvs[var]] = value.args[0]
            if var not in sites:
                return None
            filters = relax.const(sites[var][1], value.args[1].ty.dtype)
            return relax.Call(value.op, [operands[var], filters], value.attrs)

        return rebuild(mod, rewrite) if sites else mod


def fconv_sites(mod: tvm.IRModule) -> tuple[str, ...]:
    """Variables of the cores that `FoldFconvs` treats."""
    return tuple(var.name for var in _sites(mod))


def _sites(mod: tvm.IRModule) -> dict[relax.Var, tuple[relax.Var, np.ndarray]]:
    """By variable of each core that the pass treats, the fconv, and the filters of the new layer."""
    bindings, names, role_of = main_bindings(mod), LAYER_NAMES.read(mod), LAYER_ROLES.read(mod)
    if not role_of:
        return {}
    counts, values, sites = use_counts(mod), {b.var: b.value for b in bindings}, {}
    role = {var: role_of.get(names.get(var.name, var.name), "") for var in values}
    inputs = set(mod["main"].params)
    for var, value in values.items():  # inputs in another layout are read through the kernel's own index
        if operator(value) in ("permute_dims", "reshape") and value.args[0] in inputs:
            inputs.add(var)
    for var, value in values.items():
        if role[var] != "core" or operator(value) != "nn.conv2d" or int(value.attrs.groups) != 1:
            continue
        fconv = value.args[0]
        if role.get(fconv) != "fconv" or counts[fconv] != 1 or not is_pointwise(values[fconv]):
            continue
        if values[fconv].args[0] not in inputs or math.prod(map(int, values[fconv].attrs.strides)) != 1:
            continue
        reducing = values[fconv].args[1].value.numpy()[:, 0, 0].astype(np.float64)
        filters = value.args[1].value.numpy()
        if filters.shape[3] == shape(fconv)[3] == len(reducing):
            sites[var] = fconv, (filters.astype(np.float64) @ reducing).astype(filters.dtype)
    return sites
