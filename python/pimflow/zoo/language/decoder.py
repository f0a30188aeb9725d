"""Decoders of language models as data: their sizes, and the shapes of their weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pimflow.errors import ModelError

Shape = tuple[int, ...]

NORMS = ("rms", "layer")
POSITIONS = ("rotary", "learned")
ACTIVATIONS = ("swiglu", "gelu", "relu")


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A decoder: blocks of attention and feed-forward, each with a norm before it and a residual around it.

    Attributes
    ----------
    name : str
    layers, hidden, heads, kv_heads, head_size, feed_forward, vocabulary : int
        `kv_heads` divides `heads`: ``heads / kv_heads`` heads of queries share a head of keys and values.
    norm : str
        ``rms`` (scale alone) or ``layer`` (mean, variance, scale and bias).
    norm_epsilon : float
    positions : str
        ``rotary``: queries and keys are rotated by an angle that depends on the position, as complex numbers
        whose parts are the halves of a head (arXiv 2104.09864); ``learned``: a row of a table is added.
    rotary_base : float
    max_context : int
        Maximum context in tokens; the table of positions has as many rows.
    position_offset : int
        Row of the first position in the table; 2 in OPT.
    activation : str
        ``swiglu``: the product of two, one after x * sigmoid(x); ``gelu``: its approximation by tanh;
        ``relu``.
    biases : bool
        Whether products have biases.
    tied : bool
        Whether logits are a product with the table of tokens.
    trained : bool
        Whether the zoo has trained weights; else they are drawn.
    file : str
        Path of the GGUF file with its weights, if there is one.
    text : str
        Tokenizer: ``bytes``, or empty if the zoo has none.
    source : str
        Source of these sizes.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    vocabulary: int
    norm: str = "rms"
    norm_epsilon: float = 1e-5
    positions: str = "rotary"
    rotary_base: float = 10000.0
    max_context: int
    position_offset: int = 0
    activation: str = "swiglu"
    biases: bool = False
    tied: bool = False
    trained: bool = False
    file: str = ""
    text: str = ""
    source: str

    def __post_init__(self) -> None:
        for field, choices in (("norm", NORMS), ("positions", POSITIONS), ("activation", ACTIVATIONS)):
            if getattr(self, field) not in choices:
                raise ModelError(
                    f"decoder '{self.name}': {field} is '{getattr(self, field)}'; one of "
                    f"{', '.join(choices)} "
                    "is supported"
                )
        if self.heads % self.kv_heads:
            raise ModelError(
                f"decoder '{self.name}': {self.heads} heads cannot share {self.kv_heads} heads of keys"
            )
        if self.positions == "rotary" and self.head_size % 2:
            raise ModelError(f"decoder '{self.name}': a head of {self.head_size} has no halves to turn")

    @property
    def has_weights(self) -> bool:
        """Whether its weights are trained, in the zoo or in a file; else they are drawn."""
        return self.trained or bool(self.file)

    @property
    def group(self) -> int:
        """How many heads of queries share a head of keys and values."""
        return self.heads // self.kv_heads

    def weights(self) -> dict[str, Shape]:
        """Shapes of all weights by name; matrices are [inputs, outputs], tables [rows, values]."""
        shapes: dict[str, Shape] = {"tokens.table": (self.vocabulary, self.hidden)}
        if self.positions == "learned":
            shapes["positions.table"] = (self.max_context + self.position_offset, self.hidden)
        for layer in range(self.layers):
            shapes |= self.block_weights(layer)
        return shapes | self.head_weights()

    def block_weights(self, layer: int) -> dict[str, Shape]:
        """Shapes of the weights of one block, by name."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        products = {
            "query": (self.hidden, queries),
            "key": (self.hidden, keys),
            "value": (self.hidden, keys),
            "attention": (queries, self.hidden),
            **({"gate": (self.hidden, self.feed_forward)} if self.activation == "swiglu" else {}),
            "up": (self.hidden, self.feed_forward),
            "down": (self.feed_forward, self.hidden),
        }
        return dict(self._block_weights(f"layers.{layer}", products))

    def _block_weights(self, prefix: str, products: Mapping[str, Shape]) -> Iterator[tuple[str, Shape]]:
        for norm in ("attention_norm", "feed_forward_norm"):
            yield from self._norm(f"{prefix}.{norm}")
        for name, shape in products.items():
            yield f"{prefix}.{name}.weight", shape
            if self.biases:
                yield f"{prefix}.{name}.bias", shape[1:]

    def head_weights(self) -> dict[str, Shape]:
        """Shapes of the weights after the last block; a tied output has no matrix of its own."""
        shapes = dict(self._norm("norm"))
        return shapes if self.tied else shapes | {"head.weight": (self.hidden, self.vocabulary)}

    def _norm(self, name: str) -> Iterator[tuple[str, Shape]]:
        yield f"{name}.scale", (self.hidden,)
        if self.norm == "layer":
            yield f"{name}.bias", (self.hidden,)

    @property
    def parameters(self) -> int:
        """Number of trainable values."""
        return sum(map(math.prod, self.weights().values()))

    @property
    def macs_per_token(self) -> int:
        """Multiply-accumulates of all products with weights for one token, without those of attention."""
        blocks = sum(math.prod(shape) for shape in self.block_weights(0).values() if len(shape) == 2)
        return self.layers * blocks + self.hidden * self.vocabulary

    def kv_bytes_per_token(self, element_bytes: int = 2) -> int:
        """Bytes of a token in the KV cache: a key and a value for each of `kv_heads` in each block."""
        return 2 * self.layers * self.kv_heads * self.head_size * element_bytes
