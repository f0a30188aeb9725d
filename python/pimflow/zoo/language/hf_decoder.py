"""Decoders in folders as Hugging Face's transformers writes them: ``config.json`` and ``*.safetensors``.

Facts of architectures are those of transformers' classes of configurations and models.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from pimflow.errors import ModelError, one_line
from pimflow.zoo.language.decoder import BLOCK_PRODUCTS, FEED_FORWARD_PRODUCTS, Decoder, Shape
from pimflow.zoo.language.hf_config import norm_epsilon, variant_fields
from pimflow.zoo.language.hf_config_file import Config, config_key
from pimflow.zoo.language.hf_quantized import QuantisedTensor, quantisation, with_quantised
from pimflow.zoo.language.hf_types import MODEL_TYPES, ModelType
from pimflow.zoo.language.safetensors_file import StoredTensor, read_tensors

Tensor = StoredTensor | QuantisedTensor

_FOURFOLD = ("gpt2", "bloom", "falcon")  # a feed-forward part is four times as wide, unless a key says it


def read_decoder(folder: Path) -> Decoder:
    """Read the decoder in a folder, without its weights.

    Raises
    ------
    ModelError
        If a file cannot be read, or the kind of model, a key of its configuration or a tensor is not
        supported.
    """
    try:
        changed = (folder / "config.json").stat().st_mtime_ns
    except OSError as error:
        raise ModelError(f"'{folder}': has no config.json: {error.strerror or error}") from None
    return _read_decoder(folder.resolve(), os.fspath(folder), changed)


@functools.lru_cache(maxsize=1)
def _read_decoder(folder: Path, name: str, _: int) -> Decoder:
    config = Config(Path(name))
    tensors = _folder_tensors(folder, config)
    kind = config.value("model_type", str, "")
    if kind not in MODEL_TYPES:
        raise ModelError(
            f"{config.where}: is a '{one_line(kind)[:40]}'; of folders, these kinds are supported: "
            f"{', '.join(MODEL_TYPES)}"
        )
    model = _model_type(config)
    layers, heads = (
        config.size(config_key(model, f"num_{part}")) for part in ("hidden_layers", "attention_heads")
    )
    hidden = config.size(config_key(model, "hidden_size"))
    head_size = config.size("head_dim", hidden // heads)
    names = _Names(model, tensors)
    has_head = f"{model.names['head']}.weight" in tensors
    longest = config.size(config_key(model, "max_position_embeddings"), model.max_context)
    sizes = {
        "kv_heads": config.size("num_key_value_heads", heads),
        "head_size": head_size,
        "max_context": longest,
        **model.fields,
        **variant_fields(config, kind, model, hidden, head_size, layers),
    }
    decoder = Decoder(
        name=one_line(folder.name),
        layers=layers,
        hidden=hidden,
        heads=heads,
        feed_forward=config.size(
            config_key(model, "intermediate_size"), 4 * hidden if kind in _FOURFOLD else None
        ),
        vocabulary=names.tensor(f"{model.names['tokens']}.weight").shape[0],
        norm_epsilon=norm_epsilon(config, model),
        tied=config.value("tie_word_embeddings", bool, model.tied and not has_head) or not has_head,
        biases=names.products_with_bias(),
        file=os.fspath(folder),
        source=config.where,
        **sizes,
    )
    config.require_all_read()
    _require_tensors(decoder, names, config.where)
    return replace(decoder, weight_types=_narrow_types(decoder, names))


def _folder_tensors(folder: Path, config: Config) -> dict[str, Tensor]:
    """The tensors of a folder, each product of a few bits as one; raises `ModelError`."""
    form = quantisation(config)
    try:
        return with_quantised(read_tensors(folder), form)
    except ModelError as error:
        raise error if str(folder) in str(error) else ModelError(f"{config.where}: {error}") from None


def _narrow_types(decoder: Decoder, names: _Names) -> dict[str, str]:
    """Types of the matrices that are stored in a few bits."""
    places = {
        name: names.place(decoder, name, shape).tensors
        for name, shape in decoder.weights().items()
        if len(shape) == 2
    }
    tensors = {name: names.tensor(stored[0]) for name, stored in places.items()}
    return {
        name: tensor.weight_type for name, tensor in tensors.items() if isinstance(tensor, QuantisedTensor)
    }


def _model_type(config: Config) -> ModelType:
    """The kind of a model, with the names of the weights that this model has."""
    model = MODEL_TYPES[config.tree["model_type"]]
    if model.has_latent and not config.value("q_lora_rank", int, 0):
        model = replace(model, names={**model.names, "query": model.names["whole_query"]})
    if model.has_latent:
        pairs = config.value("rope_interleave", bool, True)
        model = replace(model, pairs_neighbours=pairs)
    return model


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a weight is in a folder.

    Attributes
    ----------
    tensors : tuple of str
        Its tensor; of experts that are not joined, one for each.
    outputs : ndarray or slice
        Which of the outputs that a tensor has are those of the weight.
    inputs_first : bool
        Whether a product is stored as [inputs, outputs].
    """

    tensors: tuple[str, ...]
    shape: Shape
    outputs: np.ndarray | slice = field(default_factory=lambda: slice(None))
    inputs_first: bool = False


