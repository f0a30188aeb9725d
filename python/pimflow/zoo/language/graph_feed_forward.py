"""Feed-forward parts of a block, added to the graph of a decoder: one, or experts that a router chooses."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from onnx import TensorProto, helper

from pimflow.zoo.language.decoder import CLAMPED_GAIN, CLAMPED_LIMIT, GATED
from pimflow.zoo.language.decoder_parts import Experts
from pimflow.zoo.language.graph_builder import HIDE, GraphBuilder

Product = Callable[[str, str], str]


def feed_forward(graph: GraphBuilder, name: str, source: str, product: Product, prefix: str = "") -> str:
    """The products and the activation of one part.

    Parameters
    ----------
    product : callable
        Adds a product by its name and its operand.
    prefix : str
        What the names of the products begin with.
    """
    wide = product(f"{name}.{prefix}up", source)
    activation, place = graph.decoder.activation, f"{name}.{prefix.rstrip('_')}".rstrip(".")
    if activation in GATED:
        wide = _gate_product(graph, place, activation, product(f"{name}.{prefix}gate", source), wide)
    else:
        wide = _activation(graph, place, activation, wide)
    return product(f"{name}.{prefix}down", wide)


def expert_mixture(graph: GraphBuilder, name: str, source: str, experts: Experts) -> str:
    """The experts that the router chooses, added by their shares: [batch, tokens, hidden].

    If all tokens together go through fewer experts than there are, the weights of those are gathered;
    else every expert computes all tokens, and those that did not choose it have no share of it.
    """
    shares, choices = _router_choices(graph, f"{name}.router", source, experts)
    if graph.batch * graph.tokens * experts.used < experts.count:
        mixed = _mixture_of_chosen(graph, name, source, shares, choices)
    else:
        mixed = _mixture_of_all(graph, name, source, shares, choices, experts)
    if not experts.shared:
        return mixed
    shared = feed_forward(graph, name, source, graph.product, "shared_")
    return graph.node("Add", f"{name}.with_shared", [mixed, shared])


def _router_choices(graph: GraphBuilder, name: str, source: str, experts: Experts) -> tuple[str, str]:
    """Shares and numbers of the chosen experts, both [batch, tokens, used]."""
    logits = graph.product(name, source)
    if experts.scores == "softmax":
        scores = graph.node("Softmax", f"{name}.shares", [logits], axis=-1)
    else:
        scores = graph.node("Sigmoid", f"{name}.shares", [logits])
    ranks = scores
    if experts.corrected:
        ranks = graph.node("Add", f"{name}.corrected", [scores, graph.weight(f"{name}_correction.bias")])
    if experts.used_groups < experts.groups:
        ranks = _within_groups(graph, name, ranks, experts)
    largest, choices = _largest(graph, f"{name}.choices", ranks, experts.used)
    if ranks != scores:
        largest = graph.node("GatherElements", f"{name}.chosen_shares", [scores, choices], axis=-1)
    if experts.normalised:
        last = graph.integers("axes_last", [-1])
        total = graph.node("ReduceSum", f"{name}.total", [largest, last], keepdims=1)
        largest = graph.node("Div", f"{name}.normalised", [largest, total])
    return graph.scale(f"{name}.scaled", largest, experts.factor), choices


def _largest(graph: GraphBuilder, name: str, source: str, count: int) -> tuple[str, str]:
    """The largest elements along the last axis, and their indices."""
    values, indices = f"{name}.largest", f"{name}.indices"
    number = graph.integers(f"largest_{count}", [count])
    graph.nodes.append(helper.make_node("TopK", [source, number], [values, indices], values, axis=-1))
    return values, indices


def _within_groups(graph: GraphBuilder, name: str, ranks: str, experts: Experts) -> str:
    """`ranks`, far below all others outside the groups whose best experts rank highest."""
    batch, tokens, groups = graph.batch, graph.tokens, experts.groups
    last = graph.integers("axes_last", [-1])
    grouped = graph.integers("router_groups", [batch, tokens, groups, experts.count // groups])
    members = graph.node("Reshape", f"{name}.groups", [ranks, grouped])
    best, _ = _largest(graph, f"{name}.best", members, experts.group_best)
    sums = graph.node("ReduceSum", f"{name}.group_ranks", [best, last], keepdims=0)
    _, chosen = _largest(graph, f"{name}.group_choices", sums, experts.used_groups)
    chosen = graph.node("Unsqueeze", f"{name}.group_columns", [chosen, last])
    numbers = graph.integers("group_numbers", np.arange(groups))
    open_groups = graph.node("Equal", f"{name}.group_is_chosen", [chosen, numbers])
    open_groups = graph.node("Cast", f"{name}.group_counts", [open_groups], to=TensorProto.FLOAT)
    second = graph.integers("axis_2", [2])
    open_groups = graph.node("ReduceSum", f"{name}.open_groups", [open_groups, second], keepdims=0)
    closed = graph.node("Sub", f"{name}.closed_groups", [graph.constant("one", 1.0), open_groups])
    closed = graph.node("Mul", f"{name}.group_terms", [closed, graph.constant("hide", HIDE)])
    closed = graph.node("Unsqueeze", f"{name}.group_hides", [closed, last])
    hidden = graph.node("Add", f"{name}.open_members", [members, closed])
    flat = graph.integers("router_experts", [batch, tokens, experts.count])
    return graph.node("Reshape", f"{name}.open_ranks", [hidden, flat])


def _mixture_of_chosen(graph: GraphBuilder, name: str, source: str, shares: str, choices: str) -> str:
    """Each chosen expert by itself, [batch, tokens, used, 1, size], and their sum by shares."""
    chosen_axes = graph.integers("axes_2_3", [2, 3])
    rows = graph.node("Unsqueeze", f"{name}.rows", [source, chosen_axes])

    def product(part: str, operand: str) -> str:
        """A product with the weights of the chosen experts."""
        biased = part.rpartition(".")[2] in graph.decoder.biases
        weights = graph.node("Gather", f"{part}.chosen", [graph.weight(f"{part}.weight"), choices], axis=0)
        result = graph.node("MatMul", f"{part}.product" if biased else part, [operand, weights])
        if not biased:
            return result
        biases = graph.node("Gather", f"{part}.biases", [graph.weight(f"{part}.bias"), choices], axis=0)
        return graph.node("Add", part, [result, biases])

    results = feed_forward(graph, name, rows, product)
    result_axes = graph.integers("axes_3_4", [3, 4])
    factors = graph.node("Unsqueeze", f"{name}.factors", [shares, result_axes])
    parts = graph.node("Mul", f"{name}.parts", [results, factors])
    return graph.node("ReduceSum", f"{name}.mixed_experts", [parts, chosen_axes], keepdims=0)


def _mixture_of_all(
    graph: GraphBuilder, name: str, source: str, shares: str, choices: str, experts: Experts
) -> str:
    """Every expert with all tokens, [batch, experts, tokens, size], and their sum by shares."""
    numbers = graph.integers("expert_numbers", np.arange(experts.count))
    last = graph.integers("axes_last", [-1])
    choices = graph.node("Unsqueeze", f"{name}.choices", [choices, last])
    chosen = graph.node("Equal", f"{name}.is_chosen", [choices, numbers])
    chosen = graph.node("Cast", f"{name}.chosen", [chosen], to=TensorProto.FLOAT)
    columns = graph.node("Unsqueeze", f"{name}.columns", [shares, last])
    placed = graph.node("Mul", f"{name}.placed", [chosen, columns])
    second = graph.integers("axis_2", [2])
    table = graph.node("ReduceSum", f"{name}.share_table", [placed, second], keepdims=0)
    table = graph.node("Transpose", f"{name}.share_rows", [table], perm=[0, 2, 1])
    factors = graph.node("Unsqueeze", f"{name}.factors", [table, last])
    first = graph.integers("axis_1", [1])
    rows = graph.node("Unsqueeze", f"{name}.rows", [source, first])
    results = feed_forward(graph, name, rows, graph.product)
    parts = graph.node("Mul", f"{name}.parts", [results, factors])
    return graph.node("ReduceSum", f"{name}.mixed_experts", [parts, first], keepdims=0)


def _gate_product(graph: GraphBuilder, name: str, activation: str, gate: str, wide: str) -> str:
    """The product of an activated gate and another product."""
    if activation != "clamped_swiglu":
        return graph.node("Mul", f"{name}.gated", [_activation(graph, name, activation, gate), wide])
    limit = graph.constant("clamp.limit", CLAMPED_LIMIT)
    gate = graph.node("Min", f"{name}.clamped_gate", [gate, limit])
    wide = graph.node("Clip", f"{name}.clamped", [wide, graph.constant("clamp.least", -CLAMPED_LIMIT), limit])
    wide = graph.node("Add", f"{name}.raised", [wide, graph.constant("one", 1.0)])
    steep = graph.node("Mul", f"{name}.steep", [gate, graph.constant("clamp.gain", CLAMPED_GAIN)])
    gate = graph.node("Mul", f"{name}.active", [gate, graph.node("Sigmoid", f"{name}.sigmoid", [steep])])
    return graph.node("Mul", f"{name}.gated", [gate, wide])


def _activation(graph: GraphBuilder, name: str, activation: str, x: str) -> str:
    """An activation of one operand."""
    if activation == "relu":
        return graph.node("Relu", f"{name}.active", [x])
    if activation == "swiglu":
        return graph.node("Mul", f"{name}.active", [x, graph.node("Sigmoid", f"{name}.sigmoid", [x])])
    if activation != "gelu_erf":
        return _gelu(graph, f"{name}.gelu", x)
    ratio = graph.node("Mul", f"{name}.ratio", [x, graph.constant("gelu.ratio", math.sqrt(0.5))])
    more = graph.node("Erf", f"{name}.erf", [ratio])
    more = graph.node("Add", f"{name}.more", [more, graph.constant("one", 1.0)])
    half = graph.node("Mul", f"{name}.half", [more, graph.constant("half", 0.5)])
    return graph.node("Mul", f"{name}.active", [x, half])


def _gelu(graph: GraphBuilder, name: str, x: str) -> str:
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))."""
    square = graph.node("Mul", f"{name}.square", [x, x])
    cube = graph.node("Mul", f"{name}.cube", [square, x])
    cube = graph.node("Mul", f"{name}.part", [cube, graph.constant("gelu.cube", 0.044715)])
    inner = graph.node("Add", f"{name}.sum", [x, cube])
    inner = graph.node("Mul", f"{name}.inner", [inner, graph.constant("gelu.root", math.sqrt(2 / math.pi))])
    inner = graph.node("Tanh", f"{name}.tanh", [inner])
    inner = graph.node("Add", f"{name}.more", [inner, graph.constant("one", 1.0)])
    inner = graph.node("Mul", f"{name}.half", [inner, graph.constant("half", 0.5)])
    return graph.node("Mul", name, [x, inner])
