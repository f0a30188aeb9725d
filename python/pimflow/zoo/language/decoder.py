"""Decoders of language models as data: their sizes, and the shapes of their weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from pimflow.errors import ModelError, UsageError
from pimflow.weight_types import INTEGERS, WEIGHT_TYPES, cache_bytes
from pimflow.zoo.language.decoder_parts import Experts, LatentAttention

Shape = tuple[int, ...]

NORMS = ("rms", "layer")
POSITIONS = ("rotary", "learned", "alibi")
ACTIVATIONS = ("swiglu", "geglu", "clamped_swiglu", "gelu", "gelu_erf", "relu")
GATED = ("swiglu", "geglu", "clamped_swiglu")  # activations of a product that is multiplied with another
CLAMPED_GAIN, CLAMPED_LIMIT = 1.702, 7.0  # of ``clamped_swiglu``, as gpt-oss has them
QUERY_NORMS = ("", "heads", "whole")
FEED_FORWARD_PRODUCTS = ("gate", "up", "down")
LATENT_PRODUCTS = ("query_latent", "latent")
BLOCK_PRODUCTS = ("query", "key", "value", *LATENT_PRODUCTS, "attention", "router", *FEED_FORWARD_PRODUCTS)


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A decoder: blocks of attention and feed-forward, each with norms and a residual around it.

    Attributes
    ----------
    layers, hidden, heads, kv_heads, head_size, feed_forward, vocabulary : int
        `kv_heads` divides `heads`: ``heads / kv_heads`` heads of queries share a head of keys and values.
    norm : str
        ``rms`` (scale alone) or ``layer`` (mean, variance, scale and bias).
    positions : str
        ``rotary``: queries and keys are rotated by an angle that depends on the position, as complex numbers
        whose parts are the halves of a head (arXiv 2104.09864); ``learned``: a row of a table is added;
        ``alibi``: scores fall with the distance of a key, for each head by a slope of its own
        (arXiv 2108.12409).
    rotary_size : int
        Elements of a head that are rotated, from the first on; 0 for all.
    rotary_factors : tuple of float
        Divisors of the frequencies of rotation, for each pair; empty if all are 1.
    rotary_scale : float
        Factor of the cosines and sines of rotation.
    local_rotary_base : float
        Base in the layers with a window, without `rotary_factors` and `rotary_scale`; 0 if these are like
        all others.
    unturned_layers : frozenset of int
        Layers whose queries and keys are not rotated, of a decoder with rotary positions.
    max_context : int
        Maximum context in tokens; the table of positions has as many rows.
    position_offset : int
        Row of the first position in the table; 2 in OPT.
    activation : str
        ``swiglu``: the product of two, one after x * sigmoid(x); ``geglu``: one after ``gelu``;
        ``clamped_swiglu``: (u + 1) * g * sigmoid(1.702 g), with g and u within 7; ``gelu``: its
        approximation by tanh; ``gelu_erf``: as it is defined; ``relu``.
    experts : Experts, optional
        The experts of each block, each of the size `feed_forward`; None if there is one feed-forward part.
    dense_layers, dense_feed_forward : int
        The first layers, which have no experts but a feed-forward part of that size.
    latent : LatentAttention, optional
        How keys and values are made from one vector, of heads whose last `rotary_size` elements are rotated;
        `kv_heads` is 1 then.
    sinks : bool
        Whether each head has a score that no key stands for: softmax goes over it, too (arXiv 2309.17453).
    biases : frozenset of str
        Products that have a bias, of `BLOCK_PRODUCTS` and ``head``.
    input_norms, result_norms : bool
        Whether attention and feed-forward have a norm before them; and one after them, before the residual.
    query_norm : str
        Norm of queries and keys before they are rotated: none if empty, of each of the ``heads``, or of the
        ``whole`` result of the product.
    parallel : bool
        Whether attention and feed-forward read the same hidden state, and both are added to it.
    shares_norm : bool
        Whether the two of a `parallel` block also share the norm before them.
    windows : tuple of int
        By layer, the tokens that a query sees: its own, and those before it; 0 for all. Empty: all in every
        layer.
    score_scale : float
        Factor of the products of queries and keys; 0 for ``1 / sqrt(head_size)``.
    score_softcap, logit_softcap : float
        If not 0, scores, or logits, x become ``cap * tanh(x / cap)``.
    embedding_scale, residual_scale, logit_scale : float
        Factors of embedded tokens, of what is added to a residual, and of logits.
    tied : bool
        Whether logits are a product with the table of tokens.
    trained : bool
        Whether the zoo has trained weights; else they are drawn.
    file : str
        Path of the GGUF file with its weights, if there is one.
    weight_types : mapping of str to str
        By name of a weight, the type of `weight_types.WEIGHT_TYPES` in which it is stored; of all others it
        is that of the device.
    activations : str
        Type, of `weight_types.INTEGERS`, to which the inputs of products with weights of `weight_types` are
        quantised, with one scale a token; empty if they are of the device's type.
    cache_type : str
        Type, of `weight_types.CACHE_TYPES`, to which keys and values are quantised as they are appended to
        the cache, with one scale a token and head; empty if they are of the device's type.
    text : str
        Tokenizer: ``bytes``, or empty if the zoo has none.
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
    rotary_size: int = 0
    rotary_factors: tuple[float, ...] = ()
    rotary_scale: float = 1.0
    local_rotary_base: float = 0.0
    unturned_layers: frozenset[int] = frozenset()
    max_context: int
    position_offset: int = 0
    activation: str = "swiglu"
    experts: Experts | None = None
    dense_layers: int = 0
    dense_feed_forward: int = 0
    latent: LatentAttention | None = None
    sinks: bool = False
    biases: frozenset[str] = frozenset()
    embedding_norm: bool = False
    input_norms: bool = True
    result_norms: bool = False
    query_norm: str = ""
    parallel: bool = False
    shares_norm: bool = False
    windows: tuple[int, ...] = ()
    score_scale: float = 0.0
    score_softcap: float = 0.0
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    tied: bool = False
    trained: bool = False
    file: str = ""
    weight_types: Mapping[str, str] = field(default_factory=dict, hash=False)
    activations: str = ""
    cache_type: str = ""
    text: str = ""
    source: str

    def __post_init__(self) -> None:
        allowed = dict(norm=NORMS, positions=POSITIONS, activation=ACTIVATIONS, query_norm=QUERY_NORMS)
        for name, choices in allowed.items():
            if getattr(self, name) not in choices:
                raise ModelError(
                    f"decoder '{self.name}': {name} is '{getattr(self, name)}'; one of "
                    f"{', '.join(choices)} "
                    "is supported"
                )
        if self.heads % self.kv_heads:
            raise ModelError(
                f"decoder '{self.name}': {self.heads} heads cannot share {self.kv_heads} heads of keys"
            )
        if self.positions == "rotary" and self.rotation_size % 2:
            raise ModelError(f"decoder '{self.name}': a head of {self.rotation_size} has no halves to turn")
        if self.rotation_size > self.head_size or len(self.rotary_factors) not in (
            0,
            self.rotation_size // 2,
        ):
            raise ModelError(f"decoder '{self.name}': its rotation does not fit heads of {self.head_size}")
        if self.experts and (flaw := self.experts.flaw()):
            raise ModelError(f"decoder '{self.name}': {flaw}")
        is_plain = self.positions == "rotary" and not self.unturned_layers and not self.query_norm
        if self.latent and (self.kv_heads != 1 or self.rotation_size == self.head_size or not is_plain):
            raise ModelError(f"decoder '{self.name}': keys of such heads are not made of a latent vector")
        if len(self.windows) not in (0, self.layers):
            raise ModelError(f"decoder '{self.name}': has windows for {len(self.windows)} layers")

    def with_weights(self, kind: str) -> Decoder:
        """The decoder with all matrices and the table of tokens stored in a type; raises `UsageError`.

        A matrix must be of whole blocks along its inputs. Norms, biases and positions keep their type.
        """
        inputs = {
            name: shape[1] if name.endswith(".table") else shape[0]
            for name, shape in self.weights().items()
            if len(shape) == 2 and name != "positions.table"
        }
        for name, size in inputs.items():
            if not WEIGHT_TYPES[kind].holds(size):
                raise UsageError(
                    f"'{self.name}': '{name}' has {size} inputs, no whole blocks of the "
                    f"{WEIGHT_TYPES[kind].block} values that share a scale in {kind}; choose another type"
                )
        return replace(self, weight_types=dict.fromkeys(inputs, kind))

    def with_activations(self, kind: str) -> Decoder:
        """The decoder with the inputs of products quantised, a token at a time; raises `UsageError`.

        Weights must be of integers with one scale an output, so that sums are of integers. Products of
        experts and with the table of tokens are not quantised.
        """
        wide = sorted(set(self.weight_types.values()) - set(INTEGERS))
        if wide or not self.weight_types:
            raise UsageError(
                f"--activation-type {kind}: weights of {', '.join(wide) or 'fp16'} are no integers with one "
                f"scale an output; give --weight-type {' or '.join(INTEGERS)}"
            )
        return replace(self, activations=kind)

    def with_types(
        self, weight_type: str = "fp16", activation_type: str = "fp16", kv_cache_dtype: str = "fp16"
    ) -> Decoder:
        """The decoder with narrow weights, activations and caches; ``fp16`` leaves each as it is.

        Raises
        ------
        UsageError
            As `with_weights`, `with_activations` and `with_cache`.
        """
        decoder = self if weight_type == "fp16" else self.with_weights(weight_type)
        decoder = decoder if activation_type == "fp16" else decoder.with_activations(activation_type)
        return decoder if kv_cache_dtype == "fp16" else decoder.with_cache(kv_cache_dtype)

    def with_cache(self, kind: str) -> Decoder:
        """The decoder with integers in its cache, of `weight_types.CACHE_TYPES`; raises `UsageError`."""
        if self.latent is not None:
            raise UsageError(
                f"--kv-cache-dtype {kind}: '{self.name}' caches a latent vector, not keys and values of "
                "heads; leave it out"
            )
        return replace(self, cache_type=kind)

    @property
    def rotation_size(self) -> int:
        """Elements of a head that are rotated."""
        return self.rotary_size or self.head_size

    @property
    def key_size(self) -> int:
        """Elements of a key in the cache."""
        return self.latent.rank + self.rotation_size if self.latent else self.head_size

    @property
    def value_size(self) -> int:
        """Elements of a value in the cache."""
        return self.latent.rank if self.latent else self.head_size

    def has_experts(self, layer: int) -> bool:
        """Whether the feed-forward part of a layer is one of experts."""
        return self.experts is not None and layer >= self.dense_layers

    @property
    def attention_scale(self) -> float:
        """Factor of the products of queries and keys."""
        return self.score_scale or self.head_size**-0.5

    @property
    def slopes(self) -> tuple[float, ...]:
        """By head, how much a score falls with each token of distance, of a decoder with ``alibi``.

        2^(-8 k / n) for the k-th of n heads; where n is no power of 2, the heads beyond the power below it
        have every second slope of twice as many.
        """
        power = 2 ** int(math.log2(self.heads))
        slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
        between = [2 ** (-8 * (head + 1) / (2 * power)) for head in range(0, 2 * power, 2)]
        return tuple(slopes + between[: self.heads - power])

    def window(self, layer: int) -> int:
        """Tokens that a query of a layer sees; 0 for all."""
        return self.windows[layer] if self.windows else 0

    def turns_locally(self, layer: int) -> bool:
        """Whether a layer rotates by `local_rotary_base`."""
        return bool(self.local_rotary_base and self.window(layer))

    @property
    def has_weights(self) -> bool:
        """Whether its weights are trained, in the zoo or in a file; else they are drawn."""
        return self.trained or bool(self.file)

    @property
    def group(self) -> int:
        """How many heads of queries share a head of keys and values."""
        return self.heads // self.kv_heads

    def weights(self) -> dict[str, Shape]:
        """Shapes of all weights by name: matrices [inputs, outputs], tables [rows, values].

        Those of experts are [experts, inputs, outputs].
        """
        shapes: dict[str, Shape] = {"tokens.table": (self.vocabulary, self.hidden)}
        if self.embedding_norm:
            shapes |= dict(self._norm("tokens_norm"))
        if self.positions == "learned":
            shapes["positions.table"] = (self.max_context + self.position_offset, self.hidden)
        for layer in range(self.layers):
            shapes |= self.block_weights(layer)
        return shapes | self.head_weights()

    def block_weights(self, layer: int) -> dict[str, Shape]:
        """Shapes of the weights of one block, by name."""
        products = self._attention_products()
        if not self.has_experts(layer):
            size = self.dense_feed_forward if layer < self.dense_layers else self.feed_forward
            products |= self._feed_forward_products("", size)
            return dict(self._block_weights(f"layers.{layer}", products))
        experts = self.experts
        assert experts is not None
        products["router"] = (self.hidden, experts.count)
        products |= {
            name: (experts.count, *shape)
            for name, shape in self._feed_forward_products("", self.feed_forward).items()
        }
        if experts.shared:
            products |= self._feed_forward_products("shared_", experts.shared)
        shapes = dict(self._block_weights(f"layers.{layer}", products))
        if experts.corrected:
            shapes[f"layers.{layer}.router_correction.bias"] = (experts.count,)
        return shapes

    def _attention_products(self) -> dict[str, Shape]:
        """Shapes of the weights of attention's products; those of a latent vector also have the head."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        if self.latent is None:
            products: dict[str, Shape] = {
                "query": (self.hidden, queries),
                "key": (self.hidden, keys),
                "value": (self.hidden, keys),
            }
            return products | {"attention": (queries, self.hidden)}
        latent, still = self.latent, self.head_size - self.rotation_size
        products = {"query_latent": (self.hidden, latent.query_rank)} if latent.query_rank else {}
        return products | {
            "query": (latent.query_rank or self.hidden, queries),
            "latent": (self.hidden, latent.rank + self.rotation_size),
            "key_heads": (self.heads, still, latent.rank),
            "value_heads": (self.heads, latent.rank, latent.value_size),
            "attention": (self.heads * latent.value_size, self.hidden),
        }

    def _feed_forward_products(self, prefix: str, size: int) -> dict[str, Shape]:
        gate = {f"{prefix}gate": (self.hidden, size)} if self.activation in GATED else {}
        return {**gate, f"{prefix}up": (self.hidden, size), f"{prefix}down": (size, self.hidden)}

    def _block_weights(self, prefix: str, products: Mapping[str, Shape]) -> Iterator[tuple[str, Shape]]:
        if self.input_norms:
            yield from self._norm(f"{prefix}.attention_norm")
        if self.input_norms and not self.shares_norm:
            yield from self._norm(f"{prefix}.feed_forward_norm")
        for part in ("attention", "feed_forward") if self.result_norms else ():
            yield from self._norm(f"{prefix}.{part}_result_norm")
        if self.latent:
            yield from self._norm(f"{prefix}.latent_norm", self.latent.rank)
            if self.latent.query_rank:
                yield from self._norm(f"{prefix}.query_latent_norm", self.latent.query_rank)
        if self.sinks:
            yield f"{prefix}.sinks.bias", (self.heads,)
        for part in ("query", "key") if self.query_norm else ():
            size = products[part][1] if self.query_norm == "whole" else self.head_size
            yield from self._norm(f"{prefix}.{part}_norm", size)
        for name, shape in products.items():
            yield f"{prefix}.{name}.weight", shape
            if name in self.biases:
                *lead, _, outputs = shape
                yield f"{prefix}.{name}.bias", (*lead, 1, outputs) if lead else (outputs,)

    def head_weights(self) -> dict[str, Shape]:
        """Shapes of the weights after the last block; a tied output has no matrix of its own."""
        shapes = dict(self._norm("norm"))
        if not self.tied:
            shapes["head.weight"] = (self.hidden, self.vocabulary)
        return shapes | ({"head.bias": (self.vocabulary,)} if "head" in self.biases else {})

    def _norm(self, name: str, size: int = 0) -> Iterator[tuple[str, Shape]]:
        yield f"{name}.scale", (size or self.hidden,)
        if self.norm == "layer":
            yield f"{name}.bias", (size or self.hidden,)

    @property
    def parameters(self) -> int:
        """Number of trainable values."""
        return sum(map(math.prod, self.weights().values()))

    @property
    def macs_per_token(self) -> int:
        """Multiply-accumulates of all products with weights for one token, without those of attention."""
        return sum(map(self._block_macs, range(self.layers))) + self.hidden * self.vocabulary

    def _block_macs(self, layer: int) -> int:
        macs = 0
        for name, shape in self.block_weights(layer).items():
            if not name.endswith(".weight"):
                continue
            is_expert = self.has_experts(layer) and name.split(".")[-2] in FEED_FORWARD_PRODUCTS
            used = self.experts.used / self.experts.count if is_expert and self.experts else 1
            macs += round(math.prod(shape) * used)
        return macs

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of a token in the KV cache: a key and a value for each of `kv_heads` in each block."""
        return self.layers * self.kv_heads * (self.key_size + self.value_size)

    def kv_bytes_per_token(self, element_bytes: int = 2) -> int:
        """Bytes of a token in the KV cache, scales included, on a device whose elements have so many."""
        vectors = 2 * self.layers * self.kv_heads
        return cache_bytes(self.cache_type, self.kv_elements_per_token, vectors, element_bytes)
