"""A decoder as an ONNX graph of one step: some tokens after a cache of keys and values.

Inputs and outputs have the names of Hugging Face's Optimum, and every length is fixed: a step of T tokens
with a cache of C - T tokens returns a cache of C. Unused places of the cache are at the front, where the mask
is 0.
"""

from __future__ import annotations

import math

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from pimflow.errors import UsageError
from pimflow.zoo.language.decoder import Decoder

OPSET = 17
IR_VERSION = 10  # the first with metadata on values
HIDDEN = "inputs_embeds"  # input of a block without tokens
CONTEXT_OF_STEP, CONTEXT_OF_BLOCK = 128, 1024  # contexts if none is given when a network is compiled
_HIDE = -30000.0  # added to hidden scores: below every score, and in the range of fp16
_LINEAR_GAIN = 0.71  # of drawn weights: outputs of a layer have the variance of its inputs
_RULES = {"table": "embedding", "scale": "scale", "bias": "bias", "weight": "weight"}


def past_name(layer: int, part: str) -> str:
    """Name of the input with the cached keys or values of a layer; `part` is ``key`` or ``value``."""
    return f"past_key_values.{layer}.{part}"


def present_name(layer: int, part: str) -> str:
    """Name of the output with the cached keys or values, followed by those of the step's tokens."""
    return f"present.{layer}.{part}"


def step_graph(decoder: Decoder, context: int, *, tokens: int = 1, batch: int = 1) -> onnx.ModelProto:
    """The graph of one step of a decoder, without weights: they are inputs, marked how to draw or read them.

    Parameters
    ----------
    context : int
        Tokens that the last token of the step attends to: ``context - tokens`` in the cache, and the step's.
    tokens : int
        Tokens of the step: 1 to decode.
    batch : int
        Number of sequences.

    Returns
    -------
    onnx.ModelProto
        Inputs ``input_ids`` and ``position_ids`` [batch, tokens], ``attention_mask`` [batch, context], all
        int64, and for each layer ``past_key_values.N.key`` and ``.value`` [batch, kv_heads, context - tokens,
        head_size], if there are any; outputs ``logits`` [batch, tokens, vocabulary] and ``present.N.key`` and
        ``.value`` [batch, kv_heads, context, head_size].
    """
    graph = _GraphBuilder(decoder, context, tokens, batch)
    hidden = graph.node(
        "Gather", "tokens", [graph.weight("tokens.table"), graph.input("input_ids", (batch, tokens))]
    )
    hidden = graph.add_positions(hidden)
    for layer in range(decoder.layers):
        hidden = graph.block(hidden, layer)
    return graph.model(decoder.name, {"logits": (graph.logits(hidden), (batch, tokens, decoder.vocabulary))})


def block_graph(decoder: Decoder, context: int, *, tokens: int = 1, batch: int = 1) -> onnx.ModelProto:
    """The first block of a decoder as `step_graph` has it, from ``inputs_embeds`` to ``hidden_states``.

    Both are [batch, tokens, hidden]. Learned positions are already added to the input.
    """
    graph = _GraphBuilder(decoder, context, tokens, batch)
    shape = (batch, tokens, decoder.hidden)
    hidden = graph.block(graph.input(HIDDEN, shape, TensorProto.FLOAT), 0)
    return graph.model(f"{decoder.name} block", {"hidden_states": (hidden, shape)})


def head_graph(decoder: Decoder, *, tokens: int = 1, batch: int = 1) -> onnx.ModelProto:
    """The graph of what follows the last block: the norm, and the product with the vocabulary."""
    graph = _GraphBuilder(decoder, tokens, tokens, batch)
    hidden = graph.input(HIDDEN, (batch, tokens, decoder.hidden), TensorProto.FLOAT)
    outputs = {"logits": (graph.logits(hidden), (batch, tokens, decoder.vocabulary))}
    return graph.model(f"{decoder.name} head", outputs)


def product_graph(decoder: Decoder, product: str, *, tokens: int = 1) -> onnx.ModelProto:
    """The graph of one product with weights of the first block, such as ``up``, without its bias.

    From ``inputs_embeds`` [tokens, inputs] to ``hidden_states`` [tokens, outputs].
    """
    graph, name = _GraphBuilder(decoder, tokens, tokens, 1), f"layers.0.{product}"
    inputs, outputs = graph.shapes[f"{name}.weight"]
    result = graph.product_without_bias(name, graph.input(HIDDEN, (tokens, inputs), TensorProto.FLOAT))
    return graph.model(f"{decoder.name} {product}", {"hidden_states": (result, (tokens, outputs))})


