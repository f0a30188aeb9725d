"""A decoder with its cache, from an ONNX file whose inputs and outputs have Optimum's names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import helper

from pimflow import zoo
from pimflow.errors import ModelError, one_line
from pimflow.frontend.onnx_runtime import convert_runtime_errors
from pimflow.frontend.reference import Run
from pimflow.zoo.precision import has_other_types, require_types, to_single

Shape = tuple[int, ...]
TOKENS, MASK, PLACES, LOGITS = "input_ids", "attention_mask", "position_ids", "logits"
PARTS = ("key", "value")


@dataclass(frozen=True, kw_only=True)
class OnnxDecoder:
    """An ONNX decoder, with the properties that its file gives.

    Attributes
    ----------
    model : path or ModelProto
        In fp32: models of another floating-point type are widened, so that the reference does not round.
    name : str
    layers, kv_heads, head_size : int
        Sizes of the cache.
    vocabulary : int
    uses : int
        Query heads that share a key head, from attributes of operators or shapes before a Softmax; else 1.
    tokens, context : int or None
        Tokens of a step, and tokens that its last one attends to, if the file fixes them.
    counted : bool
        Whether tokens are in the first places of a cache, as many as the mask has ones: so for
        GroupQueryAttention, and where a cache does not grow. Else they are at the places of the mask. If
        `counted`, a step is one token: with several, unused places would have to be after them.
    grows : bool
        Whether a step appends its tokens to the caches; else caches have all places from the start.
    kinds : dict of str to dtype
        Type of every input.
    outputs : tuple of str
        Names of the outputs.
    """

    model: str | os.PathLike[str] | onnx.ModelProto
    name: str
    layers: int
    kv_heads: int
    head_size: int
    vocabulary: int
    uses: int
    tokens: int | None
    context: int | None
    counted: bool
    grows: bool
    kinds: dict[str, np.dtype]
    outputs: tuple[str, ...]

    def shapes(self, context: int, tokens: int, batch: int) -> dict[str, Shape]:
        """Shapes of all inputs for a step of `tokens` tokens whose last one attends to `context` tokens."""
        past = context - tokens if self.grows else context
        return _shapes(self.kinds, (batch, self.kv_heads, past, self.head_size), context, tokens)

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
    kv_heads, length, head_size = _cache_sizes(dims["past_key_values.0.key"], where)
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
    cache = ((token_dims or (1,))[0] or 1, kv_heads, length or 1, head_size)
    step_model = zoo.load_model(model, _shapes(kinds, cache, context or 2, 1), seed=None)
    values = (*step_model.graph.value_info, *step_model.graph.output)
    inferred = {value.name: zoo.dims_of(value) for value in values}
    logits = inferred[LOGITS]
    if logits is None or len(logits) != 3 or logits[2] is None:
        raise ModelError(f"{where}: output 'logits' is not [batch, tokens, vocabulary]")
    return OnnxDecoder(
        model=model,
        name=name,
        layers=layers,
        kv_heads=kv_heads,
        head_size=head_size,
        vocabulary=logits[2],
        uses=_query_heads_per_kv_head(step_model.graph, inferred, kv_heads),
        tokens=tokens,
        context=context,
        counted=counted,
        grows=grows,
        kinds=kinds,
        outputs=tuple(value.name for value in graph.output),
    )


def _cache_sizes(past: tuple[int | None, ...] | None, where: str) -> tuple[int, int | None, int]:
    """KV heads, tokens (None if open) and elements of a key, by the shape of a cache."""
    if past is None or len(past) != 4 or past[1] is None or past[3] is None:
        raise ModelError(
            f"{where}: input 'past_key_values.0.key' is not [batch, heads, tokens, head_size] with fixed "
            "heads and head_size; export it so"
        )
    return past[1], past[2], past[3]


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


def _shapes(names: dict[str, np.dtype], cache: Shape, context: int, tokens: int) -> dict[str, Shape]:
    shapes_by_name = {TOKENS: (cache[0], tokens), MASK: (cache[0], context), PLACES: (cache[0], tokens)}
    return {name: shapes_by_name.get(name, cache) for name in names}


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


class OnnxReference:
    """ONNX Runtime on the file: logits of one sequence, token by token.

    Keys and values are stored in a list; they are passed without padding if the file leaves the length open.

    Parameters
    ----------
    run : callable
        `OnnxDecoder.run`, or a replacement, such as one with random roundings.
    """

    def __init__(self, decoder: OnnxDecoder, run: Run) -> None:
        self._decoder = decoder
        self._cache: dict[str, list[np.ndarray]] = {}
        self._length = 0
        self.run = run

    def step(self, tokens: np.ndarray) -> np.ndarray:
        """Logits of some further tokens, [n] to [n, vocabulary]."""
        if self._decoder.tokens is None:
            return self._step(tokens)
        return np.concatenate([self._step(token) for token in tokens.reshape(-1, 1)])

    def _step(self, tokens: np.ndarray) -> np.ndarray:
        decoder, count = self._decoder, len(tokens)
        past_length = self._length if decoder.context is None else decoder.context - count
        free = past_length - self._length
        begin = 0 if decoder.counted else free
        end = begin + self._length
        places = np.arange(past_length + count)
        token_inputs = {
            TOKENS: tokens[None],
            MASK: ((places >= begin) & (places < end + count))[None],
            PLACES: self._length + np.arange(count)[None],
        }
        beyond = free - begin + (0 if decoder.grows else count)
        before, behind = (np.zeros((1, decoder.kv_heads, n, decoder.head_size)) for n in (begin, beyond))
        feeds = {
            name: token_inputs[name]
            if name in token_inputs
            else np.concatenate([before, *self._cache.get(name, []), behind], axis=2)
            for name in decoder.kinds
        }
        outputs = self.run({name: array.astype(decoder.kinds[name]) for name, array in feeds.items()})
        for name, value in zip(decoder.outputs, outputs, strict=True):
            if name.startswith("present."):
                past = "past_key_values." + name.removeprefix("present.")
                self._cache.setdefault(past, []).append(value[:, :, end : end + count])
        self._length += count
        return np.asarray(outputs[decoder.outputs.index(LOGITS)][0], np.float32)
