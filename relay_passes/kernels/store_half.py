"""Half precision in memory, single precision in registers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tvm
from tvm import relax

from pimflow.relay_passes.flat import main_bindings, operator, substitute, with_operands

PRODUCTS = ("nn.conv1d", "nn.conv2d", "nn.conv3d", "nn.conv2d_transpose", "matmul")
SELECTIONS = (  # operators that only select elements of their operands
    *("reshape", "permute_dims", "expand_dims", "squeeze", "flatten", "broadcast_to", "nn.pad"),
    *("strided_slice", "concat", "take", "nn.max_pool1d", "nn.max_pool2d", "nn.max_pool3d"),
)
VIEWS = ("reshape", "strided_slice", "concat")  # where `GroupKernels` left them in ``main``
FULL, HALF = "float32", "float16"
CHANNELS_LAST = (3, 1, 2, 0)  # of OHWI filters with one input channel


@tvm.transform.module_pass(opt_level=0, name="StoreHalf")
class StoreHalf:
    """Store tensors between kernels in fp16, and compute inside kernels in fp32.

    Run it after `GroupKernels`: in the flat form a cast is an operator, which may start a kernel or move a
    tensor into another one; inside a kernel's function it cannot.

    Convolutions and matrix products take fp16 operands, which is what tensor cores multiply, and
    accumulate in fp32. Data movement and maxima need no cast. Everything else reads fp16, computes in fp32
    and rounds what it stores. Filters, matrices and gathered tables become fp16; other constants stay
    fp32: biases and scales are small vectors, for which precision matters more than size.

    Operands and results of functions for PIM are fp16 as well. Those of ``main`` and of foreign functions
    keep their types; the kernels on either side cast.

    Rewrite: ``relu(conv2d(x, w)) -> half(relu(conv2d(x16, w16, out_dtype=fp32)))`` in every kernel.
    Preserves: values up to the rounding of stored tensors, interface of ``main``, kernels, names.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        main, full, parts = mod["main"], _full_precision_vars(mod), _parts(mod)
        others = {gv: f for gv, f in mod.functions_items() if not isinstance(f, relax.Function)}
        builder = relax.BlockBuilder(tvm.IRModule(others))
        env: dict[relax.Var, relax.Expr] = {}
        with builder.function("main", list(main.params)):
            with builder.dataflow():
                for binding in main_bindings(mod):
                    var, value = binding.var, binding.value
                    if _is_kernel(mod, value):
                        function = mod[value.op]
                        operands, moved = _convert_operands(function, value.args)
                        operands = [substitute(arg, env) for arg in operands]
                        keep = [var in full or part in full for part in parts.get(var, [var])]
                        half = _to_half_kernel(function, [arg.ty for arg in operands], keep, moved)
                        new = relax.Call(builder.add_func(half, value.op.name_hint), operands)
                    else:
                        new = substitute(value, env)
                    env[var] = builder.emit(new, name_hint=var.name)
                output = builder.emit_output(substitute(main.body.body, env))
            builder.emit_func_output(output)
        result = builder.get()
        result["main"] = result["main"].with_attrs(dict(main.attrs or {}))
        result = relax.transform.CanonicalizeBindings()(result)
        return tvm.IRModule(result.functions, attrs=mod.attrs)


def _is_kernel(mod: tvm.IRModule, value: relax.Expr) -> bool:
    """Whether `value` calls one kernel: a primitive function, or one for PIM."""
    if not (isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.GlobalVar)):
        return False
    function = mod[value.op]
    attrs = function.attrs or {}
    return isinstance(function, relax.Function) and ("Primitive" in attrs or "Codegen" in attrs)


def _full_precision_vars(mod: tvm.IRModule) -> set[relax.Var]:
    """Variables of ``main`` that keep their type: its results, and operands and results of foreign calls.

    Views of such a tensor keep their type too, and so do the tensors of which it is a view.
    """
    full = set(relax.analysis.free_vars(mod["main"].body.body))
    values = {b.var: b.value for b in main_bindings(mod)}
    for var, value in reversed(values.items()):
        if isinstance(value, relax.TupleGetItem):
            if not _is_kernel(mod, values.get(value.tuple_value)):
                full.add(var)
        elif not isinstance(value, relax.Tuple | relax.Var) and not _is_kernel(mod, value):
            full |= set() if operator(value) in VIEWS else {var, *relax.analysis.free_vars(value)}
    sharing = [
        {var, *relax.analysis.free_vars(value)}
        for var, value in values.items()
        if isinstance(value, relax.Tuple | relax.Var) or operator(value) in VIEWS
    ]
    while True:
        added = {var for tensors in sharing if tensors & full for var in tensors} - full
        if not added:
            return full
        full |= added


def _parts(mod: tvm.IRModule) -> dict[relax.Var, list[relax.Var | None]]:
    """For each kernel with several results, the variables that hold them."""
    parts: dict[relax.Var, list[relax.Var | None]] = {}
    for binding in main_bindings(mod):
        value = binding.value
        if isinstance(value, relax.TupleGetItem) and isinstance(value.tuple_value, relax.Var):
            count = len(value.tuple_value.ty.fields)
            parts.setdefault(value.tuple_value, [None] * count)[value.index] = binding.var
    return parts


