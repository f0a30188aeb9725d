"""Memory that kernels would allocate while they run, as tensors of the graph."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx

from pimflow.primitives.primitive import STACK_BYTES
from pimflow.relay_passes.flat import main_bindings, operator, rebuild

WORKSPACES = "pimflow.workspaces"  # attribute of a kernel: how many of its last results are workspaces


@tvm.transform.module_pass(opt_level=0, name="LiftWorkspaces")
class LiftWorkspaces:
    """Turn tensors inside a kernel into results that nothing reads, so that memory planning includes them.

    Buffers in registers or shared memory stay; so do, on a CPU, those that fit on the stack, and buffers
    declared in a loop, of which each iteration has one.

    Rewrite: ``y = call_tir(f, x, Y) -> r = call_tir(f', x, (Y, Workspace)); y = r[0]``; ``f'`` has the
    attribute `WORKSPACES`.
    Preserves: values exactly, names, other kernels.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        gpu = "gpu" in list(tvm.target.Target.current(allow_none=False).keys)
        min_bytes = 0 if gpu else STACK_BYTES
        calls: dict[tvm.ir.GlobalVar, list[relax.Call]] = {}
        for binding in main_bindings(mod):
            if operator(binding.value) == "call_tir":
                calls.setdefault(binding.value.args[0], []).append(binding.value)
        lifted = {gv: _workspaces(mod[gv], kernel_calls, min_bytes) for gv, kernel_calls in calls.items()}
        lifted = {gv: buffers for gv, buffers in lifted.items() if buffers}
        if not lifted:
            return mod

        def rewrite(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
            """The new value of `var`; None if `value` stays."""
            if operator(value) != "call_tir" or value.args[0] not in lifted:
                return None
            old = value.args[0]
            dims = _dims(mod[old], value)
            spaces = [
                relax.TensorType(_resolve_shape(space, dims), str(space.dtype)) for space in lifted[old]
            ]
            # A new global variable, because the old one has the type of the old function.
            new = builder.add_func(_with_parameters(mod[old], lifted[old]), old.name_hint)
            call = relax.call_tir(new, value.args[1], [*_result_types(value), *spaces])
            single = isinstance(var.ty, relax.TensorType)
            return relax.TupleGetItem(builder.emit(call), 0) if single else call

        functions = {gv: f for gv, f in mod.functions_items() if gv not in lifted}
        return rebuild(tvm.IRModule(functions, attrs=mod.attrs), rewrite)


def with_workspaces(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """`func`, with static shapes, for a CPU; its allocations become its last parameters (`WORKSPACES`)."""
    workspaces = [buffer for buffer in _workspaces(func, [], 0) if _bytes(buffer, {}) >= STACK_BYTES]
    return _with_parameters(func, workspaces) if workspaces else func


def _workspaces(func: tirx.PrimFunc, calls: Sequence[relax.Call], min_bytes: int) -> list[tirx.Buffer]:
    """Buffers of `func` to lift; none if a call also passes operands that are no tensors."""
    if any(len(call.args) > 2 for call in calls):
        return []
    allocated: list[tirx.Buffer] = []

    visitors = [
        (tirx.For, lambda _: tvm_ffi.WalkResult.SKIP),
        (s_tir.SBlock, lambda block: allocated.extend(block.alloc_buffers)),
        (tirx.AllocBuffer, lambda stmt: allocated.append(stmt.buffer)),
    ]
    tvm_ffi.structural_walk(func.body, visitors, order="pre")
    return [
        buffer
        for buffer in allocated
        if buffer.scope() == "global"
        and all(_bytes(buffer, dims) >= min_bytes for dims in (_dims(func, call) for call in calls))
    ]


def _result_types(call: relax.Call) -> list[relax.TensorType]:
    (output_type,) = call.ty_args
    return list(output_type.fields) if isinstance(output_type, relax.TupleType) else [output_type]


def _dims(func: tirx.PrimFunc, call: relax.Call) -> dict[tirx.Var, tirx.Expr]:
    """Values of the shape variables of `func` in `call`."""
    types = [*(arg.ty for arg in call.args[1].fields), *_result_types(call)]
    return {
        dim: value
        for param, ty in zip(func.params, types, strict=True)
        for dim, value in zip(param.shape, ty.shape.values, strict=True)
        if isinstance(dim, tirx.Var)
    }


def _resolve_shape(buffer: tirx.Buffer, dims: dict[tirx.Var, tirx.Expr]) -> list[tirx.Expr]:
    return [dims.get(dim, dim) if isinstance(dim, tirx.Var) else dim for dim in buffer.shape]


def _bytes(buffer: tirx.Buffer, dims: dict[tirx.Var, tirx.Expr]) -> float:
    """Size of `buffer`; infinite if it is not known."""
    resolved = _resolve_shape(buffer, dims)
    if not all(isinstance(dim, tirx.IntImm) for dim in resolved):
        return float("inf")
    return prod(int(dim) for dim in resolved) * tvm.DataType(str(buffer.dtype)).itemsize


def _with_parameters(func: tirx.PrimFunc, buffers: Sequence[tirx.Buffer]) -> tirx.PrimFunc:
    """`func` taking `buffers` instead of allocating them."""

    def block(old: s_tir.SBlock) -> s_tir.SBlock:
        """The block `old` without allocations of `buffers`."""
        remaining = [b for b in old.alloc_buffers if b not in buffers]
        if len(remaining) == len(old.alloc_buffers):
            return old
        return s_tir.SBlock(
            old.iter_vars, old.reads, old.writes, old.name_hint, old.body, old.init, remaining,
            old.match_buffers, old.annotations,
        )  # fmt: skip

    visitors = [
        (s_tir.SBlock, block),
        (tirx.AllocBuffer, lambda old: tirx.Evaluate(0) if old.buffer in buffers else old),
    ]
    body = tvm_ffi.structural_map(func.body, visitors)
    attrs = {**dict(func.attrs or {}), WORKSPACES: len(buffers)}
    return tirx.PrimFunc([*func.params, *buffers], body, func.ret_type).with_attrs(attrs)
