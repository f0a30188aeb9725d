"""An lconv and the fconv behind it as one small layer, if only a bias lies between them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax

from pimflow.relay_passes.decomposition.branches import Branch, ChannelwiseOperator, is_pointwise
from pimflow.relay_passes.flat import (
    LAYER_NAMES,
    LAYER_ROLES,
    layer_name,
    main_bindings,
    operator,
    rebuild,
    shape,
    use_counts,
)


@tvm.transform.module_pass(opt_level=0, name="FoldLconvs")
class FoldLconvs:
    """Fold an lconv into the fconv that is its only reader: the new filter is the product of both.

    This applies where no activation lies between two layers, such as behind a transposed convolution in a
    concatenation whose parts have separate fconvs by `SplitConcat`. The stride of the fconv stays.

    Rewrite: ``fconv(add(lconv(x), b)) -> add(conv(x), fconv @ b)``, its filter ``fconv @ lconv``. The new
    layer has the name of the fconv, and the role of a core: both its ends are reduced.
    Preserves: values up to the order of sums, shapes, names of other layers.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        sites = _sites(mod)
        if not sites:
            return mod
        names, role_of = LAYER_NAMES.read(mod), LAYER_ROLES.read(mod)
        lconvs = {site.lconv for site in sites.values()}
        lconv_inputs: dict[relax.Var, relax.Expr] = {}  # by lconv, its input in the new module

        def rewrite(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
            """The new value of `var`; None if `value` stays."""
            if var in lconvs:
                lconv_inputs[var] = value.args[0]
            if var not in sites:
                return None
            site = sites[var]
            filters = site.product(site.restoring)
            args = [lconv_inputs[site.lconv], relax.const(filters[:, None, None, :], value.args[1].ty.dtype)]
            conv = builder.emit(relax.Call(value.op, args, value.attrs), name_hint=var.name)
            layer = layer_name(mod, var)
            names[conv.name], role_of[layer] = layer, "core"
            if site.bias is None:
                return conv
            bias = relax.const(site.product(site.bias).reshape(1, 1, 1, -1), value.args[1].ty.dtype)
            return builder.emit(relax.op.add(conv, bias), name_hint=f"{var.name}_bias")

        new = rebuild(mod, rewrite)
        return LAYER_ROLES.attach(LAYER_NAMES.attach(new, names), role_of)


def fold_sites(mod: tvm.IRModule) -> tuple[str, ...]:
    """Variables of the fconvs that `FoldLconvs` treats."""
    return tuple(var.name for var in _sites(mod))


@dataclass(frozen=True, eq=False)
class _FoldSite:
    """An fconv, and the lconv and bias in front of it.

    Attributes
    ----------
    restoring, reducing : ndarray
        Filters of both, [channels, rank], [rank, channels].
    bias : ndarray, [channels], optional
    """

    lconv: relax.Var
    restoring: np.ndarray
    reducing: np.ndarray
    bias: np.ndarray | None

    def product(self, operand: np.ndarray) -> np.ndarray:
        """The fconv applied to `operand`, computed in double precision."""
        return (self.reducing.astype(np.float64) @ operand.astype(np.float64)).astype(self.reducing.dtype)


def _sites(mod: tvm.IRModule) -> dict[relax.Var, _FoldSite]:
    """The sites that the pass folds, by variable of the fconv."""
    bindings, names, role_of = main_bindings(mod), LAYER_NAMES.read(mod), LAYER_ROLES.read(mod)
    role = {b.var: role_of.get(names.get(b.var.name, b.var.name), "") for b in bindings}
    counts, values, sites = use_counts(mod), {b.var: b.value for b in bindings}, {}
    for var, value in values.items():
        if role[var] != "fconv" or not is_pointwise(value):
            continue
        lconv, bias = value.args[0], None
        if operator(values.get(lconv)) == "add" and counts[lconv] == 1:
            added = ChannelwiseOperator.from_call(values[lconv], shape(lconv)[3])
            if added is None:
                continue
            lconv, bias = added.operand, added.channel_constants(shape(lconv)[3])
        if role.get(lconv) != "lconv" or counts[lconv] != 1:
            continue
        if branch := Branch.from_call(values[lconv]):
            sites[var] = _FoldSite(lconv, branch.filters, value.args[1].value.numpy()[:, 0, 0], bias)
    return sites
