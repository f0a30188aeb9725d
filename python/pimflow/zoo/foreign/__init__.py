"""Operators of other domains than ONNX's own."""

from pimflow.zoo.foreign.expansion import expand, has_foreign, infer_types, operator_key

__all__ = ["expand", "has_foreign", "infer_types", "operator_key"]
