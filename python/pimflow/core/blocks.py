"""What every GPU that kernels are compiled for has."""

# Shared memory that every block may have without opting in to more (CUDA programming guide).
BLOCK_SHARED_BYTES = 48 * 1024
