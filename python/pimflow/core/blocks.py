"""Limits of thread blocks: those that hold on every GPU that kernels are compiled for, and those of one GPU.

The former are from the CUDA C++ programming guide, technical specifications per compute capability, 5.0 to
12.x.
"""

from __future__ import annotations

from dataclasses import dataclass

# Shared memory that a block may use without opting in to more.
BLOCK_SHARED_BYTES = 48 * 1024
MAX_THREADS = 1024  # of a block
MAX_BLOCK_AXIS = {"x": 1024, "y": 1024, "z": 64}  # threads along an axis
MAX_GRID_AXIS = {"x": 2**31 - 1, "y": 65535, "z": 65535}  # blocks along an axis
WARP_THREADS = 32
MULTIPROCESSOR_SHARED_BYTES = 64 * 1024
MULTIPROCESSOR_REGISTER_BYTES = 256 * 1024


@dataclass(frozen=True, kw_only=True)
class KernelLimits:
    """What the schedules of kernels for a GPU must keep, and what they are chosen for.

    The defaults are those of the smallest GPU that CUDA 13 compiles for, an sm_75 with 30 multiprocessors.

    Attributes
    ----------
    multiprocessors : int
        All of them should have blocks.
    threads, shared_bytes : int
        Of a block, at most.
    multiprocessor_shared_bytes, register_bytes : int
        Of a multiprocessor.
    tensor_cores : bool
        Whether products of fp16 may use tensor cores.
    step_ns, launch_ns : float
        Latency of a step of a product's loop, and time of a launch: tiles are chosen by them.
    """

    multiprocessors: int = 30
    threads: int = MAX_THREADS
    shared_bytes: int = BLOCK_SHARED_BYTES
    multiprocessor_shared_bytes: int = MULTIPROCESSOR_SHARED_BYTES
    register_bytes: int = MULTIPROCESSOR_REGISTER_BYTES
    tensor_cores: bool = True
    step_ns: float = 613.0
    launch_ns: float = 3000.0
    clock_mhz: float = 1365.0

    @property
    def is_tight(self) -> bool:
        """Whether a block may have less than on every GPU that CUDA compiles for."""
        least_registers = self.register_bytes < MULTIPROCESSOR_REGISTER_BYTES
        return self.threads < MAX_THREADS or self.shared_bytes < BLOCK_SHARED_BYTES or least_registers

    @property
    def shared_bytes_per_ns(self) -> float:
        """Rate of a multiprocessor's shared memory: 32 banks of 4 bytes."""
        return 128 * self.clock_mhz / 1e3

    @property
    def l2_bytes_per_ns(self) -> float:
        """Rate of a multiprocessor's connection to the L2."""
        return 64 * self.clock_mhz / 1e3

    def threads_up_to(self, threads: int) -> int:
        """The largest power of two up to `threads` that a block may have."""
        return 1 << (min(threads, self.threads).bit_length() - 1)


SMALLEST_GPU = KernelLimits()