def _bindings(function: relax.Function) -> list[relax.VarBinding]:
    return [b for block in function.body.blocks for b in block.bindings]


def _tables(function: relax.Function) -> set[relax.Var]:
    """Parameters that are operands of products of `function`, or tables from which it gathers."""
    tables: set[relax.Var] = set()
    for binding in _bindings(function):
        kind = operator(binding.value)
        if kind in PRODUCTS or kind == "take":
            tables.update(a for a in binding.value.args[:2] if isinstance(a, relax.Var))
    return tables


def _depthwise_filters(function: relax.Function) -> set[relax.Var]:
    """Parameters that are fp32 filters of a depthwise convolution and have no other reader."""
    bindings = _bindings(function)
    return {
        b.value.args[1]
        for b in bindings
        if operator(b.value) == "nn.conv2d"
        and b.value.attrs.kernel_layout == "OHWI"
        and b.value.attrs.groups > 1
        and _dtype(b.value.args[1]) == FULL
        and b.value.args[1].ty.shape[3] == 1
        and sum(b.value.args[1] in relax.analysis.free_vars(reader.value) for reader in bindings) == 1
    } & set(function.params)


def _convert_operands(
    function: relax.Function, operands: Sequence[relax.Expr]
) -> tuple[list[relax.Expr], set[relax.Var]]:
    """`operands` with constants in their stored form, and the parameters whose channels are now last."""
    tables, filters = _tables(function), _depthwise_filters(function)
    stored, moved = [], set()
    for param, arg in zip(function.params, operands, strict=True):
        if isinstance(arg, tvm.ir.GenericConst) and param in filters:
            arg = relax.const(arg.value.numpy().transpose(CHANNELS_LAST))
            moved.add(param)
        stored.append(_half_constant(arg) if param in tables else arg)
    return stored, moved


def _half_constant(expr: relax.Expr) -> relax.Expr:
    """An fp32 constant as fp16; other expressions unchanged."""
    if isinstance(expr, tvm.ir.GenericConst) and _dtype(expr) == FULL:
        return relax.const(expr.value.numpy().astype(np.float16))
    return expr


def _dtype(expr: relax.Expr) -> str:
    return str(expr.ty.dtype) if isinstance(expr.ty, relax.TensorType) else ""


def _to_half_kernel(
    function: relax.Function, types: Sequence[tvm.ir.Type], keep_full: Sequence[bool], moved: set[relax.Var]
) -> relax.Function:
    """`function` with parameters of `types`, and with fp32 results stored as fp16 except where
    `keep_full`.
    """
    builder = relax.BlockBuilder()
    params = [relax.Var(p.name, ty) for p, ty in zip(function.params, types, strict=True)]
    env: dict[relax.Var, relax.Expr] = dict(zip(function.params, params))
    casts: dict[tuple[relax.Var, str], relax.Var] = {}

    def cast(expr: relax.Expr, dtype: str) -> relax.Expr:
        """`expr` as `dtype`; a cast of a variable is emitted once."""
        if _dtype(expr) == dtype:
            return expr
        if isinstance(expr, tvm.ir.GenericConst):
            return relax.const(expr.value.numpy().astype(dtype))
        if (expr, dtype) not in casts:
            casts[expr, dtype] = builder.emit(relax.op.astype(expr, dtype))
        return casts[expr, dtype]

    def cast_back(expr: relax.Expr) -> relax.Expr:
        """`expr` over the new variables, cast to its original type."""
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([cast_back(field) for field in expr.fields])
        return cast(env[expr], _dtype(expr)) if expr in env else expr

    with builder.function("kernel", params, private=True):
        with builder.dataflow():
            values = {b.var: b.value for b in _bindings(function)}
            body = function.body.body
            results = list(values[body].fields) if isinstance(values[body], relax.Tuple) else [body]
            for var, value in values.items():
                kind, new = operator(value), substitute(value, env)
                if kind in PRODUCTS and _dtype(var) == FULL:
                    last = value.args[1] in moved
                    new = _product(value, [cast(arg, HALF) for arg in new.args], last)
                elif isinstance(new, relax.Call) and kind != "astype":
                    leaves = {_dtype(leaf) for arg in new.args for leaf in getattr(arg, "fields", [arg])}
                    if kind not in SELECTIONS or leaves >= {FULL, HALF}:
                        args = [cast_back(arg) for arg in value.args]
                        new = relax.Call(value.op, args, value.attrs, value.ty_args)
                if not isinstance(new, relax.Tuple):
                    env[var] = builder.emit(new, name_hint=var.name)
            stored = [
                cast(env[var], _dtype(var) if is_full or _dtype(var) != FULL else HALF)
                for var, is_full in zip(results, keep_full, strict=True)
            ]
            output = builder.emit_output(stored[0] if len(stored) == 1 else relax.Tuple(stored))
        builder.emit_func_output(output)
    return builder.get()["kernel"].with_attrs(dict(function.attrs))


def _product(call: relax.Call, operands: list[relax.Expr], channels_last: bool) -> relax.Call:
    """`call` of fp16 operands, accumulating in fp32."""
    changed = {"kernel_layout": "".join("OHWI"[axis] for axis in CHANNELS_LAST)} if channels_last else {}
    return with_operands(call, operands, out_dtype=FULL, **changed)
