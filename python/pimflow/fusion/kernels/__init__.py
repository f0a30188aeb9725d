"""Fused groups as TIR functions: `generator` writes them, `execution` runs, verifies and counts them."""
