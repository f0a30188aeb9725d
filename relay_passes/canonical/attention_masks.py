"""Masks of attention: sums of terms, of which the constant ones become properties."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import tvm
from tvm import relax

from pimflow.core.attention import Attention
from pimflow.relay_passes.attention import MASKED_SCORE, query_visibility
from pimflow.relay_passes.canonical.attention_operands import Values
from pimflow.relay_passes.flat import number, operator, shape

MASK_THRESHOLD = -1e4  # a mask value that hides a key is at most this (fp16 has few lower values)
_RESHAPES = ("reshape", "expand_dims", "squeeze")
_CONJUNCTIONS = ("logical_and", "bitwise_and")
_DISJUNCTIONS = ("logical_or", "bitwise_or")


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A part of the condition under which a key is visible.

    Attributes
    ----------
    expr : Expr
        A tensor of bool.
    negated : bool
        Whether keys are visible where it is false.
    moves : tuple of (str, tuple of int)
        ``broadcast_to`` and ``reshape`` that follow, in order, each with its shape.
    """

    expr: relax.Expr
    negated: bool
    moves: tuple[tuple[str, tuple[int, ...]], ...]

    def array(self) -> np.ndarray | None:
        """Its value after the moves if it is constant; else None."""
        if not isinstance(self.expr, tvm.ir.GenericConst):
            return None
        value = self.expr.value.numpy() != self.negated
        for kind, dims in self.moves:
            value = np.broadcast_to(value, dims) if kind == "broadcast_to" else value.reshape(dims)
        return value

    def emit(self, builder: relax.BlockBuilder, var_remap: Values) -> relax.Expr:
        """Emit its value after the moves."""
        expr = var_remap.get(self.expr, self.expr)
        for kind, dims in self.moves:
            if shape(expr) != dims:
                expr = builder.emit(getattr(relax.op, kind)(expr, dims))
        return builder.emit(relax.op.logical_not(expr)) if self.negated else expr


# A term: (mask,), the operands (condition, mask, mask) of a ``where``, or all conditions of visible keys.
MaskTerm = tuple[relax.Expr, ...] | tuple[Condition, ...]


@dataclass
class MaskEmitter:
    """Emits masks; layers that share a mask get one.

    Attributes
    ----------
    terms : dict of MaskTerm to Expr
        What was emitted for each term.
    guards : dict of Expr to (Expr, Expr)
        By mask, what `guard` emitted for it.
    """

    terms: dict[MaskTerm, relax.Expr] = field(default_factory=dict)
    guards: dict[relax.Expr, tuple[relax.Expr, relax.Expr]] = field(default_factory=dict)

    def mask(
        self, terms: tuple[MaskTerm, ...], builder: relax.BlockBuilder, var_remap: Values
    ) -> relax.Expr | None:
        """Emit the sum of `terms`; None without any."""
        mask: relax.Expr | None = None
        for term in terms:
            if term not in self.terms:
                self.terms[term] = _emit_term(term, builder, var_remap)
            mask = self.terms[term] if mask is None else builder.emit(relax.op.add(mask, self.terms[term]))
        return mask

    def guard(self, mask: relax.Expr, builder: relax.BlockBuilder) -> tuple[relax.Expr, relax.Expr]:
        """Emit `mask` without infinities, and factors that are 0 for queries that see no key."""
        if mask not in self.guards:
            bounded = builder.emit(relax.op.maximum(mask, relax.const(MASKED_SCORE, "float32")))
            visibility = query_visibility(bounded, lambda value, _: builder.emit(value))
            self.guards[mask] = bounded, visibility
        return self.guards[mask]


def _emit_term(term: MaskTerm, builder: relax.BlockBuilder, var_remap: Values) -> relax.Expr:
    if not isinstance(term[0], Condition):
        new = [var_remap.get(operand, operand) for operand in term]
        return new[0] if len(new) == 1 else builder.emit(relax.op.where(*new))
    visible, *others = [condition.emit(builder, var_remap) for condition in term]
    for condition in others:
        visible = builder.emit(relax.op.logical_and(visible, condition))
    hidden = relax.const(MASKED_SCORE, "float32")
    return builder.emit(relax.op.where(visible, relax.const(0.0, "float32"), hidden))


