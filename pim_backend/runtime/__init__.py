"""Targets, code generation and the modules that run; with TVM."""
