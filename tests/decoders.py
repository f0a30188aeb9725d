"""Decoders in ONNX, as exporters write them: a step that reads a cache of keys and values."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from pimflow.zoo.language import decoder
from pimflow.zoo.language.reference import ReferenceDecoder

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
MICROSOFT = "com.microsoft"
TYPES = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64, "int32": TensorProto.INT32}
WINDOW = 3
SMALL = decoder.Decoder(
    name="small",
    layers=1,
    hidden=32,
    heads=4,
    kv_heads=1,
    head_size=8,
    feed_forward=48,
    vocabulary=60,
    max_context=32,
    source="a test",
)


def greedy(model, weights, prompt, n: int, dtype=np.float32) -> tuple[int, ...]:
    """The `n` likeliest tokens behind `prompt`, one after the other, by the decoder in NumPy."""
    reference = ReferenceDecoder(model, weights, dtype)
    logits, tokens = reference.step(np.array(prompt)), []
    while len(tokens) < n:
        tokens.append(int(logits[-1].argmax()))
        logits = reference.step(np.array(tokens[-1:]))
    return tuple(tokens)


class DecoderModel:
    """A GPT-2-shaped decoder: LayerNorm, attention, LayerNorm, ReLU.

    Parameters
    ----------
    tokens, past : int
        Tokens of the step, and how many are in the cache before it.
    scaled : str
        What the scale multiplies: ``scores``, ``query`` or ``both`` operands of the first product.
    mask : str
        None if empty; ``causal``: a constant; ``given``: the input ``attention_mask`` [1, past + tokens]; or
        that input and a constant from the length, a ``window`` of `WINDOW` tokens or each ``second`` token,
        as PyTorch exports them, with zeros for queries that see nothing.
    """

    def __init__(
        self,
        *,
        layers: int = 1,
        heads: int = 4,
        kv_heads: int = 4,
        head_size: int = 8,
        tokens: int = 1,
        past: int = 7,
        hidden: int = 32,
        vocabulary: int = 50,
        scaled: str = "scores",
        mask: str = "",
        seed: int = 0,
    ):
        self.rng, self.nodes, self.weights = np.random.default_rng(seed), [], []
        self.heads, self.kv_heads, self.head_size = heads, kv_heads, head_size
        self.tokens, self.past, self.scaled, self.mask = tokens, past, scaled, mask
        self.width, self.length = heads * head_size, past + tokens
        self.inputs = [helper.make_tensor_value_info("input_ids", INT64, [1, tokens])]
        if mask in ("given", "window", "second"):
            self.inputs.append(helper.make_tensor_value_info("attention_mask", FLOAT, [1, self.length]))
        self.outputs = []
        x = self.add("Gather", self.random_weight(vocabulary, self.width), "input_ids", name="embedding")
        for layer in range(layers):
            x = self.layer(layer, x, hidden)
        logits = self.add("MatMul", x, self.random_weight(self.width, vocabulary), name="head")
        self.nodes[-1].output[0] = "logits"
        assert logits
        self.outputs.insert(0, helper.make_tensor_value_info("logits", FLOAT, [1, tokens, vocabulary]))

    def model(self) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, "decoder", self.inputs, self.outputs, self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)

    def layer(self, index: int, x: str, hidden: int) -> str:
        width = self.width
        y = self.add("MatMul", self.attention(index, self.norm(x)), self.random_weight(width, width))
        x = self.add("Add", x, y)
        y = self.add("Relu", self.add("MatMul", self.norm(x), self.random_weight(width, hidden)))
        return self.add("Add", x, self.add("MatMul", y, self.random_weight(hidden, width)))

    def attention(self, layer: int, x: str) -> str:
        query, key, value = (self.split_heads(x, n) for n in (self.heads, self.kv_heads, self.kv_heads))
        key, value = self.append_to_cache(layer, "key", key), self.append_to_cache(layer, "value", value)
        return self.merge_heads(self.attention_values(layer, query, key, value))

    def attention_values(self, layer: int, query: str, key: str, value: str) -> str:
        key, value = self.repeat_kv_heads(key), self.repeat_kv_heads(value)
        key = self.add("Transpose", key, perm=[0, 1, 3, 2])
        if self.scaled == "both":
            root = self.constant(np.float32(self.head_size**-0.25))
            query, key = self.add("Mul", query, root), self.add("Mul", key, root)
        if self.scaled == "query":
            query = self.add("Mul", query, self.constant(np.float32(self.head_size**-0.5)))
        scores = self.add("MatMul", query, key, name=f"layer{layer}.scores")
        if self.scaled == "scores":
            scores = self.add("Div", scores, self.constant(np.float32(self.head_size**0.5)))
        if self.mask == "causal":
            seen = np.tri(self.tokens, self.length, self.past, dtype=bool)
            scores = self.add("Where", self.constant(seen), scores, self.constant(np.float32(-1e9)))
        if self.mask == "given":
            shape = self.constant(np.array([1, 1, 1, self.length]))
            scores = self.add("Add", scores, self.add("Reshape", "attention_mask", shape))
        weights = self.add("Softmax", self.add_guarded_mask(scores), axis=-1)
        if self.mask in ("window", "second"):
            zero = self.constant(np.float32(0))
            weights = self.add("Where", self.add("IsNaN", weights), zero, weights)
        return self.add("MatMul", weights, value, name=f"layer{layer}.values")

    def add_guarded_mask(self, scores: str) -> str:
        """Scores with -inf where a constant, or the input with the mask, hides a key."""
        if self.mask not in ("window", "second"):
            return scores
        behind = self.length - 1 - np.arange(self.length)
        seen = behind < WINDOW if self.mask == "window" else behind % 2 == 0
        given = self.add("Cast", "attention_mask", to=TensorProto.BOOL)
        given = self.add("Reshape", given, self.constant(np.array([1, 1, 1, self.length])))
        seen = self.add("And", self.constant(seen[None, None, None]), given)
        zero, hidden = self.constant(np.float32(0)), self.constant(np.float32(-np.inf))
        return self.add("Add", scores, self.add("Where", seen, zero, hidden))

    def append_to_cache(self, layer: int, kind: str, new: str) -> str:
        """What is in the cache after the step."""
        dims = [1, self.kv_heads, self.past, self.head_size]
        past, present = f"past_key_values.{layer}.{kind}", f"present.{layer}.{kind}"
        self.inputs.append(helper.make_tensor_value_info(past, FLOAT, dims))
        dims[2] = self.length
        self.outputs.append(helper.make_tensor_value_info(present, FLOAT, dims))
        self.nodes.append(helper.make_node("Concat", [past, new], [present], f"{present}.append", axis=2))
        return present

    def repeat_kv_heads(self, cache: str) -> str:
        """Keys or values of every query head."""
        if self.heads == self.kv_heads:
            return cache
        dims = [1, self.kv_heads, self.heads // self.kv_heads, self.length, self.head_size]
        expanded = self.add("Unsqueeze", cache, self.constant(np.array([2])))
        expanded = self.add("Expand", expanded, self.constant(np.array(dims)))
        merged_dims = [1, self.heads, self.length, self.head_size]
        return self.add("Reshape", expanded, self.constant(np.array(merged_dims)))

    def split_heads(self, x: str, count: int) -> str:
        y = self.add("MatMul", x, self.random_weight(self.width, count * self.head_size))
        y = self.add("Add", y, self.random_weight(count * self.head_size))
        y = self.add("Reshape", y, self.constant(np.array([1, self.tokens, count, self.head_size])))
        return self.add("Transpose", y, perm=[0, 2, 1, 3])

    def merge_heads(self, x: str) -> str:
        x = self.add("Transpose", x, perm=[0, 2, 1, 3])
        return self.add("Reshape", x, self.constant(np.array([1, self.tokens, self.width])))

    def norm(self, x: str) -> str:
        ones, zeros = np.ones(self.width, np.float32), np.zeros(self.width, np.float32)
        return self.add("LayerNormalization", x, self.constant(ones), self.constant(zeros), axis=-1)

    def random_weight(self, *dims: int) -> str:
        return self.constant((self.rng.normal(size=dims) / np.sqrt(dims[0])).astype(np.float32))

    def constant(self, array: np.ndarray) -> str:
        self.weights.append(numpy_helper.from_array(np.asarray(array), f"weight{len(self.weights)}"))
        return self.weights[-1].name

    def add(self, kind: str, *operands: str, name: str = "", **attributes) -> str:
        name = name or f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, operands, [f"{name}.out"], name, **attributes))
        return f"{name}.out"


def one_node(kind, inputs, results, constants=(), domain=MICROSOFT, opset=17, **attributes):
    """A network of one node; of each result, its name and shape."""
    graph = helper.make_graph(
        [helper.make_node(kind, list(inputs), list(results), "node", domain=domain, **attributes)],
        kind,
        [
            helper.make_tensor_value_info(name, TYPES[str(array.dtype)], array.shape)
            for name, array in inputs.items()
            if array is not None and name not in constants
        ],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, dims) for n, dims in results.items() if n],
        [onnx.numpy_helper.from_array(inputs[name], name) for name in constants],
    )
    domains = [helper.make_opsetid("", opset), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=domains, ir_version=10)


def query(*dims: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *dims)).normal(size=dims).astype(np.float32)


def tables(rows: int, half: int) -> tuple[np.ndarray, np.ndarray]:
    angles = np.arange(rows)[:, None] / 100.0 ** (np.arange(half) / half)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def gqa_model(past, tokens, *, length=0, heads=4, kv_heads=2, size=16, batch=1, sinks=False, **attributes):
    """GroupQueryAttention, and its operands: a cache of `length` places, or one that grows."""
    total = past + tokens
    places = length or past
    inputs = {
        "query": query(batch, tokens, heads * size),
        "key": query(batch, tokens, kv_heads * size, seed=1),
        "value": query(batch, tokens, kv_heads * size, seed=2),
        "past_key": query(batch, kv_heads, places, size, seed=3),
        "past_value": query(batch, kv_heads, places, size, seed=4),
        "seqlens_k": np.full(batch, total - 1, np.int32),
        "total_sequence_length": np.array(total, np.int32),
    }
    cosines, sines = tables(32, size // 2)
    if attributes.get("do_rotary"):
        inputs |= {"cos_cache": cosines, "sin_cache": sines}
    present = [batch, kv_heads, length or total, size]
    results = {"y": [batch, tokens, heads * size], "present_key": present, "present_value": present}
    constants = [name for name in ("cos_cache", "sin_cache", "total_sequence_length") if name in inputs]
    node_attributes = {"num_heads": heads, "kv_num_heads": kv_heads, **attributes}
    if not places:
        inputs = {name: array for name, array in inputs.items() if not name.startswith("past")}
    model = one_node("GroupQueryAttention", inputs, results, constants, **node_attributes)
    if sinks:
        operands = list(model.graph.node[0].input)
        model.graph.node[0].input[:] = [*operands, *[""] * (11 - len(operands)), "head_sink"]
        model.graph.initializer.append(onnx.numpy_helper.from_array(query(heads, seed=5), "head_sink"))
    if not places:
        operands = list(model.graph.node[0].input)
        model.graph.node[0].input[:] = [*operands[:3], "", "", *operands[3:]]
    return model, inputs


def decode_tokens(tokenizer, tokens) -> str:
    """The text of a sequence of tokens."""
    decoder = tokenizer.decoder()
    return "".join(decoder.text(token, index + 1 == len(tokens)) for index, token in enumerate(tokens))
