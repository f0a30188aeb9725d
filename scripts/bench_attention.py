"""Attention of one layer over a cache, on the GPU and in PIM: ``bench_attention.py [--write]``.

It times a decode step of 32 query heads of 128 elements, including the appends. Rows and columns are the
number of attended tokens, of requests at once, and of query heads that share keys. The result is a table;
``--write`` puts it into docs/language_models.md, with a picture. Programs over caches of thousands of tokens,
or of many requests, are not timed: their times are extrapolated linearly from two shorter programs
(`papers.attention_crossovers.LengthCosts`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench_generate import PAGE, PIMS
from configurations import fill
from papers.attention_crossovers import Crossing, crossing, speedup_chart

from pimflow import Profiling, system
from pimflow.commands.generate.export import decode_attention
from pimflow.host import pictures
from pimflow.host.result_cache import ResultCache, default_path
from pimflow.placement import Costs

HEADS, HEAD_SIZE = 32, 128
CONTEXTS = (128, 512, 1024, 4096, 16384, 32768)
BATCHES = (1, 4, 16, 32)
GROUPS = (1, 4, 8, 16)
PICTURE = Path(PAGE).with_name("attention_in_pim.svg")


def system_crossings(
    pim: str, costs: Costs, contexts: Sequence[int], batches: Sequence[int]
) -> list[Crossing]:
    """Time every context, batch and group on one system."""
    attentions = (
        decode_attention(HEADS, HEADS // group, HEAD_SIZE, places=context, batch=batch)
        for group in GROUPS
        for batch in batches
        for context in contexts
    )
    return [crossing(attention, system(pim=pim), costs) for attention in attentions]


def table(pim: str, points: Sequence[Crossing]) -> list[str]:
    """Rows of a Markdown table, one for each group and number of requests."""
    rows = []
    for group, batch in dict.fromkeys((point.group, point.batch) for point in points):
        row_points = [point for point in points if (point.group, point.batch) == (group, batch)]
        cells = (_cell(point) for point in row_points)
        rows.append(f"| {pim} | {group} | {batch} | {' | '.join(cells)} |")
    return rows


def slowdown_text(pim: str, points: Sequence[Crossing]) -> str:
    """For each group, the number of tokens from which PIM is slower than the GPU alone, by requests."""
    lines = []
    for group in dict.fromkeys(point.group for point in points):
        slow: dict[int, int] = {}
        for point in points:
            if point.group == group and point.speedup is not None:
                if point.speedup < 1:
                    slow.setdefault(point.batch, point.context)
                else:
                    slow.pop(point.batch, None)
        where = ", ".join(f"from {tokens} tokens with {requests}" for requests, tokens in slow.items())
        if where:
            lines.append(f"- {pim}, {group} query heads a KV head: {where} at once")
    return "\n".join(lines) or f"- {pim}: nowhere"


def _cell(point: Crossing) -> str:
    if point.pim_ns is None or point.speedup is None:
        return f"{point.gpu_ns / 1e3:.0f}, no room"
    return f"{point.gpu_ns / 1e3:.0f} → {point.pim_ns / 1e3:.0f} ({point.speedup:.1f}x)"


def main() -> None:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, help="default: %(default)s")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="default: %(default)s")
    parser.add_argument("--write", action="store_true", help="write docs/language_models.md anew")
    arguments = parser.parse_args()
    lengths = (f"{tokens} tokens" for tokens in arguments.contexts)
    lines = [
        f"| PIM | query heads a KV head | requests | {' | '.join(lengths)} |",
        "|---" * (3 + len(arguments.contexts)) + "|",
    ]
    print(*lines, sep="\n", flush=True)
    points_by_pim = {}
    for pim in PIMS:
        cache = ResultCache(default_path())
        costs = Costs(system(pim=pim), Profiling(cache=cache))
        points_by_pim[pim] = system_crossings(pim, costs, arguments.contexts, arguments.batches)
        cache.close()
        lines += (rows := table(pim, points_by_pim[pim]))
        print(*rows, sep="\n", flush=True)
    if arguments.write:
        page = fill(PAGE.read_text(encoding="utf-8"), "attention", "\n".join(lines))
        slower = "\n".join(slowdown_text(pim, points) for pim, points in points_by_pim.items())
        PAGE.write_text(fill(page, "crossovers", slower), "utf-8")
        pictures.save(PICTURE, speedup_chart(points_by_pim), "Attention in PIM")


if __name__ == "__main__":
    main()
