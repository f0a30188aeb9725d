"""Schedules of kernels, for the CPU and the GPU."""
