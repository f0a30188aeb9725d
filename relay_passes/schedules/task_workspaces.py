"""Workspaces of parallel tasks as parts of one tensor of the kernel."""

from __future__ import annotations

from math import prod

import tvm
import tvm_ffi
from tvm import s_tir, tirx

COMPACTED = tvm.transform.Sequential(
    [s_tir.transform.ConvertBlocksToOpaque(), s_tir.transform.CompactBufferAllocation()]
)


def task_workspaces(mod: tvm.IRModule, stack_bytes: int) -> tvm.IRModule:
    """`mod` with tensors in parallel loops as small as a turn needs; large ones are moved out of the loops.

    Parameters
    ----------
    mod : IRModule
        Scheduled kernels.
    stack_bytes : int
        A smaller tensor stays in the loop, on the stack. In place of a larger one, the kernel gets one tensor
        with a part for each turn of the parallel loop, which `LiftWorkspaces` finds.
    """
    return tvm.IRModule(
        {gv: _outside(f, stack_bytes) for gv, f in COMPACTED(mod).functions_items()}, attrs=mod.attrs
    )


def _outside(func: tirx.PrimFunc, stack_bytes: int) -> tirx.PrimFunc:
    moved = _large(func, stack_bytes)
    if not moved:
        return func

    def replacement(buffer: tirx.Buffer) -> tuple[tirx.Buffer, tirx.Var] | None:
        return next((new for old, new in moved if old.same_as(buffer)), None)

    def load(old: tvm.ir.TensorLoad) -> tvm.ir.TensorLoad:
        new = replacement(old.source)
        return tirx.BufferLoad(new[0], [new[1], *old.indices]) if new else old

    def store(old: tirx.BufferStore) -> tirx.BufferStore:
        new = replacement(old.buffer)
        return tirx.BufferStore(new[0], old.value, [new[1], *old.indices]) if new else old

    def region(old: tvm.ir.TensorRegion) -> tvm.ir.TensorRegion:
        new = replacement(old.source)
        return tirx.BufferRegion(new[0], [tvm.ir.Range(new[1], new[1] + 1), *old.region]) if new else old

    def block(old: s_tir.SBlock) -> s_tir.SBlock:
        kept = [buffer for buffer in old.alloc_buffers if replacement(buffer) is None]
        if old.name_hint == "root":
            kept += [new for _, (new, _) in moved]
        return s_tir.SBlock(
            old.iter_vars, old.reads, old.writes, old.name_hint, old.body, old.init, kept,
            old.match_buffers, old.annotations,
        )  # fmt: skip

    visitors = [
        (tvm.ir.TensorLoad, load),
        (tirx.BufferStore, store),
        (tvm.ir.TensorRegion, region),
        (s_tir.SBlock, block),
    ]
    body = tvm_ffi.structural_map(func.body, visitors)
    return tirx.PrimFunc(func.params, body, func.ret_type).with_attrs(dict(func.attrs or {}))


def _large(func: tirx.PrimFunc, stack_bytes: int) -> list[tuple[tirx.Buffer, tuple[tirx.Buffer, tirx.Var]]]:
    """Tensors in parallel loops that do not fit on the stack, with what takes their place and the task."""
    large = []

    def allocated(task: tirx.For) -> None:
        def visit(block: s_tir.SBlock) -> None:
            for old in block.alloc_buffers:
                size_bytes = prod(int(d) for d in old.shape) * tvm.DataType(str(old.dtype)).itemsize
                if old.scope() == "global" and size_bytes >= stack_bytes:
                    new = tirx.decl_buffer([task.extent, *old.shape], old.dtype, old.name)
                    large.append((old, (new, task.loop_var)))

        tvm_ffi.structural_walk(task.body, [(s_tir.SBlock, visit)], order="pre")

    def loop(stmt: tirx.For) -> tvm_ffi.WalkResult | None:
        if stmt.kind != tirx.ForKind.PARALLEL:
            return None
        allocated(stmt)
        return tvm_ffi.WalkResult.SKIP

    tvm_ffi.structural_walk(func.body, [(tirx.For, loop)], order="pre")
    return large
