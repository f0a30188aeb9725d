"""Decoders in folders as Hugging Face's transformers writes them: ``config.json`` and ``*.safetensors``.

Facts of architectures are those of transformers' classes of configurations and models.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from pimflow.errors import ModelError, one_line
from pimflow.zoo.language.decoder import BLOCK_PRODUCTS, Decoder, Shape
from pimflow.zoo.language.hf_config import Config, config_key, norm_epsilon, variant_fields
from pimflow.zoo.language.hf_types import MODEL_TYPES, ModelType
from pimflow.zoo.language.safetensors_file import StoredTensor, read_tensors


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
    config, tensors = Config(Path(name)), read_tensors(folder)
    kind = config.value("model_type", str, "")
    if kind not in MODEL_TYPES:
        raise ModelError(
            f"{config.where}: is a '{one_line(kind)[:40]}'; of folders, these kinds are supported: "
            f"{', '.join(MODEL_TYPES)}"
        )
    model = MODEL_TYPES[kind]
    layers, heads = (
        config.size(config_key(model, f"num_{part}")) for part in ("hidden_layers", "attention_heads")
    )
    hidden = config.size(config_key(model, "hidden_size"))
    head_size = config.size("head_dim", hidden // heads)
    names = _Names(model, tensors)
    has_head = f"{model.names['head']}.weight" in tensors
    fields = {**model.fields, **variant_fields(config, kind, model, hidden, head_size, layers)}
    longest = config.size(config_key(model, "max_position_embeddings"))
    decoder = Decoder(
        name=one_line(folder.name),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=config.size("num_key_value_heads", heads),
        head_size=head_size,
        feed_forward=config.size(
            config_key(model, "intermediate_size"), 4 * hidden if kind == "gpt2" else None
        ),
        vocabulary=names.tensor(f"{model.names['tokens']}.weight").shape[0],
        norm_epsilon=norm_epsilon(config, model),
        max_context=fields.pop("max_context", longest),
        tied=config.value("tie_word_embeddings", bool, model.tied and not has_head) or not has_head,
        biases=names.products_with_bias(),
        file=os.fspath(folder),
        source=config.where,
        **fields,
    )
    config.require_all_read()
    _require_tensors(decoder, names, config.where)
    return decoder


class _Names:
    """Where weights are in the tensors of a folder."""

    def __init__(self, model: ModelType, tensors: Mapping[str, StoredTensor]) -> None:
        prefix = model.names["tokens"].partition(".")[0] + "."
        # Base models are stored without the name of the part that they are of a larger one.
        self._bare = not any(name.startswith(prefix) for name in tensors)
        self.model, self.tensors, self._prefix = model, tensors, prefix

    def name(self, weight: str, expert: int | None = None) -> str:
        """The name of the tensor of a weight, of one expert if experts have it."""
        *block, part, kind = weight.split(".")
        name = self.model.names[part].format(expert)
        name = self.model.names["block"].format(block[1]) + name if block else name
        suffix = "bias" if kind == "bias" else "weight"
        return f"{name.removeprefix(self._prefix) if self._bare else name}.{suffix}"

    def names(self, weight: str, shape: Shape) -> list[str]:
        """The names of the tensors of a weight of `shape`: of experts, one for each."""
        numbers = range(shape[0]) if len(shape) == 3 else [None]
        return [self.name(weight, number) for number in numbers]

    def tensor(self, name: str) -> StoredTensor:
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

    def rows(self, decoder: Decoder, weight: str) -> np.ndarray | slice:
        """The outputs of a product in its tensor, which may have several products."""
        part = weight.split(".")[-2]
        queries, keys = decoder.heads * decoder.head_size, decoder.kv_heads * decoder.head_size
        names = self.model.names
        if part in ("query", "key", "value") and names["query"] == names["key"]:
            if self.model.by_head:
                index = ("query", "key", "value").index(part)
                heads = np.arange(3 * queries).reshape(decoder.heads, 3, decoder.head_size)
                return heads[:, index].reshape(-1)
            begin = {"query": 0, "key": queries, "value": queries + keys}[part]
            return slice(begin, begin + (queries if part == "query" else keys))
        if part in ("gate", "up") and names.get("gate") == names["up"]:
            begin = 0 if part == "gate" else decoder.feed_forward
            return slice(begin, begin + decoder.feed_forward)
        return slice(None)


def _require_tensors(decoder: Decoder, names: _Names, where: str) -> None:
    """Raise `ModelError` unless the tensors of a folder are the weights of `decoder`."""
    read: dict[str, int] = {}
    tensors = [
        (weight, shape[-2:], name)
        for weight, shape in decoder.weights().items()
        for name in names.names(weight, shape)
    ]
    for weight, shape, name in tensors:
        try:
            stored = names.tensor(name).shape
        except ModelError as error:
            raise ModelError(f"{where}: {error}") from None
        is_product = weight.endswith(".weight")
        expected = shape[::-1] if is_product and not names.model.transposed else shape
        axis = len(shape) - 1 if names.model.transposed or not is_product else 0
        rows = names.rows(decoder, weight)
        fits = len(stored) == len(expected) and stored[:axis] == expected[:axis]
        whole = isinstance(rows, slice) and rows.start is None
        if not fits or stored[axis + 1 :] != expected[axis + 1 :] or (whole and stored != expected):
            raise ModelError(f"{where}: tensor '{name}' has shape {stored}, not {expected}")
        read[name] = read.get(name, 0) + expected[axis]
        if read[name] > stored[axis]:
            raise ModelError(f"{where}: tensor '{name}' has shape {stored}, which is too small")
    ignored = (".inv_freq", ".masked_bias", ".attn.bias", ".attention.bias")  # made from the configuration
    unread = {name for name in names.tensors.keys() - read.keys() if not name.endswith(ignored)}
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
    model = MODEL_TYPES[Config(path).tree["model_type"]]
    names, shape = _Names(model, read_tensors(path)), decoder.weights()[name]
    if len(shape) == 3:
        result = np.empty(shape, np.float32)
        for expert, tensor in enumerate(names.names(name, shape)):
            result[expert] = names.tensor(tensor).values().T
        return result
    values, rows = names.tensor(names.name(name)).values(), names.rows(decoder, name)
    if name.endswith(".weight"):
        values = values[:, rows] if model.transposed else values[rows].T
    elif name.endswith(".bias"):
        values = values[rows]
    result = np.ascontiguousarray(values, np.float32)
    return result + np.float32(model.scale_offset) if name.endswith(".scale") else result


def storage_types(folder: str) -> str:
    """Types in which a folder stores weights; the most frequent first."""
    elements: dict[str, int] = {}
    for tensor in read_tensors(Path(folder)).values():
        elements[tensor.dtype] = elements.get(tensor.dtype, 0) + math.prod(tensor.shape)
    return ", ".join(sorted(elements, key=lambda dtype: -elements[dtype]))
