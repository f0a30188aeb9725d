"""Sums over rows of a matrix that begin at different elements of the rows."""

from __future__ import annotations

from math import prod

import tvm
import tvm_ffi
from tvm import s_tir, tirx

from pimflow.relay_passes.schedules.loops import ACCESS_BYTES, WARP, reduction_axes, variables

ROTATED_BYTES = WARP * ACCESS_BYTES  # distance between the first elements of consecutive blocks of threads


def is_row_by_matrix(block: s_tir.SBlock) -> bool:
    """Whether `block` is C[..., n] += A[..., k] * B[n, ..., k], where the dots are axes of one element."""
    over = [axis for axis in block.iter_vars if axis.var in reduction_axes(block) and axis.dom.extent > 1]
    if len(over) != 1 or len(block.reads) != 2:
        return False
    k = over[0].var
    return all(
        variables(region.region[-1].min) == {k}
        and not any(k in variables(axis.min) for axis in list(region.region)[:-1])
        for region in block.reads
    )


def rotate_rows(func: tirx.PrimFunc, name: str, results: int) -> tirx.PrimFunc:
    """`func`, with another first element in its product of a row by a matrix for every `results` results.

    Parameters
    ----------
    name : str
        Name of the product's block, for which `is_row_by_matrix` holds.
    results : int
        Results of a block of threads: their sums begin at the same element.

    Rewrite: ``C[n] += A[k] * B[n, k]`` -> ``C[n] += A[at] * B[n, at]``, where ``at`` is ``(k + n // results *
    elements) % extent`` and ``elements`` are `ROTATED_BYTES` of B.
    Preserves: values up to the order of sums.
    """

    def block(old: s_tir.SBlock) -> s_tir.SBlock:
        """Rotate the loads of the block `name`."""
        if old.name_hint != name:
            return old
        (over,) = (axis for axis in old.iter_vars if axis.var in reduction_axes(old) and axis.dom.extent > 1)
        number = tirx.IntImm(over.var.ty.dtype, 0)
        for axis in old.iter_vars:
            if axis.var not in reduction_axes(old):
                number = number * axis.dom.extent + axis.var
        matrix = max((region.source for region in old.reads), key=lambda read: prod(map(int, read.shape)))
        elements = ROTATED_BYTES * 8 // matrix.dtype.bits
        rotated_index = tirx.floormod(over.var + tirx.floordiv(number, results) * elements, over.dom.extent)

        def load(read: tvm.ir.TensorLoad) -> tvm.ir.TensorLoad:
            """A load at the rotated index."""
            indices = list(read.indices)
            if over.var not in variables(indices[-1]):
                return read
            return tirx.BufferLoad(read.source, [*indices[:-1], rotated_index])

        def whole_row(region: tirx.BufferRegion) -> tirx.BufferRegion:
            """`region` with the whole row as its last axis."""
            *others, _ = region.region
            last = tvm.ir.Range.from_min_extent(tirx.IntImm(over.var.ty.dtype, 0), over.dom.extent)
            return tirx.BufferRegion(region.source, [*others, last])

        body = tvm_ffi.structural_map(old.body, [(tvm.ir.TensorLoad, load)])
        return s_tir.SBlock(
            old.iter_vars, [whole_row(region) for region in old.reads], old.writes, old.name_hint, body,
            old.init, old.alloc_buffers, old.match_buffers, old.annotations,
        )  # fmt: skip

    return func.with_body(tvm_ffi.structural_map(func.body, [(s_tir.SBlock, block)]))
