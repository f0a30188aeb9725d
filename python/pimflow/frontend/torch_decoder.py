"""A decoder with its cache, from a program of PyTorch: caches as inputs, or as buffers that it writes to."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from pimflow import zoo
from pimflow.errors import ModelError, one_line
from pimflow.frontend import perturbed_torch, torch_program
from pimflow.frontend.exported_decoder import MASK, PLACES, TOKENS, UNREAD, ExportedDecoder, ExportedReference
from pimflow.frontend.reference import Fp16Storage, Run
from pimflow.frontend.torch_caches import program_runner
from pimflow.frontend.torch_program import TorchProgram

_RANKS = {TOKENS: (1, 2), MASK: (2,), PLACES: (0, 1, 2)}
_WORDS = {MASK: ("mask",), PLACES: ("position", "pos", "place"), TOKENS: ("input_ids", "ids", "token")}


@dataclass(frozen=True, kw_only=True)
class TorchDecoder(ExportedDecoder):
    """A decoder in PyTorch. A step is one token, of one sequence."""

    model: TorchProgram

    def step(self, context: int, tokens: int, batch: int) -> TorchProgram:
        """The program; lengths that it leaves open follow from those of the step."""
        return self.model

    def run(self) -> Run:
        """A function that runs the program by PyTorch, with its own shapes.

        Its guards are those of the example: with a cache that grows, a text begins with an empty one.
        """
        model = self.model
        return program_runner(model.program, model.inputs, model.buffers, check_guards=False)

    def reference_with_roundings(
        self, tokens: int, layers: frozenset[str]
    ) -> Callable[[], ExportedReference]:
        """Gives references that round results of `layers` at random."""
        model, stored = self.model, Fp16Storage(layers=layers)
        run = perturbed_torch.reference_with_roundings(
            lambda: model.program, model.inputs, model.buffers, stored
        )
        return lambda: ExportedReference(self, run)


def open_decoder(path: str | os.PathLike[str]) -> TorchDecoder:
    """Read a decoder in PyTorch.

    Raises
    ------
    UsageError
        If PyTorch is not installed.
    ModelError, UnsupportedOpError
        If it cannot be read or imported, has no cache, or has inputs that are none of a decoder's.
    """
    program, where = torch_program.load(path), f"'{os.fspath(path)}'"
    inputs = {value.name: value for value in program.data}
    outputs = {value.name: value for value in program.outputs}
    presents = zoo.state_pairs(program.data, program.outputs, program.caches)
    if not presents:
        raise ModelError(f"{where}: no input or buffer is a cache to which tokens are written")
    dims = {name: zoo.dims_of(value) or () for name, value in inputs.items()}
    roles = {name: _role(program, inputs[name], where) for name in inputs if name not in presents}
    by_role = {role: name for name, role in roles.items()}
    past, present = next(iter(presents.items()))
    length = dims[past][2]
    grows = length is None or (zoo.dims_of(outputs[present]) or ())[2:3] != (length,)
    if TOKENS not in by_role:
        raise ModelError(f"{where}: no input is the tokens of a step, as 'input_ids'")
    if PLACES not in by_role:
        raise ModelError(
            f"{where}: no input is the position of a step's token; export it with 'position_ids'"
        )
    if length is not None and grows and MASK not in by_role:
        raise ModelError(
            f"{where}: attends to all {length} places of its caches, used or not; export it with "
            "'attention_mask', or with caches of an open length"
        )
    _require_single_token(dims, roles, presents, where)
    logits, vocabulary = _logits(outputs, presents, where)
    return TorchDecoder(
        model=program,
        name=one_line(Path(path).stem),
        cache_dims={name: (dims[name][1] or 1, dims[name][3] or 1) for name in presents},
        presents=presents,
        roles=roles,
        vocabulary=vocabulary,
        uses=1,
        tokens=1,
        context=None if length is None else length + grows,
        counted=not grows,
        grows=grows,
        kinds={name: _dtype(value) for name, value in inputs.items()},
        ranks={name: len(dims[name]) for name in inputs},
        outputs=tuple(outputs),
        logits=logits,
        max_batch=1,
    )


def _role(program: TorchProgram, value: onnx.ValueInfoProto, where: str) -> str:
    """What an input that is no cache is for; raises `ModelError` if that is unknown."""
    name, rank = value.name, len(zoo.dims_of(value) or ())
    if not program.reads(name):
        return UNREAD
    if name in program.buffers:
        raise ModelError(f"{where}: has a state '{program.buffers[name]}' that is no cache of attention")
    is_integer = _dtype(value).kind in "iub"
    for role, words in _WORDS.items():
        if is_integer and rank in _RANKS[role] and any(word in name for word in words):
            return role
    raise ModelError(
        f"{where}: input '{name}' is none of a decoder's: 'input_ids', 'attention_mask' [1, places] and "
        "'position_ids', integers, and caches"
    )


def _require_single_token(
    dims: dict[str, tuple[int | None, ...]], roles: dict[str, str], presents: dict[str, str], where: str
) -> None:
    """Raise `ModelError` unless a step is one token of one sequence."""
    for name, role in roles.items():
        if role in (TOKENS, PLACES) and any(size not in (1, None) for size in dims[name]):
            raise ModelError(f"{where}: input '{name}' has more than one token; export a step of one token")
    for name in presents:
        if len(dims[name]) != 4 or dims[name][0] not in (1, None) or None in (dims[name][1], dims[name][3]):
            raise ModelError(f"{where}: cache '{name}' is not [1, heads, tokens, head_size]")


def _logits(outputs: dict[str, onnx.ValueInfoProto], presents: dict[str, str], where: str) -> tuple[str, int]:
    """Name of the output with logits, and the size of the vocabulary."""
    for name, value in outputs.items():
        dims = zoo.dims_of(value) or ()
        if name not in presents.values() and len(dims) == 3 and dims[2] is not None:
            return name, dims[2]
    raise ModelError(f"{where}: no output is logits, [1, tokens, vocabulary]")


def _dtype(value: onnx.ValueInfoProto) -> np.dtype:
    return np.dtype(helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
