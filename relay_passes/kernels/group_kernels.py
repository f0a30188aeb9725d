"""One function a kernel, so that the kernels that run are those that were costed."""

from __future__ import annotations

import tvm
from tvm import relax

from pimflow.relay_passes.attention import ATTENTION
from pimflow.relay_passes.flat import (
    CHANNEL_SETS,
    is_pure_reshape,
    main_bindings,
    operator,
    shape,
    substitute,
)
from pimflow.relay_passes.operators import BINARY
from pimflow.relay_passes.regions.kernel_groups import (
    KernelGroup,
    attention_kernels,
    free_variables,
    kernel_groups,
)


@tvm.transform.module_pass(opt_level=0, name="GroupKernels")
class GroupKernels:
    """Outline each group of `kernel_groups` as a primitive function, of which `FuseTIR` makes one kernel.

    Parameters
    ----------
    views : bool
        See `kernel_groups`.

    Rewrite: ``y = clip(add(conv2d(x, w), b)) -> y = fused_conv(x, w, b)``; of attention several
    such functions.
    Preserves: values exactly.
    """

    def __init__(self, views: bool = True):
        self.views = views

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        groups = {g.result: g for g in kernel_groups(mod, views=self.views)}
        function = mod["main"]
        builder = relax.BlockBuilder(mod)
        env: dict[relax.Var, relax.Expr] = {}
        with builder.function("pimflow_grouped", list(function.params)):
            with builder.dataflow():
                for binding in main_bindings(mod):
                    group = groups.get(binding.var)
                    if group is None:
                        continue
                    value = substitute(binding.value, env)
                    if group.view and is_pure_reshape(group.bindings):
                        source = substitute(group.bindings[0].value.args[0], env)
                        value = relax.op.reshape(source, shape(binding.var))
                    if not group.fusible:
                        env[binding.var] = builder.emit(value, name_hint=binding.var.name)
                        continue
                    inner = attention_kernels(mod, group)
                    if inner is None:
                        _emit(builder, group, env)
                    else:
                        _emit_parts(builder, group, inner, env)
                output = builder.emit_output(substitute(function.body.body, env))
            builder.emit_func_output(output)
        built = builder.get()
        functions = {
            gv: f
            for gv, f in built.functions_items()
            if gv.name_hint not in ("pimflow_grouped", "main") and ATTENTION not in (f.attrs or {})
        }
        functions[mod.get_global_var("main")] = built["pimflow_grouped"].with_attr("global_symbol", "main")
        grouped = tvm.IRModule(functions, attrs=mod.attrs)
        sets = CHANNEL_SETS.read(mod)
        return relax.transform.CanonicalizeBindings()(CHANNEL_SETS.attach(grouped, sets) if sets else grouped)


def _emit(builder: relax.BlockBuilder, group: KernelGroup, env: dict[relax.Var, relax.Expr]) -> None:
    """Emit a call of the group's function, and put the replacements of its results into `env`."""
    operands, primitive = _primitive(group)
    callee = builder.add_func(primitive, f"fused_{group.title.name}")
    call = relax.Call(callee, [substitute(v, env) for v in operands])
    results = [*group.extra_outputs, group.result]
    # The result has the layer's name, not that of its last operator: plans of memory show it.
    names = [*(var.name for var in group.extra_outputs), group.title.name]
    output = builder.emit(call, name_hint=names[0] if len(results) == 1 else "results")
    for index, (var, name) in enumerate(zip(results, names, strict=True)):
        part = relax.TupleGetItem(output, index)
        env[var] = output if len(results) == 1 else builder.emit(part, name_hint=name)


def _emit_parts(
    builder: relax.BlockBuilder, group: KernelGroup, inner: tvm.IRModule, env: dict[relax.Var, relax.Expr]
) -> None:
    """Like `_emit`, for a group of several kernels, those of `inner`."""
    main = inner["main"]
    read = free_variables(group.bindings)
    inside = {param: env.get(var, var) for param, var in zip(main.params, read, strict=True)}
    for part in kernel_groups(inner, views=False):
        if part.fusible and not isinstance(part.bindings[-1].value, relax.Tuple):
            _emit(builder, part, inside)
    values = {binding.var: binding.value for binding in main_bindings(inner)}
    body = main.body.body
    results = list(values[body].fields) if isinstance(values[body], relax.Tuple) else [body]
    env |= {
        var: inside[result] for var, result in zip((*group.extra_outputs, group.result), results, strict=True)
    }


def _primitive(group: KernelGroup) -> tuple[list[relax.Expr], relax.Function]:
    """The group's operands, tensor constants included, and its function.

    `FuseTIR` accepts no tensor constants in functions, so they become parameters; scalar operands become
    immediates before it runs.
    """
    bindings = group.bindings
    inside = {b.var for b in bindings}
    operands: list[relax.Expr] = []
    params: list[relax.Var] = []
    env: dict[relax.Var, relax.Expr] = {}

    def lift(expr: relax.Expr, scalars: bool) -> relax.Expr:
        """`expr` over parameters, with new ones for operands from outside, and for constant `scalars`."""
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([lift(field, scalars) for field in expr.fields])
        if isinstance(expr, relax.Var):
            if expr not in inside and expr not in env:
                env[expr] = parameter(expr)
            return env.get(expr, expr)
        constant = isinstance(expr, tvm.ir.GenericConst) and (scalars or expr.value.ndim > 0)
        return parameter(expr) if constant else expr

    def parameter(expr: relax.Expr) -> relax.Var:
        """A new parameter for `expr`."""
        operands.append(expr)
        params.append(relax.Var(f"x{len(params)}", expr.ty))
        return params[-1]

    lifted = [
        (b.var, b.value, [lift(arg, operator(b.value) not in BINARY) for arg in b.value.args])
        for b in bindings
    ]
    builder = relax.BlockBuilder()
    with builder.function("primitive", params, attrs={"Primitive": True}, private=True):
        with builder.dataflow():
            for var, value, args in lifted:
                call = relax.Call(
                    value.op, [substitute(arg, env) for arg in args], value.attrs, value.ty_args
                )
                env[var] = builder.emit(call)
            results = [env[var] for var in (*group.extra_outputs, bindings[-1].var)]
            output = builder.emit_output(results[0] if len(results) == 1 else relax.Tuple(results))
        builder.emit_func_output(output)
    return operands, builder.get()["primitive"]
