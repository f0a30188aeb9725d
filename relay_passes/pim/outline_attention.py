"""Attention over a cache for the PIM code generator; the softmax stays on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import tvm
from tvm import relax

from pimflow.core.attention import SCORES, VALUES, Attention
from pimflow.core.stages import part_name
from pimflow.errors import PlanError
from pimflow.relay_passes.attention import (
    Emit,
    attention_from_call,
    emit_attention_weights,
    emit_scaled,
    scale_places,
)
from pimflow.relay_passes.caches import IN_PLACE
from pimflow.relay_passes.flat import main_bindings, operator, rebuild, shape, use_counts
from pimflow.relay_passes.pim.outline_pim import symbol

CACHE_ATTR, PRODUCT_ATTR, GROUP_ATTR = "pim.cache", "pim.product", "pim.group"


@dataclass(frozen=True, kw_only=True)
class PimAttention:
    """How PIM computes attention, as far as a module contains it.

    Attributes
    ----------
    product_part : callable
        Name of a product (`SCORES`, `VALUES`) of a group.
    keys_shape, values_shape : tuple of int
        Shapes of the caches as they lie in the banks, with elements of `dtype`.
    terms : int
        Partial sums for each element of the product with the values.
    """

    text: str
    group: Attention
    groups: int
    product_part: Callable[[str, int], str]
    keys_shape: tuple[int, ...]
    values_shape: tuple[int, ...]
    dtype: str
    terms: int


@tvm.transform.module_pass(opt_level=0, name="OutlineAttention")
class OutlineAttention:
    """Outline both products of attention over a cache in place as functions for ``relax.ext.pim``.

    Parameters
    ----------
    caches : mapping of str to PimAttention
        By name of the variable that holds the attention.

    Rewrite: ``k = append(keys, new_k, p); v = append(values, new_v, p); y = attention(q, k, v, p) ->
    s = pim_scores(q, p, keys, values, new_k, new_v); y = sum(pim_values(softmax(s), p, values))``. The
    parameters ``keys`` and ``values`` have the layout of the banks, and ``pim_scores`` writes to both. No
    other operator reads them, so ``pim_values`` and the caller see what it wrote.
    Preserves: values up to the storage type of the device, names.

    Raises
    ------
    PlanError
        If another operator reads a cache, if the appends are not right in front of the attention, or if keys
        and values have different positions.
    """

    def __init__(self, caches: Mapping[str, PimAttention]):
        self.caches = dict(caches)

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        sites = {site.attention: site for site in attention_sites(mod, self.caches)}
        var_remap: dict[relax.Var, relax.Expr] = {}
        for site in sites.values():
            pim_attention = self.caches[site.attention.name]
            for append, dims in zip(
                site.appends, (pim_attention.keys_shape, pim_attention.values_shape), strict=True
            ):
                kind = relax.TensorType(dims, pim_attention.dtype)
                var_remap[append.cache] = relax.Var(append.cache.name, kind)
        appended = {
            append.result: var_remap[append.cache] for site in sites.values() for append in site.appends
        }
        main = mod["main"]
        other_functions = {gv: f for gv, f in mod.functions_items() if gv.name_hint != "main"}
        params = [var_remap.get(param, param) for param in main.params]
        outer = relax.Function(params, main.body, main.ret_ty, main.is_pure, main.attrs)
        outer = tvm.IRModule({**other_functions, mod.get_global_var("main"): outer}, attrs=mod.attrs)

        def rewrite(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
            """The new value of `var`; None if `value` stays."""
            if var in appended:
                return appended[var]
            if var not in sites:
                return None
            return _emit_on_pim(builder, mod, sites[var], self.caches[var.name], value, var_remap)

        return rebuild(outer, rewrite, var_remap)


@dataclass(frozen=True, kw_only=True)
class CacheAppend:
    """The write of a step's tokens into a cache; `result` is an alias of `cache`."""

    result: relax.Var
    cache: relax.Var
    new: relax.Expr
    position: relax.Expr


@dataclass(frozen=True, kw_only=True)
class AttentionSite:
    """Attention for PIM in a module, with the appends to its keys and its values."""

    attention: relax.Var
    appends: tuple[CacheAppend, CacheAppend]


def attention_sites(mod: tvm.IRModule, names: Collection[str]) -> list[AttentionSite]:
    """The attention regions of variables `names`; raises the errors of `OutlineAttention`."""
    bindings, counts = main_bindings(mod), use_counts(mod)
    values = {binding.var: binding.value for binding in bindings}
    returned = mod["main"].body.body
    results = set(relax.analysis.free_vars(values.get(returned, returned)))
    sites = []
    for var, value in values.items():
        if var.name not in names or attention_from_call(mod, value) is None:
            continue
        appends = [_cache_append(var, values, operand) for operand in value.args[1:3]]
        for append in appends:
            if counts[append.cache] != 1 or counts[append.result] != 1 + (append.result in results):
                raise PlanError(
                    f"'{var.name}': its cache '{append.cache.name}' has other readers, which PIM cannot do"
                )
        if appends[0].position != appends[1].position:
            raise PlanError(f"'{var.name}': keys and values go to different positions, which PIM cannot do")
        sites.append(AttentionSite(attention=var, appends=(appends[0], appends[1])))
    if missing := sorted(set(names) - {site.attention.name for site in sites}):
        raise PlanError(f"'{missing[0]}' is not attention, so its caches cannot be on PIM")
    return sites


