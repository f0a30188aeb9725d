"""Kernels as TVM's generator of C can say them: without vectors, cores and register scopes."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir.pipeline import default_s_tir_pipeline

from pimflow.relay_passes.keep_registers import ON_THE_STACK

KINDS = (tirx.ForKind.VECTORIZED, tirx.ForKind.PARALLEL, tirx.ForKind.UNROLLED)
PIPELINE = "pimflow-c"  # name of the TIR pipeline with both passes


@tvm.transform.module_pass(opt_level=0, name="PlainLoops")
class PlainLoops:
    """Serial loops in place of vectorised, parallel and unrolled ones.

    To be run after a schedule for the CPU. TVM's generator of C has no vectors, asks a runtime for parallel
    loops, and prints unrolled loops in full; C compilers make vectors and unroll by themselves.

    Rewrite: ``for i in vectorized(n) -> for i in range(n)``.
    Preserves: values exactly, signatures, everything else.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        return _each(mod, (tirx.For, _serial))


def _serial(loop: tirx.For) -> tirx.For:
    if loop.kind not in KINDS:
        return loop
    return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body)


@tvm.transform.module_pass(opt_level=0, name="PlainRegisters")
class PlainRegisters:
    """Arrays of the function in place of buffers of scope ``local``, for which the generator has no word.

    To be run right before ``LowerTVMBuiltin``.

    Rewrite: ``alloc_buffer(tile, scope="local") -> alloc_buffer(tile, scope="global")``, on the stack.
    Preserves: values exactly, signatures, everything else.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        functions = {
            gv: _without_scopes(f) if isinstance(f, tirx.PrimFunc) else f for gv, f in mod.functions_items()
        }
        return tvm.IRModule(functions, attrs=mod.attrs)


def _without_scopes(func: tirx.PrimFunc) -> tirx.PrimFunc:
    local: list[tirx.Buffer] = []

    def note(alloc: tirx.AllocBuffer) -> None:
        if alloc.buffer.scope() == "local":
            local.append(alloc.buffer)

    tvm_ffi.structural_walk(func.body, [(tirx.AllocBuffer, note)], order="pre")
    arrays = [tirx.decl_buffer(buffer.shape, buffer.dtype, buffer.name) for buffer in local]

    def array(buffer: tirx.Buffer) -> tirx.Buffer:
        return next((new for old, new in zip(local, arrays) if old.same_as(buffer)), buffer)

    def alloc(old: tirx.AllocBuffer) -> tirx.AllocBuffer:
        new = array(old.buffer)
        return old if new.same_as(old.buffer) else tirx.AllocBuffer(new, ON_THE_STACK)

    def load(old: tvm.ir.TensorLoad) -> tvm.ir.TensorLoad:
        new = array(old.source)
        return old if new.same_as(old.source) else tirx.BufferLoad(new, old.indices)

    def store(old: tirx.BufferStore) -> tirx.BufferStore:
        new = array(old.buffer)
        return old if new.same_as(old.buffer) else tirx.BufferStore(new, old.value, old.indices)

    visitors = [(tvm.ir.TensorLoad, load), (tirx.BufferStore, store), (tirx.AllocBuffer, alloc)]
    return func.with_body(tvm_ffi.structural_map(func.body, visitors))


def _each(mod: tvm.IRModule, visitor: tuple) -> tvm.IRModule:
    functions = {
        gv: f.with_body(tvm_ffi.structural_map(f.body, [visitor])) if isinstance(f, tirx.PrimFunc) else f
        for gv, f in mod.functions_items()
    }
    return tvm.IRModule(functions, attrs=mod.attrs)


def register() -> None:
    """Make ``tvm.compile(…, tir_pipeline="pimflow-c")`` TVM's own pipeline with both passes."""

    def pipeline():
        phases, _, device = default_s_tir_pipeline()
        host = [PlainRegisters(), tirx.transform.LowerTVMBuiltin(), tirx.transform.LowerIntrin()]
        return (
            tvm.transform.Sequential([PlainLoops(), phases]),
            lambda: tvm.transform.Sequential(host),
            device,
        )

    tirx.register_tir_pipeline(PIPELINE, pipeline)
