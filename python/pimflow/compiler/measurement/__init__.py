"""Kernels and allocations of compiled networks, timed."""
