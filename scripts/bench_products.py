"""Products with weights by tokens at once, on the GPU and on both devices: ``bench_products.py [--write]``.

The tokens of a prompt, or of several requests, share the weights of a product: the GPU reads them once, but
PIM multiplies them for each token. Each product of `PRODUCTS` is searched by itself. ``--write`` replaces the
tables and a picture of docs/language_models.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench_generate import PAGE, PIMS
from configurations import fill
from papers.product_crossovers import (
    ProductCrossing,
    first_slower_tokens,
    product_crossing,
    speedup_chart,
    uses_while_read,
)

from pimflow import Profiling, system, zoo
from pimflow.host import pictures
from pimflow.host.result_cache import ResultCache, default_path

MODELS = ("llama-2-7b", "gpt-2")
PRODUCTS = ("query", "up", "down")  # of the first block
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
PICTURE = Path(PAGE).with_name("products_in_pim.svg")
CROSSING_HEAD = (
    "| PIM | model | product | all of it in PIM, against the GPU alone "
    "| the plan, against the GPU alone with one token |",
    "|---|---|---|---|---|",
)


def cell(point: ProductCrossing) -> str:
    """Times and speed-up of a product, as a cell of the table."""
    times = f"{point.gpu_ns / 1e3:.0f} → {point.plan_ns / 1e3:.0f}"
    return f"{times} ({point.speedup:.1f}x, {point.pim_share:.0%})"


def product_cells(point: ProductCrossing) -> str:
    """The cells that name a product."""
    return f"{point.model} | {point.product}, {point.inputs} x {point.outputs}"


def crossings(pim: str, points: Sequence[ProductCrossing]) -> str:
    """The number of tokens from which PIM is slower, as a row of Markdown."""
    one_token_ns = points[0].gpu_ns
    verdicts = (
        _crossing_text(first_slower_tokens(points, slower), points)
        for slower in (
            lambda point: point.pim_ns is None or point.pim_ns > point.gpu_ns,
            lambda point: point.plan_ns > one_token_ns,
        )
    )
    return f"| {pim} | {product_cells(points[0])} | {' | '.join(verdicts)} |"


def _crossing_text(tokens: int | None, points: Sequence[ProductCrossing]) -> str:
    return f"slower from {tokens} tokens on" if tokens else f"faster up to {points[-1].tokens}"


def uses(pim: str) -> str:
    """How often banks use a weight while the GPU reads it, which bounds all products, as Markdown."""
    return f"- {pim}: {uses_while_read(system(pim=pim)):.1f} times"


def main() -> None:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=MODELS, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="default: %(default)s")
    parser.add_argument("--write", action="store_true", help="write docs/language_models.md anew")
    arguments = parser.parse_args()
    tokens = sorted(arguments.tokens)
    head = [
        f"| PIM | model | product | {' | '.join(f'{count} at once' for count in tokens)} |",
        "|---" * (3 + len(tokens)) + "|",
    ]
    print(*head, sep="\n", flush=True)
    points_by_pim: dict[str, list[ProductCrossing]] = {}
    rows, crossing_rows = [], []
    cache = ResultCache(default_path())
    for pim in PIMS:
        for model in arguments.models:
            for product in PRODUCTS:
                points = [
                    product_crossing(
                        zoo.decoder(model), product, count, system(pim=pim), Profiling(cache=cache)
                    )
                    for count in tokens
                ]
                points_by_pim.setdefault(pim, []).extend(points)
                rows.append(f"| {pim} | {product_cells(points[0])} | {' | '.join(map(cell, points))} |")
                crossing_rows.append(crossings(pim, points))
                print(rows[-1], flush=True)
    cache.close()
    crossing_lines = [*CROSSING_HEAD, *crossing_rows]
    bounds = "\n".join(map(uses, PIMS))
    print(*crossing_lines, bounds, sep="\n")
    if arguments.write:
        page = PAGE.read_text(encoding="utf-8")
        bodies = {"products": [*head, *rows], "products behind": crossing_lines, "uses": [bounds]}
        for name, lines in bodies.items():
            page = fill(page, name, "\n".join(lines))
        PAGE.write_text(page, encoding="utf-8")
        pictures.save(PICTURE, speedup_chart(points_by_pim), "Products with weights on both devices")


if __name__ == "__main__":
    main()