class _Names:
    """Where weights are in the tensors of a folder."""

    def __init__(self, model: ModelType, tensors: Mapping[str, Tensor]) -> None:
        prefix = model.names["tokens"].partition(".")[0] + "."
        # Base models are stored without the name of the part that they are of a larger one.
        self._bare = not any(name.startswith(prefix) for name in tensors)
        self.model, self.tensors, self._prefix = model, tensors, prefix

    def name(self, weight: str, expert: int | None = None) -> str:
        """The name of the tensor of a weight, of one expert if each has its own."""
        *block, part, kind = weight.split(".")
        names = self.model.names
        is_dense = expert is None and not self.model.joins_experts
        name = names[f"dense_{part}" if is_dense and f"dense_{part}" in names else part].format(expert)
        name = names["block"].format(block[1]) + name if block else name
        suffix = ".bias" if kind == "bias" else ".weight"
        if part in ("sinks", "router_correction"):
            suffix = ""
        elif self.model.joins_experts and part in FEED_FORWARD_PRODUCTS:
            suffix = "_bias" if kind == "bias" else ""
        return f"{name.removeprefix(self._prefix) if self._bare else name}{suffix}"

    def tensor(self, name: str) -> Tensor:
        """A tensor by its name; raises `ModelError` if there is none."""
        name = name.removeprefix(self._prefix) if self._bare else name
        if name not in self.tensors:
            raise ModelError(
                f"a file of weights has no tensor '{name}'; it is incomplete, or of another kind"
            )
        return self.tensors[name]

    def products_with_bias(self) -> frozenset[str]:
        """Products with a bias, by the tensors of the first block and of the output."""
        parts = [f"layers.0.{name}" for name in BLOCK_PRODUCTS if name in self.model.names]
        biased = {part for part in (*parts, "head") if self.name(f"{part}.bias") in self.tensors}
        return frozenset(part.rpartition(".")[2] for part in biased)

    def place(self, decoder: Decoder, weight: str, shape: Shape) -> _Place:
        """Where a weight of `shape` is."""
        part, kind = weight.split(".")[-2:]
        if kind in ("table", "scale") or part in ("sinks", "router_correction"):
            return _Place(tensors=(self.name(weight),), shape=shape)
        inputs, (count, outputs) = shape[-2:][0], self._outputs(decoder, part, shape[-1])
        if part in ("key_heads", "value_heads"):
            latent = decoder.latent
            assert latent is not None
            count = decoder.heads * (decoder.head_size - decoder.rotation_size + latent.value_size)
            return _Place(tensors=(self.name(weight),), shape=(count, latent.rank))
        is_product = kind == "weight"
        if len(shape) == 3 and self.model.joins_experts:
            stored = (shape[0], inputs, count) if is_product else (shape[0], count)
            return _Place(tensors=(self.name(weight),), shape=stored, outputs=outputs, inputs_first=True)
        turned = self.model.transposed
        stored = ((inputs, count) if turned else (count, inputs)) if is_product else (count,)
        numbers = range(shape[0]) if len(shape) == 3 else [None]
        tensors = tuple(self.name(weight, number) for number in numbers)
        return _Place(tensors=tensors, shape=stored, outputs=outputs, inputs_first=turned)

    def _outputs(self, decoder: Decoder, part: str, count: int) -> tuple[int, np.ndarray | slice]:
        """How many outputs the tensor of a product has, and which of them are those of the product."""
        queries, keys = decoder.heads * decoder.head_size, decoder.kv_heads * decoder.head_size
        names = self.model.names
        if part in ("query", "key", "value") and names["query"] == names.get("key"):
            if self.model.by_head:
                index = ("query", "key", "value").index(part)
                heads = np.arange(3 * queries).reshape(decoder.heads, 3, decoder.head_size)
                return 3 * queries, heads[:, index].reshape(-1)
            begin = {"query": 0, "key": queries, "value": queries + keys}[part]
            return queries + 2 * keys, slice(begin, begin + count)
        if part in ("gate", "up") and names.get("gate") == names["up"]:
            begin = ("gate", "up").index(part)
            if self.model.joins_experts:
                return 2 * count, slice(begin, None, 2)
            return 2 * count, slice(begin * count, (begin + 1) * count)
        if self.model.pairs_neighbours and part in ("query", "latent"):
            return count, _halves(decoder, decoder.head_size if part == "query" else count, count)
        return count, slice(None)