def zoo_graph(decoder: Decoder, context: int | None = None) -> onnx.ModelProto:
    """A decoder of the zoo as a network: one step; without trained weights, only its first block.

    Raises `UsageError` if `context` is out of the decoder's range.
    """
    if context is not None and not 1 < context <= decoder.max_context:
        raise UsageError(f"--context {context}: give 2 to {decoder.max_context} tokens for '{decoder.name}'")
    if decoder.trained:
        return step_graph(decoder, context or CONTEXT_OF_STEP)
    return block_graph(decoder, context or CONTEXT_OF_BLOCK)


class _GraphBuilder:
    """Builds a graph: nodes in order of execution, each with the name of its result."""

    def __init__(self, decoder: Decoder, context: int, tokens: int, batch: int) -> None:
        self.decoder, self.context, self.tokens, self.batch = decoder, context, tokens, batch
        self.shapes = decoder.weights()
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: dict[str, onnx.ValueInfoProto] = {}
        self.weights: dict[str, onnx.ValueInfoProto] = {}
        self.constants: dict[str, onnx.TensorProto] = {}
        self.present: list[onnx.ValueInfoProto] = []
        self._mask = ""

    def node(self, operator: str, name: str, inputs: list[str], **attributes: object) -> str:
        """Add a node; returns the name of its result, as all methods that add nodes do."""
        self.nodes.append(helper.make_node(operator, inputs, [name], name, **attributes))
        return name

    def input(self, name: str, shape: tuple[int, ...], kind: int = TensorProto.INT64) -> str:
        """Add an input, unless it is there; returns its name."""
        self.inputs.setdefault(name, helper.make_tensor_value_info(name, kind, shape))
        return name

    def constant(self, name: str, value: object, dtype: type = np.float32) -> str:
        """Add a constant, unless it is there; returns its name."""
        if name not in self.constants:
            self.constants[name] = numpy_helper.from_array(np.array(value, dtype), name)
        return name

    def weight(self, name: str) -> str:
        """Add a weight as an input, with metadata that says how to draw or read it; returns its name."""
        shape = self.shapes[name]
        rule = _RULES[name.rpartition(".")[2]]
        fan_in, gain = (shape[0], _LINEAR_GAIN) if rule == "weight" else (1, 1.0)
        value = helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        metadata = {"init": f"{rule}:{fan_in}:{gain:g}"}
        if self.decoder.trained:
            metadata["trained"] = self.decoder.name
        if self.decoder.file:
            metadata["gguf"] = self.decoder.file
        helper.set_model_props(value, metadata)
        self.weights[name] = value
        return name

    def product(self, name: str, source: str) -> str:
        """A product with a weight, and its bias if the decoder has biases."""
        biased = self.decoder.biases
        result = self.node(
            "MatMul", f"{name}.product" if biased else name, [source, self.weight(f"{name}.weight")]
        )
        return self.node("Add", name, [result, self.weight(f"{name}.bias")]) if biased else result

    def norm(self, name: str, source: str) -> str:
        """The decoder's norm, by layer or by root mean square."""
        epsilon = self.decoder.norm_epsilon
        if self.decoder.norm == "layer":
            operands = [source, self.weight(f"{name}.scale"), self.weight(f"{name}.bias")]
            return self.node("LayerNormalization", name, operands, axis=-1, epsilon=epsilon)
        square = self.node("Mul", f"{name}.square", [source, source])
        mean = self.node("ReduceMean", f"{name}.mean", [square], axes=[-1], keepdims=1)
        mean = self.node("Add", f"{name}.epsilon", [mean, self.constant("epsilon", epsilon)])
        root = self.node("Sqrt", f"{name}.root", [mean])
        unit = self.node("Div", f"{name}.unit", [source, root])
        return self.node("Mul", name, [unit, self.weight(f"{name}.scale")])

    def positions(self) -> str:
        """The input with the positions of the step's tokens."""
        return self.input("position_ids", (self.batch, self.tokens))

    def add_positions(self, hidden: str) -> str:
        """Add learned positions to `hidden`, if the decoder has them."""
        if self.decoder.positions != "learned":
            return hidden
        positions = self.positions()
        if offset := self.decoder.position_offset:
            positions = self.node(
                "Add", "positions.offset", [positions, self.constant("offset", offset, np.int64)]
            )
        rows = self.node("Gather", "positions", [self.weight("positions.table"), positions])
        return self.node("Add", "tokens.placed", [hidden, rows])

    def angles(self) -> tuple[str, str]:
        """Cosine and sine for each position, [batch, 1, tokens, head_size]; added to the graph once."""
        names = ("rotary.cosine", "rotary.sine")
        if any(node.name == names[0] for node in self.nodes):
            return names
        for name, table in zip(names, rotary_tables(self.decoder, self.context)):
            rows = self.node(
                "Gather", f"{name}.rows", [self.constant(f"{name}.table", table), self.positions()]
            )
            self.node("Unsqueeze", name, [rows, self.constant("axis_1", [1], np.int64)])
        return names

    def rotate(self, name: str, source: str) -> str:
        """Rotate heads by their positions: the halves of a head are the two parts of complex numbers."""
        if self.decoder.positions != "rotary":
            return source
        cosine, sine = self.angles()
        half = self.decoder.head_size // 2
        axis = self.constant("last_axis", [3], np.int64)
        cuts = [self.constant(f"cut_{position}", [position], np.int64) for position in (0, half, 2 * half)]
        first = self.node("Slice", f"{name}.first", [source, cuts[0], cuts[1], axis])
        second = self.node("Slice", f"{name}.second", [source, cuts[1], cuts[2], axis])
        second = self.node("Neg", f"{name}.minus_second", [second])
        swapped = self.node("Concat", f"{name}.other", [second, first], axis=-1)
        unrotated = self.node("Mul", f"{name}.kept", [source, cosine])
        rotated = self.node("Mul", f"{name}.crossed", [swapped, sine])
        return self.node("Add", f"{name}.turned", [unrotated, rotated])

    def mask(self) -> str:
        """The mask that is added to scores, [batch, 1, tokens, context]; added to the graph once."""
        if self._mask:
            return self._mask
        visible = self.node(
            "Cast",
            "mask.kept",
            [self.input("attention_mask", (self.batch, self.context))],
            to=TensorProto.FLOAT,
        )
        hidden = self.node("Sub", "mask.hidden", [self.constant("one", 1.0), visible])
        added = self.node("Mul", "mask.added", [hidden, self.constant("hide", _HIDE)])
        mask = self.node("Unsqueeze", "mask", [added, self.constant("axes_1_2", [1, 2], np.int64)])
        if self.tokens > 1:
            columns = np.arange(self.context) > np.arange(self.context - self.tokens, self.context)[:, None]
            later = self.constant("mask.later", columns[None, None] * _HIDE)
            mask = self.node("Add", "mask.causal", [mask, later])
            # Both masks may hide a column: their sum would be infinite in fp16.
            mask = self.node("Max", "mask.bounded", [mask, self.constant("hide", _HIDE)])
        self._mask = mask
        return mask

    def heads(self, name: str, source: str, count: int) -> str:
        """Split into heads: [batch, tokens, count * head_size] to [batch, count, tokens, head_size]."""
        shape = [self.batch, self.tokens, count, self.decoder.head_size]
        split = self.node(
            "Reshape", f"{name}.split", [source, self.constant(f"{count}_heads", shape, np.int64)]
        )
        return self.node("Transpose", f"{name}.heads", [split], perm=[0, 2, 1, 3])

    def append_to_cache(self, layer: int, part: str, source: str) -> str:
        """Append keys or values to those in the cache; the result is an output of the graph."""
        d = self.decoder
        name, past_tokens = present_name(layer, part), self.context - self.tokens
        shape = (self.batch, d.kv_heads, self.context, d.head_size)
        self.present.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
        if not past_tokens:
            return self.node("Identity", name, [source])
        past_values = self.input(
            past_name(layer, part), (*shape[:2], past_tokens, d.head_size), TensorProto.FLOAT
        )
        return self.node("Concat", name, [past_values, source], axis=2)

    def repeat_heads(self, name: str, source: str) -> str:
        """Repeat each head of keys or values for all heads of queries that share it."""
        d = self.decoder
        if d.group == 1:
            return source
        apart = self.node("Unsqueeze", f"{name}.apart", [source, self.constant("axis_2", [2], np.int64)])
        repeated_shape = [self.batch, d.kv_heads, d.group, self.context, d.head_size]
        repeated_shape = self.constant("repeated", repeated_shape, np.int64)
        repeated = self.node("Expand", f"{name}.repeated", [apart, repeated_shape])
        merged_shape = [self.batch, d.heads, self.context, d.head_size]
        return self.node(
            "Reshape", f"{name}.shared", [repeated, self.constant("shared", merged_shape, np.int64)]
        )

    def attention(self, name: str, layer: int, source: str) -> str:
        """Attention over the cache and the step's tokens, with its four products."""
        d = self.decoder
        query = self.heads(f"{name}.query", self.product(f"{name}.query", source), d.heads)
        key = self.heads(f"{name}.key", self.product(f"{name}.key", source), d.kv_heads)
        value = self.heads(f"{name}.value", self.product(f"{name}.value", source), d.kv_heads)
        query, key = self.rotate(f"{name}.query", query), self.rotate(f"{name}.key", key)
        key = self.repeat_heads(f"{name}.key", self.append_to_cache(layer, "key", key))
        value = self.repeat_heads(f"{name}.value", self.append_to_cache(layer, "value", value))
        key = self.node("Transpose", f"{name}.key.columns", [key], perm=[0, 1, 3, 2])
        scores = self.node("MatMul", f"{name}.scores", [query, key])
        scale = self.constant("scale", 1 / math.sqrt(d.head_size))
        scores = self.node("Mul", f"{name}.scaled", [scores, scale])
        scores = self.node("Add", f"{name}.masked", [scores, self.mask()])
        scores = self.node("Softmax", f"{name}.softmax", [scores], axis=-1)
        mixed = self.node("MatMul", f"{name}.mixed", [scores, value])
        mixed = self.node("Transpose", f"{name}.mixed.tokens", [mixed], perm=[0, 2, 1, 3])
        joined = [self.batch, self.tokens, d.heads * d.head_size]
        mixed = self.node(
            "Reshape", f"{name}.mixed.joined", [mixed, self.constant("joined", joined, np.int64)]
        )
        return self.product(f"{name}.attention", mixed)

    def feed_forward(self, name: str, source: str) -> str:
        """The feed-forward part of a block."""
        wide = self.product(f"{name}.up", source)
        if self.decoder.activation == "relu":
            wide = self.node("Relu", f"{name}.active", [wide])
        elif self.decoder.activation == "gelu":
            wide = self.gelu(f"{name}.gelu", wide)
        else:
            gate = self.product(f"{name}.gate", source)
            open_ = self.node("Sigmoid", f"{name}.sigmoid", [gate])
            gate = self.node("Mul", f"{name}.active", [gate, open_])
            wide = self.node("Mul", f"{name}.gated", [gate, wide])
        return self.product(f"{name}.down", wide)

    def gelu(self, name: str, x: str) -> str:
        """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))."""
        square = self.node("Mul", f"{name}.square", [x, x])
        cube = self.node("Mul", f"{name}.cube", [square, x])
        cube = self.node("Mul", f"{name}.part", [cube, self.constant("gelu.cube", 0.044715)])
        inner = self.node("Add", f"{name}.sum", [x, cube])
        inner = self.node("Mul", f"{name}.inner", [inner, self.constant("gelu.root", math.sqrt(2 / math.pi))])
        inner = self.node("Tanh", f"{name}.tanh", [inner])
        inner = self.node("Add", f"{name}.more", [inner, self.constant("one", 1.0)])
        inner = self.node("Mul", f"{name}.half", [inner, self.constant("half", 0.5)])
        return self.node("Mul", name, [x, inner])

    def block(self, hidden: str, layer: int) -> str:
        """A block: attention and feed-forward, each with a norm before it and a residual around it."""
        name = f"layers.{layer}"
        mixed = self.attention(name, layer, self.norm(f"{name}.attention_norm", hidden))
        hidden = self.node("Add", f"{name}.attended", [hidden, mixed])
        wide = self.feed_forward(name, self.norm(f"{name}.feed_forward_norm", hidden))
        return self.node("Add", f"{name}.sum", [hidden, wide])

    def logits(self, hidden: str) -> str:
        """The norm after the last block, and the product with the vocabulary."""
        hidden = self.norm("norm", hidden)
        if not self.decoder.tied:
            return self.product_without_bias("head", hidden)
        table = self.node("Transpose", "head.table", [self.weight("tokens.table")], perm=[1, 0])
        return self.node("MatMul", "head", [hidden, table])

    def product_without_bias(self, name: str, source: str) -> str:
        """A product with a weight, without its bias."""
        return self.node("MatMul", name, [source, self.weight(f"{name}.weight")])

    def model(self, name: str, outputs: dict[str, tuple[str, tuple[int, ...]]]) -> onnx.ModelProto:
        """The ONNX model; `outputs` has, by name, the node whose result an output is, and its shape."""
        renamed = {node_name: output for output, (node_name, _) in outputs.items()}
        for node in self.nodes:
            node.input[:] = [renamed.get(operand, operand) for operand in node.input]
            node.output[0] = renamed.get(node.output[0], node.output[0])
        results = [
            helper.make_tensor_value_info(output, TensorProto.FLOAT, dims)
            for output, (_, dims) in outputs.items()
        ]
        order = ["input_ids", "attention_mask", "position_ids"]
        data = sorted(self.inputs.values(), key=lambda value: (*order, value.name).index(value.name))
        graph = helper.make_graph(
            self.nodes,
            name,
            [*data, *self.weights.values()],
            [*results, *self.present],
            list(self.constants.values()),
        )
        opset = [helper.make_opsetid("", OPSET)]
        return helper.make_model(graph, opset_imports=opset, ir_version=IR_VERSION)


def rotary_tables(decoder: Decoder, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine of the angles of rotation at each position, [positions, head_size], fp32."""
    turns = decoder.rotary_base ** (-np.arange(0, decoder.head_size, 2) / decoder.head_size)
    angles = np.arange(positions)[:, None] * np.concatenate([turns, turns])
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
