"""Limits of thread blocks that hold on every GPU that kernels are compiled for."""

# Shared memory that a block may use without opting in to more (CUDA programming guide).
BLOCK_SHARED_BYTES = 48 * 1024
