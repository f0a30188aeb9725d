"""Registers of those GPU kernels that TVM schedules itself."""

from __future__ import annotations

import tvm_ffi
from tvm import tirx


def allocate_in_threads(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """`func` with its register buffers allocated inside the threads.

    TVM's scans (``topi.gpu.scan``: running sums and products) allocate them around the launch, which makes
    them arguments of the kernel, that is, memory that all threads share.

    Rewrite: ``alloc_local b; launch { … b … } -> launch { alloc_local b; … b … }``.
    Preserves: everything else, including registers that threads allocate already.
    """

    def move_inward(sequence: tirx.SeqStmt) -> tirx.Stmt:
        """Move register buffers of a sequence into the launch behind them."""
        local = [s for s in sequence.seq if isinstance(s, tirx.AllocBuffer) and s.buffer.scope() == "local"]
        rest = [s for s in sequence.seq if not any(s.same_as(alloc) for alloc in local)]
        if not local or len(rest) != 1 or not _launches(rest[0]):
            return sequence
        return _inside(rest[0], local)

    return func.with_body(tvm_ffi.structural_map(func.body, [(tirx.SeqStmt, move_inward)]))


def _launches(stmt: tirx.Stmt) -> bool:
    return isinstance(stmt, tirx.AttrStmt) and stmt.attr_key == "thread_extent"


def _inside(stmt: tirx.Stmt, local: list[tirx.Stmt]) -> tirx.Stmt:
    """`stmt` with the allocations `local` moved into its threads."""
    if _launches(stmt):
        return tirx.AttrStmt(stmt.node, stmt.attr_key, stmt.value, _inside(stmt.body, local))
    return tirx.SeqStmt([*local, *(stmt.seq if isinstance(stmt, tirx.SeqStmt) else [stmt])])
