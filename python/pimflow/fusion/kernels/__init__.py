"""Fused groups as TIR functions: `generator` writes them, `execution` runs and verifies them."""