def split_constants(term: MaskTerm, values: Values) -> list[MaskTerm]:
    """`term` as the sum of a constant term and a computed one, if parts of its condition are constant."""
    if len(term) == 1:
        source, moves = before_moves(term[0], values)
        value = values.get(source)
        if operator(value) == "add" and not moves:
            return [part for side in value.args for part in split_constants((side,), values)]
        if operator(value) != "where":
            return [term]
        condition, *sides = value.args
    else:
        (condition, *sides), moves = term, ()
    numbers = [number(side) for side in sides]
    hides = [value is not None and value <= MASK_THRESHOLD for value in numbers]
    if hides.count(True) != 1 or numbers[hides.index(False)] != 0:
        return [term]
    dims = np.broadcast_shapes(*map(shape, (condition, *sides)))
    moves = (("broadcast_to", dims), *moves)
    conditions = tuple(_conditions(condition, hides[0], moves, values))
    arrays = [condition.array() for condition in conditions]
    constant_arrays = [array for array in arrays if array is not None]
    if not constant_arrays or all(array.all() for array in constant_arrays):
        return [term]
    added = np.where(np.logical_and.reduce(constant_arrays), 0.0, MASKED_SCORE).astype("float32")
    computed = tuple(part for part, array in zip(conditions, arrays) if array is None)
    return [(relax.const(added),), *([computed] if computed else [])]


def before_moves(expr: relax.Expr, values: Values) -> tuple[relax.Expr, tuple]:
    """The tensor of which `expr` is a reshape or a broadcast, and these moves."""
    moves: list[tuple[str, tuple[int, ...]]] = []
    while operator(value := values.get(expr)) in (*_RESHAPES, "broadcast_to"):
        kind = "broadcast_to" if operator(value) == "broadcast_to" else "reshape"
        moves.insert(0, (kind, shape(expr)))
        expr = value.args[0]
    return expr, tuple(moves)


def _conditions(expr: relax.Expr, negated: bool, moves: tuple, values: Values) -> Iterator[Condition]:
    """All conditions that hold where `expr` does (or does not, if `negated`)."""
    source, inner_moves = before_moves(expr, values)
    moves = (*inner_moves, *moves)
    value = values.get(source)
    kind = operator(value)
    if kind in ("logical_not", "bitwise_not"):
        yield from _conditions(value.args[0], not negated, moves, values)
    elif kind in (_DISJUNCTIONS if negated else _CONJUNCTIONS) and str(value.args[0].ty.dtype) == "bool":
        for operand in value.args:
            yield from _conditions(operand, negated, (("broadcast_to", shape(source)), *moves), values)
    else:
        yield Condition(expr=source, negated=negated, moves=moves)


def with_constant_masks(attention: Attention, terms: list[MaskTerm]) -> tuple[Attention, list[MaskTerm]]:
    """`attention` with constant masks as properties if they are causal or a window, and the other terms."""
    constants, others = [], []
    for term in terms:
        is_constant = all(isinstance(part, tvm.ir.GenericConst) for part in term)
        (constants if is_constant else others).append(term)
    if constants and (visible := _visible_keys(constants, attention)) is not None:
        first, last = int(visible[-1].argmax()), int(np.flatnonzero(visible[0]).max(initial=-1))
        window = last + attention.queries - first if first else 0
        masked = replace(attention, causal=True, offset=last, window=window)
        if (masked.visible_keys()[0] == visible).all():
            is_all = not window and last >= attention.keys - 1  # the first query sees all
            return replace(attention if is_all else masked, masked=bool(others)), others
    return replace(attention, masked=bool(terms)), terms


def _visible_keys(constants: list[MaskTerm], attention: Attention) -> np.ndarray | None:
    """The keys that each query sees, [queries, keys]; None if masks do more than to hide keys."""
    hidden = np.zeros((), bool)
    for term in constants:
        arrays = [part.value.numpy() for part in term]
        added = arrays[0] if len(arrays) == 1 else np.where(*arrays)
        is_hidden = added <= MASK_THRESHOLD
        if np.where(is_hidden, 0, added).any():
            return None
        hidden = hidden | is_hidden
    try:
        hidden = np.broadcast_to(hidden, attention.score_shape)
    except ValueError:
        return None
    visible: np.ndarray = ~hidden[0, 0]
    return visible if (~hidden == visible).all() else None
