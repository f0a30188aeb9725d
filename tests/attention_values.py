"""What attention gives, computed in fp64 from its definition."""

import numpy as np

from pimflow.core.attention import Attention


def attend(attention: Attention, q, k, v, mask=None, position=None) -> np.ndarray:
    """Shapes as in `Attention`; `mask` if it is masked, `position` if it is positioned."""
    assert (mask is not None) == attention.masked
    shapes = (attention.query_shape, attention.key_shape, attention.value_shape)
    assert (q.shape, k.shape, v.shape) == shapes

    def of_heads(cache: np.ndarray) -> np.ndarray:
        return np.repeat(cache[:, :, : attention.extent].astype(np.float64), attention.group, axis=1)

    scores = q.astype(np.float64) @ of_heads(k).swapaxes(-1, -2) * attention.scale
    scores = attention.softcap * np.tanh(scores / attention.softcap) if attention.softcap else scores
    scores = scores if mask is None else scores + mask.astype(np.float64)
    scores = np.where(attention.visible_keys(position)[:, None], scores, -np.inf)
    largest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isneginf(largest), 0.0, largest))
    return weights / np.maximum(weights.sum(-1, keepdims=True), np.finfo(np.float64).tiny) @ of_heads(v)
