"""Compile a network; its report, fronts, conventions and timeline."""
