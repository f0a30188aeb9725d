"""Caches of keys and values among the inputs and outputs of a network, and their shapes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import onnx

from pimflow.errors import ModelError, UnknownNameError, UsageError
from pimflow.zoo.language.graph import past_name, present_name
from pimflow.zoo.shapes import Shape, dims_of

_PAST = re.compile(re.escape(past_name(0, "PART")).replace("0", r"(\d+)").replace("PART", "(key|value)"))


def state_pairs(
    data: Iterable[onnx.ValueInfoProto],
    results: Iterable[onnx.ValueInfoProto],
    given: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """By input that is a cache, the output that is the cache with the tokens of the step.

    Names say it, ``past_key_values.N.key|value`` and ``present.N.key|value``, or ``past`` in one and
    ``present`` in the other; of the rest shapes do: as many outputs as inputs have four dimensions, of which
    the third alone is another, and they are in the same order.

    Parameters
    ----------
    given : mapping of str to str, optional
        Such pairs, which go before all others.

    Raises
    ------
    UnknownNameError
        For a name in `given` that is none.
    UsageError
        If two inputs are to become one output.
    """
    inputs, outputs = ({value.name: value for value in values} for values in (data, results))
    pairs = dict(given or {})
    for past, present in pairs.items():
        if past not in inputs:
            raise UnknownNameError("input", past, list(inputs))
        if present not in outputs:
            raise UnknownNameError("output", present, list(outputs))
    if len(set(pairs.values())) < len(pairs):
        raise UsageError("two caches become one output; give each an output of its own, as past=present")
    for name in inputs:
        match = _PAST.fullmatch(name)
        present = present_name(int(match[1]), match[2]) if match else name.replace("past", "present")
        if name not in pairs and present != name and present in outputs.keys() - {*pairs.values()}:
            pairs[name] = present
    pairs |= _pairs_by_shape(
        [value for name, value in inputs.items() if name not in pairs],
        [value for name, value in outputs.items() if name not in pairs.values()],
    )
    return {name: pairs[name] for name in inputs if name in pairs}


def _pairs_by_shape(
    data: Iterable[onnx.ValueInfoProto], results: Iterable[onnx.ValueInfoProto]
) -> dict[str, str]:
    """Inputs and outputs of four dimensions that differ in the third; none where their order is open."""
    caches, grown = ([value for value in values if len(_dims(value)) == 4] for values in (data, results))
    if len(caches) != len(grown):
        return {}
    for past, present in zip(caches, grown):
        before, after = _dims(past), _dims(present)
        same = [a == b or not (isinstance(a, int) and isinstance(b, int)) for a, b in zip(before, after)]
        longer = before[2] != after[2] or not before[2]
        if not (longer and all(each for axis, each in enumerate(same) if axis != 2)):
            return {}
    return {past.name: present.name for past, present in zip(caches, grown)}


def _dims(value: onnx.ValueInfoProto) -> list[int | str]:
    """Sizes of a value, and names of those that are open."""
    return [dim.dim_value or dim.dim_param for dim in value.type.tensor_type.shape.dim]


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
            kept = _dims(presents[pairs[name]])
            # One length throughout, or as many more afterwards as the step has tokens.
            grown = 0 if len(kept) == 4 and kept[2] and kept[2] == _dims(value)[2] else tokens
            length = dims[2] or context - grown
            if length + grown != context:
                raise ModelError(f"input '{name}' has {length} places; --context {length + grown} suits it")
            known[name] = (dims[0] or 1, dims[1] or 1, length, dims[3] or 1)
        elif None in dims:
            last = context if "mask" in name else tokens
            known[name] = tuple(
                size or (1 if axis == 0 and len(dims) > 1 else last) for axis, size in enumerate(dims)
            )
    return known
