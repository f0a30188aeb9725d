"""TIR passes that prepare kernels for C code."""
