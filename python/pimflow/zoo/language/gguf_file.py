"""Decoders in GGUF files: sizes and weights of the Llama family, dequantised by the `gguf` library.

Quantised blocks are converted to fp32 when they are read. For rotary positions, files store rows of queries
and keys such that neighbouring rows are a complex number; here the halves of a head are, as in `Decoder`.
"""

from __future__ import annotations

import functools
import math
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pimflow.errors import ModelError, one_line
from pimflow.zoo.language.decoder import Decoder
from pimflow.zoo.language.gguf_header import GgufTensor, read_header

Value = TypeVar("Value")
_FAMILY = "llama"
# Names in the file of the weights of a block, and of all others.
_BLOCK = {
    "attention_norm.scale": "attn_norm",
    "query.weight": "attn_q",
    "key.weight": "attn_k",
    "value.weight": "attn_v",
    "attention.weight": "attn_output",
    "feed_forward_norm.scale": "ffn_norm",
    "gate.weight": "ffn_gate",
    "up.weight": "ffn_up",
    "down.weight": "ffn_down",
}
_OTHER = {"tokens.table": "token_embd", "norm.scale": "output_norm", "head.weight": "output"}


def read_decoder(path: Path) -> Decoder:
    """Read the decoder in a file, without its weights.

    Raises
    ------
    ModelError
        If the library is not installed, the file cannot be read or is of another family, the angles of its
        positions are scaled, or it has tensors that are not supported.
    """
    file, where = open_file(path), f"'{path}'"
    _require_family(file, where)

    def size(name: str, default: int | None = None) -> int:
        """A size of the family in the file's table; raises `ModelError` if it is none."""
        value = file.field(f"{_FAMILY}.{name}", int, default)
        if value is None or value < 1:
            raise ModelError(f"{where}: has no {_FAMILY}.{name}, a number from 1 on; it is incomplete")
        return value

    def number(name: str, default: float) -> float:
        """A positive number of the family in the file's table; raises `ModelError` if it is none."""
        value = file.field(f"{_FAMILY}.{name}", float, default)
        if value is None or not 0 < value < math.inf:
            raise ModelError(f"{where}: {_FAMILY}.{name} is {value}, no finite number above zero")
        return value

    blocks = size("block_count")
    if blocks * len(_BLOCK) > len(file.tensors):
        raise ModelError(f"{where}: has too few tensors for {blocks} blocks; it is incomplete")
    heads, hidden = size("attention.head_count"), size("embedding_length")
    head_size = size("attention.key_length", hidden // heads)
    scaling = file.field(f"{_FAMILY}.rope.scaling.type", str, "none")
    has_scaled_angles = scaling != "none" or "rope_freqs.weight" in file.tensors
    experts = file.field(f"{_FAMILY}.expert_count", int, 0)
    if has_scaled_angles or size("rope.dimension_count", head_size) != head_size or experts:
        raise ModelError(
            f"{where}: has positions with scaled angles, heads turned in part, or experts: none is supported"
        )
    decoder = Decoder(
        name=one_line(path.stem),
        layers=blocks,
        hidden=hidden,
        heads=heads,
        kv_heads=size("attention.head_count_kv", heads),
        head_size=head_size,
        feed_forward=size("feed_forward_length"),
        vocabulary=len(file.array("tokenizer.ggml.tokens", str)) or file.tensor("token_embd.weight").shape[1],
        norm_epsilon=number("attention.layer_norm_rms_epsilon", 1e-5),
        rotary_base=number("rope.freq_base", 10000.0),
        max_context=size("context_length"),
        tied="output.weight" not in file.tensors,
        file=os.fspath(path.resolve()),
        source=where,
    )
    _require_tensors(file, decoder)
    return decoder


def _require_family(file: GgufFile, where: str) -> None:
    family = file.field("general.architecture", str)
    if family != _FAMILY:
        raise ModelError(
            f"{where}: is a '{family}'; of GGUF files, those of the family '{_FAMILY}' are supported"
        )


def _require_tensors(file: GgufFile, decoder: Decoder) -> None:
    """Raise `ModelError` unless the tensors of `file` are the weights of `decoder`."""
    where = decoder.source
    for name, shape in decoder.weights().items():
        tensor_shape = file.tensor(_tensor_name(name)).shape
        # In the library, the fastest axis is the first: inputs of a product, values of a row.
        expected = shape[::-1] if name.endswith(".table") else shape
        if tensor_shape != expected:
            raise ModelError(
                f"{where}: tensor '{_tensor_name(name)}' has shape {tensor_shape}, not {expected}"
            )
    if unsupported := sorted(file.tensors.keys() - set(map(_tensor_name, decoder.weights()))):
        raise ModelError(
            f"{where}: has a tensor '{unsupported[0]}', which is not supported but changes the results"
        )


def weight(path: str, name: str) -> np.ndarray:
    """Read a weight by its name in `Decoder.weights`, in fp32."""
    file = open_file(Path(path))
    values = file.tensor(_tensor_name(name)).values(path)
    if name.endswith((".query.weight", ".key.weight")):
        heads = file.fields[f"{_FAMILY}.attention.head_count"]
        if name.endswith(".key.weight"):
            heads = file.fields.get(f"{_FAMILY}.attention.head_count_kv", heads)
        pairs = values.reshape(heads, -1, 2, values.shape[1])
        values = pairs.swapaxes(1, 2).reshape(values.shape)
    return np.ascontiguousarray(values.T if name.endswith(".weight") else values)


def storage_types(path: str) -> str:
    """Types in which a file stores weights, such as ``Q4_1, Q8_0, F32``; the most frequent first."""
    elements: Counter[str] = Counter()
    for tensor in open_file(Path(path)).tensors.values():
        elements[tensor.kind.name] += math.prod(tensor.shape)
    return ", ".join(name for name, _ in elements.most_common())


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    """The header of a file; unlike the library's reader, it does not hold hundreds of megabytes of arrays.

    Attributes
    ----------
    path : Path
    fields : dict of str to object
        Table of metadata.
    tensors : dict of str to GgufTensor
        By name in the file.
    """

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def field(self, name: str, kind: type[Value], default: Value | None = None) -> Value | None:
        """A value of the file's table, or `default`; raises `ModelError` if it is of another type."""
        value = self.fields.get(name, default)
        if kind is float and type(value) is int:
            value = float(value)
        if value is not None and type(value) is not kind:
            raise ModelError(f"'{self.path}': {name} is a {type(value).__name__}, not a {kind.__name__}")
        return value

    def array(self, name: str, kind: type[Value]) -> list[Value]:
        """An array of the file's table, empty without one; raises `ModelError` as `field`."""
        values = self.field(name, list) or []
        if any(type(value) is not kind for value in values):
            raise ModelError(f"'{self.path}': {name} is no array of {kind.__name__}")
        return values

    def tensor(self, name: str) -> GgufTensor:
        """A tensor by its name in the file; raises `ModelError` if there is none."""
        if name not in self.tensors:
            raise ModelError(f"'{self.path}': has no tensor '{name}'; it is incomplete, or of another family")
        return self.tensors[name]


def open_file(path: Path) -> GgufFile:
    """Read the header of a file; raises `ModelError`. The last one is cached."""
    try:
        return _open_file(os.fspath(path), path.stat().st_mtime_ns)
    except ImportError:
        raise ModelError(
            f"'{path}': the library gguf reads such files; pip install 'pimflow[gguf]'"
        ) from None
    except OSError as error:
        raise ModelError(f"'{path}': cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ModelError(f"'{path}': is not a GGUF file, or is damaged: a text is no UTF-8") from None
    except (ValueError, KeyError, OverflowError) as error:
        raise ModelError(f"'{path}': is not a GGUF file, or is damaged: {error}") from None


@functools.lru_cache(maxsize=1)
def _open_file(path: str, _: int) -> GgufFile:
    fields, tensors = read_header(path)
    return GgufFile(path=Path(path), fields=fields, tensors=tensors)


def _tensor_name(name: str) -> str:
    if name in _OTHER:
        return f"{_OTHER[name]}.weight"
    _, layer, weight_name = name.split(".", 2)
    return f"blk.{layer}.{_BLOCK[weight_name]}.weight"
