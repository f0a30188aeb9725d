"""Networks without a kernel, given one: the copy of their results."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relax, te, topi

from pimflow.relay_passes.flat import main_bindings, rebuild, shape
from pimflow.relay_passes.regions.kernel_groups import kernel_groups


@tvm.transform.module_pass(opt_level=0, name="CopyResults")
class CopyResults:
    """Copy the results of a network that only looks at its inputs and constants: it has to write them.

    Such a network would take no time, and no pass and no figure would have anything to work on. A constant
    result without elements, which a file cannot hold, is made by a kernel in any network.

    Rewrite: ``return reshape(x, dims) -> return identity(reshape(x, dims))``, if ``main`` has no kernel.
    Preserves: values exactly, interface of ``main``.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        bindings = {binding.var: binding.value for binding in main_bindings(mod)}
        has_kernel = any(
            not group.view and isinstance(group.bindings[-1].value, relax.Call)
            for group in kernel_groups(mod)
        )
        results = _value(mod["main"].body.body, bindings.get)
        fields = results.fields if isinstance(results, relax.Tuple) else [results]
        if has_kernel and not any(_is_empty(_value(field, bindings.get)) for field in fields):
            return mod

        def copies(builder: relax.BlockBuilder, result: relax.Expr) -> relax.Expr:
            """Copies of a result, or of the fields of a tuple."""
            result = _value(result, builder.lookup_binding)
            if isinstance(result, relax.Tuple):
                return relax.Tuple([copies(builder, field) for field in result.fields])
            if _is_empty(result):
                return builder.emit_te(_nothing, shape(result), str(result.ty.dtype))
            if has_kernel:
                return result
            name = result.name if isinstance(result, relax.Var) else "constant"
            call = builder.call_te(topi.identity, result, primfunc_name_hint="copy")
            return builder.emit(call, name_hint=f"{name}_copy")

        return rebuild(mod, lambda *_: None, rewrite_result=copies)


def _value(result: relax.Expr, binding_of: Callable[[relax.Var], relax.Expr | None]) -> relax.Expr:
    """What a variable stands for: a tuple, a constant, or a variable that is computed or an input."""
    while isinstance(result, relax.Var):
        value = binding_of(result)
        if not isinstance(value, relax.Var | relax.Tuple | tvm.ir.GenericConst):
            break
        result = value
    return result


def _is_empty(value: relax.Expr) -> bool:
    """Whether `value` is a constant without elements."""
    return isinstance(value, tvm.ir.GenericConst) and 0 in shape(value)


def _nothing(dims: tuple[int, ...], dtype: str) -> te.Tensor:
    """A tensor without elements."""
    return te.compute(dims, lambda *_: tvm.tirx.const(0, dtype), name="nothing")
