"""References of a network's outputs, and how far roundings move them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx

Run = Callable[[Mapping[str, np.ndarray]], list[np.ndarray]]


@dataclass(frozen=True)
class Reference:
    """Outputs of a network, computed by what shares no code with ours.

    Attributes
    ----------
    prepared : callable
        Reads or compiles the network, which takes memory for as long as what it returns is kept: a function
        from inputs by name to outputs.
    model : ModelProto, optional
        What ONNX Runtime runs, if it is the reference.
    """

    prepared: Callable[[], Run]
    model: onnx.ModelProto | None = None

    def __call__(self, values: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Outputs for `values`; nothing is kept between calls."""
        return self.prepared()(values)


@dataclass(frozen=True, kw_only=True)
class Stored:
    """What a build stores in fp16 where its reference has fp32.

    Attributes
    ----------
    layers : frozenset of str
        Layers whose operands, weights and products, before the bias, are stored so: those on PIM.
    kernels : bool
        Whether the results of all kernels and the weights of all products are too.
    """

    layers: frozenset[str] = frozenset()
    kernels: bool = False


# What a build stores, to outputs with random roundings: each call of the result draws others, and the
# calls of two results the same.
Perturbed = Callable[[Stored], Run]