def _cache_append(
    attention: relax.Var, values: Mapping[relax.Var, relax.Expr], operand: relax.Expr
) -> CacheAppend:
    value = values.get(operand)
    if operator(value) != IN_PLACE or not isinstance(value.args[1].fields[0], relax.Var):
        raise PlanError(f"'{attention.name}': no cache that stays in place is appended to before it")
    cache, new, position = value.args[1].fields
    return CacheAppend(result=operand, cache=cache, new=new, position=position)


def _emit_on_pim(
    builder: relax.BlockBuilder,
    mod: tvm.IRModule,
    site: AttentionSite,
    pim_attention: PimAttention,
    call: relax.Call,
    var_remap: Mapping[relax.Var, relax.Expr],
) -> relax.Expr:
    """Emit the replacement of the attention `call`, whose operands are variables of the new module."""
    attention, name = attention_from_call(mod, call), site.attention.name
    caches = [var_remap.get(append.cache, append.cache) for append in site.appends]
    new = [var_remap.get(append.new, append.new) for append in site.appends]
    position = site.appends[0].position
    position = var_remap.get(position, position)

    def product(which: str, group: int, operands: Sequence[relax.Expr], dims: Sequence[int]) -> relax.Var:
        """Emit a call of the product `which` of a group."""
        part = pim_attention.product_part(which, group)
        callee_name = symbol(part_name(name, part))
        attrs = {CACHE_ATTR: pim_attention.text, PRODUCT_ATTR: which, GROUP_ATTR: group}
        callee = builder.add_func(_function(operands, dims, callee_name, attrs), callee_name)
        return builder.emit(relax.Call(callee, list(operands)), name_hint=f"{name}_{part}")

    # All groups have the same shapes. Partial sums of an element are adjacent; groups are concatenated.
    group_attention = pim_attention.group
    partial = (pim_attention.terms,) if pim_attention.terms > 1 else ()
    sums = []
    for group in range(pim_attention.groups):

        def emit(value: relax.Expr, part: str, group: int = group) -> relax.Var:
            return builder.emit(value, name_hint=f"{name}_{pim_attention.product_part(part, group)}")

        scores = product(SCORES, group, [call.args[0], position, *caches, *new], group_attention.score_shape)
        scales = scale_places(attention)
        extra_operands = [
            _group_part(
                call.args[index], attention, group_attention, group, emit, by_query=index not in scales
            )
            for index in range(3, len(call.args))
        ]
        weights = _emit_weights(group_attention, scores, extra_operands, emit)
        dims = (group_attention.batch * group_attention.heads, *partial, group_attention.value_size)
        sums.append(product(VALUES, group, [weights, position, caches[1]], dims))
    result = sums[0] if len(sums) == 1 else builder.emit(relax.op.concat(sums, axis=0), f"{name}_groups")
    if partial:
        result = builder.emit(relax.op.sum(result, axis=1), f"{name}_sums")
    return relax.op.reshape(result, attention.output_shape)


def _emit_weights(
    attention: Attention, scores: relax.Var, extra_operands: Sequence[relax.Expr], emit: Emit
) -> relax.Var:
    """Emit the softmax of scores that PIM returns, with the scales of both caches if these are narrow."""
    scales = [extra_operands[place - 3] for place in scale_places(attention)]
    if scales:
        scores = emit_scaled(attention, scores, scales[0], emit)
    weights = emit_attention_weights(attention, scores, extra_operands, emit, scale=attention.scale)
    return emit_scaled(attention, weights, scales[1], emit) if scales else weights


def _group_part(
    operand: relax.Expr,
    attention: Attention,
    group_attention: Attention,
    group: int,
    emit: Emit,
    *,
    by_query: bool,
) -> relax.Expr:
    """Emit the part for one group of the mask [.., heads, queries, extent], or of the positions [batch].

    Or of scales [batch, kv_heads, keys, 1], which are not by query head.
    """
    first = group * group_attention.batch * group_attention.kv_heads
    dims = shape(operand)
    axes = {len(dims) - 4: (first // attention.kv_heads, group_attention.batch)}
    query_heads = attention.group if by_query else 1
    axes[len(dims) - 3] = (first % attention.kv_heads * query_heads, group_attention.kv_heads * query_heads)
    if len(dims) == 1:
        axes = {0: axes[-3]}
    for axis, (begin, extent) in axes.items():
        if axis >= 0 and dims[axis] > extent:
            operand = emit(relax.op.strided_slice(operand, [axis], [begin], [begin + extent]), "part")
    return operand


def _function(
    operands: Sequence[relax.Expr], dims: Sequence[int], name: str, attrs: Mapping[str, object]
) -> relax.Function:
    """The function of one product, which is described by its attributes and contains no Relax operators."""
    builder = relax.BlockBuilder()
    params = [relax.Var(f"x{n}", operand.ty) for n, operand in enumerate(operands)]
    kind = relax.TensorType(dims, "float32")
    with builder.function("outlined", params):
        with builder.dataflow():
            call = relax.call_dps_packed(name, relax.Tuple(params), out_ty=kind)
            result = builder.emit_output(call)
        builder.emit_func_output(result)
    return builder.get()["outlined"].with_attrs({"Codegen": "pim", "global_symbol": name, **attrs})
