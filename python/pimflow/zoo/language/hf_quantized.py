"""Weights of a few bits in Hugging Face folders: GPTQ and AWQ, as ``quantization_config`` says.

A product has tensors ``qweight``, ``qzeros`` and ``scales`` in place of ``weight``, and in GPTQ ``g_idx``.
Layouts are those of AutoGPTQ (``qlinear_cuda.py``) and AutoAWQ (``gemm.py``): of both, weights are
[inputs, outputs], and inputs share a scale and a zero in groups. GPTQ packs along inputs, lowest bits first,
and its zeros along outputs; AWQ packs both along outputs, eight columns a word in an order of its own. The
first form of GPTQ's files stores zeros less one; files that say so of symmetric weights, but do not, are read
as they mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pimflow.errors import ModelError, one_line
from pimflow.weight_types import group_type
from pimflow.zoo.language.hf_config_file import Config
from pimflow.zoo.language.safetensors_file import StoredTensor

KEY = "quantization_config"
METHODS = ("gptq", "awq")
WORD_BITS = 32
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each nibble of a word, the lowest first
_BITS = {"gptq": (4, 8), "awq": (4,)}
_NEUTRAL = {"zero_point": (True,), "version": ("gemm", "GEMM"), "checkpoint_format": ("gptq", "gptq_v2")}


@dataclass(frozen=True, kw_only=True)
class Quantisation:
    """What a configuration says of the products that are stored in a few bits.

    Attributes
    ----------
    method : str
        One of `METHODS`.
    group : int
        Inputs that share a scale; 0 for all.
    symmetric : bool
        Whether zeros are in the middle of the range.
    zero_offset : int
        What is added to stored zeros.
    """

    method: str
    bits: int
    group: int
    symmetric: bool
    zero_offset: int

    @property
    def middle(self) -> int:
        """The zero of symmetric weights."""
        return 1 << (self.bits - 1)


def quantisation(config: Config) -> Quantisation | None:
    """What a configuration says of narrow weights, None if nothing; raises `ModelError`."""
    table = config.value(KEY, dict)
    if table is None:
        return None
    where = f"{config.where}: {KEY}"
    method = table.get("quant_method")
    if method not in METHODS:
        raise ModelError(
            f"{where} has the method '{one_line(str(method))[:40]}'; of folders, "
            f"{' and '.join(METHODS)} are read"
        )
    for name, values in _NEUTRAL.items():
        if table.get(name, values[0]) not in values:
            raise ModelError(
                f"{where} has {one_line(str(table[name]))[:40]} as {name}, which is not supported"
            )
    bits, group = table.get("bits"), table.get("group_size", -1)
    if type(bits) is not int or bits not in _BITS[method]:
        raise ModelError(f"{where}: {method} of {one_line(str(bits))[:40]} bits is not supported")
    if type(group) is not int or (group < 1 and group != -1):
        raise ModelError(f"{where} has {one_line(str(group))[:40]} as group_size, which is no size")
    is_first_form = method == "gptq" and table.get("checkpoint_format", "gptq") == "gptq"
    return Quantisation(
        method=method,
        bits=bits,
        group=max(group, 0),
        symmetric=method == "gptq" and table.get("sym", True) is True,
        zero_offset=int(is_first_form),
    )


@dataclass(frozen=True, kw_only=True)
class QuantisedTensor:
    """A product whose weights take a few bits, seen as one tensor [outputs, inputs].

    Attributes
    ----------
    parts : mapping of str to StoredTensor
        Its tensors by the last part of their names.
    """

    name: str
    quantisation: Quantisation
    parts: Mapping[str, StoredTensor]

    @property
    def dtype(self) -> str:
        """The type as reports name it."""
        return f"{self.quantisation.method} {self.weight_type}"

    @property
    def weight_type(self) -> str:
        """The type in `weight_types.WEIGHT_TYPES`."""
        form = self.quantisation
        return group_type(form.bits, form.group or self.shape[1], zeros=not form.symmetric)

    @property
    def shape(self) -> tuple[int, ...]:
        """Outputs and inputs."""
        form, (rows, columns) = self.quantisation, self.parts["qweight"].shape
        per_word = WORD_BITS // form.bits
        return (columns, rows * per_word) if form.method == "gptq" else (columns * per_word, rows)

    def check(self) -> None:
        """Raise `ModelError` unless its parts fit one another."""
        form, stored = self.quantisation, {name: part.shape for name, part in self.parts.items()}
        if any(len(stored.get(name, ())) != 2 for name in ("qweight", "qzeros", "scales")):
            raise ModelError(f"tensor '{self.name}.qweight' has no qzeros and scales that fit it")
        outputs, inputs = self.shape
        groups = math.ceil(inputs / form.group) if form.group else 1
        expected = {"scales": (groups, outputs), "qzeros": (groups, outputs * form.bits // WORD_BITS)}
        expected |= {"g_idx": (inputs,)} if "g_idx" in stored else {}
        for name, shape in expected.items():
            if stored[name] != shape:
                raise ModelError(f"tensor '{self.name}.{name}' has shape {stored[name]}, not {shape}")

    def values(self) -> np.ndarray:
        """The weights in fp32; raises `ModelError`."""
        form, (outputs, inputs) = self.quantisation, self.shape
        unpack = _by_awq if form.method == "awq" else _along_last
        words = self.parts["qweight"].values()
        if form.method == "awq":
            steps = _by_awq(words, form.bits)
        else:
            steps = _along_last(words.T, form.bits).T
        zeros = unpack(self.parts["qzeros"].values(), form.bits).astype(np.int32) + form.zero_offset
        if form.symmetric:
            if not (np.ptp(zeros) == 0 and zeros.flat[0] - form.middle in (0, form.zero_offset)):
                raise ModelError(f"tensor '{self.name}.qzeros' is not that of symmetric weights")
            zeros = np.full_like(zeros, form.middle)
        group_of_input = self._groups(inputs, len(zeros))
        scales = self.parts["scales"].values().astype(np.float32)
        result = np.empty((outputs, inputs), np.float32)
        for group in range(len(zeros)):  # the weights of one group at a time: intermediate results stay small
            members = np.flatnonzero(group_of_input == group)
            result[:, members] = ((steps[members] - zeros[group]) * scales[group]).T
        return result

    def _groups(self, inputs: int, groups: int) -> np.ndarray:
        """The group of each input."""
        if "g_idx" in self.parts:
            indices = np.asarray(self.parts["g_idx"].values())
            if indices.min(initial=0) < 0 or indices.max(initial=0) >= groups:
                raise ModelError(
                    f"tensor '{self.name}.g_idx' names a group beyond the {groups} of its scales"
                )
            return indices
        return np.arange(inputs) // (self.quantisation.group or inputs)


def _along_last(words: np.ndarray, bits: int) -> np.ndarray:
    """Small unsigned integers of words, along the last axis, the lowest bits first."""
    shifts = np.arange(0, WORD_BITS, bits, dtype=np.uint32)
    parts = (np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return parts.reshape(*words.shape[:-1], -1).astype(np.int32)


def _by_awq(words: np.ndarray, bits: int) -> np.ndarray:
    """The same, in AWQ's order of columns."""
    parts = _along_last(words, bits).reshape(*words.shape, len(_AWQ_COLUMNS))
    columns = np.empty_like(parts)
    columns[..., list(_AWQ_COLUMNS)] = parts
    return columns.reshape(*words.shape[:-1], -1)


def with_quantised(
    tensors: Mapping[str, StoredTensor], form: Quantisation | None
) -> dict[str, StoredTensor | QuantisedTensor]:
    """The tensors of a folder, each product of a few bits as one; raises `ModelError`."""
    result: dict[str, StoredTensor | QuantisedTensor] = dict(tensors)
    for name in [name for name in tensors if name.endswith(".qweight")] if form else ():
        product = name.removesuffix(".qweight")
        kinds = [kind for kind in ("qweight", "qzeros", "scales", "g_idx") if f"{product}.{kind}" in tensors]
        assert form is not None
        parts = {kind: tensors[f"{product}.{kind}"] for kind in kinds}
        tensor = QuantisedTensor(name=product, quantisation=form, parts=parts)
        tensor.check()
        for kind in kinds:
            del result[f"{product}.{kind}"]
        result[f"{product}.weight"] = tensor
    return result
