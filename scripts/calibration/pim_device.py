"""Functional simulation of PIM by itself: a program's commands on a memory image and an input tensor."""

from __future__ import annotations

import os

import numpy as np

from pimflow.core.commands import Write
from pimflow.core.program import MemoryImage, PimProgram
from pimflow.errors import TraceError, UnknownNameError, UsageError
from pimflow.host import native
from pimflow.pim_backend.programs.cache_layout import CacheLayout
from pimflow.pim_backend.programs.layout import NUMPY_DTYPE

_execute = native.get("pimflow.simulators.execute")
_HEADER = native.Record("pimflow.simulators.program_header")


def simd_variants() -> tuple[str, ...]:
    """Instruction sets in which the executor can run here, the fastest first; the last is ``portable``.

    All of them compute the same bits. The environment variable ``PIMFLOW_SIMD`` selects one.
    """
    return tuple(map(str, native.get("pimflow.simulators.simd_variants")()))


class PimDevice:
    """PIM channels with a region's weights, which can run its program any number of times.

    A program with WRITEs changes `image`, whose pages are in the layout of the executor
    (`MemoryImage.lane_bits`).

    Raises
    ------
    TraceError
        If `program` cannot be executed, see `PimProgram.validate`.
    UsageError
        If `image` does not fit the program, or `program` writes rows that `image` lacks or shares.
    """

    def __init__(self, program: PimProgram, image: MemoryImage):
        try:
            program.validate()
        except ValueError as error:
            raise TraceError(f"region '{program.region}': {error}") from error
        table_shape = (len(program.channels), program.rows)
        page = (program.banks, program.columns_per_row * program.elements_per_column)
        fits = image.table.shape == table_shape and image.pages.shape[1:] == page
        if image.dtype != program.dtype or not fits or image.table.max(initial=-1) >= len(image.pages):
            raise UsageError(f"region '{program.region}': the memory image is another program's")
        if _has_writes(program) and (image.table < 0).any():
            raise UsageError(f"region '{program.region}' writes rows, and the memory image lacks some")
        if _has_writes(program) and np.unique(image.table).size < image.table.size:
            raise UsageError(f"region '{program.region}' writes rows that its image holds once for several")
        import tvm_ffi

        self.program = program
        table = np.ascontiguousarray(image.table, np.int32)
        arrays = (_HEADER.row(**program.header()), *program.program_words(), image.lane_bits, table)
        self._tensors = tuple(map(tvm_ffi.from_dlpack, arrays))

    def run(
        self,
        x: np.ndarray,
        threads: int | None = None,
        variant: str = "",
        initial: np.ndarray | None = None,
        added: np.ndarray | None = None,
    ) -> np.ndarray:
        """The results of the program.

        Parameters
        ----------
        x : ndarray, [n, h, w, c], float32
            Input of the convolution; rounded to the program's storage type. int8 for an int8 program.
        threads : int, optional
            Channels simulated in parallel; one for each processor by default. Results do not depend on it.
        variant : str, optional
            One of `simd_variants`. Results do not depend on it.
        initial : ndarray, optional
            Initial values of the latches, if the program needs them (`PimProgram.initial`): [oc] or
            [n, oh, ow, oc], rounded to the storage type; int32 for an int8 program.
        added : ndarray, [n, oh, ow, oc], optional
            Tensor that the product adds, if the program has one (`PimProgram.added_channels`); of the type of
            `x`.

        Returns
        -------
        ndarray, [pixel_end - pixel_begin, oc], float32
            Values of the storage type; NaN where no READRES delivered a result. For an int8 program the
            int32 sums modulo 2^32, and -2^31 where none was delivered.

        Raises
        ------
        UsageError
            If `x`, `initial` or `added` does not fit the program, or the environment variable names an
            unknown variant.
        UnknownNameError
            If this processor does not have `variant`.
        """
        g, program = self.program.geometry, self.program
        input_shape = (g.n, g.h, g.w, g.c - program.added_channels)
        if x.shape != input_shape:
            raise UsageError(
                f"region '{program.region}' takes an input of shape {input_shape}, got {x.shape}"
            )
        added_shape = (g.n, g.h, g.w, program.added_channels)
        if (added is None) == bool(program.added_channels) or (
            added is not None and added.shape != added_shape
        ):
            actual = "none" if added is None else str(added.shape)
            raise UsageError(f"region '{program.region}' adds a tensor of shape {added_shape}, got {actual}")
        if variant and variant not in simd_variants():
            raise UnknownNameError("variant", variant, simd_variants())
        import tvm_ffi

        is_integer = program.dtype == "int8"
        inputs = [x] if added is None else [x, added]
        for tensor in inputs:
            if is_integer and tensor.dtype != np.int8:
                raise UsageError(f"region '{program.region}' takes an input of int8, got {tensor.dtype}")
        x = np.concatenate(inputs, axis=-1)
        word = np.int32 if is_integer else np.float32
        initial_shape = {"": (0,), "bias": (g.oc,), "add": (g.n, g.oh, g.ow, g.oc)}[program.initial]
        start = np.empty(0, word) if initial is None else np.ascontiguousarray(initial, word)
        if start.shape != initial_shape:
            raise UsageError(
                f"region '{program.region}' starts its sums from values of shape {initial_shape}, got "
                f"{start.shape}"
            )
        out = np.empty((program.pixel_end - program.pixel_begin, g.oc), word)
        operands = (tvm_ffi.from_dlpack(a) for a in (np.ascontiguousarray(x, word), start, out))
        _execute(*self._tensors, *operands, threads or os.cpu_count() or 1, variant)
        return out


def _has_writes(program: PimProgram) -> bool:
    return Write in program.command_kinds


def empty_image(layout: CacheLayout) -> MemoryImage:
    """An image of zeros with one page for each row of each channel, which programs of a cache can write."""
    row = layout.pim.columns_per_row * layout.elements
    pages = np.zeros((layout.channels * layout.rows, row, layout.banks), NUMPY_DTYPE[layout.dtype])
    table = np.arange(layout.channels * layout.rows, dtype=np.int32).reshape(layout.channels, layout.rows)
    return MemoryImage(row_begin=layout.first_row, pages=pages.swapaxes(1, 2), table=table)
