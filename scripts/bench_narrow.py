"""Decoding with narrow weights on each PIM device: time, energy, memory, and the share of the bound.

    bench_narrow.py [MODELS…] [--pims NAMES…] [--types TYPES…] [--write]

A block and the output layer are searched over full caches, and figures are those of all blocks. ``--write``
puts the table on docs/language_models.md, a row when it is done.
"""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from bench_generate import best_gpu_cell
from configurations import fill

from pimflow import search, system, zoo
from pimflow.commands.generate.decoding import Lengths, shared_regions, step_times
from pimflow.commands.generate.generation import StepCosts
from pimflow.commands.generate.step_bound import pim_share, shared_bound_ns, weight_times
from pimflow.commands.shared.published_decode import PublishedDecode
from pimflow.hardware import System
from pimflow.host.result_cache import ResultCache, default_path
from pimflow.placement import Profiling, SearchResult
from pimflow.placement.solvers.capacity import channel_bytes, weight_row_bytes
from pimflow.zoo.language import graph
from pimflow.zoo.language.decoder import Decoder

PAGE = Path(__file__).parent.parent / "docs" / "language_models.md"
MODELS = ("llama-3-8b", "llama-2-7b")
PIMS = ("newton-gddr6", "newton-gddr6-narrow", "aim-gddr6", "hbm-pim", "hbm-pim-narrow")
TYPES = ("fp16", "int8", "q4_k")
CONTEXT = 1024
HEAD = (
    "| model | PIM | weights | best GPU, ms | GPU alone, ms | plan, ms | tokens/s | mJ a token | in PIM "
    "| of the bound |",
    "|---|---|---|---|---|---|---|---|---|---|",
)


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """A step over a full cache, of all blocks and the output layer.

    Attributes
    ----------
    costs : StepCosts
        With PIM, and on the GPU alone.
    held_bytes : int
        Rows of PIM that weights and caches take.
    """

    costs: StepCosts
    bound_ns: float
    held_bytes: int


HEADS: dict[tuple[Decoder, str], SearchResult] = {}


def output_layer(decoder: Decoder, target: System, profiling: Profiling) -> SearchResult:
    """The search result of the output layer, which is the same for all contexts and caches."""
    key = (decoder, target.name)
    if key not in HEADS:
        head_graph = zoo.blank_matrices(graph.head_graph(decoder))
        HEADS[key] = search(head_graph, target, profiling=profiling)
    return HEADS[key]


def decoding(decoder: Decoder, target: System, context: int, profiling: Profiling) -> Decoding:
    """Search a block and the output layer of a decoder over a full cache."""
    block_graph = zoo.blank_matrices(graph.block_graph(decoder, context))
    block = search(block_graph, target, context=context, profiling=profiling)
    head = output_layer(replace(decoder, cache_type=""), target, profiling)
    costs = StepCosts.from_search(block, decoder.layers, shared_regions(block.graph))
    lengths = Lengths(attended=context, places=context)
    parts = step_times(block, lengths, decoder.kv_elements_per_token / decoder.layers, decoder.group)
    parts = [*(part.scale(decoder.layers) for part in parts), *weight_times(head.graph, 1, target)]
    rows = [weight_row_bytes(target, result.candidates) for result in (block, head)]
    return Decoding(
        costs=costs + StepCosts.from_search(head),
        bound_ns=shared_bound_ns(parts, pim_share(target)),
        held_bytes=decoder.layers * rows[0] + rows[1],
    )


def line(model: str, pim: str, kind: str, profiling: Profiling) -> str:
    """A row of the table as Markdown."""
    target, decoder = system(pim=pim), zoo.decoder(model).with_types(kind)
    step = decoding(decoder, target, CONTEXT, profiling)
    costs = step.costs
    room = "" if step.held_bytes <= channel_bytes(target) else ", no room"
    published = PublishedDecode.from_decoder(decoder, target)
    cells = (
        *(model, pim, kind),
        best_gpu_cell(published and published.step_ns(CONTEXT), costs.ns),
        f"{costs.ns_gpu_only / 1e6:.2f}",
        f"{costs.ns / 1e6:.2f} ({costs.ns_gpu_only / costs.ns:.2f}x)",
        f"{1e9 / costs.ns:.0f}",
        f"{costs.pj_gpu_only / 1e9:.0f} → {costs.pj / 1e9:.0f}",
        f"{step.held_bytes / 2**30:.1f} GiB{room}",
        f"{step.bound_ns / costs.ns:.0%}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODELS")
    parser.add_argument("--pims", nargs="+", default=PIMS)
    parser.add_argument("--types", nargs="+", default=TYPES)
    parser.add_argument("--write", action="store_true", help="write docs/language_models.md anew")
    arguments = parser.parse_args()
    cache = ResultCache(default_path())
    lines = [*HEAD]
    print(*HEAD, sep="\n", flush=True)
    for model in arguments.models or MODELS:
        for pim in arguments.pims:
            for kind in arguments.types:
                lines.append(line(model, pim, kind, Profiling(cache=cache)))
                print(lines[-1], flush=True)
                if arguments.write:
                    text = fill(PAGE.read_text("utf-8"), "narrow", "\n".join(lines))
                    PAGE.write_text(text, "utf-8")
    cache.close()


if __name__ == "__main__":
    main()
