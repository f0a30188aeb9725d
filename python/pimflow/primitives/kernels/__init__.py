"""Code of the convolution primitives: `prim_func.kernel` makes one TIR function of tensor expressions."""
