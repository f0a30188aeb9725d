"""Exact covers of the regions by candidates, and the evaluator of all plans."""
