"""Nodes of ONNX networks for the converters of language models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tvm import relax

from pimflow.core.attention import Attention
from pimflow.errors import UnsupportedOpError
from pimflow.relay_passes.attention import NAME, attention_function, emit_attention, is_cached_attention
from pimflow.relay_passes.flat import shape

op = relax.op


@dataclass(kw_only=True)
class OnnxNode:
    """A node of an ONNX network that is being imported.

    Attributes
    ----------
    operands : list of Expr or None
        None for missing optional operands.
    results : int
        Number of results that the network names.
    value_of : callable
        Function that gives the value of a constant operand, else the operand.
    present : int
        Declared length of the cache that is the second result; 0 if none is declared.
    sight : dict
        By mask, whether queries see any key; shared by layers that have the same mask.
    names : dict
        By variable, the suffix after the name of the node; converters fill it.
    """

    builder: relax.BlockBuilder
    operands: Sequence[relax.Expr | None]
    attrs: dict[str, Any]
    results: int
    value_of: Callable[[relax.Expr | None], np.ndarray | relax.Expr | None]
    present: int = 0
    sight: dict[tuple, relax.Expr] = field(default_factory=dict)
    names: dict[relax.Var, str] = field(default_factory=dict)

    def emit(self, value: relax.Expr, part: str | None = None) -> relax.Var:
        """Emit `value` as a variable named after the node and `part`, or only the node if `part` is empty."""
        var = self.builder.emit(value)
        if part is not None:
            self.names[var] = part
        return var

    def operand(self, index: int) -> relax.Expr | None:
        """An operand; None if it is missing."""
        return self.operands[index] if index < len(self.operands) else None

    def constant(self, index: int) -> np.ndarray | None:
        """The value of an operand that is a constant; None if it is computed or missing."""
        value = self.value_of(self.operand(index))
        return value if isinstance(value, np.ndarray) else None

    def number(self, name: str, default: float = 0) -> Any:
        """A numeric attribute."""
        return self.attrs.get(name, default)

    def refuse_unsupported(self, *names: str, after: int = 10**9) -> None:
        """Raise `UnsupportedOpError` for attributes that are set, and operands from `after` on."""
        for name in names:
            if self.attrs.get(name) not in (None, 0, 0.0, -1, b"", b"NONE"):
                raise UnsupportedOpError(f"attribute '{name}' is not supported")
        for index, operand in enumerate(self.operands):
            if index >= after and operand is not None:
                raise UnsupportedOpError(f"operand {index} is not supported")

    def split_heads(self, x: relax.Expr, heads: int) -> relax.Expr:
        """[batch, tokens, heads * size] to [batch, heads, tokens, size]; tensors with four axes stay."""
        if len(shape(x)) == 4:
            return x
        batch, tokens, width = shape(x)
        if width % heads:
            raise UnsupportedOpError(f"{width} channels are no {heads} heads")
        by_head = self.emit(op.reshape(x, (batch, tokens, heads, width // heads)))
        return self.emit(op.permute_dims(by_head, [0, 2, 1, 3]))

    def merge_heads(self, x: relax.Expr) -> relax.Expr:
        """[batch, heads, tokens, size] to [batch, tokens, heads * size]."""
        batch, heads, tokens, size = shape(x)
        return self.emit(
            op.reshape(self.emit(op.permute_dims(x, [0, 2, 1, 3])), (batch, tokens, heads * size))
        )

    def emit_attention(
        self, attention: Attention, operands: Sequence[relax.Expr], parts: dict | None = None
    ) -> relax.Var:
        """Emit `attention`; with `parts`, emit its steps as operators and record them there by name."""
        if is_cached_attention(attention) and parts is None:
            mask = operands[3] if attention.masked else None
            function = attention_function(attention, () if mask is None else shape(mask))
            return self.emit(relax.Call(self.builder.add_func(function, NAME), list(operands)), "")

        def emit(value: relax.Expr, part: str) -> relax.Var:
            """Emit a value of attention, and note its variable."""
            var = self.emit(value, "" if part == "values" else part)
            if parts is not None:
                parts[part] = var
            return var

        return emit_attention(attention, operands, emit)
