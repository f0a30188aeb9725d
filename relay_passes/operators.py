"""Kinds of operators, by the names that Relax gives them."""

from __future__ import annotations

from pimflow.core.region import GATHERS, MOVES

UNARY = (
    *("clip", "nn.prelu", "nn.relu", "nn.silu", "nn.gelu", "nn.leakyrelu", "sigmoid", "tanh", "exp"),
    *("negative", "abs", "ceil", "erf", "floor", "log", "round", "rsqrt", "sign", "sqrt"),
)
BINARY = ("add", "subtract", "multiply", "divide", "maximum", "minimum", "power")
ELEMENTWISE = UNARY + BINARY + MOVES + GATHERS
# How many times the formula of an operator names its operand, if more than once (`keep_nan`, TVM's formulas).
# An operand that is inlined is computed as many times.
OPERAND_USES = {
    **dict.fromkeys(("nn.relu", "nn.silu", "nn.gelu"), 2),
    "tanh": 5,  # TVM writes it with exponentials of both signs
    **dict.fromkeys(("nn.prelu", "nn.leakyrelu", "clip", "sign"), 3),
    **dict.fromkeys(("maximum", "minimum"), 4),
}
LOOKUP = "take"
REDUCE = ("mean", "sum", "max", "min")
POOL = ("nn.max_pool2d", "nn.avg_pool2d")
