"""Caches of keys and values among the inputs and outputs of a network, and their shapes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import onnx

from pimflow.errors import ModelError, UnknownNameError, UsageError
from pimflow.zoo.language.graph_builder import past_name, present_name
from pimflow.zoo.shapes import Shape, dims_of

_PARTS = "((?:key|value)(?:_scale)?)"
_PAST = re.compile(re.escape(past_name(0, "PART")).replace("0", r"(\d+)").replace("PART", _PARTS))


def state_pairs(
    data: Iterable[onnx.ValueInfoProto],
    results: Iterable[onnx.ValueInfoProto],
    explicit_pairs: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """By input that is a cache, the output that is the cache with the tokens of the step appended.

    Pairs are found by their names: ``past_key_values.N.key|value`` and ``present.N.key|value``, the same of
    their scales (``key_scale``), or ``past`` in one name and ``present`` in the other. Remaining ones are
    found by their shapes: if as many outputs as inputs have four dimensions, and in the same order they
    differ only in the third, they are pairs.

    Raises
    ------
    UnknownNameError
        For a name in `explicit_pairs` that is no input or output.
    UsageError
        If two inputs have the same output.
    """
    inputs, outputs = ({value.name: value for value in values} for values in (data, results))
    pairs = dict(explicit_pairs or {})
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
    """Inputs and outputs of four dimensions that differ only in the third; empty if they do not match."""
    caches, grown = ([value for value in values if len(_dims(value)) == 4] for values in (data, results))
    if len(caches) != len(grown):
        return {}
    for past, present in zip(caches, grown):
        before, after = _dims(past), _dims(present)
        equal_axes = [
            a == b or not (isinstance(a, int) and isinstance(b, int)) for a, b in zip(before, after)
        ]
        is_longer = before[2] != after[2] or not before[2]
        if not (is_longer and all(is_equal for axis, is_equal in enumerate(equal_axes) if axis != 2)):
            return {}
    return {past.name: present.name for past, present in zip(caches, grown)}


def _dims(value: onnx.ValueInfoProto) -> list[int | str]:
    """Sizes of a value; of a dynamic dimension its name."""
    return [dim.dim_value or dim.dim_param for dim in value.type.tensor_type.shape.dim]


def context_shapes(
    data: Iterable[onnx.ValueInfoProto],
    outputs: Iterable[onnx.ValueInfoProto],
    pairs: Mapping[str, str],
    context: int,
    shapes: Mapping[str, Shape],
) -> dict[str, Shape]:
    """Shapes of inputs for a step with a context of `context` tokens: `shapes`, and all dynamic ones.

    A cache that grows is shorter than the context by the tokens of the step, which are appended to it. Masks
    are as long as the context. Other dynamic dimensions are fixed for one sequence of one token.

    Raises
    ------
    ModelError
        If a cache does not have four dimensions, or has another length.
    UsageError
        If the context is no longer than the step.
    """
    result_shapes, presents = dict(shapes), {value.name: value for value in outputs}
    values = {value.name: value for value in data}
    ids = values.get("input_ids")
    tokens = (result_shapes.get("input_ids") or (ids is not None and dims_of(ids)) or (1, 1))[-1] or 1
    if context <= tokens:
        raise UsageError(f"--context {context}: give more than the {tokens} of a step")
    for name, value in values.items():
        dims = dims_of(value)
        if name in result_shapes or dims is None:
            continue
        if name in pairs:
            if len(dims) != 4:
                raise ModelError(f"input '{name}' has {len(dims)} dimensions; a cache has four")
            present_dims = _dims(presents[pairs[name]])
            # The length stays the same, or grows by the tokens of the step.
            added_tokens = (
                0
                if len(present_dims) == 4 and present_dims[2] and present_dims[2] == _dims(value)[2]
                else tokens
            )
            length = dims[2] or context - added_tokens
            if length + added_tokens != context:
                raise ModelError(
                    f"input '{name}' has {length} places; --context {length + added_tokens} suits it"
                )
            result_shapes[name] = (dims[0] or 1, dims[1] or 1, length, dims[3] or 1)
        elif None in dims:
            last = context if "mask" in name else tokens
            result_shapes[name] = tuple(
                size or (1 if axis == 0 and len(dims) > 1 else last) for axis, size in enumerate(dims)
            )
    return result_shapes
