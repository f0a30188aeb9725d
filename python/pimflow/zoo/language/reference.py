"""A decoder in NumPy: the reference for logits and greedy tokens.

It shares no code with the graph of a decoder, nor with the compiler.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pimflow.zoo.language.decoder import Decoder


class ReferenceDecoder:
    """A decoder of one sequence, with a cache of keys and values of all tokens so far.

    Parameters
    ----------
    weights : mapping of str to ndarray
        By name, of the shapes in `Decoder.weights`; converted to `dtype`.
    dtype : type
        Type of all computations.
    """

    def __init__(self, decoder: Decoder, weights: Mapping[str, np.ndarray], dtype: type = np.float32) -> None:
        self._decoder, self._dtype = decoder, dtype
        self.weights = {name: np.asarray(value, dtype) for name, value in weights.items()}
        empty = np.zeros((decoder.kv_heads, 0, decoder.head_size), dtype)
        self.keys = [empty] * decoder.layers
        self.values = [empty] * decoder.layers

    @property
    def length(self) -> int:
        """Number of tokens in the cache."""
        return int(self.keys[0].shape[1])

    def step(self, tokens: np.ndarray) -> np.ndarray:
        """Process the next tokens, [n], and return their logits, [n, vocabulary]."""
        d, w = self._decoder, self.weights
        places = np.arange(self.length, self.length + len(tokens))
        x = w["tokens.table"][tokens]
        if d.positions == "learned":
            x = x + w["positions.table"][places + d.position_offset]
        for layer in range(d.layers):
            x = self.block(x, layer, places)
        x = self._normalise(x, "norm")
        return x @ (w["tokens.table"].T if d.tied else w["head.weight"])

    def block(self, x: np.ndarray, layer: int, places: np.ndarray) -> np.ndarray:
        """One block: [n, hidden] to [n, hidden]; `places` are the positions of the tokens."""
        name = f"layers.{layer}"
        x = x + self._attention(self._normalise(x, f"{name}.attention_norm"), layer, places)
        return x + self._feed_forward(self._normalise(x, f"{name}.feed_forward_norm"), name)

    def _dense(self, x: np.ndarray, name: str) -> np.ndarray:
        y = x @ self.weights[f"{name}.weight"]
        return y + self.weights[f"{name}.bias"] if self._decoder.biases else y

    def _normalise(self, x: np.ndarray, name: str) -> np.ndarray:
        if self._decoder.norm == "layer":
            x = x - x.mean(axis=-1, keepdims=True)
        variance = np.square(x).mean(axis=-1, keepdims=True)
        y = x / np.sqrt(variance + self._dtype(self._decoder.norm_epsilon)) * self.weights[f"{name}.scale"]
        return y + self.weights[f"{name}.bias"] if self._decoder.norm == "layer" else y

    def _rotate(self, x: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Rotate heads [heads, n, head_size], as complex numbers, by an angle for each position."""
        d = self._decoder
        half = d.head_size // 2
        speed = d.rotary_base ** (-2.0 * np.arange(half) / d.head_size)
        rotated = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * np.outer(places, speed))
        return np.concatenate([rotated.real, rotated.imag], axis=-1).astype(self._dtype)

    def _attention(self, x: np.ndarray, layer: int, places: np.ndarray) -> np.ndarray:
        d, name = self._decoder, f"layers.{layer}"
        query, key, value = (
            self._dense(x, f"{name}.{part}").reshape(len(x), -1, d.head_size).swapaxes(0, 1)
            for part in ("query", "key", "value")
        )
        if d.positions == "rotary":
            query, key = self._rotate(query, places), self._rotate(key, places)
        keys = self.keys[layer] = np.concatenate([self.keys[layer], key], axis=1)
        values = self.values[layer] = np.concatenate([self.values[layer], value], axis=1)
        first = keys.shape[1] - len(x)
        allowed = np.arange(keys.shape[1]) <= first + np.arange(len(x))[:, None]
        mixed = np.empty((d.heads, len(x), d.head_size), self._dtype)
        for head in range(d.heads):
            shared = head // d.group
            scores = query[head] @ keys[shared].T / self._dtype(np.sqrt(d.head_size))
            scores = np.where(allowed, scores, -np.inf)
            shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
            mixed[head] = shares / shares.sum(axis=-1, keepdims=True) @ values[shared]
        return self._dense(mixed.swapaxes(0, 1).reshape(len(x), -1), f"{name}.attention")

    def _feed_forward(self, x: np.ndarray, name: str) -> np.ndarray:
        wide, activation = self._dense(x, f"{name}.up"), self._decoder.activation
        if activation == "swiglu":
            gate = self._dense(x, f"{name}.gate")
            wide = wide * gate / (1 + np.exp(-gate))
        elif activation == "gelu":
            wide = wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3))) / 2
        else:
            wide = np.maximum(wide, 0)
        return self._dense(wide.astype(self._dtype), f"{name}.down")
