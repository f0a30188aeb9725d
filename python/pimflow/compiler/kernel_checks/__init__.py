"""Checks of emitted GPU kernels without a card: what every thread of a block reads, writes and waits for."""
