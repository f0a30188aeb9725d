"""A decoder in NumPy: the reference for logits and greedy tokens.

It shares no code with the graph of a decoder, nor with the compiler.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from pimflow.zoo.language.decoder import Decoder


class ReferenceDecoder:
    """A decoder of one sequence, with a cache of keys and values of all tokens so far.

    Parameters
    ----------
    weights : mapping of str to ndarray
        By name, of the shapes in `Decoder.weights`; converted to `dtype`.
    """

    def __init__(self, decoder: Decoder, weights: Mapping[str, np.ndarray], dtype: type = np.float32) -> None:
        self._decoder, self._dtype = decoder, dtype
        self.weights = {name: np.asarray(value, dtype) for name, value in weights.items()}
        heads, keys, values = decoder.kv_heads, decoder.head_size, decoder.head_size
        if decoder.latent:  # as keys the rotated part that all heads share, as values the vector
            heads, keys, values = 1, decoder.rotary_size, decoder.latent.rank
        self.keys = [np.zeros((heads, 0, keys), dtype)] * decoder.layers
        self.values = [np.zeros((heads, 0, values), dtype)] * decoder.layers

    @property
    def length(self) -> int:
        """Number of tokens in the cache."""
        return int(self.keys[0].shape[1])

    def step(self, tokens: np.ndarray) -> np.ndarray:
        """Process the next tokens, [n], and return their logits, [n, vocabulary]."""
        d, w = self._decoder, self.weights
        places = np.arange(self.length, self.length + len(tokens))
        x = w["tokens.table"][tokens]
        x = x * self._dtype(d.embedding_scale)
        if d.embedding_norm:
            x = self._normalise(x, "tokens_norm")
        if d.positions == "learned":
            x = x + w["positions.table"][places + d.position_offset]
        for layer in range(d.layers):
            x = self.block(x, layer, places)
        x = self._normalise(x, "norm")
        logits = x @ w["tokens.table"].T if d.tied else self._product(x, w["head.weight"])
        logits = (logits + w.get("head.bias", self._dtype(0))) * self._dtype(d.logit_scale)
        return self._cap(logits, d.logit_softcap)

    def block(self, x: np.ndarray, layer: int, places: np.ndarray) -> np.ndarray:
        """One block: [n, hidden] to [n, hidden]; `places` are the positions of the tokens."""
        d, name = self._decoder, f"layers.{layer}"
        part = self._attention(self._before(x, f"{name}.attention_norm"), layer, places)
        attended = x + self._after(part, f"{name}.attention_result_norm")
        if d.shares_norm:
            source = self._before(x, f"{name}.attention_norm")
        else:
            source = self._before(x if d.parallel else attended, f"{name}.feed_forward_norm")
        if d.experts is None or layer < d.dense_layers:
            part = self._feed_forward(source, name)
        else:
            part = self._experts(source, name)
        return attended + self._after(part, f"{name}.feed_forward_result_norm")

    def _before(self, x: np.ndarray, name: str) -> np.ndarray:
        """`x` after the norm in front of a part of a block."""
        return self._normalise(x, name) if self._decoder.input_norms else x

    def _after(self, x: np.ndarray, name: str) -> np.ndarray:
        """The result of a part of a block as it is added."""
        x = self._normalise(x, name) if self._decoder.result_norms else x
        return x * self._dtype(self._decoder.residual_scale)

    def _cap(self, x: np.ndarray, cap: float) -> np.ndarray:
        return self._dtype(cap) * np.tanh(x / self._dtype(cap)) if cap else x

    def _dense(self, x: np.ndarray, name: str, expert: int | None = None) -> np.ndarray:
        weight, bias = self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias", self._dtype(0))
        if expert is None:
            return self._product(x, weight) + bias
        return x @ weight[expert] + (bias[expert] if np.ndim(bias) else bias)

    def _product(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """`x` times a weight; integers of `x` times a scale for each token, if the decoder has them."""
        if not self._decoder.activations:
            return x @ weight
        largest = {"int8": 127, "int4": 7}[self._decoder.activations]
        scales = np.maximum(np.abs(x).max(axis=-1, keepdims=True), 1e-2) / largest
        return (np.clip(np.rint(x / scales), -largest, largest) @ weight * scales).astype(self._dtype)

    def _normalise(self, x: np.ndarray, name: str) -> np.ndarray:
        if self._decoder.norm == "layer":
            x = x - x.mean(axis=-1, keepdims=True)
        variance = np.square(x).mean(axis=-1, keepdims=True)
        y = x / np.sqrt(variance + self._dtype(self._decoder.norm_epsilon)) * self.weights[f"{name}.scale"]
        return y + self.weights[f"{name}.bias"] if self._decoder.norm == "layer" else y

    def _rotate(self, x: np.ndarray, places: np.ndarray, layer: int) -> np.ndarray:
        """Rotate heads [heads, n, head_size], as complex numbers, by an angle for each position."""
        d = self._decoder
        size = d.rotary_size or d.head_size
        half, base, factors = size // 2, d.rotary_base, np.array(d.rotary_factors or 1.0)
        scale = d.rotary_scale
        if d.local_rotary_base and d.windows and d.windows[layer]:
            base, factors, scale = d.local_rotary_base, np.array(1.0), 1.0
        speed = base ** (-2.0 * np.arange(half) / size) / factors
        turn = scale * np.exp(1j * np.outer(places, speed))
        rotated = (x[..., :half] + 1j * x[..., half:size]) * turn
        parts = [rotated.real, rotated.imag, x[..., size:]]
        return np.concatenate(parts, axis=-1).astype(self._dtype)

    def _heads(self, x: np.ndarray, name: str) -> np.ndarray:
        """Queries or keys of each head, [heads, n, head_size], with their norm."""
        d = self._decoder
        y = self._dense(x, name)
        y = self._normalise(y, f"{name}_norm") if d.query_norm == "whole" else y
        y = y.reshape(len(x), -1, d.head_size).swapaxes(0, 1)
        return self._normalise(y, f"{name}_norm") if d.query_norm == "heads" else y

    def _attention(self, x: np.ndarray, layer: int, places: np.ndarray) -> np.ndarray:
        d, name = self._decoder, f"layers.{layer}"
        if d.latent:
            query, keys, values = self._latent_operands(x, layer, places)
        else:
            query, key = self._heads(x, f"{name}.query"), self._heads(x, f"{name}.key")
            value = self._dense(x, f"{name}.value").reshape(len(x), -1, d.head_size).swapaxes(0, 1)
            if d.positions == "rotary" and layer not in d.unturned_layers:
                query, key = self._rotate(query, places, layer), self._rotate(key, places, layer)
            keys, values = self._append(layer, key, value)
        first = keys.shape[1] - len(x)
        distance = first + np.arange(len(x))[:, None] - np.arange(keys.shape[1])
        allowed = (distance >= 0) & (distance < ((d.windows and d.windows[layer]) or np.inf))
        scale = d.score_scale or 1 / np.sqrt(d.head_size)
        mixed = np.empty((d.heads, len(x), values.shape[2]), self._dtype)
        for head in range(d.heads):
            shared = head * len(keys) // d.heads
            scores = self._cap(query[head] @ keys[shared].T * self._dtype(scale), d.score_softcap)
            if d.positions == "alibi":
                scores = scores - self._dtype(d.slopes[head]) * distance
            scores = np.where(allowed, scores, -np.inf)
            largest, rest = scores.max(axis=-1, keepdims=True), self._dtype(0)
            if d.sinks:
                sink = self.weights[f"{name}.sinks.bias"][head]
                largest = np.maximum(largest, sink)
                rest = np.exp(sink - largest)
            shares = np.exp(scores - largest)
            mixed[head] = shares / (shares.sum(axis=-1, keepdims=True) + rest) @ values[shared]
        return self._dense(mixed.swapaxes(0, 1).reshape(len(x), -1), f"{name}.attention")

    def _append(self, layer: int, key: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of all tokens so far."""
        if self._decoder.cache_type:
            key, value = self._narrow(key), self._narrow(value)
        self.keys[layer] = np.concatenate([self.keys[layer], key], axis=1)
        self.values[layer] = np.concatenate([self.values[layer], value], axis=1)
        return self.keys[layer], self.values[layer]

    def _narrow(self, x: np.ndarray) -> np.ndarray:
        """What a narrow cache keeps of keys or values: whole steps of a scale, one a token and head."""
        steps = {"int8": 127, "int4": 7}[self._decoder.cache_type]
        peak = np.maximum(np.abs(x).max(axis=-1, keepdims=True), 1e-2)
        return (np.clip(np.rint(x * steps / peak), -steps, steps) * peak / steps).astype(self._dtype)

    def _latent_operands(
        self, x: np.ndarray, layer: int, places: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Queries, and the keys and values of every head, made from the vectors of all tokens so far."""
        d, name = self._decoder, f"layers.{layer}"
        latent, turned = d.latent, d.rotary_size
        assert latent is not None
        source = x
        if latent.query_rank:
            source = self._normalise(self._dense(x, f"{name}.query_latent"), f"{name}.query_latent_norm")
        query = self._dense(source, f"{name}.query").reshape(len(x), d.heads, -1).swapaxes(0, 1)
        query = np.concatenate([query[..., :-turned], self._rotate(query[..., -turned:], places, layer)], -1)
        made = self._dense(x, f"{name}.latent")[None]
        vector = self._normalise(made[..., : latent.rank], f"{name}.latent_norm")
        rotated, vectors = self._append(layer, self._rotate(made[..., latent.rank :], places, layer), vector)
        keys = vectors @ self.weights[f"{name}.key_heads.weight"].swapaxes(1, 2)
        keys = np.concatenate([keys, np.broadcast_to(rotated, (*keys.shape[:2], turned))], axis=-1)
        return query, keys, vectors @ self.weights[f"{name}.value_heads.weight"]

    def _experts(self, x: np.ndarray, name: str) -> np.ndarray:
        """Each token through the experts of its largest shares, one after the other."""
        experts = self._decoder.experts
        assert experts is not None
        mixed = self._feed_forward(x, name, part="shared_") if experts.shared else np.zeros_like(x)
        for row, logits in enumerate(self._dense(x, f"{name}.router")):
            if experts.scores == "softmax":
                shares = np.exp(logits - logits.max())
                shares = shares / shares.sum()
            else:
                shares = 1 / (1 + np.exp(-logits))
            chosen = self._choice(shares, name)
            whole = shares[chosen].sum() if experts.normalised else self._dtype(1)
            for expert in chosen:
                result = self._feed_forward(x[row : row + 1], name, expert)
                mixed[row] += shares[expert] / whole * self._dtype(experts.factor) * result[0]
        return mixed

    def _choice(self, shares: np.ndarray, name: str) -> np.ndarray:
        """The experts of a token."""
        experts = self._decoder.experts
        assert experts is not None
        ranks = shares + self.weights.get(f"{name}.router_correction.bias", self._dtype(0))
        groups = ranks.reshape(experts.groups, -1)
        sums = np.sort(groups, axis=1)[:, -experts.group_best :].sum(axis=1)
        closed = np.argsort(-sums, kind="stable")[experts.used_groups :]
        groups[closed] = -np.inf
        return np.argsort(-groups.reshape(-1), kind="stable")[: experts.used]

    def _feed_forward(
        self, x: np.ndarray, name: str, expert: int | None = None, part: str = ""
    ) -> np.ndarray:
        wide, activation = self._dense(x, f"{name}.{part}up", expert), self._decoder.activation
        if activation in ("swiglu", "geglu", "clamped_swiglu"):
            gate = self._dense(x, f"{name}.{part}gate", expert)
            if activation == "clamped_swiglu":
                gate, wide = np.minimum(gate, 7), np.clip(wide, -7, 7) + 1
                wide = wide * gate / (1 + np.exp(-1.702 * gate))
            else:
                wide = wide * (gate / (1 + np.exp(-gate)) if activation == "swiglu" else _gelu(gate))
        elif activation == "gelu":
            wide = _gelu(wide)
        elif activation == "gelu_erf":
            wide = wide * (1 + np.vectorize(math.erf)(wide / math.sqrt(2))) / 2
        else:
            wide = np.maximum(wide, 0)
        return self._dense(wide.astype(self._dtype), f"{name}.{part}down", expert)


def _gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2
