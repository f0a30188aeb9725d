"""Caches of keys and values in the flat form: how tokens are appended, by operators or in place."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np
import tvm
from tvm import relax
from tvm.script import tirx as T

from pimflow.relay_passes.attention import Emit
from pimflow.relay_passes.flat import operator, shape

IN_PLACE = "call_tir_inplace"


def append_tokens(cache: relax.Expr, new: relax.Expr, position: relax.Expr, emit: Emit) -> relax.Var:
    """Emit a copy of `cache` [batch, kv_heads, places, size] with the tokens `new` in it.

    Parameters
    ----------
    new : Expr
        [batch, kv_heads, tokens, size].
    position : Expr
        Place of the first token, int64 [batch].
    """
    op, (batch, _, places, _), tokens = relax.op, shape(cache), shape(new)[2]
    first = emit(op.reshape(emit(op.astype(position, "float32"), "first"), (batch, 1, 1, 1)), "firsts")
    # Distance of each token from each place of the cache: 0 at the place where the token is written.
    distance = np.arange(places, dtype="float32")[:, None] - np.arange(tokens, dtype="float32")
    off = emit(op.abs(emit(op.subtract(relax.const(distance[None, None]), first), "apart")), "off")
    hits = emit(op.subtract(relax.const(1.0, "float32"), emit(op.clip(off, 0, 1), "misses")), "hits")
    if tokens == 1:
        placed_tokens, hit = emit(op.multiply(new, hits), "put"), hits
    else:
        placed_tokens = emit(op.matmul(hits, new), "put")
        hit = emit(op.sum(hits, axis=-1, keepdims=True), "hit")
    masked_cache = emit(
        op.multiply(cache, emit(op.subtract(relax.const(1.0, "float32"), hit), "kept")), "left"
    )
    return emit(op.add(masked_cache, placed_tokens), "appended")


def append_operands(
    value: relax.Expr | None, values: Mapping[relax.Var, relax.Expr]
) -> tuple[relax.Var, relax.Var, relax.Expr] | None:
    """The cache, tokens and position from which `append_tokens` made `value`; None for other values."""

    def operand(expr: relax.Expr | None, kind: str, index: int) -> relax.Expr | None:
        """Operand `index` of `expr`, or of its producer, if that is an operator of this `kind`; else None."""
        producer = values.get(expr) if isinstance(expr, relax.Var) else expr
        return producer.args[index] if operator(producer) == kind else None

    masked_cache, placed_tokens = operand(value, "add", 0), operand(value, "add", 1)
    cache, by_token = operand(masked_cache, "multiply", 0), operand(placed_tokens, "multiply", 0)
    new = by_token if by_token is not None else operand(placed_tokens, "matmul", 1)
    hits = (
        operand(placed_tokens, "multiply", 1) if by_token is not None else operand(placed_tokens, "matmul", 0)
    )
    off = operand(operand(hits, "subtract", 1), "clip", 0)
    first = operand(operand(off, "abs", 0), "subtract", 1)
    position = operand(operand(first, "reshape", 0), "astype", 0)
    if position is None or not isinstance(cache, relax.Var) or not isinstance(new, relax.Var):
        return None
    return cache, new, position


def append_in_place(
    builder: relax.BlockBuilder, cache: relax.Expr, new: relax.Expr, position: relax.Expr
) -> relax.Call:
    """A call of a kernel that writes `new` into `cache`; its result is an alias of `cache`.

    After the call, only the result may be read, not `cache` or another alias of it.
    """
    callee = builder.add_func(_write_kernel(*shape(cache), tokens=shape(new)[2]), "append_in_place")
    return relax.op.call_tir_inplace(callee, relax.Tuple([cache, new, position]), [0], cache.ty)


@functools.lru_cache
def _write_kernel(batch: int, heads: int, places: int, size: int, tokens: int) -> tvm.tirx.PrimFunc:
    last = places - tokens  # parsing the script is slow, and layers have equal shapes: hence the cache

    @T.prim_func(private=True, s_tir=True)
    def append(c: T.handle, n: T.handle, p: T.handle):  # noqa: ANN202
        """Write the new tokens into the cache, from a position on."""
        cache = T.match_buffer(c, (batch, heads, places, size), "float32")
        new = T.match_buffer(n, (batch, heads, tokens, size), "float32")
        position = T.match_buffer(p, (batch,), "int64")
        for b, h, t, i in T.grid(batch, heads, tokens, size):
            with T.sblock("append"):
                vb, vh, vt, vi = T.axis.remap("SSSS", [b, h, t, i])
                T.reads(new[vb, vh, vt, vi], position[vb])
                T.writes(cache[vb, vh, 0:places, vi])
                # Clamped: a caller's position must not lead to a write outside the cache.
                cache[vb, vh, T.max(0, T.min(position[vb], last)) + vt, vi] = new[vb, vh, vt, vi]

    return append
