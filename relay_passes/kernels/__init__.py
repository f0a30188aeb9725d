"""What is to be one kernel: groups, runs, primitives; storage types."""
