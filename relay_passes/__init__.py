"""Relax to Relax rewrites, one pass a file.

All passes work on the *flat form*: one function ``main`` with one dataflow block in A-normal form.
Bindings carry the names of the layers from which they come.
"""
