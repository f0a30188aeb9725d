"""Builds the ONNX graph of a decoder from its parts: nodes in order of execution."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from pimflow.weight_types import WEIGHT_TYPES
from pimflow.zoo.language.decoder import Decoder

OPSET = 17
IR_VERSION = 10  # the first with metadata on values
HIDE = -30000.0  # added to hidden scores: below every score, and in the range of fp16
# Of a token that is quantised: below it, integers are smaller; its scale is no denormal of fp16.
LEAST_PEAK = 1e-2
_LINEAR_GAIN = 0.71  # of drawn weights: outputs of a layer have the variance of its inputs

_RULES = {"table": "embedding", "scale": "scale", "bias": "bias", "weight": "weight"}


def past_name(layer: int, part: str) -> str:
    """Name of the input with the cached keys or values of a layer; `part` is ``key`` or ``value``.

    Or their scales, ``key_scale`` or ``value_scale``.
    """
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

    def cache(self, layer: int, part: str, shape: tuple[int, ...]) -> str:
        """Add the input with a part of a layer's cache, marked with its type; returns its name."""
        name = self.input(past_name(layer, part), shape, TensorProto.FLOAT)
        if self.decoder.cache_type:
            helper.set_model_props(self.inputs[name], {"cache": self.decoder.cache_type})
        return name

    def constant(self, name: str, value: object, dtype: type = np.float32) -> str:
        """Add a constant, unless it is there; returns its name."""
        if name not in self.constants:
            self.constants[name] = numpy_helper.from_array(np.array(value, dtype), name)
        return name

    def integers(self, name: str, values: object) -> str:
        """Add a constant of integers, such as axes or a shape, unless it is there; returns its name."""
        return self.constant(name, values, np.int64)

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
            if self.decoder.activations and name.endswith(".weight"):
                metadata["activations"] = self.decoder.activations
        helper.set_model_props(value, metadata)
        self.weights[name] = value
        return name

    def product(self, name: str, source: str) -> str:
        """A product with a weight, and its bias if it has one."""
        biased = name.rpartition(".")[2] in self.decoder.biases
        scale = ""
        if self.decoder.activations:
            source, scale = self.quantise(source, self.decoder.activations)
        is_last = not (biased or scale)
        operands = [source, self.weight(f"{name}.weight")]
        result = self.node("MatMul", name if is_last else f"{name}.product", operands)
        if scale:
            result = self.node("Mul", f"{name}.scaled" if biased else name, [result, scale])
        return self.node("Add", name, [result, self.weight(f"{name}.bias")]) if biased else result

    def quantise(self, source: str, kind: str) -> tuple[str, str]:
        """Integers of a type, and a scale for each vector along the last axis, by its largest magnitude.

        The vectors are those of tokens, or of tokens and heads.
        """
        result, scale = f"{source}.integers", f"{source}.token_scale"
        if any(result in node.output for node in self.nodes):
            return result, scale
        largest = float((1 << (WEIGHT_TYPES[kind].bits - 1)) - 1)  # and the magnitude of the least
        magnitude = self.node("Abs", f"{source}.magnitude", [source])
        peak = self.node("ReduceMax", f"{source}.peak", [magnitude], axes=[-1], keepdims=1)
        peak = self.node("Max", f"{source}.bounded", [peak, self.constant("least_peak", LEAST_PEAK)])
        self.node("Mul", scale, [peak, self.constant(f"step_{kind}", 1 / largest)])
        ratio = self.node("Div", f"{source}.ratio", [source, scale])
        near = self.node("Round", f"{source}.rounded", [ratio])
        bounds = [self.constant(f"least_{kind}", -largest), self.constant(f"largest_{kind}", largest)]
        return self.node("Clip", result, [near, *bounds]), scale

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
        if self.decoder.embedding_norm:
            hidden = self.norm("tokens_norm", hidden)
        if self.decoder.positions != "learned":
            return hidden
        positions = self.positions()
        if offset := self.decoder.position_offset:
            positions = self.node("Add", "positions.offset", [positions, self.integers("offset", offset)])
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
        """Cosine and sine for each position, [batch, 1, tokens, rotation_size]; added to the graph once."""
        local = self.decoder.turns_locally(layer)
        prefix = "rotary.local" if local else "rotary"
        names = (f"{prefix}.cosine", f"{prefix}.sine")
        if any(node.name == names[0] for node in self.nodes):
            return names
        for name, table in zip(names, rotary_tables(self.decoder, self.context, local)):
            rows = self.node(
                "Gather", f"{name}.rows", [self.constant(f"{name}.table", table), self.positions()]
            )
            self.node("Unsqueeze", name, [rows, self.integers("axis_1", [1])])
        return names

    def cut(self, name: str, source: str, begin: int, end: int) -> str:
        """Elements of the last of four axes."""
        places = [self.integers(f"cut_{place}", [place]) for place in (begin, end)]
        return self.node("Slice", name, [source, *places, self.integers("last_axis", [3])])

    def rotate(self, name: str, source: str, layer: int) -> str:
        """Rotate by positions: the halves of the last axis are the two parts of complex numbers."""
        cosine, sine = self.angles(layer)
        turned = self.decoder.rotation_size
        first = self.cut(f"{name}.first", source, 0, turned // 2)
        second = self.cut(f"{name}.second", source, turned // 2, turned)
        second = self.node("Neg", f"{name}.minus_second", [second])
        swapped = self.node("Concat", f"{name}.other", [second, first], axis=-1)
        unrotated = self.node("Mul", f"{name}.kept", [source, cosine])
        rotated = self.node("Mul", f"{name}.crossed", [swapped, sine])
        return self.node("Add", f"{name}.turned", [unrotated, rotated])

    def mask(self) -> str:
        """The mask that is added to scores, [batch, 1, tokens, context]; added to the graph once."""
        if self._mask:
            return self._mask
        mask = self.input("attention_mask", (self.batch, self.context))
        visible = self.node("Cast", "mask.kept", [mask], to=TensorProto.FLOAT)
        hidden = self.node("Sub", "mask.hidden", [self.constant("one", 1.0), visible])
        added = self.node("Mul", "mask.added", [hidden, self.constant("hide", HIDE)])
        mask = self.node("Unsqueeze", "mask", [added, self.integers("axes_1_2", [1, 2])])
        if self.tokens > 1:
            columns = np.arange(self.context) > np.arange(self.context - self.tokens, self.context)[:, None]
            later = self.constant("mask.later", columns[None, None] * HIDE)
            mask = self.node("Add", "mask.causal", [mask, later])
            # Both masks may hide a column: their sum would be infinite in fp16.
            mask = self.node("Max", "mask.bounded", [mask, self.constant("hide", HIDE)])
        self._mask = mask
        return mask

    def fall(self, name: str, scores: str) -> str:
        """Add to scores what falls with the distance of a key, if positions are such slopes.

        What is added to all scores of a query alike changes nothing: distances are those of the last token.
        """
        if self.decoder.positions != "alibi":
            return scores
        distances = np.arange(self.context) - (self.context - 1)
        falls = np.array(self.decoder.slopes)[:, None] * distances
        term = self.constant("falls", falls[None, :, None].astype(np.float32))
        return self.node("Add", f"{name}.falling", [scores, term])

    def hide_outside(self, name: str, scores: str, window: int) -> str:
        """Add a term to scores that hides keys before the window of a query; none if it sees all."""
        if not window or window >= self.context:
            return scores
        places, queries = np.arange(self.context), np.arange(self.context - self.tokens, self.context)
        outside = places <= queries[:, None] - window
        term = self.constant(f"window_{window}", outside[None, None] * np.float32(HIDE))
        return self.node("Add", f"{name}.windowed", [scores, term])

    def heads(self, name: str, source: str, count: int) -> str:
        """Split into heads: [batch, tokens, count * head_size] to [batch, count, tokens, head_size]."""
        shape = [self.batch, self.tokens, count, self.decoder.head_size]
        split = self.node("Reshape", f"{name}.split", [source, self.integers(f"{count}_heads", shape)])
        return self.node("Transpose", f"{name}.heads", [split], perm=[0, 2, 1, 3])

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
    """Cosine and sine of the angles of rotation at each position, [positions, rotation_size], fp32.

    Those of layers that rotate by `Decoder.local_rotary_base`, if `local`.
    """
    base = decoder.local_rotary_base if local else decoder.rotary_base
    turns = base ** (-np.arange(0, decoder.rotation_size, 2) / decoder.rotation_size)
    if decoder.rotary_factors and not local:
        turns = turns / np.array(decoder.rotary_factors)
    angles = np.arange(positions)[:, None] * np.concatenate([turns, turns])
    scale = 1.0 if local else decoder.rotary_scale
    return (scale * np.cos(angles)).astype(np.float32), (scale * np.sin(angles)).astype(np.float32)
