"""A decoder with its cache, from an ONNX file whose inputs and outputs have Optimum's names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import helper

from pimflow import zoo
from pimflow.errors import ModelError, one_line
from pimflow.frontend.exported_decoder import (
    LOGITS,
    MASK,
    PLACES,
    TOKENS,
    ExportedDecoder,
    ExportedReference,
    Shape,
)
from pimflow.frontend.onnx_runtime import convert_runtime_errors, reference_with_roundings
from pimflow.frontend.reference import Fp16Storage, Run
from pimflow.zoo.precision import has_other_types, require_types, to_single

PARTS = ("key", "value")


@dataclass(frozen=True, kw_only=True)
class OnnxDecoder(ExportedDecoder):
    """An ONNX decoder."""

    model: str | os.PathLike[str] | onnx.ModelProto

    def shapes(self, context: int, tokens: int, batch: int) -> dict[str, Shape]:
        """Shapes of all inputs for a step of `tokens` tokens whose last one attends to `context` tokens."""
        past = context - tokens if self.grows else context
        return _shapes(self.kinds, self.cache_dims, (batch, past), context, tokens)

    def step(self, context: int, tokens: int, batch: int) -> onnx.ModelProto:
        """The model of a step with fixed shapes; raises the errors of `zoo.load_model`."""
        return zoo.load_model(self.model, self.shapes(context, tokens, batch))

    def run(self) -> Run:
        """A function that runs the file by ONNX Runtime, with its own shapes."""
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # its warnings are not the user's
        model = self.model
        source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else os.fspath(model)
        with convert_runtime_errors():
            session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])

        def run(values: Mapping[str, np.ndarray]) -> list[np.ndarray]:
            with convert_runtime_errors():
                return session.run(None, dict(values))

        return run

    def reference_with_roundings(
        self, tokens: int, layers: frozenset[str]
    ) -> Callable[[], ExportedReference]:
        """Gives references for this number of tokens that round results of `layers` at random."""
        length = self.context or max(tokens, 2)  # one graph for all steps, so its length is fixed
        run = reference_with_roundings(lambda: self.step(length, 1, 1), Fp16Storage(layers=layers))
        return lambda: ExportedReference(replace(self, context=length), run)


def open_decoder(model: str | os.PathLike[str] | onnx.ModelProto) -> OnnxDecoder:
    """Read an ONNX decoder.

    Raises
    ------
    ModelError
        If it cannot be read, has no cache with these names, or leaves another size than a length open.
    """
    proto = model if isinstance(model, onnx.ModelProto) else zoo.read_model(Path(model))
    name = one_line(proto.graph.name or "model" if proto is model else Path(model).stem)
    where = f"model '{name}'"
    single = _single(proto, where)
    model, graph = model if single is proto else single, single.graph
    stored = {tensor.name for tensor in graph.initializer}
    dims = {value.name: zoo.dims_of(value) for value in graph.input if value.name not in stored}
    layers = _layers(dims, {value.name for value in graph.output}, where)
    kinds = {
        value.name: np.dtype(helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
        for value in graph.input
        if value.name in dims
    }
    pasts = [zoo.past_name(layer, part) for layer in range(layers) for part in PARTS]
    cache_dims = {name: _cache_sizes(name, dims[name], where) for name in pasts}
    length = (dims[pasts[0]] or ())[2]
    token_dims = dims[TOKENS]
    (present_key,) = (output for output in graph.output if output.name == zoo.present_name(0, "key"))
    grows = length is None or (zoo.dims_of(present_key) or ())[2:3] != (length,)
    counted = not grows or any(node.op_type == "GroupQueryAttention" for node in graph.node)
    tokens = 1 if counted else token_dims[1] if token_dims is not None and len(token_dims) == 2 else None
    if length is not None and tokens != 1:
        raise ModelError(
            f"{where}: its cache has a fixed length, but a step is not one token; export it for one token"
        )
    context = None if length is None else length + grows
    sizes = ((token_dims or (1,))[0] or 1, length or 1)
    step_model = zoo.load_model(model, _shapes(kinds, cache_dims, sizes, context or 2, 1), seed=None)
    values = (*step_model.graph.value_info, *step_model.graph.output)
    inferred = {value.name: zoo.dims_of(value) for value in values}
    logits = inferred[LOGITS]
    if logits is None or len(logits) != 3 or logits[2] is None:
        raise ModelError(f"{where}: output 'logits' is not [batch, tokens, vocabulary]")
    return OnnxDecoder(
        model=model,
        name=name,
        cache_dims=cache_dims,
        presents={zoo.past_name(*pair): zoo.present_name(*pair) for pair in product(range(layers), PARTS)},
        roles={name: name for name in kinds if name not in cache_dims},
        vocabulary=logits[2],
        uses=_query_heads_per_kv_head(step_model.graph, inferred, cache_dims[pasts[0]][0]),
        tokens=tokens,
        context=context,
        counted=counted,
        grows=grows,
        kinds=kinds,
        ranks={name: 4 if name in cache_dims else 2 for name in kinds},
        outputs=tuple(value.name for value in graph.output),
    )


def _cache_sizes(name: str, past: tuple[int | None, ...] | None, where: str) -> tuple[int, int]:
    """Heads, and elements of each, by the shape of a cache."""
    if past is None or len(past) != 4 or past[1] is None or past[3] is None:
        raise ModelError(
            f"{where}: input '{name}' is not [batch, heads, tokens, head_size] with fixed "
            "heads and head_size; export it so"
        )
    return past[1], past[3]


def _single(model: onnx.ModelProto, where: str) -> onnx.ModelProto:
    """`model` with fp32 as its only floating-point type; raises the errors of `require_types`."""
    require_types(model, where)
    if not has_other_types(model):
        return model
    single = onnx.ModelProto()
    single.CopyFrom(model)
    to_single(single, [value.name for value in model.graph.output])
    return single


def _layers(dims: dict[str, Shape | None], outputs: set[str], where: str) -> int:
    """Number of layers with a cache; raises `ModelError` unless inputs and outputs are those of a decoder."""
    for name in (TOKENS, MASK):
        if name not in dims:
            raise ModelError(
                f"{where}: has no input '{name}': it is no decoder with a cache as Optimum exports it"
            )
    layers = sum(name.startswith("past_key_values.") for name in dims) // 2
    pairs = [(layer, part) for layer in range(layers) for part in PARTS]
    past = {zoo.past_name(*pair) for pair in pairs}
    if not layers or not past <= dims.keys():
        raise ModelError(
            f"{where}: has no cache: inputs past_key_values.N.key and .value are missing; export it with "
            "them (Optimum: --task text-generation-with-past)"
        )
    if unexpected := sorted(dims.keys() - past - {TOKENS, MASK, PLACES}):
        raise ModelError(
            f"{where}: input '{unexpected[0]}' is none of a decoder's; export the model without it"
        )
    for name in (LOGITS, *(zoo.present_name(*pair) for pair in pairs)):
        if name not in outputs:
            raise ModelError(
                f"{where}: has no output '{name}', as Optimum calls it; rename it, or export it anew"
            )
    return layers


def _shapes(
    names: Iterable[str],
    cache_dims: Mapping[str, tuple[int, int]],
    sizes: tuple[int, int],
    context: int,
    tokens: int,
) -> dict[str, Shape]:
    """Shapes of all inputs; `sizes` are those of batch and tokens in a cache."""
    batch, past = sizes
    shapes = {TOKENS: (batch, tokens), MASK: (batch, context), PLACES: (batch, tokens)}
    shapes |= {name: (batch, heads, past, size) for name, (heads, size) in cache_dims.items()}
    return {name: shapes[name] for name in names}


def _query_heads_per_kv_head(graph: onnx.GraphProto, dims: dict[str, Shape | None], kv_heads: int) -> int:
    for node in graph.node:
        heads = {
            attribute.name: attribute.i
            for attribute in node.attribute
            if attribute.name.endswith("num_heads")
        }
        if "kv_num_heads" in heads:
            return max(heads.values()) // kv_heads
        shape = dims.get(node.output[0]) if node.op_type == "Softmax" else None
        if shape is not None and len(shape) == 4 and shape[1] and shape[1] % kv_heads == 0:
            return shape[1] // kv_heads
    return 1
