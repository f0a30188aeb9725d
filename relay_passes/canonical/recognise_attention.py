"""Recognition of attention in matrix products and softmax."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import tvm
from tvm import relax

from pimflow.core.attention import Attention
from pimflow.relay_passes.attention import MASKED_SCORE, NAME, attention_function, is_cached_attention
from pimflow.relay_passes.canonical.attention_masks import (
    MASK_THRESHOLD,
    MaskEmitter,
    MaskTerm,
    split_constants,
    with_constant_masks,
)
from pimflow.relay_passes.canonical.attention_operands import (
    AttentionOperand,
    Values,
    cache_operand,
    constant_scale,
    query_operand,
)
from pimflow.relay_passes.canonical.plain_softmax import guarded_softmax
from pimflow.relay_passes.canonical.softmax_sinks import softmax_with_sinks
from pimflow.relay_passes.flat import CACHE_TYPES, main_bindings, number, operator, rebuild, shape, use_counts


@tvm.transform.module_pass(opt_level=0, name="RecogniseAttention")
class RecogniseAttention:
    """Replace attention over a cache by a call of one function, whose attribute describes it.

    Scale factors of queries, keys and scores become one; keys that are repeated for several heads are read
    in place; a constant causal mask becomes a property. Attention with as many queries as keys stays: it
    reads every key so often that its products are ordinary ones on a GPU.

    Rewrite: ``matmul(softmax(matmul(q, transpose(repeat(k))) * c + mask), repeat(v)) -> attention(q, k, v)``,
    a private function with the attribute `relay_passes.attention.ATTENTION`.
    Preserves: values up to rounding, name of the second product, interface.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        values = {binding.var: binding.value for binding in main_bindings(mod)}
        cache_type = next(iter(CACHE_TYPES.read(mod).values()), "")  # all caches have one
        finder = _AttentionFinder(values, use_counts(mod), cache_type)
        matches = {var: match for var in values if (match := finder.match(var)) is not None}
        if not matches:
            return mod
        var_remap: dict[relax.Var, relax.Expr] = {}
        flat: dict[relax.Var, relax.Var] = {}  # by result in any shape, the function's result
        emitter = MaskEmitter()

        def rewrite(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
            """The new value of `var`; None if `value` stays."""
            if var in matches:
                result, name = matches[var].call(builder, var_remap, var.name, emitter), f"{var.name}_whole"
            elif _keeps_order(value) and value.args[0] in flat:
                result, name = flat[value.args[0]], var.name
            else:
                return None
            same = shape(result) == shape(var)
            reshaped = result if same else builder.emit(relax.op.reshape(result, shape(var)), name_hint=name)
            flat[reshaped] = flat[result] = result
            return reshaped

        return rebuild(mod, rewrite, var_remap)


@dataclass(frozen=True, kw_only=True)
class _AttentionMatch:
    """A match: an attention and its operands.

    Attributes
    ----------
    sinks : Expr, optional
        The scores that no key stands for, one for each head.
    guarded : bool
        Whether queries from which a mask hides all keys give zeros.
    scales : tuple of AttentionOperand
        Those of keys and of values, [batch, kv_heads, keys, 1], of caches of a narrow type; None for what are
        no such scales.
    """

    attention: Attention
    operands: tuple[AttentionOperand, AttentionOperand, AttentionOperand]
    masks: tuple[MaskTerm, ...]
    guarded: bool
    sinks: relax.Expr | None = None
    scales: tuple[AttentionOperand | None, ...] = ()

    def call(
        self, builder: relax.BlockBuilder, var_remap: Values, name: str, emitter: MaskEmitter
    ) -> relax.Var:
        """Emit the call of the attention function, and its operands."""
        operands = [operand.emit(builder, var_remap) for operand in self.operands]
        mask = emitter.mask(self.masks, builder, var_remap)
        visibility = None
        if mask is not None and self.guarded:
            mask, visibility = emitter.guard(mask, builder)
        operands += [] if mask is None else [mask]
        if self.sinks is not None:
            sinks = var_remap.get(self.sinks, self.sinks)
            operands.append(builder.emit(relax.op.reshape(sinks, (1, self.attention.heads, 1, 1))))
        operands += [scale.emit(builder, var_remap) for scale in self.scales]
        function = attention_function(self.attention, () if mask is None else shape(mask))
        result = builder.emit(relax.Call(builder.add_func(function, NAME), operands), name_hint=name)
        if visibility is None:
            return result
        return builder.emit(relax.op.multiply(result, visibility), name_hint=f"{name}_seeing")


@dataclass(kw_only=True)
class _ScoreChain:
    """The operators between the first product and the softmax.

    Attributes
    ----------
    masks : list of tuple
        Masks that are added: each (mask,), or the operands (condition, mask, mask) of a ``where``.
    scales : Var, optional
        Scales of keys by which the product is multiplied.
    """

    product: relax.Call | None = None
    scale: float = 1.0
    softcap: float = 0.0
    masks: list[tuple[relax.Expr, ...]] = field(default_factory=list)
    scales: relax.Var | None = None


class _AttentionFinder:
    """Looks for attention in a flat module."""

    def __init__(self, values: Values, counts: Mapping[relax.Var, int], cache_type: str):
        self.values, self.counts, self.cache_type = values, counts, cache_type

    def match(self, var: relax.Var) -> _AttentionMatch | None:
        """The attention of which `var` is the second product; None if it is no such product."""
        value = self.values[var]
        if operator(value) != "matmul" or not all(isinstance(operand, relax.Var) for operand in value.args):
            return None
        weights = self._skip_reshapes(value.args[0])
        scaled = self._split_scales(weights)
        if scaled is None:
            found = self._match_softmax(weights, value)
            return None if found is None or found.scales else found
        found = self._match_softmax(self._skip_reshapes(scaled[0]), value)
        if found is None or not found.scales:
            return None
        scales = (*found.scales, self._scale_operand(scaled[1]))
        attention = replace(found.attention, cache_type=self.cache_type)
        if any(
            scale is None or math.prod(scale.dims) != math.prod(attention.scale_shape) for scale in scales
        ):
            return None
        scales = tuple(_with_shape(scale, attention.scale_shape) for scale in scales)
        return replace(found, attention=attention, scales=scales)

    def _match_softmax(self, softmax: relax.Expr | None, value: relax.Call) -> _AttentionMatch | None:
        """The match of `softmax` in front of the second product `value`, with scales of keys; else None."""
        readers = 1
        if (with_sinks := softmax_with_sinks(softmax, self.values, self.counts)) is not None:
            return self._match_with_sinks(value, *with_sinks)
        if (guarded := guarded_softmax(softmax, self.values, self.counts)) is not None:
            softmax, readers = guarded
        if operator(softmax) != "nn.softmax":
            return None
        dims = shape(softmax.args[0])
        scores = None
        if int(softmax.attrs.axis) in (-1, len(dims) - 1):
            scores = self._scores(softmax.args[0], readers)
        if scores is None or len(dims) < 3:
            return None
        attention_match = self._build_match(scores, dims, value)
        if attention_match is None or not is_cached_attention(attention_match.attention):
            return None
        return replace(attention_match, guarded=guarded is not None)

    def _match_with_sinks(
        self, second: relax.Call, scores_var: relax.Var, sinks: relax.Expr
    ) -> _AttentionMatch | None:
        """The match of a softmax over scores and sinks in front of the `second` product; else None."""
        scores, dims = self._scores(scores_var), shape(scores_var)
        found = self._build_match(scores, dims, second) if scores is not None and len(dims) == 4 else None
        if found is None or dims[:2] != (found.attention.batch, found.attention.heads):
            return None
        if not is_cached_attention(found.attention):
            return None
        return replace(found, attention=replace(found.attention, sinks=True), sinks=sinks)

    def _build_match(
        self, scores: _ScoreChain, dims: tuple[int, ...], second: relax.Call
    ) -> _AttentionMatch | None:
        """The match of a softmax over `dims` in front of the `second` product; None if there is none."""
        first, (*lead, query_count, keys) = scores.product, dims
        heads = math.prod(lead)
        products = [(first, shape(first)[-2]), (second, shape(second)[-2])]
        if any(rows % query_count for _, rows in products) or shape(second.args[1])[-2] != keys:
            return None
        for folded in (True, False):
            k, v = (
                cache_operand(
                    product.args[1],
                    self.values,
                    matrices=shape(product)[:-2],
                    heads_per_matrix=rows // query_count,
                    transposed=product is first,
                    folded=folded,
                )
                for product, rows in products
            )
            if k is None or v is None or math.prod(k.dims[:2]) == math.prod(v.dims[:2]):
                break
        if k is None or v is None or math.prod(k.dims[:2]) != math.prod(v.dims[:2]):
            return None
        batch, kv_heads = max(k.dims[:2], v.dims[:2])
        if v.scale != 1 or heads % (batch * kv_heads):
            return None
        q, value_size = query_operand(first.args[0], self.values), shape(second.args[1])[-1]
        attention = Attention(
            batch=batch,
            heads=heads // batch,
            kv_heads=kv_heads,
            head_size=shape(first.args[0])[-1],
            value_size=value_size,
            queries=query_count,
            keys=keys,
            scale=scores.scale * q.scale * k.scale,
            softcap=scores.softcap,
        )
        masks = [_broadcastable_mask(mask, dims, attention) for mask in scores.masks]  # None: no
        if None in masks:
            return None
        terms = [part for mask in masks if mask for part in split_constants(mask, self.values)]
        attention, terms = with_constant_masks(attention, terms)
        dims_of = ((q, attention.query_shape), (k, attention.key_shape), (v, attention.value_shape))
        operands = tuple(_with_shape(operand, required_dims) for operand, required_dims in dims_of)
        scales = () if scores.scales is None else (self._scale_operand(scores.scales),)
        return _AttentionMatch(
            attention=attention, operands=operands, masks=tuple(terms), guarded=False, scales=scales
        )

    def _split_scales(self, value: relax.Expr | None) -> tuple[relax.Var, relax.Var] | None:
        """What `value` multiplies by scales of a narrow cache, and these scales; None if it does not."""
        if not self.cache_type or operator(value) != "multiply":
            return None
        x, scales = value.args
        if not all(isinstance(operand, relax.Var) for operand in value.args) or shape(x) != shape(value):
            return None
        return (x, scales) if shape(scales)[-1] == shape(x)[-1] else None

    def _scale_operand(self, scales: relax.Var) -> AttentionOperand | None:
        """Scales of a cache [batch, kv_heads, keys, 1] that are read as `scales` [batch, heads, 1, keys]."""
        if len(shape(scales)) < 3 or shape(scales)[-2] != 1:
            return None
        return cache_operand(
            scales, self.values, matrices=shape(scales)[:-2], heads_per_matrix=1, transposed=True
        )

    def _sole(self, expr: relax.Expr, readers: int = 1) -> relax.Expr | None:
        """The value of a variable with exactly `readers` readers; else None."""
        return self.values.get(expr) if self.counts.get(expr, 0) == readers else None

    def _skip_reshapes(self, expr: relax.Expr) -> relax.Expr | None:
        value = self._sole(expr)
        while _same_elements(value):
            value = self._sole(value.args[0])
        return value

    def _scores(self, var: relax.Expr, readers: int = 1) -> _ScoreChain | None:
        """The operators from the first product to the softmax of `var`; None if there is no such product.

        Parameters
        ----------
        readers : int
            How many operators read `var`.
        """
        scores = _ScoreChain()
        masked, value = True, self._sole(var, readers)  # masks come last
        while value is not None:
            kind = operator(value)
            if kind == "matmul":
                scores.product = value
                has_vars = all(isinstance(operand, relax.Var) for operand in value.args)
                return scores if has_vars else None
            if _same_elements(value):
                value = self._sole(value.args[0])
            elif (scaled := constant_scale(value)) is not None:
                capped = self._softcap(scaled) if not scores.softcap else None
                if capped is not None and scores.scale == 1:
                    scores.softcap, value = capped[1], self._sole(capped[0])
                else:
                    scores.scale *= scaled[1]
                    value = self._sole(scaled[0])
                masked = False
            elif scores.scales is None and (of_keys := self._split_scales(value)) is not None:
                scores.scales, masked = of_keys[1], False
                value = self._sole(of_keys[0])
            elif masked and (parts := self._split_mask(value)) is not None:
                scores.masks.append(parts[1])
                value = self._sole(parts[0])
            else:
                return None
        return None

    def _softcap(self, scaled: tuple[relax.Var, float]) -> tuple[relax.Var, float] | None:
        """Operand x and the cap of ``cap * tanh(x / cap)``; None for other operators."""
        curve, cap = self._sole(scaled[0]), scaled[1]
        inner = constant_scale(self._sole(curve.args[0])) if operator(curve) == "tanh" else None
        return (
            (inner[0], cap) if inner is not None and math.isclose(inner[1] * cap, 1, rel_tol=1e-5) else None
        )

    def _split_mask(self, value: relax.Expr) -> tuple[relax.Var, tuple[relax.Expr, ...]] | None:
        """The scores that `value` masks, and the mask; None if it masks none."""
        kind = operator(value)
        if kind == "add":
            sides = [(value.args[0], value.args[1]), (value.args[1], value.args[0])]
            scores = [s for s in sides if isinstance(s[0], relax.Var) and self._scores(s[0]) is not None]
            return (scores[0][0], (scores[0][1],)) if len(scores) == 1 else None
        if kind != "where":
            return None
        condition, *sides = value.args
        for place, side in enumerate(sides):
            hidden = number(sides[1 - place])
            if isinstance(side, relax.Var) and hidden is not None and hidden <= MASK_THRESHOLD:
                if shape(side) != shape(value):
                    return None
                hides = relax.const(MASKED_SCORE, "float32")
                none = relax.const(0.0, "float32")
                return side, (condition, *((none, hides) if place == 0 else (hides, none)))
        return None


def _same_elements(value: relax.Expr | None) -> bool:
    """Whether `value` has the elements of its operand in their order."""
    kind = operator(value)
    if kind == "broadcast_to":
        return shape(value) == shape(value.args[0])
    return kind == "reshape" or (kind == "astype" and value.ty.dtype == value.args[0].ty.dtype)


def _keeps_order(value: relax.Expr) -> bool:
    """Like `_same_elements`, but axes of 1 may also be permuted."""
    if operator(value) == "permute_dims" and value.attrs.axes is not None:
        dims = shape(value.args[0])
        long = [axis for axis in map(int, value.attrs.axes) if dims[axis] > 1]
        return long == sorted(long)
    return _same_elements(value)


def _with_shape(operand: AttentionOperand, required_dims: tuple[int, ...]) -> AttentionOperand:
    """`operand` reshaped so that its shape after the transpose is `required_dims`."""
    dims = (*required_dims[:2], required_dims[3], required_dims[2]) if operand.transposed else required_dims
    return AttentionOperand(var=operand.var, dims=dims, transposed=operand.transposed)


def _broadcastable_mask(
    mask: tuple[relax.Expr, ...], dims: tuple[int, ...], attention: Attention
) -> tuple[relax.Expr, ...] | None:
    """`mask` of scores of `dims`, if it broadcasts to [batch, heads, queries, keys]; else None."""
    if dims == attention.score_shape or all(len(shape(part)) <= 2 for part in mask):
        return mask
    return mask if len(dims) == 4 and all(max(shape(part)[:-2], default=1) == 1 for part in mask) else None
