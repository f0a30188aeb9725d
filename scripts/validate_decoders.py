"""Errors of the GPU model on published kernel times of decoders: ``validate_decoders.py [--update]``.

The presets of the cards in `DATA` and `ATTENTION` were fitted to none of their rows, so all are held out.
``--update`` writes the tables into docs/validation.md. Vidur's tables of attention are files of Git LFS, of
which the repository that was read has only pointers.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from papers.attention_crossovers import attention_regions
from update_readme import ROOT, fill

from pimflow import Profiling, search, system, zoo
from pimflow.core.attention import Attention
from pimflow.core.candidate import Cost
from pimflow.core.kernel import ConvGeometry, convolution_kernel
from pimflow.hardware import GpuSpec
from pimflow.placement import CandidateGenerator, Costs
from pimflow.simulators.gpu.model import kernel_cost
from pimflow.zoo.language import graph

DATA = ROOT / "tests/gpu_model/data/decoder_kernels.csv"
ATTENTION = DATA.with_name("decoder_attention.csv")
PAGE = ROOT / "docs/validation.md"
DTYPE = "fp16"  # of the model; the measured ones are fp16 or bf16
SOURCES = {
    "vidur": "microsoft/vidur (MIT) at 7d47513, data/profiling/compute, median, resolution 1 us",
    "llmservingsim": "casys-kaist/LLMServingSim (MIT) at 5daddb2, profiler/perf",
    "pytorch-graph": "measured for this project: PyTorch 2.11 on an H100 80GB, eager kernels as a CUDA graph",
}


@dataclass(frozen=True, kw_only=True)
class MeasuredProduct:
    """A product of a decoder, as measured on a card and by the model, without launches."""

    gpu: str
    model: str
    product: str
    tokens: int
    measured_us: float
    modelled_us: float
    peak_share: float

    @property
    def error(self) -> float:
        """Relative error of the model."""
        return self.modelled_us / self.measured_us - 1


def read_rows(steps: bool) -> list[dict[str, str]]:
    """The rows of `DATA`: of whole steps, or of products."""
    with DATA.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file)]
    return [row for row in rows if bool(row["reduction"]) != steps]


def products() -> list[MeasuredProduct]:
    """Every measured product beside the model's time."""
    results = []
    for row in read_rows(steps=False):
        gpu = GpuSpec.load(row["gpu"])
        tokens, reduction, outputs = (int(row[name]) for name in ("tokens", "reduction", "outputs"))
        kernel = convolution_kernel(ConvGeometry(n=tokens, h=1, w=1, c=reduction, oc=outputs), DTYPE)
        peak_bytes_per_us = gpu.memory_channels * gpu.channel_bytes_per_ns * 1000
        results.append(
            MeasuredProduct(
                gpu=gpu.name,
                model=row["model"],
                product=row["product"],
                tokens=tokens,
                measured_us=float(row["us"]),
                modelled_us=kernel_cost(kernel, gpu, dtype=DTYPE).execution_ns / 1000,
                peak_share=kernel.weight_bytes / float(row["us"]) / peak_bytes_per_us,
            )
        )
    return results


