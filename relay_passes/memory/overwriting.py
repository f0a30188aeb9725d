"""Kernels that may write their result over an operand."""

from __future__ import annotations

from collections.abc import Iterator

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir.expr import TensorRegion

# Attribute of a kernel without declared accesses: positions of the operands that its result may overwrite.
OVERWRITABLE = "pimflow.overwritable"


def can_overwrite(kernel: tirx.PrimFunc, operand: int, result: int) -> bool:
    """Whether `kernel` stays correct if parameter `result` lies in the bytes of parameter `operand`.

    It does if each element of the operand is read only to compute the element of the result with the same
    index, and only once: in a single block without a reduction. A kernel without declared accesses says by
    its attribute `OVERWRITABLE` of which operands that holds.
    """
    source, target = kernel.params[operand], kernel.params[result]
    if str(source.ty.dtype) != str(target.ty.dtype) or not _is_equal(source.ty.shape, target.ty.shape):
        return False
    if kernel.attrs and OVERWRITABLE in kernel.attrs:
        return operand in map(int, kernel.attrs[OVERWRITABLE])
    body = kernel.body
    if not isinstance(body, s_tir.SBlockRealize) or body.block.name_hint != "root":
        return False  # a loop nest without declared accesses
    writers = []
    for block in _blocks(kernel):
        if not block.iter_vars:
            return False  # likewise without declared accesses
        read, written = _accesses(block.reads, source), _accesses(block.writes, target)
        if _accesses(block.reads, target) or _accesses(block.writes, source):
            return False
        if any(
            match.source.source.same_as(tensor)
            for match in block.match_buffers
            for tensor in (source, target)
        ):
            return False
        if read and not written:
            return False
        if written:
            writers.append((block, read, written))
    if len(writers) != 1:
        return False
    ((block, read, (element, *rest)),) = writers
    plain = all(i.iter_type == tirx.IterVar.DataPar for i in block.iter_vars)
    single = all(int(axis.extent) == 1 if isinstance(axis.extent, tirx.IntImm) else False for axis in element)
    return plain and single and not rest and all(_is_equal(element, read_element) for read_element in read)


def _is_equal(a: object, b: object) -> bool:
    return bool(tvm_ffi.structural_equal(list(a), list(b)))


def _accesses(regions: list[TensorRegion], buffer: tirx.Var) -> list[list[tvm.ir.Range]]:
    """The accessed parts of `buffer` among `regions`."""
    return [list(region.region) for region in regions if region.source.same_as(buffer)]


def _blocks(kernel: tirx.PrimFunc) -> Iterator[s_tir.SBlock]:
    """All blocks except those that only contain other blocks."""
    schedule = s_tir.Schedule(kernel)
    waiting = list(schedule.get_child_blocks(schedule.get_sblock("root")))
    while waiting:
        block = waiting.pop()
        inner = schedule.get_child_blocks(block)
        if inner:
            waiting += inner
        else:
            yield schedule.get(block)
