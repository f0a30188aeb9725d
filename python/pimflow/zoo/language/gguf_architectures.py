"""Architectures of GGUF files: what their names say. Facts are those of llama.cpp's `llama-model.cpp`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What a name in ``general.architecture`` says, beside the table of a file.

    Attributes
    ----------
    fields : mapping of str to object
        Fields of `Decoder` that it fixes.
    pairs_neighbours : bool
        Whether rotary positions turn neighbouring elements of a head, not its halves.
    scales_embedding : bool
        Whether embedded tokens are multiplied by the root of their size.
    has_scales : bool
        Whether the table has factors of embeddings and residuals, and a divisor of logits.
    has_softcaps : bool
        Whether its table has to have caps of scores and logits.
    window_period : int, optional
        Of layers with a sliding window: 0 if all have it, n if each n-th has none; None if no layer has one.
    wide_layers : int
        Number of blocks of the size whose scores are scaled by hidden / heads, not by the size of a head.
    says_parallel : bool
        Whether the table says if attention and feed-forward are parallel.
    unturned_period : int
        n if each n-th block does not rotate queries and keys; 0 if all do.
    normalises_shares : bool, optional
        Whether the shares of chosen experts sum to 1; None if the architecture has no experts.
    gates : tuple of int
        Values of ``expert_gating_func`` that change nothing, or are read.
    has_latent : bool
        Whether keys and values are made from one vector, and the first blocks may have no experts.
    names : mapping of str to str
        Names of weights of a block that are others than those of most architectures.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    pairs_neighbours: bool = False
    scales_embedding: bool = False
    has_scales: bool = False
    has_softcaps: bool = False
    window_period: int | None = None
    wide_layers: int = 0
    says_parallel: bool = False
    unturned_period: int = 0
    normalises_shares: bool | None = None
    gates: tuple[int, ...] = (0, 1)
    has_latent: bool = False
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_experts(self) -> bool:
        """Whether the table may have experts."""
        return self.normalises_shares is not None


_LAYER_NORM = {"norm": "layer"}
_GEMMA = {"activation": "geglu"}
ARCHITECTURES = {
    "llama": Architecture(pairs_neighbours=True, window_period=0, normalises_shares=True),
    "granite": Architecture(pairs_neighbours=True, has_scales=True),
    "smollm3": Architecture(pairs_neighbours=True, unturned_period=4),
    "qwen2": Architecture(),
    "qwen3": Architecture(fields={"query_norm": "heads"}),
    "qwen3moe": Architecture(fields={"query_norm": "heads"}, normalises_shares=True),
    "olmoe": Architecture(fields={"query_norm": "whole"}, normalises_shares=False),
    "deepseek2": Architecture(
        pairs_neighbours=True, normalises_shares=False, gates=(0, 1, 2), has_latent=True
    ),
    "gpt-oss": Architecture(
        fields={"activation": "clamped_swiglu", "sinks": True},
        window_period=2,
        normalises_shares=True,
        gates=(0, 1, 3),
        names={"feed_forward_norm": "post_attention_norm"},
    ),
    "gemma": Architecture(fields=_GEMMA, scales_embedding=True),
    "gemma2": Architecture(
        fields={**_GEMMA, "result_norms": True},
        scales_embedding=True,
        has_softcaps=True,
        window_period=2,
        wide_layers=46,
    ),
    "gemma3": Architecture(
        fields={**_GEMMA, "result_norms": True, "query_norm": "heads", "local_rotary_base": 10000.0},
        scales_embedding=True,
        window_period=6,
        wide_layers=62,
    ),
    "phi3": Architecture(window_period=0),
    "phi2": Architecture(fields={**_LAYER_NORM, "activation": "gelu", "parallel": True, "shares_norm": True}),
    "gpt2": Architecture(fields={**_LAYER_NORM, "activation": "gelu", "positions": "learned"}),
    "bloom": Architecture(
        fields={**_LAYER_NORM, "activation": "gelu", "positions": "alibi", "embedding_norm": True}
    ),
    "falcon": Architecture(
        fields={**_LAYER_NORM, "activation": "gelu_erf", "parallel": True, "shares_norm": True}
    ),
    "gptneox": Architecture(fields={**_LAYER_NORM, "activation": "gelu_erf"}, says_parallel=True),
    "starcoder2": Architecture(fields={**_LAYER_NORM, "activation": "gelu"}),
    "stablelm": Architecture(fields=_LAYER_NORM),
    "olmo2": Architecture(fields={"query_norm": "whole", "input_norms": False, "result_norms": True}),
}
