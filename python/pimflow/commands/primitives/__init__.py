"""Convolution primitives for a network (TASO)."""
