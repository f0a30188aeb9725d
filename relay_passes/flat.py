"""The flat form on which passes work: reading it, and rebuilding it binding by binding.

Arrays of TVM are read as slices: ``call.args[:]`` is a list, which takes a third of the time of iterating.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import tvm
import tvm_ffi
from tvm import relax

from pimflow.errors import UnsupportedOpError

Analysis = TypeVar("Analysis")


def cached_by_module(analysis: Callable[..., Analysis]) -> Callable[..., Analysis]:
    """`analysis`, whose arguments are a module and keywords, with its results for the last two modules.

    Callers get a copy of the result, with the same elements.

    Whoever needs an analysis of a module again mostly does so at once. Results hold modules, which are large.
    """

    @functools.lru_cache(maxsize=2)
    def cached(mod: tvm.IRModule, main: relax.Function, **keywords: bool) -> Analysis:
        return analysis(mod, **keywords)

    @functools.wraps(analysis)
    def wrapper(mod: tvm.IRModule, **keywords: bool) -> Analysis:
        return copy.copy(cached(mod, mod["main"], **keywords))  # passes may replace a module's `main`

    return wrapper


@cached_by_module
def main_bindings(mod: tvm.IRModule) -> list[relax.VarBinding]:
    """Bindings of ``main`` in order; raises `UnsupportedOpError` if it is not in flat form."""
    body = mod["main"].body
    bindings = [b for block in getattr(body, "blocks", ()) for b in block.bindings[:]]
    flat = isinstance(body, relax.SeqExpr) and len(body.blocks) <= 1
    if not flat or any(isinstance(b.value, relax.If) for b in bindings):
        raise UnsupportedOpError("main is not one dataflow block; control flow is not supported")
    return bindings


def substitute(expr: relax.Expr, env: dict[relax.Var, relax.Expr]) -> relax.Expr:
    """`expr` with variables replaced by `env`, through calls and tuples."""
    if isinstance(expr, relax.Var):
        return env.get(expr, expr)
    if isinstance(expr, relax.Call | relax.Tuple):
        before = (expr.args if isinstance(expr, relax.Call) else expr.fields)[:]
        after = [substitute(part, env) for part in before]
        if all(new.same_as(old) for new, old in zip(after, before)):
            return expr
        if isinstance(expr, relax.Tuple):
            return relax.Tuple(after)
        return relax.Call(expr.op, after, expr.attrs, expr.ty_args)
    if isinstance(expr, relax.TupleGetItem):
        source = substitute(expr.tuple_value, env)
        return expr if source.same_as(expr.tuple_value) else relax.TupleGetItem(source, expr.index)
    return expr


@dataclass(frozen=True)
class TextAttribute:
    """A text for each of some layers or variables: an attribute of ``main`` called `key`.

    Passes preserve it, and the names of layers, so a text can be looked up by layer at any time.
    """

    key: str

    def read(self, mod: tvm.IRModule) -> dict[str, str]:
        """The texts by name, as `attach` stored them; empty if there are none."""
        return dict(_texts(mod["main"], self.key))

    def attach(self, mod: tvm.IRModule, texts: Mapping[str, str]) -> tvm.IRModule:
        """`mod` with `texts` in place of those that it has."""
        mod = mod.clone()
        mod["main"] = mod["main"].with_attr(self.key, {name: str(text) for name, text in texts.items()})
        return mod


@functools.lru_cache(maxsize=8)  # as in `cached_by_module`, for the attributes of two modules
def _texts(main: relax.Function, key: str) -> dict[str, str]:
    return {str(name): str(text) for name, text in (main.attrs or {}).get(key, {}).items()}


LAYER_NAMES = TextAttribute("pimflow.layer_names")  # by variable, its layer's name in the network file
LAYER_ROLES = TextAttribute("pimflow.roles")  # by layer, of `core.region.ROLES`
WEIGHT_TYPES = TextAttribute("pimflow.weight_types")  # by layer, in which its weights are stored
ACTIVATION_TYPES = TextAttribute("pimflow.activation_types")  # by layer, which it multiplies with weights
CACHE_TYPES = TextAttribute("pimflow.cache_types")  # by input that is a cache, the type of its integers
CHANNEL_SETS = TextAttribute("pimflow.channel_sets")  # by variable; see `core.channel_sets`
RESULT = "%result"  # the only result of a network, which passes may rename


def layer_name(mod: tvm.IRModule, var: relax.Var) -> str:
    """Name of the layer of `var` in the network file."""
    return _texts(mod["main"], LAYER_NAMES.key).get(var.name, var.name)


def unique_name(name: str, used_names: Container[str]) -> str:
    """`name`, with underscores appended until it differs from all names in `used_names`."""
    while name in used_names:
        name += "_"
    return name


Rewriter = Callable[[relax.BlockBuilder, relax.Var, relax.Expr], "relax.Expr | None"]


def rebuild(
    mod: tvm.IRModule,
    rewrite: Rewriter,
    var_remap: dict[relax.Var, relax.Expr] | None = None,
    rewrite_result: Callable[[relax.BlockBuilder, relax.Expr], relax.Expr] | None = None,
) -> tvm.IRModule:
    """`mod` with every binding of ``main`` passed through `rewrite`.

    Parameters
    ----------
    var_remap : dict of Var to Expr, optional
        Filled, binding by binding, with the replacement of each old variable.
    rewrite_result : callable, optional
        Gets the builder and the new result, and gives what ``main`` returns instead.

    ``rewrite(builder, var, value)`` gets the old variable, and the value over new variables. It may emit
    further bindings. It returns the value to bind under the old name, a variable that it emitted as the
    replacement, or None for no change.
    """
    function, bindings = mod["main"], main_bindings(mod)
    params = function.params[:]
    # Without `main`, which the builder would hash: it looks for equal functions.
    others = {gv: f for gv, f in mod.functions_items() if gv.name_hint != "main"}
    builder = relax.BlockBuilder(tvm.IRModule(others, attrs=mod.attrs))
    env: dict[relax.Var, relax.Expr] = {} if var_remap is None else var_remap
    same: set[relax.Var] = set(params)  # variables whose type did not change
    with _dataflow_block(builder, params) as blocks:
        for binding in bindings:
            var, old = binding.var, binding.value
            value = substitute(old, env)
            new = rewrite(builder, var, value)
            if new is None and (value is old or same.issuperset(relax.analysis.free_vars(old)[:])):
                env[var] = emit_as(builder, var, value)
                same.add(var)
                continue
            if new is None:
                new = value
            done = isinstance(new, relax.Var) and not isinstance(value, relax.Var)
            env[var] = new if done else builder.emit(new, name_hint=var.name)
            if tvm_ffi.structural_equal(env[var].ty, var.ty):
                same.add(var)
        body = builder.normalize(substitute(function.body.body, env))
        if rewrite_result is not None:
            body = builder.normalize(rewrite_result(builder, body))
        output = relax.Var(_source_name(builder, body), body.ty)
        builder.emit_normalized(relax.VarBinding(output, body))
    return _with_main(mod, builder.get(), blocks[0], output)


class BindingPass:
    """A pass whose method ``rewrite`` is the `Rewriter` of each binding by itself."""

    rewrite: Rewriter

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        return rebuild(mod, self.rewrite)


@contextlib.contextmanager
def _dataflow_block(
    builder: relax.BlockBuilder, params: Sequence[relax.Var]
) -> Iterator[list[relax.DataflowBlock]]:
    """A dataflow block that sees `params`, and is in the list at the end.

    A function of the builder would be hashed, and its bindings normalised once more.
    """
    blocks: list[relax.DataflowBlock] = []
    builder.begin_scope(params)
    builder._begin_dataflow_block()
    try:
        yield blocks
    finally:
        blocks.append(builder._end_block())
        builder.end_scope()


def _with_main(
    mod: tvm.IRModule, built: tvm.IRModule, block: relax.DataflowBlock, output: relax.Var
) -> tvm.IRModule:
    """`mod` with the functions of `built`, and a ``main`` with the block that ends with `output`."""
    functions, old = dict(built.functions_items()), mod["main"]
    is_alone = not any(isinstance(other, relax.Function) for other in functions.values())
    canonical = _without_output_alias(block) if is_alone else None  # the pass also visits other functions
    sequence = relax.SeqExpr([canonical or block], output)
    relax.expr._update_type(sequence, output.ty)
    rebuilt = relax.Function(old.params, sequence, output.ty, attrs=old.attrs)
    functions[mod.get_global_var("main")] = rebuilt.with_attr("global_symbol", "main")
    result = tvm.IRModule(functions, attrs=mod.attrs)
    result = result if canonical else relax.transform.CanonicalizeBindings()(result)
    if canonical and len(functions) == 1 and _is_all_read(canonical):
        return result
    return relax.transform.DeadCodeElimination(["main"])(result)


def _is_all_read(block: relax.DataflowBlock) -> bool:
    """Whether each variable of `block` but the last is read. To find no dead code takes TVM longer."""
    return sum(not readers for readers in relax.analysis.udchain(block).values()) == 1


def _without_output_alias(block: relax.DataflowBlock) -> relax.DataflowBlock | None:
    """`block`, whose last binding is its output, as ``CanonicalizeBindings`` would return it.

    None if there is more to do than to compute the output where it is an alias: that pass takes as long as
    all else that `rebuild` does.
    """
    *bindings, output = block.bindings[:]
    last = bindings[-1] if bindings else None
    if last is None or not isinstance(last.var, relax.DataflowVar) or not last.var.same_as(output.value):
        return None
    if not all(isinstance(binding.value, relax.Call | relax.Tuple) for binding in bindings):
        return None
    return relax.DataflowBlock([*bindings[:-1], relax.VarBinding(output.var, last.value)])


def emit_as(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr, name: str = "") -> relax.Var:
    """Emit `value`, which has the type of `var`; this is faster than inferring the type.

    The new variable has the name of `var`, or `name`. It is `var` itself if its name is still free.
    """
    if type(value.ty) is tvm.ir.Type:  # not known yet
        relax.expr._update_type(value, var.ty)
    free = builder.get_unique_name(name or var.name)
    keeps_var = isinstance(var, relax.DataflowVar) and free == var.name
    new = var if keeps_var else relax.DataflowVar(free, var.ty)
    builder.emit_normalized(relax.VarBinding(new, value))
    return new


def _source_name(builder: relax.BlockBuilder, expr: relax.Expr) -> str:
    """Name of the variable of which `expr` is an alias; the builder would make a unique name instead."""
    name = "gv"
    while isinstance(expr, relax.Var):
        name, expr = expr.name, builder.lookup_binding(expr)
    return name


_operator_names: dict[int, str] = {}  # by handle of an operator, which TVM registers once and for all


def operator(expr: relax.Expr) -> str:
    """Name of the operator that `expr` calls, without ``relax.``; empty if it calls none."""
    if not isinstance(expr, relax.Call):
        return ""
    callee = expr.op
    handle = callee.__chandle__()
    if handle not in _operator_names and isinstance(callee, tvm.ir.Op):
        _operator_names[handle] = callee.name.removeprefix("relax.")
    return _operator_names.get(handle, "")


def bare_operator(expr: tvm.ir.Expr) -> str:
    """Name of the operator that `expr` calls, without its dialect; empty if it calls none."""
    calls = isinstance(expr, tvm.ir.Call) and isinstance(expr.op, tvm.ir.Op)
    return expr.op.name.rpartition(".")[2] if calls else ""


def shape(expr: relax.Expr) -> tuple[int, ...]:
    """Static shape of a tensor."""
    dims = _static_dims(expr.ty.shape)
    if dims is None:
        raise UnsupportedOpError(
            f"'{getattr(expr, 'name', expr)}' has a dynamic shape; fix open sizes with --shape, or the "
            "values that decide it"
        )
    return dims


# Cached: each number is a call of TVM, and passes ask for the shapes of the same tensors again and again.
@functools.lru_cache(maxsize=1 << 14)
def _static_dims(shape_expr: relax.Expr | None) -> tuple[int, ...] | None:
    """The sizes in the shape of a type; None if it has none, or some are not constant."""
    values = getattr(shape_expr, "values", None)
    dims = values[:] if values else []
    if values is None or not all(isinstance(d, int | tvm.tirx.IntImm) for d in dims):
        return None
    return tuple(int(d) for d in dims)


def has_static_shape(expr: relax.Expr) -> bool:
    """Whether `expr` is a tensor with a static shape."""
    return _static_dims(getattr(expr.ty, "shape", None)) is not None


# These keep the order of elements, if they keep their number and type.
RESHAPING = ("reshape", "expand_dims", "squeeze", "astype", "broadcast_to")


def slice_begin(call: relax.Call) -> tuple[int, int] | None:
    """Axis and first index of a slice along one axis in steps of one; None for other slices."""
    if not all(isinstance(arg, relax.Tuple) for arg in call.args[1:]):
        return None
    axes, begins, _, *strides = ([int(v.value) for v in arg.fields] for arg in call.args[1:])
    if len(axes) != 1 or (strides and strides[0] != [1]):
        return None
    extent = shape(call.args[0])[axes[0]]
    begin = begins[0] + extent if begins[0] < 0 else begins[0]
    return axes[0] % len(shape(call.args[0])), min(max(begin, 0), extent)


def is_pure_reshape(bindings: Sequence[relax.VarBinding]) -> bool:
    """Whether a chain of bindings only gives a tensor another shape, so that it needs no kernel.

    The elements keep their type and order: in reshapes, in permutations that move only axes of one element,
    and in moves that undo one another. False for a tensor without elements.
    """
    if not all(operator(b.value) in (*RESHAPING, "permute_dims", "strided_slice") for b in bindings):
        return False
    read = [next(iter(getattr(binding.value, "args", ())), None) for binding in bindings]
    if not all(isinstance(x, relax.Var) and has_static_shape(x) for x in (*read, *(b.var for b in bindings))):
        return False
    if not read or not all(x.same_as(b.var) for x, b in zip(read[1:], bindings)):
        return False
    # Axes of the source with more than one element as (extent, stride), outermost first.
    count = math.prod(shape(read[0]))
    factors = split_factors([(count, 1)], shape(read[0])) if count else None
    for x, binding in zip(read, bindings):
        value, kind = binding.value, operator(binding.value)
        if factors is None or x.ty.dtype != binding.var.ty.dtype:
            return False
        input_dims, output_dims = shape(x), shape(binding.var)
        if kind == "permute_dims":
            axes = [int(a) for a in value.attrs.axes or reversed(range(len(input_dims)))]
            grouped = factors_by_axis(factors, input_dims)
            factors = [factor for axis in axes for factor in grouped[axis]]
        elif kind == "strided_slice":
            steps = value.args[4].fields if len(value.args) > 4 else ()
            if input_dims != output_dims or any(int(step.value) != 1 for step in steps):
                return False
        elif math.prod(input_dims) != math.prod(output_dims):
            return False
        else:
            factors = split_factors(factors, output_dims)
    strides = [stride for _, stride in factors or ()]
    return factors is not None and strides == sorted(strides, reverse=True)


def split_factors(factors: Sequence[tuple[int, int]], dims: Sequence[int]) -> list[tuple[int, int]] | None:
    """Split `factors` of an index, (extent, stride), so that each belongs to one axis of `dims`.

    None if that is not possible. The first factor is the outermost.
    """
    remaining, split = list(factors), []
    for extent in dims:
        while extent > 1:
            inner, stride = remaining.pop(0)
            factor = math.gcd(extent, inner)
            if factor < min(extent, inner):
                return None
            split.append((factor, stride * (inner // factor)))
            extent //= factor
            if inner > factor:
                remaining.insert(0, (inner // factor, stride))
    return split


def factors_by_axis(factors: Sequence[tuple[int, int]], dims: Sequence[int]) -> list[list[tuple[int, int]]]:
    """The factors of each axis of `dims`, of those that `split_factors` gives."""
    remaining, grouped = list(factors), []
    for extent in dims:
        axis_factors: list[tuple[int, int]] = []
        while math.prod(count for count, _ in axis_factors) < extent:
            axis_factors.append(remaining.pop(0))
        grouped.append(axis_factors)
    return grouped


def with_operands(call: relax.Call, operands: Sequence[relax.Expr], **new_attrs: object) -> relax.Call:
    """`call` with other `operands`, and with the attributes `new_attrs`."""
    info = type(call.attrs).__tvm_ffi_type_info__
    attrs = {field.name: getattr(call.attrs, field.name) for field in info.fields} | new_attrs
    return relax.Call(call.op, operands, tvm.ir.make_node(info.type_key, **attrs))


def with_padding(call: relax.Call, x: relax.Expr, padding: Sequence[int]) -> relax.Call:
    """Convolution `call` applied to `x`, with another padding: top, left, bottom, right."""
    return with_operands(call, [x, call.args[1]], padding=list(padding))


def constant(value: np.ndarray, dtype: str = "") -> relax.Expr:
    """`value` as a constant, copied once: weights may be most of a machine's memory.

    Parameters
    ----------
    dtype : str, optional
        That of `value` by default.
    """
    tensor = tvm.runtime.empty(value.shape, dtype or str(value.dtype))
    np.from_dlpack(tensor)[...] = value
    return relax.const(tensor)


def number(expr: relax.Expr) -> float | None:
    """The value of a constant with one element; None for other expressions."""
    if isinstance(expr, tvm.ir.GenericConst) and math.prod(expr.value.shape) == 1:
        return float(expr.value.numpy().flat[0])
    return None


def element_bytes(expr: relax.Expr) -> int:
    """Bytes of one element of a tensor."""
    dtype = tvm.DataType(str(expr.ty.dtype))
    return (dtype.bits * dtype.lanes + 7) // 8


def tensor_bytes(tensor: relax.Expr) -> int:
    """Bytes of a tensor."""
    return math.prod(shape(tensor)) * element_bytes(tensor)


@cached_by_module
def use_counts(mod: tvm.IRModule) -> Counter[relax.Var]:
    """How many bindings of ``main`` use each variable; the result of ``main`` counts as a use."""
    read = [*(binding.value for binding in main_bindings(mod)), mod["main"].body.body]
    return Counter(var for value in read for var in set(relax.analysis.free_vars(value)[:]))
