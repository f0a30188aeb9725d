"""One allocation for all tensors of a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import tvm
from tvm import relax

from pimflow.core.liveness import Liveness
from pimflow.relay_passes.buffers import Buffers, buffers
from pimflow.relay_passes.keep_views import PART, view_call


class Placement(Protocol):
    """Where buffers lie.

    Attributes
    ----------
    offsets_bytes : mapping of str to int
        By name of the lifetime.
    pool_bytes : int
    """

    @property
    def offsets_bytes(self) -> Mapping[str, int]: ...

    @property
    def pool_bytes(self) -> int: ...


@tvm.transform.module_pass(opt_level=0, name="PlanPool")
class PlanPool:
    """Places in one pool instead of allocations; in place of ``StaticPlanBlockMemory``.

    Parameters
    ----------
    planner : callable
        Decides where buffers lie.

    Rewrite: ``alloc_tensor(shape) -> alloc_tensor(pool, offset, shape)``, one ``alloc_storage`` at the
    beginning; calls of `KeepViews` become tensors inside others. A kernel that writes where it reads
    loses the promise that its operands do not alias.
    Preserves: values, names.
    """

    def __init__(self, planner: Callable[[Liveness], Placement]):
        self.planner = planner

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        found = buffers(mod)
        main = _placed(mod["main"], found, self.planner(found.liveness()))
        functions = dict(mod.functions_items())
        functions[mod.get_global_var("main")] = main
        for kernel in found.kernels_in_place:
            name = mod.get_global_var(kernel.name_hint)
            functions[name] = functions[name].with_attr("tirx.noalias", False)
        return tvm.IRModule(functions, attrs=mod.attrs)


def _placed(main: relax.Function, found: Buffers, placement: Placement) -> relax.Function:
    """`main` with its buffers in one pool."""
    offsets = placement.offsets_bytes
    places = {b.var: offsets[name] for b, name in found.names.items() if name in offsets}
    builder = relax.BlockBuilder()

    def emit(var: relax.Var, tensor: relax.Call) -> None:
        """`tensor` as `var`; kernels take no tensors that begin inside their storage."""
        inside = builder.emit(tensor, name_hint=f"{var.name}_inside")
        at_zero = builder.normalize(relax.op.memory.ensure_zero_offset(inside))
        builder.emit_normalized(relax.VarBinding(var, at_zero))

    with builder.function("pimflow_placed", list(main.params)):
        if places:
            size = relax.ShapeExpr([placement.pool_bytes])
            pool = builder.emit(relax.op.memory.alloc_storage(size, 0, "global", "uint8"), name_hint="pool")
        for binding in (b for block in main.body.blocks for b in block.bindings):
            var, value = binding.var, binding.value
            if var in places:
                offset, dtype = relax.prim_value(places[var]), str(var.ty.dtype)
                emit(var, relax.op.memory.alloc_tensor(pool, offset, var.ty.shape, dtype))
            elif view_call(value) == PART:
                source, offset = value.args
                emit(var, relax.op.memory.view(source, var.ty.shape, relative_byte_offset=offset))
            elif var not in found.by_var:
                builder.emit_normalized(binding)
        builder.emit_func_output(main.body.body)
    return builder.get()["pimflow_placed"].with_attrs(dict(main.attrs))
