"""Builds the ONNX graph of a decoder from its parts: nodes in order of execution."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from pimflow.zoo.language.decoder import GATED, Decoder, Experts

OPSET = 17
IR_VERSION = 10  # the first with metadata on values
_HIDE = -30000.0  # added to hidden scores: below every score, and in the range of fp16
_LINEAR_GAIN = 0.71  # of drawn weights: outputs of a layer have the variance of its inputs
Product = Callable[[str, str], str]

_RULES = {"table": "embedding", "scale": "scale", "bias": "bias", "weight": "weight"}


def past_name(layer: int, part: str) -> str:
    """Name of the input with the cached keys or values of a layer; `part` is ``key`` or ``value``."""
    return f"past_key_values.{layer}.{part}"


def present_name(layer: int, part: str) -> str:
    """Name of the output with the cached keys or values, followed by those of the step's tokens."""
    return f"present.{layer}.{part}"


class GraphBuilder:
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
        fan_in, gain = (shape[-2], _LINEAR_GAIN) if rule == "weight" else (1, 1.0)
        value = helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        metadata = {"init": f"{rule}:{fan_in}:{gain:g}"}
        if self.decoder.trained:
            metadata["trained"] = self.decoder.name
        if self.decoder.file:
            metadata["file"] = self.decoder.file
        if name in self.decoder.weight_types:
            metadata["stored"] = self.decoder.weight_types[name]
        helper.set_model_props(value, metadata)
        self.weights[name] = value
        return name

    def product(self, name: str, source: str) -> str:
        """A product with a weight, and its bias if it has one."""
        biased = name.rpartition(".")[2] in self.decoder.biases
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

    def embed(self, ids: str) -> str:
        """Rows of the table of tokens, with learned positions if the decoder has them."""
        hidden = self.node("Gather", "tokens", [self.weight("tokens.table"), ids])
        hidden = self.scale("tokens.scaled", hidden, self.decoder.embedding_scale)
        if self.decoder.positions != "learned":
            return hidden
        positions = self.positions()
        if offset := self.decoder.position_offset:
            positions = self.node(
                "Add", "positions.offset", [positions, self.constant("offset", offset, np.int64)]
            )
        rows = self.node("Gather", "positions", [self.weight("positions.table"), positions])
        return self.node("Add", "tokens.placed", [hidden, rows])

    def scale(self, name: str, source: str, factor: float) -> str:
        """Multiply by a constant, unless it is 1."""
        if factor == 1:
            return source
        return self.node("Mul", name, [source, self.constant(f"{name}.factor", factor)])

    def cap(self, name: str, source: str, cap: float) -> str:
        """``cap * tanh(x / cap)``; `source` itself if the cap is 0."""
        if not cap:
            return source
        bound = self.constant(f"cap_{cap:g}", cap)
        curve = self.node("Tanh", f"{name}.curve", [self.node("Div", f"{name}.ratio", [source, bound])])
        return self.node("Mul", f"{name}.capped", [curve, bound])

    def angles(self, layer: int) -> tuple[str, str]:
        """Cosine and sine for each position, [batch, 1, tokens, turned_size]; added to the graph once."""
        local = self.decoder.turns_locally(layer)
        prefix = "rotary.local" if local else "rotary"
        names = (f"{prefix}.cosine", f"{prefix}.sine")
        if any(node.name == names[0] for node in self.nodes):
            return names
        for name, table in zip(names, rotary_tables(self.decoder, self.context, local)):
            rows = self.node(
                "Gather", f"{name}.rows", [self.constant(f"{name}.table", table), self.positions()]
            )
            self.node("Unsqueeze", name, [rows, self.constant("axis_1", [1], np.int64)])
        return names

    def cut(self, name: str, source: str, begin: int, end: int) -> str:
        """Elements of the last of four axes."""
        places = [self.constant(f"cut_{place}", [place], np.int64) for place in (begin, end)]
        return self.node("Slice", name, [source, *places, self.constant("last_axis", [3], np.int64)])

    def rotate(self, name: str, source: str, layer: int) -> str:
        """Rotate heads by their positions: the halves of a head are the two parts of complex numbers."""
        if self.decoder.positions != "rotary" or layer in self.decoder.unturned_layers:
            return source
        cosine, sine = self.angles(layer)
        size, turned = self.decoder.head_size, self.decoder.turned_size
        rest = [] if turned == size else [self.cut(f"{name}.still", source, turned, size)]
        moved = self.cut(f"{name}.moved", source, 0, turned) if rest else source
        first = self.cut(f"{name}.first", moved, 0, turned // 2)
        second = self.cut(f"{name}.second", moved, turned // 2, turned)
        second = self.node("Neg", f"{name}.minus_second", [second])
        swapped = self.node("Concat", f"{name}.other", [second, first], axis=-1)
        unrotated = self.node("Mul", f"{name}.kept", [moved, cosine])
        rotated = self.node("Mul", f"{name}.crossed", [swapped, sine])
        rotated = self.node("Add", f"{name}.turned", [unrotated, rotated])
        return self.node("Concat", f"{name}.whole", [rotated, *rest], axis=-1) if rest else rotated

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

    def hide_outside(self, name: str, scores: str, window: int) -> str:
        """Add a term to scores that hides keys before the window of a query; none if it sees all."""
        if not window or window >= self.context:
            return scores
        places, queries = np.arange(self.context), np.arange(self.context - self.tokens, self.context)
        outside = places <= queries[:, None] - window
        term = self.constant(f"window_{window}", outside[None, None] * np.float32(_HIDE))
        return self.node("Add", f"{name}.windowed", [scores, term])

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

    def query_and_key(self, name: str, layer: int, source: str) -> list[str]:
        """Queries and keys in heads, with their norms, rotated."""
        results = []
        for part, count in (("query", self.decoder.heads), ("key", self.decoder.kv_heads)):
            part_name, norm = f"{name}.{part}", self.decoder.query_norm
            result = self.product(part_name, source)
            result = self.norm(f"{part_name}_norm", result) if norm == "whole" else result
            result = self.heads(part_name, result, count)
            result = self.norm(f"{part_name}_norm", result) if norm == "heads" else result
            results.append(self.rotate(part_name, result, layer))
        return results

    def attention(self, name: str, layer: int, source: str) -> str:
        """Attention over the cache and the step's tokens, with its four products."""
        d = self.decoder
        query, key = self.query_and_key(name, layer, source)
        value = self.heads(f"{name}.value", self.product(f"{name}.value", source), d.kv_heads)
        key = self.repeat_heads(f"{name}.key", self.append_to_cache(layer, "key", key))
        value = self.repeat_heads(f"{name}.value", self.append_to_cache(layer, "value", value))
        key = self.node("Transpose", f"{name}.key.columns", [key], perm=[0, 1, 3, 2])
        scores = self.node("MatMul", f"{name}.scores", [query, key])
        scale = self.constant("scale", d.attention_scale)
        scores = self.node("Mul", f"{name}.scaled", [scores, scale])
        scores = self.cap(f"{name}.scores", scores, d.score_softcap)
        scores = self.node("Add", f"{name}.masked", [scores, self.mask()])
        scores = self.hide_outside(name, scores, d.window(layer))
        scores = self.node("Softmax", f"{name}.softmax", [scores], axis=-1)
        mixed = self.node("MatMul", f"{name}.mixed", [scores, value])
        mixed = self.node("Transpose", f"{name}.mixed.tokens", [mixed], perm=[0, 2, 1, 3])
        joined = [self.batch, self.tokens, d.heads * d.head_size]
        mixed = self.node(
            "Reshape", f"{name}.mixed.joined", [mixed, self.constant("joined", joined, np.int64)]
        )
        return self.product(f"{name}.attention", mixed)

    def feed_forward(self, name: str, source: str, product: Product | None = None) -> str:
        """The feed-forward part of a block; `product` adds a product by its name and its operand."""
        product = product or self.product
        wide = product(f"{name}.up", source)
        activation = self.decoder.activation
        if activation in GATED:
            gate = self.activate(name, activation, product(f"{name}.gate", source))
            wide = self.node("Mul", f"{name}.gated", [gate, wide])
        else:
            wide = self.activate(name, activation, wide)
        return product(f"{name}.down", wide)

    def expert_mixture(self, name: str, source: str) -> str:
        """The experts that the router chooses, added by their shares: [batch, tokens, hidden].

        If all tokens together go through fewer experts than there are, the weights of those are gathered;
        else every expert computes all tokens, and those that did not choose it have no share of it.
        """
        experts = self.decoder.experts
        assert experts is not None
        shares, choices = self.router_choices(f"{name}.router", source, experts)
        if self.batch * self.tokens * experts.used < experts.count:
            return self.mixture_of_chosen(name, source, shares, choices)
        return self.mixture_of_all(name, source, shares, choices, experts)

    def router_choices(self, name: str, source: str, experts: Experts) -> tuple[str, str]:
        """Shares and numbers of the chosen experts, both [batch, tokens, used]."""
        shares = self.node("Softmax", f"{name}.shares", [self.product(name, source)], axis=-1)
        largest, choices = f"{name}.largest", f"{name}.choices"
        used = self.constant("experts_used", [experts.used], np.int64)
        self.nodes.append(helper.make_node("TopK", [shares, used], [largest, choices], largest, axis=-1))
        if experts.normalised:
            last = self.constant("axes_last", [-1], np.int64)
            total = self.node("ReduceSum", f"{name}.total", [largest, last], keepdims=1)
            largest = self.node("Div", f"{name}.normalised", [largest, total])
        return largest, choices

    def mixture_of_chosen(self, name: str, source: str, shares: str, choices: str) -> str:
        """Each chosen expert by itself, [batch, tokens, used, 1, size], and their sum by shares."""
        rows = self.node("Unsqueeze", f"{name}.rows", [source, self.constant("axes_2_3", [2, 3], np.int64)])

        def product(part: str, operand: str) -> str:
            """A product with the weights of the chosen experts."""
            weights = self.node("Gather", f"{part}.chosen", [self.weight(f"{part}.weight"), choices], axis=0)
            return self.node("MatMul", part, [operand, weights])

        results = self.feed_forward(name, rows, product)
        result_axes = self.constant("axes_3_4", [3, 4], np.int64)
        factors = self.node("Unsqueeze", f"{name}.factors", [shares, result_axes])
        parts = self.node("Mul", f"{name}.parts", [results, factors])
        chosen_axes = self.constant("axes_2_3", [2, 3], np.int64)
        return self.node("ReduceSum", f"{name}.mixed_experts", [parts, chosen_axes], keepdims=0)

    def mixture_of_all(self, name: str, source: str, shares: str, choices: str, experts: Experts) -> str:
        """Every expert with all tokens, [batch, experts, tokens, size], and their sum by shares."""
        numbers = self.constant("expert_numbers", np.arange(experts.count), np.int64)
        last = self.constant("axes_last", [-1], np.int64)
        choices = self.node("Unsqueeze", f"{name}.choices", [choices, last])
        chosen = self.node("Equal", f"{name}.is_chosen", [choices, numbers])
        chosen = self.node("Cast", f"{name}.chosen", [chosen], to=TensorProto.FLOAT)
        placed = self.node(
            "Mul", f"{name}.placed", [chosen, self.node("Unsqueeze", f"{name}.columns", [shares, last])]
        )
        second = self.constant("axis_2", [2], np.int64)
        table = self.node("ReduceSum", f"{name}.share_table", [placed, second], keepdims=0)
        table = self.node("Transpose", f"{name}.share_rows", [table], perm=[0, 2, 1])
        factors = self.node("Unsqueeze", f"{name}.factors", [table, last])
        first = self.constant("axis_1", [1], np.int64)
        rows = self.node("Unsqueeze", f"{name}.rows", [source, first])
        results = self.feed_forward(name, rows, self.product)
        parts = self.node("Mul", f"{name}.parts", [results, factors])
        return self.node("ReduceSum", f"{name}.mixed_experts", [parts, first], keepdims=0)

    def activate(self, name: str, activation: str, x: str) -> str:
        """The activation of a block."""
        if activation == "relu":
            return self.node("Relu", f"{name}.active", [x])
        if activation == "swiglu":
            return self.node("Mul", f"{name}.active", [x, self.node("Sigmoid", f"{name}.sigmoid", [x])])
        if activation != "gelu_erf":
            return self.gelu(f"{name}.gelu", x)
        ratio = self.node("Mul", f"{name}.ratio", [x, self.constant("gelu.ratio", math.sqrt(0.5))])
        more = self.node(
            "Add", f"{name}.more", [self.node("Erf", f"{name}.erf", [ratio]), self.constant("one", 1.0)]
        )
        half = self.node("Mul", f"{name}.half", [more, self.constant("half", 0.5)])
        return self.node("Mul", f"{name}.active", [x, half])

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
        """A block: attention and feed-forward with their norms, each added to a residual."""
        name, d = f"layers.{layer}", self.decoder
        source = self.norm(f"{name}.attention_norm", hidden) if d.input_norms else hidden
        attended = self.add_residual(f"{name}.attended", hidden, self.attention(name, layer, source))
        before = hidden if d.parallel else attended
        if d.input_norms and not d.shares_norm:
            source = self.norm(f"{name}.feed_forward_norm", before)
        elif not d.input_norms:
            source = before
        mix = self.feed_forward if d.experts is None else self.expert_mixture
        return self.add_residual(f"{name}.sum", attended, mix(name, source))

    def add_residual(self, name: str, hidden: str, result: str) -> str:
        """Add the result of attention or of the feed-forward part to the hidden state."""
        block, _, kind = name.rpartition(".")
        if self.decoder.result_norms:
            part = "attention" if kind == "attended" else "feed_forward"
            result = self.norm(f"{block}.{part}_result_norm", result)
        return self.node(
            "Add", name, [hidden, self.scale(f"{name}.scaled", result, self.decoder.residual_scale)]
        )

    def logits(self, hidden: str) -> str:
        """The norm after the last block, and the product with the vocabulary."""
        hidden, d = self.norm("norm", hidden), self.decoder
        if d.tied:
            table = self.node("Transpose", "head.table", [self.weight("tokens.table")], perm=[1, 0])
            logits = self.node("MatMul", "head.product" if "head" in d.biases else "head", [hidden, table])
            if "head" in d.biases:
                logits = self.node("Add", "head", [logits, self.weight("head.bias")])
        else:
            logits = self.product("head", hidden)
        return self.cap("logits", self.scale("logits.scaled", logits, d.logit_scale), d.logit_softcap)

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


def rotary_tables(decoder: Decoder, positions: int, local: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine of the angles of rotation at each position, [positions, turned_size], fp32.

    Those of layers that rotate by `Decoder.local_rotary_base`, if `local`.
    """
    base = decoder.local_rotary_base if local else decoder.rotary_base
    turns = base ** (-np.arange(0, decoder.turned_size, 2) / decoder.turned_size)
    if decoder.rotary_factors and not local:
        turns = turns / np.array(decoder.rotary_factors)
    angles = np.arange(positions)[:, None] * np.concatenate([turns, turns])
    scale = 1.0 if local else decoder.rotary_scale
    return (scale * np.cos(angles)).astype(np.float32), (scale * np.sin(angles)).astype(np.float32)
