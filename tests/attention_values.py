"""What attention gives, computed in fp64 from its definition."""

import numpy as np

from pimflow.core.attention import Attention


def attend(attention: Attention, q, k, v, mask=None, position=None, sinks=None) -> np.ndarray:
    """Shapes as in `Attention`; `mask`, `position` and `sinks` if it has them."""
    assert ((mask is not None), (sinks is not None)) == (attention.masked, attention.sinks)
    shapes = (attention.query_shape, attention.key_shape, attention.value_shape)
    assert (q.shape, k.shape, v.shape) == shapes

    def of_heads(cache: np.ndarray) -> np.ndarray:
        return np.repeat(cache[:, :, : attention.extent].astype(np.float64), attention.group, axis=1)

    scores = q.astype(np.float64) @ of_heads(k).swapaxes(-1, -2) * attention.scale
    scores = attention.softcap * np.tanh(scores / attention.softcap) if attention.softcap else scores
    scores = scores if mask is None else scores + mask.astype(np.float64)
    scores = np.where(attention.visible_keys(position)[:, None], scores, -np.inf)
    sink = np.full((1, 1, 1, 1), -np.inf) if sinks is None else sinks.astype(np.float64)
    largest = np.maximum(scores.max(-1, keepdims=True), sink)
    largest = np.where(np.isneginf(largest), 0.0, largest)
    weights = np.exp(scores - largest)
    whole = weights.sum(-1, keepdims=True) + np.exp(sink - largest)
    return weights / np.maximum(whole, np.finfo(np.float64).tiny) @ of_heads(v)
