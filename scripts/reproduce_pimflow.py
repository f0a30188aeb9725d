"""The comparison of PIMFlow's paper: ``reproduce_pimflow.py [--parts …] [--page] [MODEL…]``.

Prints tables in Markdown; ``--page`` writes those of docs/results_pimflow.md, and its picture; ``--picture``
draws that again, from the page's tables.
"""

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from papers import pimflow_ablation, pimflow_commands, pimflow_comparison, pimflow_tables
from papers.pimflow_comparison import CONFIGURATIONS, CONVENTIONS, NETWORKS, SIZES, Searches
from update_readme import ROOT, fill, table_of

from pimflow.host import pictures
from pimflow.host.executors import parse_executor
from pimflow.host.files import replace_file
from pimflow.host.result_cache import ResultCache, default_path
from pimflow.placement import Profiling

PAGE = ROOT / "docs" / "results_pimflow.md"
PICTURE = ROOT / "docs" / "pimflow_comparison.svg"
TITLE = "PIMFlow's comparison"
PARTS = ("comparison", "shares", "bounds", "ablation", "sizes")


def collect(searches: Searches, models: list[str], parts: list[str]) -> dict[str, Any]:
    """The rows of every part in `parts`, by the name of its table."""
    figures: dict[str, Any] = {}
    if "comparison" in parts:
        figures["comparison"] = pimflow_comparison.compare(searches, models)
        figures["energies"] = pimflow_comparison.energies(searches, models)
    if "shares" in parts:
        figures["shares"] = pimflow_comparison.shares(searches, models)
    if "bounds" in parts:
        figures["command bounds"] = pimflow_commands.command_bounds(searches, models)
    if "ablation" in parts:
        figures["terms"] = pimflow_ablation.terms(searches, models)
        figures["gains"] = pimflow_ablation.gains(searches)
        figures["GPU side"] = pimflow_ablation.gpu_side(searches)
    if "sizes" in parts:
        figures["sizes"] = pimflow_comparison.sizes(searches, SIZES if models == list(NETWORKS) else models)
    return figures


def tables(figures: dict[str, Any]) -> dict[str, str]:
    """The tables of what `collect` found, by the names of their marks in the page."""
    builders: dict[str, Callable[[], str]] = {}
    if "comparison" in figures:
        rows = figures["comparison"]
        for accounting, timing in CONVENTIONS:
            name = f"speed-up {accounting} {timing}"
            builders[name] = lambda a=accounting, t=timing: pimflow_tables.speedups(rows, a, t)
        builders["parts"] = lambda: pimflow_tables.parts(rows)
        builders["commands"] = lambda: pimflow_tables.commands(rows)
        builders["energy"] = lambda: pimflow_tables.energy(rows, figures["energies"])
    for name in ("shares", "command bounds", "terms", "gains", "GPU side", "sizes"):
        if name in figures:
            table = getattr(pimflow_tables, name.lower().replace(" ", "_"))
            builders[name] = lambda table=table, name=name: table(figures[name])
    return {f"pimflow {name}": table() for name, table in builders.items()}


def page_speedups() -> list[dict[str, Any]]:
    """Rows of the picture from the page's tables: of each cell, the second figure, end to end."""
    names = [configuration.name for configuration in CONFIGURATIONS]
    return [
        {"accounting": accounting, "timing": timing, "model": model, "configuration": name}
        | {"speedup": float(cell.split("/")[1])}
        for accounting, timing in CONVENTIONS
        for model, _, *cells in table_of(PAGE, f"pimflow speed-up {accounting} {timing}")
        if model in NETWORKS
        for name, cell in zip(names, cells, strict=True)
    ]


def main() -> None:
    """Parse the command line; print tables or JSON, and write the page or pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of the zoo ({', '.join(NETWORKS)})")
    parser.add_argument("--parts", default=",".join(PARTS), help="of %(default)s")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    parser.add_argument("--picture", action="store_true", help=f"only draw {PICTURE.relative_to(ROOT)} again")
    parser.add_argument("--plot", metavar="FILE", help="draw the comparison: .png, .svg or .html")
    parser.add_argument("--jobs", metavar="N", type=int, help="worker processes (default: one a processor)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    args = parser.parse_args()
    models, parts = args.models or list(NETWORKS), args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if args.page and args.models:
        parser.error("the page has the networks of the paper; leave out MODEL")
    if args.picture:
        pictures.save(PICTURE, pimflow_tables.figure(page_speedups()), TITLE)
        return
    if args.plot:
        pictures.check_format(args.plot)
    profiling = Profiling(cache=ResultCache(default_path()), executor=parse_executor("processes", args.jobs))
    say = (lambda _: None) if args.quiet else (lambda text: print(text, file=sys.stderr))
    figures = collect(Searches(profiling, say), models, parts)
    printed = tables(figures)
    if args.json:
        print(json.dumps(figures, indent=1))
    else:
        print("\n\n".join(f"{name}\n\n{table}" for name, table in printed.items()))
    paths = [args.plot, str(PICTURE) if args.page else None] if "comparison" in figures else []
    for path in filter(None, paths):
        pictures.save(path, pimflow_tables.figure(figures["comparison"]), TITLE)
    if args.page:
        text = PAGE.read_text(encoding="utf-8")
        for name, table in printed.items():
            text = fill(text, name, table)
        replace_file(PAGE, text.encode())


if __name__ == "__main__":
    main()
