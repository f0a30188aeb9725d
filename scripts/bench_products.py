"""Products with weights by tokens at once, on the GPU and on both devices: ``bench_products.py [--write]``.

The tokens of a prompt, or of several requests, share the weights of a product: the GPU reads them once, but
PIM multiplies them for each token. Each product of `PRODUCTS` is searched by itself. ``--write`` replaces the
tables and a picture of docs/language_models.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench_generate import PAGE, PIMS, replaced

from pimflow import Profiling, system, zoo
from pimflow.api.product_crossovers import (
    ProductCrossing,
    product_crossing,
    slower_from,
    speedup_chart,
    uses_while_read,
)
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


def cell(each: ProductCrossing) -> str:
    """Times and speed-up of a product, as a cell of the table."""
    times = f"{each.gpu_ns / 1e3:.0f} → {each.plan_ns / 1e3:.0f}"
    return f"{times} ({each.speedup:.1f}x, {each.pim_share:.0%})"


def named(each: ProductCrossing) -> str:
    """The cells that name a product."""
    return f"{each.model} | {each.product}, {each.inputs} x {each.outputs}"


def crossings(pim: str, of_product: Sequence[ProductCrossing]) -> str:
    """The number of tokens from which PIM is slower, as a row of Markdown."""
    one_ns = of_product[0].gpu_ns
    told = (
        _told(slower_from(of_product, slower), of_product)
        for slower in (
            lambda each: each.pim_ns is None or each.pim_ns > each.gpu_ns,
            lambda each: each.plan_ns > one_ns,
        )
    )
    return f"| {pim} | {named(of_product[0])} | {' | '.join(told)} |"


def _told(tokens: int | None, found: Sequence[ProductCrossing]) -> str:
    return f"slower from {tokens} tokens on" if tokens else f"faster up to {found[-1].tokens}"


def uses(pim: str) -> str:
    """How often banks use a weight while the GPU reads it, which bounds all products, as Markdown."""
    return f"- {pim}: {uses_while_read(system(pim=pim)):.1f} times"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=MODELS, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="default: %(default)s")
    parser.add_argument("--write", action="store_true", help="write docs/language_models.md anew")
    arguments = parser.parse_args()
    tokens = sorted(arguments.tokens)
    head = [
        f"| PIM | model | product | {' | '.join(f'{each} at once' for each in tokens)} |",
        "|---" * (3 + len(tokens)) + "|",
    ]
    print(*head, sep="\n", flush=True)
    every: dict[str, list[ProductCrossing]] = {}
    rows, behind = [], []
    cache = ResultCache(default_path())
    for pim in PIMS:
        for model in arguments.models:
            for product in PRODUCTS:
                found = [
                    product_crossing(
                        zoo.decoder(model), product, each, system(pim=pim), Profiling(cache=cache)
                    )
                    for each in tokens
                ]
                every.setdefault(pim, []).extend(found)
                rows.append(f"| {pim} | {named(found[0])} | {' | '.join(map(cell, found))} |")
                behind.append(crossings(pim, found))
                print(rows[-1], flush=True)
    cache.close()
    crossing_lines = [*CROSSING_HEAD, *behind]
    bounds = "\n".join(map(uses, PIMS))
    print(*crossing_lines, bounds, sep="\n")
    if arguments.write:
        page = PAGE.read_text(encoding="utf-8")
        bodies = {"products": [*head, *rows], "products behind": crossing_lines, "uses": [bounds]}
        for name, lines in bodies.items():
            page = replaced(page, name, "\n".join(lines))
        PAGE.write_text(page, encoding="utf-8")
        pictures.save(PICTURE, speedup_chart(every), "Products with weights on both devices")


if __name__ == "__main__":
    main()
