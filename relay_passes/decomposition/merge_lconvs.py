"""Lconvs whose results are concatenated or added, as one lconv (TeMCO, section 3.3)."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import replace

import tvm
from tvm import relax

from pimflow.relay_passes.decomposition.branches import (
    Branch,
    ChannelwiseOperator,
    concat_branches,
    emit,
    sum_branches,
)
from pimflow.relay_passes.flat import (
    LAYER_NAMES,
    LAYER_ROLES,
    emit_as,
    layer_name,
    main_bindings,
    operator,
    rebuild,
    shape,
    unique_name,
    use_counts,
)


@tvm.transform.module_pass(opt_level=0, name="MergeLconvs")
class MergeLconvs:
    """Merge lconvs whose results are concatenated or added into one lconv over the concatenated inputs.

    The operators between the lconvs and the concatenation must be the same in all branches, up to constants
    by channel, and must have no other readers; before a sum, only a bias is allowed. Other branches of a
    concatenation stay; neighbouring branches with equal operators are merged.

    Parameters
    ----------
    names : collection of str, optional
        Variables of the concatenations and sums to treat; all by default.

    Rewrite: ``concat(relu(lconv_a(x)), relu(lconv_b(y))) -> relu(lconv(concat(x, y)))`` with a
    block-diagonal filter, ``add(lconv_a(x), lconv_b(y)) -> lconv(concat(x, y))`` with both filters side by
    side. The role of the new layer is ``lconv``.
    Preserves: values up to the order of sums, shapes, names of other layers.
    """

    def __init__(self, names: Collection[str] | None = None):
        self.names = names

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        return _merge(mod, self.names)[0]


def merge_sites(mod: tvm.IRModule) -> tuple[str, ...]:
    """Variables of the concatenations and sums that `MergeLconvs` treats."""
    return tuple(dict.fromkeys(_merge(mod, None)[1]))


def _merge(mod: tvm.IRModule, selected: Collection[str] | None) -> tuple[tvm.IRModule, list[str]]:
    counts, names, role_of = use_counts(mod), LAYER_NAMES.read(mod), LAYER_ROLES.read(mod)
    used_names = {layer_name(mod, b.var) for b in main_bindings(mod)}
    sites: list[str] = []
    branches: dict[relax.Var, Branch] = {}  # by result, the branch that ends there and has no other reader

    def emit_merged(
        builder: relax.BlockBuilder, branch: Branch, var: relax.Var, is_whole: bool = True
    ) -> relax.Var:
        """Emit `branch` in place of `var`, or of a part of it, and record its layer."""
        result = var.name if is_whole else f"{var.name}_part"
        first, last = emit(builder, branch, f"{var.name}_lconv", result)
        layer = unique_name(f"{layer_name(mod, var)}.lconv", used_names)
        used_names.add(layer)
        names[first.name], role_of[layer] = layer, "lconv"
        branches[last] = branch
        sites.append(var.name)
        return last

    def rewrite(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
        """The new value of `var`; None if `value` stays."""
        has_one_use, is_selected = counts.get(var, 0) == 1, selected is None or var.name in selected
        kind = operator(value)
        if kind == "concat" and is_selected:
            parts = _merge_parts(value, branches)
            if parts is None:
                return None
            is_whole = len(parts) == 1
            outputs = [emit_merged(builder, p, var, is_whole) if isinstance(p, Branch) else p for p in parts]
            if not is_whole:
                return relax.op.concat(outputs, axis=3)
            branches.update({} if has_one_use else {outputs[0]: None})
            return outputs[0]
        if kind == "add" and is_selected and all(_is_linear(branches.get(arg)) for arg in value.args):
            last = emit_merged(builder, sum_branches([branches[arg] for arg in value.args]), var)
            branches.update({} if has_one_use else {last: None})
            return last
        branch = _extend_branch(value, branches, shape(var)) if has_one_use else None
        if role_of.get(layer_name(mod, var)) == "lconv" and has_one_use:
            branch = Branch.from_call(value)
        if branch is None:
            return None
        new = emit_as(builder, var, value)
        branches[new] = branch
        return new

    new = rebuild(mod, rewrite)
    return (LAYER_ROLES.attach(LAYER_NAMES.attach(new, names), role_of) if role_of else new), sites


def _extend_branch(
    value: relax.Expr, branches: dict[relax.Var, Branch | None], dims: tuple[int, ...]
) -> Branch | None:
    """The branch that ends with `value`, if its operand is a branch and `value` is a per-channel operator."""
    operation = ChannelwiseOperator.from_call(value, dims[-1]) if dims else None
    before = branches.get(operation.operand) if operation else None
    return replace(before, epilogue=(*before.epilogue, operation)) if before and operation else None


def _is_linear(branch: Branch | None) -> bool:
    """Whether only a bias follows the convolution of `branch`."""
    return branch is not None and len(branch.with_bias.epilogue) == 1


def _merge_parts(
    value: relax.Call, branches: dict[relax.Var, Branch | None]
) -> list[relax.Expr | Branch] | None:
    """Operands of a concatenation, with neighbouring branches of equal signature merged; None if none are."""
    fields = list(getattr(value.args[0], "fields", ()))
    if not fields or len(shape(fields[0])) != 4 or int(value.attrs.axis) % 4 != 3:
        return None

    def agreement(part: relax.Expr) -> tuple[str, object]:
        """A key that is equal for neighbouring parts that can be merged."""
        branch = branches.get(part)
        return ("branch", branch.signature) if branch else ("other", id(part))

    runs = [list(run) for _, run in itertools.groupby(fields, key=agreement)]
    if all(len(run) == 1 or not branches.get(run[0]) for run in runs):
        return None
    parts: list[relax.Expr | Branch] = []
    for run in runs:
        if len(run) > 1 and branches.get(run[0]):
            parts.append(concat_branches([branches[part] for part in run]))
        else:
            parts += run
    return parts
