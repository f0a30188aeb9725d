"""The file ``config.json`` of Hugging Face folders: typed access to its keys, none of which is ignored."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from pimflow.errors import ModelError, one_line
from pimflow.zoo.language.hf_types import ModelType

# Keys without effect on inference, or on a model that is read from its weights.
_WITHOUT_EFFECT = frozenset(
    [
        *("_attn_implementation_autoset", "_name_or_path", "activation_dropout", "architectures"),
        *("aux_loss_alpha", "attention_dropout", "attn_pdrop", "auto_map", "bos_token_id"),
        *("classifier_dropout", "decoder_start_token_id", "dropout", "dtype", "embd_pdrop", "embed_dropout"),
        *("embedding_dropout", "ep_size", "eos_token_id", "hidden_dropout", "id2label", "init_std"),
        *("initial_context_length", "initializer_range", "is_decoder", "label2id", "layerdrop"),
        *("layer_norm_elementwise_affine", "max_window_layers", "model_type", "n_ctx"),
        *("original_max_position_embeddings", "output_attentions", "output_hidden_states"),
        *("output_router_logits", "pad_token_id", "pretraining_tp", "problem_type"),
        *("reorder_and_upcast_attn", "resid_pdrop", "residual_dropout", "return_dict"),
        *("router_aux_loss_coef", "router_jitter_noise", "seq_aux", "slow_but_exact", "summary_activation"),
        *("summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
        *("task_specific_params", "torch_dtype", "transformers_version", "use_cache", "vocab_size"),
        *("_remove_final_layer_norm", "hidden_act", "cache_implementation", "qk_layernorm_eps"),
    ]
)


class Config:
    """The configuration of a folder; keys that are not read are refused."""

    def __init__(self, folder: Path) -> None:
        self.where = f"'{folder}'"
        try:
            tree = json.loads((folder / "config.json").read_bytes())
        except OSError as error:
            raise ModelError(
                f"{self.where}: has no config.json that can be read: {error.strerror or error}"
            ) from None
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{self.where}: config.json is no JSON: {one_line(str(error))[:80]}") from None
        if not isinstance(tree, dict):
            raise ModelError(f"{self.where}: config.json is no JSON object")
        self.tree: dict[str, Any] = tree
        self._read = set(_WITHOUT_EFFECT)

    def value(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """A value, or `default` for none or null; raises `ModelError` if it is of another type."""
        self._read.add(name)
        value = self.tree.get(name)
        if value is None:
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind in (int, float)):
            raise ModelError(f"{self.where}: config.json has a {type(value).__name__} as {name}")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """A size; raises `ModelError` if it is none."""
        value = self.value(name, int, default)
        if value is None or value < 1:
            raise ModelError(f"{self.where}: config.json has no {name}, a number from 1 on")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number; raises `ModelError` if it is none."""
        value = self.value(name, float, default)
        if value is None or not 0 < value < math.inf:
            raise ModelError(f"{self.where}: config.json has no {name}, a finite number above zero")
        return float(value)

    def require(self, name: str, *neutral: object) -> None:
        """Raise `ModelError` if a key has another value than the `neutral` ones, which change nothing."""
        self._read.add(name)
        value = self.tree.get(name)
        if value is not None and value not in neutral:
            raise ModelError(
                f"{self.where}: config.json has {one_line(str(value))[:40]} as {name}, which is not supported"
            )

    def require_all_read(self) -> None:
        """Raise `ModelError` if there is a key that nothing has read."""
        if unread := sorted(self.tree.keys() - self._read):
            raise ModelError(
                f"{self.where}: config.json has the key '{one_line(unread[0])[:80]}', which is not supported "
                "but may change the results"
            )


def config_key(model: ModelType, name: str) -> str:
    """The name of a size in the configuration."""
    return model.sizes.get(name, name)
