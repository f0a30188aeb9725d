"""Floating-point operations of a network's layers."""

from __future__ import annotations

import math

import tvm
from tvm import relax

from pimflow.relay_passes.flat import main_bindings, operator, shape


def layer_flops(value: relax.Expr) -> int:
    """Two operations for each multiplication of a convolution or matrix product; 0 for other operators.

    TeMCO counts in this way, by sizes of weights (algorithm 1): elementwise operators and pooling count 0.
    """
    kind = operator(value)
    if kind == "nn.conv2d":
        filters = str(value.attrs.kernel_layout)
        oc = shape(value.args[1])[filters.index("O")]
        return 2 * math.prod(shape(value)) * math.prod(shape(value.args[1])) // oc
    if kind == "matmul":
        return 2 * math.prod(shape(value)) * shape(value.args[0])[-1]
    return 0


def flops(mod: tvm.IRModule) -> int:
    """Floating-point operations of all layers of a flat module."""
    return sum(layer_flops(binding.value) for binding in main_bindings(mod))
