"""Operators of other domains than ONNX's own."""

from pimflow.zoo.foreign.expansion import constants, expand, has_foreign, infer_types, operator_key
from pimflow.zoo.foreign.quantized import narrow_products

__all__ = ["constants", "expand", "has_foreign", "infer_types", "narrow_products", "operator_key"]
