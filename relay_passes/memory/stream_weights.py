"""Weights in host memory that are copied to tensors of the network while it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tvm
from tvm import relax

from pimflow.relay_passes.memory.keep_views import view_call

COPY, BEGIN_COPY, AWAIT_COPY = "pimflow.copy_weight", "pimflow.begin_weight_copy", "pimflow.await_weight_copy"
COPY_CALLS = (COPY, BEGIN_COPY, AWAIT_COPY)


@tvm.transform.module_pass(opt_level=0, name="StreamWeights")
class StreamWeights:
    """Copy each weight to an allocated tensor, some kernels before the first that reads it (Occamy, III-A).

    Parameters
    ----------
    ahead : int
        A copy begins this many kernels before its weight is used, and is awaited right before that; with 0 it
        is made there, in order.

    Rewrite: ``kernel(x, weight, y) -> t = alloc_tensor(shape); copy_weight(weight, t); kernel(x, t, y)``, or
    with `ahead` ``begin_weight_copy(weight, t); …; await_weight_copy(t); kernel(x, t, y)``. The tensors are
    like all others of ``main``, so that the planning of memory places them.
    Preserves: values exactly, names; weights that ``main`` returns, and those that PIM holds in its banks.
    """

    def __init__(self, ahead: int = 0):
        self.ahead = ahead

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        bindings = [b for block in mod["main"].body.blocks for b in block.bindings]
        return _with_bindings(mod, _Streaming(bindings, self.ahead).bindings())


@tvm.transform.module_pass(opt_level=0, name="StoreWeightsOnHost")
class StoreWeightsOnHost:
    """Take the weights that are copied out of the constants, which lie in the memory of the device.

    Parameters
    ----------
    create_weights : callable
        Makes a runtime module that holds tensors on the host and copies each by its index.

    Rewrite: ``copy_weight(weight, t) -> copy_weight(index, t)``; the module is among the attribute
    ``external_mods``, so that the linker finds it.
    Preserves: values exactly, names.
    """

    def __init__(self, create_weights: Callable[[list[tvm.runtime.Tensor]], tvm.runtime.Module]):
        self.create_weights = create_weights

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        weights: list[tvm.runtime.Tensor] = []
        bindings = []
        for binding in (b for block in mod["main"].body.blocks for b in block.bindings):
            call = binding.value
            if weight_copy(call) in (COPY, BEGIN_COPY):
                index = relax.prim_value(len(weights))
                weights.append(call.args[0].value)
                binding = _with_args(binding, [index, *call.args[1:]])
            bindings.append(binding)
        if not weights:
            return mod
        linked = list(mod.attrs["external_mods"]) if mod.attrs and "external_mods" in mod.attrs else []
        return _with_bindings(mod, bindings).with_attr(
            "external_mods", [*linked, self.create_weights(weights)]
        )


def _with_bindings(mod: tvm.IRModule, bindings: Sequence[relax.VarBinding]) -> tvm.IRModule:
    """`mod` with other bindings of ``main``, outside of dataflow blocks."""
    main = mod["main"]
    body = relax.SeqExpr([relax.BindingBlock(list(bindings))], main.body.body)
    functions = dict(mod.functions_items())
    functions[mod.get_global_var("main")] = relax.Function(
        main.params, body, main.ret_ty, main.is_pure, main.attrs
    )
    return tvm.IRModule(functions, attrs=mod.attrs)


def _with_args(binding: relax.VarBinding, args: Sequence[relax.Expr]) -> relax.VarBinding:
    """`binding` of a call, with other arguments."""
    call = binding.value
    changed = relax.Call(call.op, list(args), call.attrs, call.ty_args)
    relax.expr._update_type(changed, call.ty)
    return relax.VarBinding(binding.var, changed)


def is_weight(expr: relax.Expr) -> bool:
    """Whether `expr` is a constant tensor."""
    return isinstance(expr, tvm.ir.GenericConst) and isinstance(expr.ty, relax.TensorType)


def weight_copy(value: relax.Expr) -> str:
    """`COPY`, `BEGIN_COPY` or `AWAIT_COPY` if `value` is a call of it; empty otherwise."""
    callee = value.op if isinstance(value, relax.Call) else None
    name = str(callee.global_symbol) if isinstance(callee, relax.ExternFunc) else ""
    return name if name in COPY_CALLS else ""


class _Streaming:
    """The bindings of ``main`` with copies between them."""

    def __init__(self, bindings: Sequence[relax.VarBinding], ahead: int):
        self.old_bindings, self.ahead = bindings, ahead
        self.kernels = [number for number, binding in enumerate(bindings) if _computes(binding.value)]
        self.tensors: list[tuple[tvm.ir.GenericConst, relax.Var]] = []
        self.before: dict[int, list[relax.VarBinding]] = {}  # by number of an old binding

    def bindings(self) -> list[relax.VarBinding]:
        """All bindings: allocations and copies, and the old ones, which read the copies."""
        reading = [self._read_copies(number, binding) for number, binding in enumerate(self.old_bindings)]
        return [
            binding for number, old in enumerate(reading) for binding in (*self.before.get(number, ()), old)
        ]

    def _read_copies(self, number: int, binding: relax.VarBinding) -> relax.VarBinding:
        """The binding, with copies in place of the weights that it reads."""
        call = binding.value
        if not isinstance(call, relax.Call) or weight_copy(call) or not any(map(is_weight, call.args)):
            return binding
        args = [self._copy(arg, number) if is_weight(arg) else arg for arg in call.args]
        return _with_args(binding, args)

    def _copy(self, weight: tvm.ir.GenericConst, number: int) -> relax.Var:
        """The tensor to which `weight` is copied; on its first use, by binding `number`, add the copy."""
        for copied, tensor in self.tensors:
            if copied.same_as(weight):
                return tensor
        tensor = relax.Var(f"weight_{len(self.tensors)}", weight.ty)
        self.tensors.append((weight, tensor))
        earlier = sum(kernel < number for kernel in self.kernels)
        begin = number if not self.ahead else self._kernel(earlier - self.ahead, number)
        dims = relax.ShapeExpr([int(extent) for extent in weight.ty.shape])
        allocation = relax.op.builtin.alloc_tensor(dims, str(weight.ty.dtype), 0)
        self._add(begin, tensor, allocation)
        if self.ahead:
            self._add_call(begin, BEGIN_COPY, weight, tensor)
            self._add_call(number, AWAIT_COPY, tensor)
        else:
            self._add_call(begin, COPY, weight, tensor)
        return tensor

    def _kernel(self, index: int, number: int) -> int:
        """The number of the binding of kernel `index`, or of the first if that is negative."""
        return min(self.kernels[max(index, 0)], number) if self.kernels else number

    def _add_call(self, number: int, name: str, *args: relax.Expr) -> None:
        call = relax.Call(relax.ExternFunc(name), list(args), ty_args=[relax.TupleType([])])
        self._add(number, relax.Var("_", relax.TupleType([])), call)

    def _add(self, number: int, var: relax.Var, value: relax.Expr) -> None:
        relax.expr._update_type(value, var.ty)
        self.before.setdefault(number, []).append(relax.VarBinding(var, value))


def _computes(value: relax.Expr) -> bool:
    """Whether `value` calls a kernel or a PIM program."""
    if not isinstance(value, relax.Call) or view_call(value) or weight_copy(value):
        return False
    return isinstance(value.op, tvm.ir.GlobalVar | relax.ExternFunc)
