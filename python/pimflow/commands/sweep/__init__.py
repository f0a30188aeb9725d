"""Sweep the design space."""
