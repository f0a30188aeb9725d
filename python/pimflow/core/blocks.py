"""Limits of thread blocks that hold on every GPU that kernels are compiled for.

From the CUDA C++ programming guide, technical specifications per compute capability, 5.0 to 12.x.
"""

# Shared memory that a block may use without opting in to more.
BLOCK_SHARED_BYTES = 48 * 1024
MAX_THREADS = 1024  # of a block
MAX_BLOCK_AXIS = {"x": 1024, "y": 1024, "z": 64}  # threads along an axis
MAX_GRID_AXIS = {"x": 2**31 - 1, "y": 65535, "z": 65535}  # blocks along an axis
