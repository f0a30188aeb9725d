"""A second baseline of language models: the bytes of a step, as fast as published decoding moves them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pimflow.core.kernel import ELEMENT_BYTES
from pimflow.hardware import GpuSpec, System
from pimflow.hardware.gpu import DECODE_BITS
from pimflow.weight_types import WEIGHT_TYPES
from pimflow.zoo.language.decoder import Decoder

# Weights of a model from which on the shares are used: the models that they were published of have 7 to 9
# times as many, and launches and caches of the GPU count in small ones.
MIN_WEIGHTS = 10**9


@dataclass(frozen=True, kw_only=True)
class PublishedDecode:
    """The time in which a GPU reads the weights and caches of a decode step, with all memory channels.

    Bytes are read at the share of the peak bandwidth that the best published kernels reach
    (`GpuSpec.decode_bandwidth_share`). Arithmetic, activations and launches take no time, so that it is no
    model of a GPU with many requests at once, but a bound that favours it.

    Attributes
    ----------
    weights_ns : float
        Of all products with weights, for any number of requests.
    layer_token_ns : float
        Of the keys and values of a token in one layer.
    windows : tuple of int
        By layer, the tokens that it attends to at most; 0 for all.
    """

    weights_ns: float
    layer_token_ns: float
    windows: tuple[int, ...]
    source: str

    @classmethod
    def from_decoder(
        cls, decoder: Decoder | None, system: System, *, block_only: bool = False
    ) -> PublishedDecode | None:
        """Of a model, or of its first block.

        None if no source says it of the GPU, or the model has fewer weights than `MIN_WEIGHTS`, or experts:
        whose weights are read depends on the tokens.
        """
        gpu = system.gpu
        if decoder is None or decoder.experts is not None or not gpu.decode_bandwidth_share:
            return None
        if decoder.parameters < MIN_WEIGHTS:
            return None
        layers = 1 if block_only else decoder.layers
        peak_bytes_per_ns = gpu.memory_channels * gpu.channel_bytes_per_ns
        element_bytes = ELEMENT_BYTES[system.dtype]
        matrices = {} if block_only else {"head.weight": (decoder.hidden, decoder.vocabulary)}
        for layer in range(layers):
            weights = decoder.block_weights(layer).items()
            matrices |= {name: (shape[0], shape[1]) for name, shape in weights if len(shape) == 2}
        keys, weights_ns = {_share_key(gpu, 8 * element_bytes)}, 0.0
        for name, (inputs, outputs) in matrices.items():
            stored_as = "tokens.table" if name == "head.weight" and decoder.tied else name
            kind = WEIGHT_TYPES.get(decoder.weight_types.get(stored_as, ""))
            stored = kind.stored_bytes(outputs, inputs) if kind else inputs * outputs * element_bytes
            key = _share_key(gpu, kind.bits if kind else 8 * element_bytes)
            weights_ns += stored / (peak_bytes_per_ns * gpu.decode_bandwidth_share[key])
            keys.add(key)
        token_bytes = decoder.kv_bytes_per_token(element_bytes) / decoder.layers
        share = gpu.decode_bandwidth_share[_share_key(gpu, 8 * element_bytes)]
        return cls(
            weights_ns=weights_ns,
            layer_token_ns=token_bytes / (peak_bytes_per_ns * share),
            windows=tuple(decoder.window(layer) for layer in range(layers)),
            source="; ".join(_source(gpu, key) for key in sorted(keys)),
        )

    def step_ns(self, tokens: int, batch: int = 1) -> float:
        """The time of a token of each of `batch` requests that attend to so many tokens."""
        attended = sum(min(window or tokens, tokens) for window in self.windows)
        return self.weights_ns + batch * attended * self.layer_token_ns


def _share_key(gpu: GpuSpec, bits: float) -> str:
    """The share for weights of so many bits: that of the next type with at least as many, or the widest."""
    known = [key for key in DECODE_BITS if key in gpu.decode_bandwidth_share]
    return next((key for key in known if int(key.rpartition("_")[2]) >= math.floor(bits)), known[-1])


def _source(gpu: GpuSpec, key: str) -> str:
    share = gpu.decode_bandwidth_share[key]
    source = gpu.sources.get(f"decode_bandwidth_share.{key}", gpu.sources.get("decode_bandwidth_share", ""))
    return f"{share:.1%} of the peak bandwidth for {key.rpartition('_')[2]} bits ({source})"
