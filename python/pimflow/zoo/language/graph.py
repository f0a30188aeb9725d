"""A decoder as an ONNX graph of one step: some tokens after a cache of keys and values.

Inputs and outputs have the names of Hugging Face's Optimum, and every length is fixed: a step of T tokens
with a cache of C - T tokens returns a cache of C. Unused places of the cache are at the front, where the mask
is 0.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto

from pimflow.errors import UsageError
from pimflow.zoo.language.decoder import Decoder
from pimflow.zoo.language.graph_attention import attention
from pimflow.zoo.language.graph_builder import GraphBuilder
from pimflow.zoo.language.graph_feed_forward import expert_mixture, feed_forward

HIDDEN = "inputs_embeds"  # input of a block without tokens
CONTEXT_OF_STEP, CONTEXT_OF_BLOCK = 128, 1024  # contexts if none is given when a network is compiled


def step_graph(decoder: Decoder, context: int, *, tokens: int = 1, batch: int = 1) -> onnx.ModelProto:
    """The graph of one step of a decoder, without weights: they are inputs, marked how to draw or read them.

    Parameters
    ----------
    context : int
        Tokens that the last token of the step attends to: ``context - tokens`` in the cache, and the step's.

    Returns
    -------
    onnx.ModelProto
        Inputs ``input_ids`` and ``position_ids`` [batch, tokens], ``attention_mask`` [batch, context], all
        int64, and for each layer ``past_key_values.N.key`` and ``.value`` [batch, kv_heads, context - tokens,
        head_size], if there are any; outputs ``logits`` [batch, tokens, vocabulary] and ``present.N.key`` and
        ``.value`` [batch, kv_heads, context, head_size].
    """
    graph = GraphBuilder(decoder, context, tokens, batch)
    hidden = graph.embed(graph.input("input_ids", (batch, tokens)))
    for layer in range(decoder.layers):
        hidden = _block(graph, hidden, layer)
    return graph.model(
        decoder.name, {"logits": (_logits(graph, hidden), (batch, tokens, decoder.vocabulary))}
    )


def block_graph(decoder: Decoder, context: int, *, tokens: int = 1, batch: int = 1) -> onnx.ModelProto:
    """The first block of a decoder as `step_graph` has it, from ``inputs_embeds`` to ``hidden_states``.

    Both are [batch, tokens, hidden]. Learned positions are already added to the input.
    """
    graph = GraphBuilder(decoder, context, tokens, batch)
    shape = (batch, tokens, decoder.hidden)
    hidden = _block(graph, graph.input(HIDDEN, shape, TensorProto.FLOAT), 0)
    return graph.model(f"{decoder.name} block", {"hidden_states": (hidden, shape)})


def head_graph(decoder: Decoder, *, tokens: int = 1, batch: int = 1) -> onnx.ModelProto:
    """The graph of what follows the last block: the norm, and the product with the vocabulary."""
    graph = GraphBuilder(decoder, tokens, tokens, batch)
    hidden = graph.input(HIDDEN, (batch, tokens, decoder.hidden), TensorProto.FLOAT)
    outputs = {"logits": (_logits(graph, hidden), (batch, tokens, decoder.vocabulary))}
    return graph.model(f"{decoder.name} head", outputs)


def zoo_graph(decoder: Decoder, context: int | None = None) -> onnx.ModelProto:
    """A decoder of the zoo as a network: one step; without trained weights, only its first block.

    Raises `UsageError` if `context` is out of the decoder's range.
    """
    if context is not None and not 1 < context <= decoder.max_context:
        raise UsageError(f"--context {context}: give 2 to {decoder.max_context} tokens for '{decoder.name}'")
    if decoder.trained:
        return step_graph(decoder, context or CONTEXT_OF_STEP)
    return block_graph(decoder, context or CONTEXT_OF_BLOCK)


def _block(graph: GraphBuilder, hidden: str, layer: int) -> str:
    """A block: attention and feed-forward with their norms, each added to a residual."""
    name, d = f"layers.{layer}", graph.decoder
    source = graph.norm(f"{name}.attention_norm", hidden) if d.input_norms else hidden
    attended = _add_residual(graph, f"{name}.attended", hidden, attention(graph, name, layer, source))
    before = hidden if d.parallel else attended
    if d.input_norms and not d.shares_norm:
        source = graph.norm(f"{name}.feed_forward_norm", before)
    elif not d.input_norms:
        source = before
    if d.experts is not None and d.has_experts(layer):
        result = expert_mixture(graph, name, source, d.experts)
    else:
        result = feed_forward(graph, name, source, graph.product)
    return _add_residual(graph, f"{name}.sum", attended, result)


def _add_residual(graph: GraphBuilder, name: str, hidden: str, result: str) -> str:
    """Add the result of attention or of the feed-forward part to the hidden state."""
    block, _, kind = name.rpartition(".")
    if graph.decoder.result_norms:
        part = "attention" if kind == "attended" else "feed_forward"
        result = graph.norm(f"{block}.{part}_result_norm", result)
    result = graph.scale(f"{name}.scaled", result, graph.decoder.residual_scale)
    return graph.node("Add", name, [hidden, result])


def _logits(graph: GraphBuilder, hidden: str) -> str:
    """The norm after the last block, and the product with the vocabulary."""
    hidden, d = graph.norm("norm", hidden), graph.decoder
    if d.tied:
        table = graph.node("Transpose", "head.table", [graph.weight("tokens.table")], perm=[1, 0])
        logits = graph.node("MatMul", "head.product" if "head" in d.biases else "head", [hidden, table])
        if "head" in d.biases:
            logits = graph.node("Add", "head", [logits, graph.weight("head.bias")])
    else:
        logits = graph.product("head", hidden)
    return graph.cap("logits", graph.scale("logits.scaled", logits, d.logit_scale), d.logit_softcap)
