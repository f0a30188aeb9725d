"""Numbers of tokens for which a product with weights is faster in PIM than on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx
from calibration.latency_bound import row_limited_ns
from onnx import TensorProto

from papers.attention_crossovers import speedup_lines
from pimflow.commands.shared.search import search
from pimflow.core.candidate import Cost
from pimflow.core.rewrite import PimRewrite
from pimflow.hardware import System
from pimflow.host.pages import Chart
from pimflow.placement import Profiling
from pimflow.zoo.language.decoder import Decoder
from pimflow.zoo.language.graph import HIDDEN
from pimflow.zoo.language.graph_builder import GraphBuilder


@dataclass(frozen=True, kw_only=True)
class ProductCrossing:
    """Times of a product with weights of a language model, launches included.

    Attributes
    ----------
    tokens : int
        Vectors that are multiplied with it: those of a prompt, or one for each request.
    gpu_ns : float
        On the GPU with all memory channels.
    pim_ns : float or None
        In PIM only; None if PIM cannot compute it.
    plan_ns : float
        Of the searched plan: on the GPU, in PIM, or split.
    pim_share : float
        PIM's share in that plan, in [0, 1].
    """

    model: str
    product: str
    inputs: int
    outputs: int
    tokens: int
    gpu_ns: float
    pim_ns: float | None
    plan_ns: float
    pim_share: float

    @property
    def speedup(self) -> float:
        """Of the plan over the GPU with all memory channels."""
        return self.gpu_ns / self.plan_ns


def _product_graph(decoder: Decoder, product: str, tokens: int) -> onnx.ModelProto:
    """The graph of one product without its bias, from [tokens, inputs] to [tokens, outputs]."""
    graph, name = GraphBuilder(decoder, tokens, tokens, 1), f"layers.0.{product}"
    inputs, outputs = graph.shapes[f"{name}.weight"]
    source = graph.input(HIDDEN, (tokens, inputs), TensorProto.FLOAT)
    result = graph.node("MatMul", name, [source, graph.weight(f"{name}.weight")])
    return graph.model(f"{decoder.name} {product}", {"hidden_states": (result, (tokens, outputs))})


def product_crossing(
    decoder: Decoder, product: str, tokens: int, system: System, profiling: Profiling
) -> ProductCrossing:
    """Search one product of a decoder's first block; `product` is the name of its weight, such as ``up``."""
    search_result = search(_product_graph(decoder, product, tokens), system, profiling=profiling)
    inputs, outputs = decoder.block_weights(0)[f"layers.0.{product}.weight"]
    (choice,) = search_result.plan.choices
    pim_latencies = [
        Cost.from_candidate(candidate).latency_ns
        for candidates in search_result.table.candidates.values()
        for candidate in candidates
        if isinstance(candidate.rewrite, PimRewrite)
    ]
    return ProductCrossing(
        model=decoder.name,
        product=product,
        inputs=inputs,
        outputs=outputs,
        tokens=tokens,
        gpu_ns=search_result.gpu_only.latency_ns,
        pim_ns=min(pim_latencies, default=None),
        plan_ns=search_result.evaluation.latency_ns,
        pim_share=1 - (choice.rewrite.gpu_share or 0.0),
    )


def first_slower_tokens(
    crossings: Sequence[ProductCrossing], is_slower: Callable[[ProductCrossing], bool]
) -> int | None:
    """The smallest number of tokens from which on all of `crossings` are `is_slower`.

    None if the last is not.
    """
    first = None
    for crossing in sorted(crossings, key=lambda crossing: crossing.tokens, reverse=True):
        if not is_slower(crossing):
            break
        first = crossing.tokens
    return first


def uses_while_read(system: System) -> float:
    """How often the banks can multiply each weight while the GPU reads it once with all channels.

    It is the ratio of the bandwidth inside the memory to that outside. Products that use a weight more often
    are slower in PIM.
    """
    pim, gpu = system.pim, system.gpu
    weight_bytes = float(system.pim_channels * pim.banks * pim.columns_per_row * pim.column_bytes)
    read_ns = weight_bytes / (gpu.memory_channels * gpu.channel_bytes_per_ns)
    none, once = (row_limited_ns(weight_bytes, uses, pim, system.pim_channels) for uses in (0, 1))
    return max(0.0, (read_ns - none) / (once - none))


def speedup_chart(crossings_by_system: dict[str, Sequence[ProductCrossing]]) -> Chart:
    """Chart of plans' speed-ups by tokens: a row a system, a column a model, a line a product."""
    values = [
        {
            "system": name,
            "tokens": crossing.tokens,
            "model": crossing.model,
            "product": f"{crossing.inputs} x {crossing.outputs}",
            "speedup": crossing.speedup,
        }
        for name, crossings in crossings_by_system.items()
        for crossing in crossings
    ]
    return speedup_lines(
        values,
        along=("tokens", "tokens at once"),
        lines=("product", "inputs x outputs"),
        column="model",
        width=300,
    )
