"""Where a product with weights is faster in PIM than on the GPU: by how many tokens share the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pimflow.api.crossovers import speedup_lines
from pimflow.api.search import search
from pimflow.core.candidate import Cost
from pimflow.hardware import System
from pimflow.host.pages import Chart
from pimflow.placement import Profiling
from pimflow.simulators.pim.bound import row_limited_ns
from pimflow.zoo.language import graph
from pimflow.zoo.language.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class ProductCrossing:
    """One product with weights of a language model, for so many tokens at once, launches included.

    Attributes
    ----------
    inputs, outputs : int
        Of its matrix.
    tokens : int
        Vectors that are multiplied with it: those of a prompt, or one of each request.
    gpu_ns : float
        On the GPU with all memory channels.
    pim_ns : float or None
        All of it in PIM; None where PIM cannot do it.
    plan_ns : float
        As the search places it: on the GPU, in PIM, or split.
    pim_share : float
        What PIM does of it in that plan, in [0, 1].
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


def product_crossing(
    decoder: Decoder, product: str, tokens: int, system: System, profiling: Profiling
) -> ProductCrossing:
    """One product of a decoder's first block, by its name among the block's weights, such as ``up``."""
    found = search(graph.product_graph(decoder, product, tokens=tokens), system, profiling=profiling)
    inputs, outputs = decoder.block_weights(0)[f"layers.0.{product}.weight"]
    (choice,) = found.plan.choices
    whole = [
        Cost.of(each).latency_ns
        for candidates in found.table.candidates.values()
        for each in candidates
        if each.rewrite.mode == "PIM"
    ]
    return ProductCrossing(
        model=decoder.name,
        product=product,
        inputs=inputs,
        outputs=outputs,
        tokens=tokens,
        gpu_ns=found.gpu_only.latency_ns,
        pim_ns=min(whole, default=None),
        plan_ns=found.evaluation.latency_ns,
        pim_share=1 - (choice.gpu_share or 0.0),
    )


def slower_from(found: Sequence[ProductCrossing], slower: Callable[[ProductCrossing], bool]) -> int | None:
    """The fewest tokens from which on, as far as `found` goes, each is `slower`; None if the last is not."""
    first = None
    for each in sorted(found, key=lambda each: each.tokens, reverse=True):
        if not slower(each):
            break
        first = each.tokens
    return first


def uses_while_read(system: System) -> float:
    """How often the banks can multiply each weight at most while the GPU reads it once, with all channels.

    What limits products that use a weight more often: bandwidth inside the memory over that outside.
    """
    pim, gpu = system.pim, system.gpu
    weight_bytes = float(system.pim_channels * pim.banks * pim.columns_per_row * pim.column_bytes)
    read_ns = weight_bytes / (gpu.memory_channels * gpu.channel_bytes_per_ns)
    none, once = (row_limited_ns(weight_bytes, uses, pim, system.pim_channels) for uses in (0, 1))
    return max(0.0, (read_ns - none) / (once - none))


def speedup_chart(found: dict[str, Sequence[ProductCrossing]]) -> Chart:
    """By system, how much faster plans are by tokens: a line for each product, a column for each model."""
    values = [
        {
            "system": name,
            "tokens": each.tokens,
            "model": each.model,
            "product": f"{each.inputs} x {each.outputs}",
            "speedup": each.speedup,
        }
        for name, of_system in found.items()
        for each in of_system
    ]
    return speedup_lines(
        values,
        along=("tokens", "tokens at once"),
        lines=("product", "inputs x outputs"),
        column="model",
        width=300,
    )