def _halves(decoder: Decoder, size: int, count: int) -> np.ndarray:
    """Outputs of heads of `size`, whose rotated elements lie in pairs, in the order of halves."""
    still = size - decoder.rotation_size
    order = [*range(still), *range(still, size, 2), *range(still + 1, size, 2)]
    return np.arange(count).reshape(-1, size)[:, order].reshape(-1)


def _require_tensors(decoder: Decoder, names: _Names, where: str) -> None:
    """Raise `ModelError` unless the tensors of a folder are the weights of `decoder`."""
    read: set[str] = set()
    for weight, shape in decoder.weights().items():
        place = names.place(decoder, weight, shape)
        for name in place.tensors:
            try:
                stored = names.tensor(name).shape
            except ModelError as error:
                raise ModelError(f"{where}: {error}") from None
            if stored != place.shape:
                raise ModelError(f"{where}: tensor '{name}' has shape {stored}, not {place.shape}")
        read.update(place.tensors)
    ignored = (".inv_freq", ".masked_bias", ".attn.bias", ".attention.bias")  # made from the configuration
    unread = {name for name in names.tensors.keys() - read if not name.endswith(ignored)}
    unread -= {names.name("head.weight")} if decoder.tied else set()
    if unread:
        raise ModelError(
            f"{where}: has a tensor '{one_line(min(unread))[:80]}', which is not supported but changes the "
            "results"
        )


def weight(folder: str, name: str) -> np.ndarray:
    """Read a weight by its name in `Decoder.weights`, in fp32."""
    path = Path(folder)
    decoder = read_decoder(path)
    config, shape = Config(path), decoder.weights()[name]
    names = _Names(_model_type(config), _folder_tensors(path, config))
    place, part = names.place(decoder, name, shape), name.split(".")[-2]
    stored = [names.tensor(tensor).values() for tensor in place.tensors]
    values = stored[0][None] if len(stored) == 1 else np.stack(stored)  # one stays mapped
    if part in ("key_heads", "value_heads"):
        still = decoder.head_size - decoder.rotation_size
        heads = values[0].reshape(decoder.heads, -1, place.shape[1])
        result = heads[:, :still] if part == "key_heads" else heads[:, still:].swapaxes(1, 2)
    elif name.endswith(".weight") and not place.inputs_first:
        result = values[:, place.outputs].swapaxes(1, 2).reshape(shape)
    else:
        result = values[..., place.outputs].reshape(shape)
    result = np.ascontiguousarray(result, np.float32)
    return result + np.float32(names.model.scale_offset) if name.endswith(".scale") else result


def storage_types(folder: str) -> str:
    """Types in which a folder stores weights; the most frequent first."""
    elements: dict[str, int] = {}
    for tensor in _folder_tensors(Path(folder), Config(Path(folder))).values():
        elements[tensor.dtype] = elements.get(tensor.dtype, 0) + math.prod(tensor.shape)
    return ", ".join(sorted(elements, key=lambda dtype: -elements[dtype]))
