"""Kernels as C can say them."""
