"""TIR passes for TVM's C generator, which has no parallel loops, no register scopes and no vectors."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import tirx

from pimflow.relay_passes.flat import bare_operator
from pimflow.relay_passes.schedules.keep_registers import ON_THE_STACK
from pimflow.relay_passes.schedules.loops import nodes, rewrite_kernels

PARALLEL = "pimflow_parallel"  # called in front of a loop whose iterations may run in parallel


@tvm.transform.module_pass(opt_level=0, name="PlainLoops")
class PlainLoops:
    """Replace vectorised and unrolled loops by serial ones.

    For kernels with vectors for which `VectorCalls` has no calls (`vector_calls.has_vectors`). Run it after
    a schedule for the CPU: C compilers vectorise and unroll by themselves.

    Rewrite: ``for i in vectorized(n) -> for i in range(n)``.
    Preserves: values exactly, signatures, everything else.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        return _map_kernels(mod, (tirx.For, _to_serial))


def _to_serial(loop: tirx.For) -> tirx.For:
    return _serial_loop(loop) if loop.kind in (tirx.ForKind.VECTORIZED, tirx.ForKind.UNROLLED) else loop


@tvm.transform.module_pass(opt_level=0, name="MarkParallel")
class MarkParallel:
    """Put a mark in front of each parallel loop, and make the loop serial.

    Run it last: a buffer in a loop is allocated there only while the loop is parallel.

    Rewrite: ``for i in parallel(n) -> pimflow_parallel(); for i in range(n)``.
    Preserves: values exactly, signatures, everything else.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        return _map_kernels(mod, (tirx.For, _mark_parallel))


def _mark_parallel(loop: tirx.For) -> tirx.Stmt:
    if loop.kind != tirx.ForKind.PARALLEL:
        return loop
    return tirx.SeqStmt([tirx.Evaluate(tirx.call_extern("void", PARALLEL)), _serial_loop(loop)])


def _serial_loop(loop: tirx.For) -> tirx.For:
    return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body)


@tvm.transform.module_pass(opt_level=0, name="PlainRegisters")
class PlainRegisters:
    """Replace buffers of scope ``local``, which the C generator cannot express, by arrays of the function.

    Run it right before ``LowerTVMBuiltin``.

    Rewrite: ``alloc_buffer(tile, scope="local") -> alloc_buffer(tile, scope="global")``, on the stack.
    Preserves: values exactly, signatures, everything else.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        return rewrite_kernels(mod, _drop_scopes)


def _drop_scopes(func: tirx.PrimFunc) -> tirx.PrimFunc:
    allocated = (node.buffer for node in nodes(func.body, tirx.AllocBuffer))
    arrays = {b: tirx.decl_buffer(b.shape, b.dtype, b.name) for b in allocated if b.scope() == "local"}

    def alloc(old: tirx.AllocBuffer) -> tirx.AllocBuffer:
        return tirx.AllocBuffer(arrays[old.buffer], ON_THE_STACK) if old.buffer in arrays else old

    def load(old: tvm.ir.TensorLoad) -> tvm.ir.TensorLoad:
        return tirx.BufferLoad(arrays[old.source], old.indices) if old.source in arrays else old

    def store(old: tirx.BufferStore) -> tirx.BufferStore:
        """A store to the array of a buffer."""
        is_local = old.buffer in arrays
        return tirx.BufferStore(arrays[old.buffer], old.value, old.indices) if is_local else old

    visitors = [(tvm.ir.TensorLoad, load), (tirx.BufferStore, store), (tirx.AllocBuffer, alloc)]
    return func.with_body(tvm_ffi.structural_map(func.body, visitors))


@tvm.transform.module_pass(opt_level=0, name="PlainMagnitudes")
class PlainMagnitudes:
    """Call the C library for magnitudes, of which TVM's rules know the name for LLVM alone.

    Run it behind `WidenHalf`, which widens those of fp16, and before ``LowerIntrin``.

    Rewrite: ``fabs(x) -> call("fabsf", x)``.
    Preserves: values exactly, signatures, vectors (`VectorCalls` has calls for them), everything else.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        return _map_kernels(mod, (tvm.ir.Call, _call_library))


def _call_library(call: tvm.ir.Call) -> tirx.Expr:
    dtype = str(getattr(call.ty, "dtype", ""))
    name = {"float32": "fabsf", "float64": "fabs"}.get(dtype)
    is_magnitude = name is not None and bare_operator(call) == "fabs"
    return tirx.call_pure_extern(dtype, name, *call.args) if is_magnitude else call


def _map_kernels(mod: tvm.IRModule, visitor: tuple) -> tvm.IRModule:
    """`mod` with `visitor` applied to the statements and expressions of every kernel."""
    return rewrite_kernels(mod, lambda f: f.with_body(tvm_ffi.structural_map(f.body, [visitor])))
