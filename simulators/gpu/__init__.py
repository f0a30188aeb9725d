"""Models of GPU kernels, and the data that they are fitted to."""
