"""Caches of keys and values among the inputs and outputs of a network, and their shapes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import onnx

from pimflow.errors import ModelError, UnknownNameError, UsageError
from pimflow.zoo.language.graph import past_name, present_name
from pimflow.zoo.shapes import Shape, dims_of

_PAST = re.compile(re.escape(past_name(0, "PART")).replace("0", r"(\d+)").replace("PART", "(key|value)"))


def state_pairs(
    inputs: Sequence[str], outputs: Sequence[str], given: Mapping[str, str] | None = None
) -> dict[str, str]:
    """By input that is a cache, the output that is the cache with the tokens of the step.

    Parameters
    ----------
    given : mapping of str to str, optional
        Such pairs, beside those whose names say it: ``past_key_values.N.key|value`` and
        ``present.N.key|value``.

    Raises
    ------
    UnknownNameError
        For a name in `given` that is none.
    """
    pairs = {}
    for name in inputs:
        if match := _PAST.fullmatch(name):
            present = present_name(int(match[1]), match[2])
            if present in outputs:
                pairs[name] = present
    for past, present in (given or {}).items():
        if past not in inputs:
            raise UnknownNameError("input", past, inputs)
        if present not in outputs:
            raise UnknownNameError("output", present, outputs)
        pairs[past] = present
    return pairs


def context_shapes(
    data: Iterable[onnx.ValueInfoProto],
    outputs: Iterable[onnx.ValueInfoProto],
    pairs: Mapping[str, str],
    context: int,
    shapes: Mapping[str, Shape],
) -> dict[str, Shape]:
    """Shapes for a step over caches of `context` places: `shapes`, and those that the model leaves open.

    A cache that grows is shorter by the tokens of the step: those are behind it. Masks are as long as the
    context; what else is open is one request of one token.

    Raises
    ------
    ModelError
        If a cache has not four dimensions, or is of another length.
    UsageError
        If the context is no longer than the step.
    """
    known, presents = dict(shapes), {value.name: value for value in outputs}
    values = {value.name: value for value in data}
    ids = values.get("input_ids")
    tokens = (known.get("input_ids") or (ids is not None and dims_of(ids)) or (1, 1))[-1] or 1
    if context <= tokens:
        raise UsageError(f"--context {context}: give more than the {tokens} of a step")
    for name, value in values.items():
        dims = dims_of(value)
        if name in known or dims is None:
            continue
        if name in pairs:
            if len(dims) != 4:
                raise ModelError(f"input '{name}' has {len(dims)} dimensions; a cache has four")
            places = value.type.tensor_type.shape.dim[2]
            kept = presents[pairs[name]].type.tensor_type.shape.dim
            same = len(kept) == 4 and bool(places.dim_param) and kept[2].dim_param == places.dim_param
            length = dims[2] or (context if same else context - tokens)
            if length not in (context, context - tokens):
                raise ModelError(f"input '{name}' has {length} places; --context {length} suits it")
            known[name] = (dims[0] or 1, dims[1] or 1, length, dims[3] or 1)
        elif None in dims:
            last = context if "mask" in name else tokens
            known[name] = tuple(
                size or (1 if axis == 0 and len(dims) > 1 else last) for axis, size in enumerate(dims)
            )
    return known
