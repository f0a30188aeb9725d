"""Casts to bf16 that round. TVM computes bf16 in fp32, so that a cast there and back would have no effect."""

from __future__ import annotations

from tvm import relax, tirx, topi

from pimflow.relay_passes.keep_nan import elementwise

_DROPPED_BITS = 16  # of fp32, whose upper half is bf16


def round_to_bf16(value: tirx.Expr) -> tirx.Expr:
    """An fp32 value rounded to the nearest bf16, ties to even, as fp32; computed on its bits."""
    word = "uint32"
    bits = tirx.reinterpret(word, value)
    odd = (bits >> tirx.const(_DROPPED_BITS, word)) & tirx.const(1, word)
    rounding_bias = tirx.const((1 << (_DROPPED_BITS - 1)) - 1, word)
    upper_bits = (bits + rounding_bias + odd) & tirx.const(~0 << _DROPPED_BITS & 0xFFFFFFFF, word)
    return tirx.Select(tirx.isnan(value), value, tirx.reinterpret("float32", upper_bits))


def _cast(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """The legalisation rule of ``astype`` for `relax.transform.LegalizeOps`."""
    to, source_dtype = str(call.ty.dtype), str(call.args[0].ty.dtype)
    if to != "bfloat16" or source_dtype == to:
        return builder.call_te(topi.cast, call.args[0], to)
    return elementwise(lambda value: round_to_bf16(value.astype("float32")).astype(to), "cast")(builder, call)


LEGAL = {"relax.astype": _cast}
