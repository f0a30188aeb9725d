"""References of a network's outputs, and references with random roundings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

Run = Callable[[Mapping[str, np.ndarray]], list[np.ndarray]]


@dataclass(frozen=True)
class Reference:
    """The reference outputs of a network, by software that shares no code with pimflow.

    Attributes
    ----------
    prepared : callable
        Reads or compiles the network, and returns a function from inputs by name to outputs. The network
        takes memory as long as this function lives.
    model : ModelProto, optional
        The model that ONNX Runtime runs, if it is the reference.
    """

    prepared: Callable[[], Run]
    model: onnx.ModelProto | None = None

    def __call__(self, values: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Outputs for `values`; the network is freed after each call."""
        return self.prepared()(values)

    def outputs(self, samples: Sequence[Mapping[str, np.ndarray]]) -> tuple[list[np.ndarray], ...]:
        """Outputs for each of several samples."""
        run = self.prepared()
        return tuple(run(values) for values in samples)


@dataclass(frozen=True, kw_only=True)
class Fp16Storage:
    """Tensors that a build stores in fp16 and its reference in fp32.

    Attributes
    ----------
    layers : frozenset of str
        Layers whose operands, weights and products, before the bias, are in fp16: those on PIM.
    kernels : bool
        Whether the results of all kernels and the weights of all products are in fp16, too.
    """

    layers: frozenset[str] = frozenset()
    kernels: bool = False


# Function from what a build stores to a run with random roundings. Each call of a run draws other
# roundings; the calls of two runs draw the same sequence.
Perturbed = Callable[[Fp16Storage], Run]
