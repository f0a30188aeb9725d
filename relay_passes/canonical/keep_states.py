"""Caches of keys and values that stay in place from step to step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import tvm
from tvm import relax

from pimflow.core.attention import Attention
from pimflow.errors import UnsupportedOpError
from pimflow.relay_passes.attention import NAME, attention_from_call, attention_function, cache_operands
from pimflow.relay_passes.caches import IN_PLACE, append_in_place, append_operands
from pimflow.relay_passes.canonical.attention_masks import before_moves
from pimflow.relay_passes.flat import main_bindings, operator, rebuild, shape, unique_name, use_counts

POSITION = "position"


@tvm.transform.module_pass(opt_level=0, name="KeepStates")
class KeepStates:
    """Turn growing caches into caches of fixed length, into which each step writes its tokens.

    Parameters
    ----------
    states : mapping of str to int
        By name of the input with a cache, the index of the output with the same cache and the step's tokens.
    places : int, optional
        Places (tokens) of the caches; by default as many as in the network. If there are more, attention
        reads the first ones, as many as the network has.

    Rewrite: ``k = concat(past, new); y = attention(q, k, v) -> k = append(cache, new, position);
    y = attention(q, k, v, position)``, where ``cache`` has the length of ``k``, or `places`, and
    ``position`` says how many tokens are in it; it becomes an input if the network has none. Appends to the
    caches of attention stand right before it: one candidate may do all three
    (`placement.candidates.pim_attention`).
    Preserves: values of the first ``position`` places and of the new ones, names.

    Raises
    ------
    UnsupportedOpError
        If an operator other than attention reads a cache, or an output is no cache with tokens appended.
    """

    def __init__(self, states: Mapping[str, int], places: int | None = None):
        self.states, self.places = dict(states), places

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        if not self.states:
            return mod
        network = _AppendFinder(mod)
        cache_appends = [network.find_append(name, index, self.places) for name, index in self.states.items()]
        _require_supported_attention(mod, cache_appends)
        main, position = mod["main"], None
        if any(append.position is None for append in cache_appends):
            name = unique_name(POSITION, {param.name for param in main.params})
            position = relax.Var(name, relax.TensorType((shape(cache_appends[0].cache)[0],), "int64"))
        var_remap: dict[relax.Var, relax.Expr] = {append.past: append.cache for append in cache_appends}
        params = [var_remap.get(param, param) for param in main.params]
        params += [] if position is None else [position]
        other_functions = {gv: f for gv, f in mod.functions_items() if gv.name_hint != "main"}
        # Its body still reads the old parameters; `rebuild` replaces them.
        outer = relax.Function(params, main.body, main.ret_ty, main.is_pure, main.attrs)
        if "num_input" in (main.attrs or {}):
            outer = outer.with_attr("num_input", len(params))
        outer = tvm.IRModule({**other_functions, mod.get_global_var("main"): outer}, attrs=mod.attrs)
        appends = {append.result: append for append in cache_appends}
        replaced_vars = {var: append.cache for append in cache_appends for var in append.between}

        def rewrite(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
            """The new value of `var`; None if `value` stays."""
            if var in replaced_vars:
                return replaced_vars[var]
            if var in appends:
                append = appends[var]
                append_position = position if append.position is None else append.position
                new, append_position = (var_remap.get(x, x) for x in (append.new, append_position))
                append_position = _positions(builder, append_position, shape(append.cache)[0])
                return append_in_place(builder, append.cache, new, append_position)
            attention = attention_from_call(mod, value)
            read = [x for x in cache_appends if attention and var_remap.get(x.result) in value.args[1:3]]
            if attention is None or not read:
                return None
            if not attention.positioned and all(append.position is not None for append in read):
                return _over_own_places(var.name, attention, value)
            return _with_position(builder, attention, value, position)

        return _move_appends_to_attention(rebuild(outer, rewrite, var_remap))


def _move_appends_to_attention(mod: tvm.IRModule) -> tvm.IRModule:
    """`mod` with each append to a cache right before the first attention that reads the cache."""
    function, bindings = mod["main"], main_bindings(mod)
    appends = {b.var: b for b in bindings if operator(b.value) == IN_PLACE}
    moved: list[relax.VarBinding] = []
    for binding in bindings:
        if binding.var in appends:
            continue
        attention = attention_from_call(mod, binding.value)
        read = [] if attention is None else cache_operands(attention, binding.value)
        moved += [appends.pop(var) for var in dict.fromkeys(read) if var in appends]
        moved.append(binding)
    if appends:  # a cache that no attention reads
        return mod
    body = relax.SeqExpr([relax.DataflowBlock(moved)], function.body.body)
    functions = dict(mod.functions_items())
    functions[mod.get_global_var("main")] = relax.Function(
        function.params,
        relax.BlockBuilder().normalize(body),
        function.ret_ty,
        function.is_pure,
        function.attrs,
    )
    return tvm.IRModule(functions, attrs=mod.attrs)


@dataclass(frozen=True, kw_only=True)
class _StateAppend:
    """The append of a step's tokens to a cache.

    Attributes
    ----------
    past, result : Var
        The cache that the network takes, and the one that it returns.
    cache : Var
        The new parameter, which serves as both.
    position : Expr, optional
        Place of the first token; behind all of `past` if None.
    between : tuple of Var
        Variables between `past` and `result`, computed from `past` alone.
    """

    past: relax.Var
    result: relax.Var
    cache: relax.Var
    new: relax.Var
    position: relax.Expr | None
    between: tuple[relax.Var, ...]


class _AppendFinder:
    """Finds the appends to the caches of a network."""

    def __init__(self, mod: tvm.IRModule) -> None:
        self.mod, self.uses = mod, use_counts(mod)
        self.values = {binding.var: binding.value for binding in main_bindings(mod)}
        self.readers: dict[relax.Var, list[relax.Var]] = {}
        for var, value in self.values.items():
            for read in set(relax.analysis.free_vars(value)):
                self.readers.setdefault(read, []).append(var)

    def find_append(self, name: str, index: int, places: int | None) -> _StateAppend:
        """The append that makes result `index` of input `name`, for a cache of `places`."""
        values, main = self.values, self.mod["main"]
        past = next(param for param in main.params if param.name == name)
        body = main.body.body
        returned = values.get(body)
        result = returned.fields[index] if isinstance(returned, relax.Tuple) else body
        producer = values.get(result)
        parts, new, position, between = None, None, None, []
        if (
            operator(producer) == "concat"
            and isinstance(producer.args[0], relax.Tuple)
            and int(producer.attrs.axis) % len(shape(result)) == 2
        ):
            parts = list(producer.args[0].fields)
            if len(parts) == 2 and parts[0].same_as(past):
                new = parts[1]
        elif (placed := _write_place(producer, values)) is not None and placed[0].same_as(past):
            _, new, position = placed
        elif (parts := append_operands(producer, values)) is not None:
            behind = values.get(parts[0])
            source = behind.args[0] if operator(behind) == "nn.pad" else parts[0]
            if source.same_as(past):
                _, new, position = parts
                between = [producer.args[0]] if source.same_as(parts[0]) else [parts[0], producer.args[0]]
        if not isinstance(new, relax.Var) or self.uses[past] != 1:
            raise UnsupportedOpError(
                f"output {index} is not input '{name}' with new tokens at its end; name the right one, as "
                "past=present"
            )
        for var in self.readers.get(result, ()):
            value = values[var]
            if not isinstance(value, relax.Tuple) and attention_from_call(self.mod, value) is None:
                raise UnsupportedOpError(f"'{var.name}' reads the cache '{name}', and is no attention")
        batch, heads, length, size = shape(result)
        dims = (batch, heads, length if places is None else places, size)
        cache = relax.Var(past.name, relax.TensorType(dims, result.ty.dtype))
        return _StateAppend(
            past=past, result=result, cache=cache, new=new, position=position, between=tuple(between)
        )


def _require_supported_attention(mod: tvm.IRModule, appends: list[_StateAppend]) -> None:
    """Raise `UnsupportedOpError` for attention over caches that a position cannot describe."""
    caches = {append.result for append in appends if append.position is None}
    values = {binding.var: binding.value for binding in main_bindings(mod)}
    for binding in main_bindings(mod):
        attention = attention_from_call(mod, binding.value)
        if attention is None or attention.positioned:
            continue
        read = sum(operand in caches for operand in binding.value.args[1:3])
        if read and attention.masked and (name := _place_dependent_tensor(binding.value.args[3], values)):
            raise UnsupportedOpError(
                f"'{binding.var.name}': its mask follows from lengths by '{name}', which is no window of the "
                "last tokens; over a cache of fixed length it would hide other tokens"
            )
        aligned = not attention.causal or attention.offset == attention.keys - attention.queries
        if read and (read < 2 or not aligned or (attention.queries > 1 and attention.masked)):
            raise UnsupportedOpError(
                f"'{binding.var.name}': attention over a cache of fixed length needs keys and values of "
                "caches, and with several tokens no mask but a causal one"
            )


def _place_dependent_tensor(mask: relax.Expr, values: Mapping[relax.Var, relax.Expr]) -> str:
    """Name of a tensor that is computed from a constant with different values for the places of a cache.

    Empty if there is none. Tokens of a cache that grows are at its last places, of one that stays in place at
    the first, so that such a constant would belong to other tokens. What is added to scores may be a line
    over the places: softmax does not change if all scores of a query do. Indices of all places in order
    select what is there.
    """
    places, queue, seen = shape(mask)[-1], [(mask, "the mask", True)], set()
    while queue:
        expr, name, added = queue.pop()
        if isinstance(expr, tvm.ir.GenericConst):
            if _differs_by_place(expr.value.numpy(), places, added):
                return name
        elif expr in values and (expr, added) not in seen:
            seen.add((expr, added))
            value = values[expr]
            kind = operator(value)
            added = added and kind in ("add", "subtract", "reshape", "expand_dims", "broadcast_to")
            operands = value.args[:1] if _selects_all(value) else value.args
            queue += [(operand, expr.name, added) for operand in operands]
    return ""


def _differs_by_place(array: np.ndarray, places: int, added: bool) -> bool:
    """Whether `array` differs along an axis of `places`, or, if it is `added` to scores, is no line."""
    for axis in range(array.ndim):
        if array.shape[axis] != places or places == 1:
            continue
        if (array == array.take([0], axis)).all():
            continue
        steps = np.diff(array.astype(np.float64), axis=axis)
        if not added or not np.allclose(steps, steps.take([0], axis), rtol=1e-5, atol=0):
            return True
    return False


def _selects_all(value: relax.Expr) -> bool:
    """Whether `value` gathers all elements of its operand, or all along an axis, in their order."""
    kind = operator(value)
    if kind not in ("take", "gather_nd") or not isinstance(value.args[1], tvm.ir.GenericConst):
        return False
    indices, dims = value.args[1].value.numpy(), shape(value.args[0])
    if kind == "take":
        size = math.prod(dims) if value.attrs.axis is None else dims[int(value.attrs.axis)]
        places = indices.reshape(-1)
    else:
        lead = dims[: indices.shape[-1]]
        size, coordinates = math.prod(lead), indices.reshape(-1, indices.shape[-1])
        if int(value.attrs.batch_dims) or not ((coordinates >= 0) & (coordinates < lead)).all():
            return False
        places = np.ravel_multi_index(tuple(coordinates.T), lead)
    return bool(places.size == size and (places == np.arange(size)).all())


def _write_place(
    value: relax.Expr | None, values: Mapping[relax.Var, relax.Expr]
) -> tuple[relax.Var, relax.Var, relax.Var] | None:
    """Cache, token and position of ``where(arange == position, token, cache)``; None for other values."""
    if operator(value) != "where":
        return None
    condition, new, past = value.args
    source, moves = before_moves(condition, values)
    test = values.get(source)
    if operator(test) != "equal" or shape(new) != (*shape(past)[:2], 1, shape(past)[3]):
        return None
    numbers = [side for side in test.args if isinstance(side, tvm.ir.GenericConst)]
    positions = [side for side in test.args if isinstance(side, relax.Var)]
    if len(numbers) != 1 or len(positions) != 1 or math.prod(shape(positions[0])) != 1:
        return None
    places = np.broadcast_to(numbers[0].value.numpy(), shape(source))
    for kind, dims in moves:
        places = np.broadcast_to(places, dims) if kind == "broadcast_to" else places.reshape(dims)
    expected = np.arange(shape(past)[2]).reshape(1, 1, -1, 1)
    is_place = places.ndim <= 4 and (np.broadcast_to(places, shape(past)) == expected).all()
    return (past, new, positions[0]) if is_place else None


def _positions(builder: relax.BlockBuilder, expr: relax.Expr, batch: int) -> relax.Expr:
    """A position as int64 [batch]."""
    if str(expr.ty.dtype) != "int64":
        expr = builder.emit(relax.op.astype(expr, "int64"))
    if shape(expr) == (batch,):
        return expr
    return builder.emit(relax.op.broadcast_to(builder.emit(relax.op.reshape(expr, (1,))), (batch,)))


def _over_own_places(name: str, attention: Attention, call: relax.Call) -> None:
    """None: attention stays as it is if its network says where tokens are."""
    if shape(call.args[1])[2] != attention.keys:
        raise UnsupportedOpError(
            f"'{name}': its caches have {attention.keys} places, and no more can be added"
        )


def _with_position(
    builder: relax.BlockBuilder, attention: Attention, call: relax.Call, position: relax.Var | None
) -> relax.Call | None:
    """`call` with a position, over a cache whose last places are empty; None if it is such a call already."""
    places, operands = shape(call.args[1])[2], list(call.args)
    if attention.positioned and places == attention.keys:
        return None
    if not attention.positioned:
        assert position is not None
        operands.append(position)
    read = 0 if places == attention.keys else attention.keys
    positioned = replace(attention, positioned=True, offset=0, keys=places, read=read)
    function = attention_function(positioned, shape(operands[3]) if attention.masked else ())
    return relax.Call(builder.add_func(function, NAME), operands)
