"""Kinds of operators, by the names that Relax gives them."""

from __future__ import annotations

UNARY = (
    *(
        "clip",
        "nn.prelu",
        "nn.relu",
        "nn.silu",
        "nn.gelu",
        "nn.leakyrelu",
        "sigmoid",
        "tanh",
        "exp",
        "negative",
    ),
    *("abs", "ceil", "erf", "floor", "log", "round", "rsqrt", "sign", "sqrt"),
)
BINARY = ("add", "subtract", "multiply", "divide", "maximum", "minimum", "power")
REDUCE = ("mean", "sum", "max", "min")
POOL = ("nn.max_pool2d", "nn.avg_pool2d")