def product_table(results: Sequence[MeasuredProduct]) -> str:
    """Errors by card and tokens, and at which share of the peak bandwidth weights are read, as Markdown."""
    lines = [
        "| GPU | model | tokens | products | median error | bias | largest error "
        "| weights of one token, of the peak |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for gpu, model, tokens in dict.fromkeys((r.gpu, r.model, r.tokens) for r in results):
        part = [r for r in results if (r.gpu, r.model, r.tokens) == (gpu, model, tokens)]
        errors = [abs(r.error) for r in part]
        bias = sum(r.modelled_us for r in part) / sum(r.measured_us for r in part) - 1
        share = sum(r.peak_share * r.measured_us for r in part) / sum(r.measured_us for r in part)
        shown = f"{share:.0%}" if tokens == 1 else ""
        lines.append(
            f"| {gpu} | {model} | {tokens} | {len(part)} | {median(errors):.1%} | {bias:+.1%} "
            f"| {max(errors):.1%} | {shown} |"
        )
    return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class MeasuredAttention:
    """Attention of a layer, as measured on a card and by the model, without launches.

    Each of `requests` has `queries` new tokens after `past` ones.
    """

    gpu: str
    requests: int
    queries: int
    past: int
    measured_us: float
    modelled_us: float

    @property
    def error(self) -> float:
        """Relative error of the model."""
        return self.modelled_us / self.measured_us - 1


def attentions() -> list[MeasuredAttention]:
    """Every measured attention beside the model's time."""
    results = []
    with ATTENTION.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        target = system(gpu=row["gpu"])
        target = replace(target, gpu=replace(target.gpu, launch_ns=0.0))
        requests, queries, past, heads, kv_heads, size = (
            int(row[name]) for name in ("requests", "queries", "past", "heads", "kv_heads", "head_size")
        )
        attention = Attention(
            batch=requests,
            heads=heads,
            kv_heads=kv_heads,
            head_size=size,
            value_size=size,
            queries=queries,
            keys=past + queries,
            scale=size**-0.5,
            causal=True,
            positioned=True,
        )
        graph = attention_regions(attention)
        generator = CandidateGenerator(graph, target, Costs(target, Profiling()))
        candidate = generator.gpu_candidates(graph.regions[-1], target.gpu.memory_channels)[0]
        results.append(
            MeasuredAttention(
                gpu=row["gpu"],
                requests=requests,
                queries=queries,
                past=past,
                measured_us=float(row["us"]),
                modelled_us=Cost.from_candidate(candidate).latency_ns / 1000,
            )
        )
    return results


def attention_table(results: Sequence[MeasuredAttention]) -> str:
    """Errors of attention by card, requests and new tokens, as Markdown."""
    lines = [
        "| GPU | requests | new tokens of each | tokens before | measured, us | model, us |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for gpu, requests, queries in dict.fromkeys((r.gpu, r.requests, r.queries) for r in results):
        part = [r for r in results if (r.gpu, r.requests, r.queries) == (gpu, requests, queries)]
        past = ", ".join(str(r.past) for r in part)
        measured = ", ".join(f"{r.measured_us:.0f}" for r in part)
        modelled = ", ".join(f"{r.modelled_us:.0f} ({r.error:+.0%})" for r in part)
        lines.append(f"| {gpu} | {requests} | {queries} | {past} | {measured} | {modelled} |")
    return "\n".join(lines)


def step_table() -> str:
    """Steps over 1024 tokens that ran as a CUDA graph, beside the model with and without launches."""
    lines = ["| GPU | step | measured, us | model, us | without launches, us |", "|---|---|---:|---:|---:|"]
    for row in read_rows(steps=True):
        decoder = zoo.decoder(row["model"])
        network = graph.block_graph if row["product"].startswith("block") else graph.step_graph
        times_us = []
        target = system(gpu=row["gpu"])
        for gpu in (target.gpu, replace(target.gpu, launch_ns=0.0)):
            search_result = search(
                network(decoder, 1024), replace(target, gpu=gpu), context=1024, modes="gpu"
            )
            times_us.append(f"{search_result.evaluation.latency_ns / 1000:.0f}")
        name = f"{row['model']}, {row['product'].replace('-', ' of ')} tokens"
        lines.append(f"| {row['gpu']} | {name} | {float(row['us']):.0f} | {' | '.join(times_us)} |")
    return "\n".join(lines)


def main() -> None:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--update", action="store_true", help="write docs/validation.md anew")
    arguments = parser.parse_args()
    tables = {
        "decoder products": product_table(products()),
        "decoder attention": attention_table(attentions()),
        "decoder steps": step_table(),
    }
    for name, body in tables.items():
        print(body)
        if arguments.update:
            PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), name, body), encoding="utf-8")


if __name__ == "__main__":
    main()
