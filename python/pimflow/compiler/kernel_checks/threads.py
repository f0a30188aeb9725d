"""The threads of a GPU kernel that run at once on the CPU, and the memories that they access."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tvm import ir

from pimflow.compiler.kernel_checks.access_log import AccessLog
from pimflow.compiler.kernel_checks.launch import KernelLaunch
from pimflow.compiler.kernel_checks.operators import Array

WARP = 32
SHARED_BYTE = 0xFF  # of shared memory before it is written: floats of such bytes are NaN


def element_type(text: str) -> tuple[np.dtype[Any], int]:
    """The type of an element, and how many a vector has: ``float16x8``."""
    name, _, lanes = text.rpartition("x") if re.fullmatch(r"\w+x\d+", text) else (text, "", "1")
    return np.dtype({"bool": "bool", "handle": "uint64"}.get(name, name)), int(lanes)


def type_of(expr: ir.Expr) -> tuple[np.dtype[Any], int]:
    return element_type(str(expr.ty).removeprefix("T."))


def coordinates(launch: KernelLaunch, prefix: str, numbers: npt.NDArray[np.int64]) -> dict[str, Array]:
    """By axis of CUDA, the coordinates of blocks or threads with these numbers, as columns."""
    axes: dict[str, Array] = {}
    for axis in "xyz":
        extent = launch.extent(f"{prefix}.{axis}")
        axes[f"{prefix}.{axis}"] = (numbers % extent).astype(np.int32)[:, None]
        numbers = numbers // extent
    return axes


def is_floating(dtype: np.dtype[Any]) -> bool:
    """Whether a type has fractions: those of `ml_dtypes` are of NumPy's kind "V"."""
    return dtype.kind in "fV"


def blank_value(dtype: np.dtype[Any]) -> float:
    """What memory has before it is written: NaN, or integers that are neutral in no reduction."""
    if is_floating(dtype):
        return np.nan
    return 1 if dtype.kind == "b" else int(np.iinfo(dtype).max) // 3


@dataclass
class Lanes:
    """The threads that run at once: all of some blocks."""

    launch: KernelLaunch
    blocks: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_] | None = None  # (threads, 1): those that take the branch that runs
    epoch: int = 0  # barriers so far

    def __post_init__(self) -> None:
        threads = self.launch.threads
        self.block_index = np.repeat(np.arange(len(self.blocks)), threads)[:, None]
        self.block = np.repeat(self.blocks, threads)
        thread = np.tile(np.arange(threads), len(self.blocks))
        self.number = self.block * threads + thread
        warps = -(-threads // WARP)  # of a block
        self.warp = self.block * warps + thread // WARP
        self.warp_index = self.block_index[:, 0] * warps + thread // WARP
        self.warp_epochs = np.zeros(len(thread), np.int64)  # barriers of each thread's warp so far
        self.axes = coordinates(self.launch, "blockIdx", self.block) | coordinates(
            self.launch, "threadIdx", thread
        )

    @property
    def count(self) -> int:
        """Threads, those included that do not take the branch that runs."""
        return len(self.number)

    def active(self) -> Threads:
        """The threads that take the branch that runs."""
        index = np.arange(self.count) if self.mask is None else np.flatnonzero(self.mask[:, 0])
        return self.threads(index, self.number[index])

    def threads(self, index: npt.NDArray[np.int64], number: npt.NDArray[np.int64]) -> Threads:
        """The threads at some places, under the numbers by which their accesses are logged."""
        return Threads(
            index=index[:, None],
            number=number,
            warp=self.warp[index],
            block=self.block[index],
            block_index=self.block_index[index],
            warp_epoch=self.warp_epochs[index],
        )


@dataclass(frozen=True, kw_only=True)
class Threads:
    """Threads that access a memory; columns of their place in `Lanes`, and of their block's place there."""

    index: npt.NDArray[np.int64]
    number: npt.NDArray[np.int64]
    warp: npt.NDArray[np.int64]
    block: npt.NDArray[np.int64]
    block_index: npt.NDArray[np.int64]
    warp_epoch: npt.NDArray[np.int64]


@dataclass
class Memory:
    """A buffer's storage.

    `data` has the axes (element), (block, byte), (thread, element) or (warp, fragment, row, column), for
    global and shared memory, registers, and fragments; `size_bytes` are those of one block or thread. `gaps`
    are bytes of shared memory that nothing may access. `version` counts writes. `unfinished` are
    elements of the log that asynchronous copies write.
    """

    name: str
    scope: str
    data: Array
    size_bytes: int = 0
    log: AccessLog | None = None
    unit: int = 2  # bytes of shared memory that are one element of its log
    gaps: npt.NDArray[np.bool_] | None = None
    version: int = 0
    unfinished: npt.NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class View:
    """A buffer: a memory with the type of an element and the elements that an index stands for."""

    memory: ir.Var
    dtype: np.dtype[Any]
    lanes: int
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape) * self.lanes
