"""Fconvs of concatenations as one fconv for each part (TeMCO, section 3.3)."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import tvm
from tvm import relax

from pimflow.relay_passes.decomposition.branches import ChannelwiseOperator
from pimflow.relay_passes.decomposition.live_bound import LiveBound
from pimflow.relay_passes.flat import (
    LAYER_NAMES,
    LAYER_ROLES,
    cached_by_module,
    emit_as,
    layer_name,
    main_bindings,
    operator,
    rebuild,
    shape,
    unique_name,
    use_counts,
)


@dataclass(eq=False)
class _SplitSite:
    """A concatenation, the per-channel operators behind it, and the fconv that reads the last one.

    Attributes
    ----------
    parts : list of Var
        Variables of the old module.
    total : Var, optional
        The sum over the parts in `done`, a variable of the new module.
    """

    parts: list[relax.Var]
    operators: list[ChannelwiseOperator]
    fconv: relax.VarBinding
    total: relax.Var | None = None
    done: set[int] = field(default_factory=set)

    @property
    def name(self) -> str:
        """Name of the variable of its fconv."""
        return self.fconv.var.name

    @functools.cached_property
    def channels(self) -> list[int]:
        """Channels of each part."""
        return [shape(part)[3] for part in self.parts]


class ConstantSlices:
    """Slices of constants along their last axis, each made once."""

    def __init__(self) -> None:
        # By handle of a constant, begin and end; with the constant, so that nothing else gets its handle.
        self._slices: dict[tuple[int, int, int], tuple[relax.Expr, relax.Expr]] = {}

    def slice(self, constant: relax.Expr, begin: int, end: int, channels: int) -> relax.Expr:
        """Elements `begin` to `end` of the last axis of `constant`, which has `channels` elements or one."""
        key = constant.__chandle__(), begin, end
        if key not in self._slices:
            values = constant.value.numpy()
            values = values if values.ndim == 4 else values.reshape(1, 1, 1, -1)
            values = np.broadcast_to(values, (*values.shape[:3], channels))[..., begin:end]
            self._slices[key] = constant, relax.const(np.ascontiguousarray(values), constant.ty.dtype)
        return self._slices[key][1]


@tvm.transform.module_pass(opt_level=0, name="SplitConcat")
class SplitConcat:
    """Replace the fconv of a concatenation by an fconv of each part, and their sum.

    A part without other readers is reduced as soon as it is computed, so that only its reduced form is live
    until the others are. Between concatenation and fconv there may be per-channel operators, such as a batch
    norm and an activation.

    Parameters
    ----------
    names : collection of str, optional
        Variables of the fconvs to treat; all by default.
    slices : ConstantSlices, optional
        Slices of earlier modules with the same constants, which are not made again.

    Rewrite: ``fconv(relu(concat(x, y))) -> add(fconv_1(relu(x)), fconv_2(relu(y)))``.
    Preserves: values up to the order of sums, shapes, names of other layers. New layers are called
    ``a.fconv_1``, ``a.fconv_2`` and have the role of ``a.fconv``.
    """

    def __init__(self, names: Collection[str] | None = None, slices: ConstantSlices | None = None):
        self.names, self.slices = names, slices or ConstantSlices()

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        selected = self.names
        while sites := _sites(mod, selected):
            mod = _split(mod, sites, self.slices)
            if selected is not None:  # a part may be a concatenation itself
                part_names = [f"{s.name}_{i + 1}" for s in sites for i in range(len(s.parts))]
                selected = {*selected, *part_names}
        return mod


def split_sites(mod: tvm.IRModule) -> tuple[str, ...]:
    """Variables of the fconvs that `SplitConcat` treats, except those that it makes itself."""
    return tuple(unsplit_elements(mod))


@cached_by_module
def unsplit_elements(mod: tvm.IRModule) -> dict[str, int]:
    """By `split_sites`, a lower bound of the elements that are live where its parts are concatenated."""
    bound = LiveBound(mod)
    return {site.name: bound.concat_elements(site.parts) for site in _sites(mod)}


def _split(mod: tvm.IRModule, sites: list[_SplitSite], slices: ConstantSlices) -> tvm.IRModule:
    names, role_of, counts = LAYER_NAMES.read(mod), LAYER_ROLES.read(mod), use_counts(mod)
    bound = {b.var for b in main_bindings(mod)}
    used_names = {names.get(var.name, var.name) for var in bound}
    sites_by_part: dict[relax.Var, list[tuple[_SplitSite, int]]] = {}
    for site in sites:
        for index, part in enumerate(site.parts):
            if counts[part] == 1 and part in bound:
                sites_by_part.setdefault(part, []).append((site, index))
    var_remap: dict[relax.Var, relax.Expr] = {}
    sites_by_fconv = {site.fconv.var: site for site in sites}

    def emit_part(builder: relax.BlockBuilder, site: _SplitSite, index: int) -> None:
        """Emit the fconv of part `index`, and add it to the sum of the site."""
        x = var_remap.get(site.parts[index], site.parts[index])
        part = _partial(builder, site, index, x, slices)
        layer = unique_name(f"{layer_name(mod, site.fconv.var)}_{index + 1}", used_names)
        used_names.add(layer)
        names[part.name], role_of[layer] = layer, "fconv"
        site.done.add(index)
        if site.total is not None:
            total = relax.op.add(site.total, part)
            part = emit_as(builder, site.fconv.var, total, f"{site.name}_sum")
        site.total = part

    def rewrite(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
        """The new value of `var`; None if `value` stays."""
        if var in sites_by_fconv:
            site = sites_by_fconv[var]
            for index in range(len(site.parts)):
                if index not in site.done:
                    emit_part(builder, site, index)
            return site.total
        if isinstance(value, relax.Var):
            var_remap[var] = value
            return None
        var_remap[var] = emit_as(builder, var, value)
        for site, index in sites_by_part.get(var, ()):
            emit_part(builder, site, index)
        return var_remap[var]

    return LAYER_ROLES.attach(LAYER_NAMES.attach(rebuild(mod, rewrite), names), role_of)


def _sites(mod: tvm.IRModule, selected: Collection[str] | None = None) -> list[_SplitSite]:
    """Sites of the fconvs whose variables are in `selected`; all by default."""
    bindings, layers, role_of = main_bindings(mod), LAYER_NAMES.read(mod), LAYER_ROLES.read(mod)
    named = {b.var.name: b for b in bindings}
    reducing = [
        binding
        for name, binding in named.items()
        if role_of.get(layers.get(name, name)) == "fconv" and (selected is None or name in selected)
    ]
    if not reducing:
        return []
    counts, values, sites = use_counts(mod), {b.var: b.value for b in bindings}, []
    for binding in reducing:
        value = binding.value
        plain = operator(value) == "nn.conv2d" and isinstance(value.args[1], tvm.ir.GenericConst)
        if not plain or int(value.attrs.groups) != 1:
            continue
        var, operators = value.args[0], []
        while var in values and counts[var] == 1:
            operation = ChannelwiseOperator.from_call(values[var], shape(var)[3])
            if operation is None:
                break
            operators.insert(0, operation)
            var = operation.operand
        joined = values.get(var)
        if operator(joined) != "concat" or counts[var] != 1 or int(joined.attrs.axis) % 4 != 3:
            continue
        parts = list(getattr(joined.args[0], "fields", ()))
        if len(parts) > 1 and all(isinstance(part, relax.Var) for part in parts):
            sites.append(_SplitSite(parts, operators, binding))
    return sites


def _partial(
    builder: relax.BlockBuilder, site: _SplitSite, index: int, x: relax.Expr, slices: ConstantSlices
) -> relax.Var:
    """Emit the fconv of one part."""
    begin, channels = sum(site.channels[:index]), sum(site.channels)
    end = begin + site.channels[index]
    name = f"{site.name}_{index + 1}"
    for operation in site.operators:
        constant = None
        if operation.constant is not None:
            whole = operation.call.args[1 - operation.position]
            constant = slices.slice(whole, begin, end, channels)
        x = emit_as(builder, x, operation.call_on(x, constant), f"{name}_in")
    call = site.fconv.value
    filters = slices.slice(call.args[1], begin, end, channels)
    return emit_as(builder, site.fconv.var, relax.Call(call.op, [x, filters], call.attrs), name)
