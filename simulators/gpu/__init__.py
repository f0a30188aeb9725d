"""Models of GPU kernels, their fit, and the data that they are fitted to."""
