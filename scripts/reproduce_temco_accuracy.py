"""Scores of the zoo's trained networks, decomposed and trained further (TeMCO, Figure 12).

``--passes``: all three at the paper's ratio, with and without TeMCO's passes; else `glyphs` by rank.
Needs PyTorch (``pip install 'pimflow[torch]'``). ``--plot FILE`` draws (.svg, .png: ``pimflow[plot]``);
``--of-page`` draws the figures of docs/results_temco.md and computes nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from papers.temco_accuracy import BATCH as PICTURES
from papers.temco_accuracy import (
    METHODS,
    NETWORK,
    PAPER_REQUEST,
    RANKS,
    STEPS,
    Accuracy,
    PassEffect,
    accuracies,
    pass_effect,
)
from papers.trained_networks import BATCH, TASKS, TOPS
from update_readme import ROOT, table_of

from pimflow.core.output_error import OUTPUT_BOUND
from pimflow.errors import PimflowError
from pimflow.hardware import system
from pimflow.host import pictures
from pimflow.host.charts import PALETTE, chart, legend_at_top

PAGE = ROOT / "docs" / "results_temco.md"
SAMPLES = 4000
PASSES_STEPS = 1000  # of the retraining with --passes: a third of the original's training
HEAD = ("", "weights", "products", "decomposed", "trained further", "with TeMCO's passes", "errors, added up")
HEAD += ("error, at once",)


def percent(shares: Mapping[str, float]) -> str:
    """Scores as text."""
    return " / ".join(f"{share:.1%}" for share in shares.values()) or "-"


def table(rows: Sequence[Accuracy], samples: int, steps: int) -> str:
    """Figure 12 as a table in Markdown."""
    lines = [HEAD, ("---",) * len(HEAD)]
    for row in rows:
        errors = (f"{row.error_sum:.2f}", f"{row.error:.2f}") if row.request else ("-", "-")
        sizes = [f"{share:.1%}" for share in (row.weights, row.macs)]
        accuracy_cells = [percent(accuracy) for accuracy in (row.before, row.after, row.optimised)]
        lines.append((row.request or "as it came", *sizes, *accuracy_cells, *errors))
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return (
        f"{text}\n\nTop-1 / top-5 of `{NETWORK}` on {samples:,} held-out pictures of 16 classes. Trained "
        f"further: {steps} steps of {BATCH} pictures. Errors are of outputs, over the largest value: layers "
        "decomposed one at a time, and all at once."
    )


def passes_table(rows: Sequence[PassEffect], samples: int, steps: int) -> str:
    """Figure 12 of three networks, and what the passes do to outputs and memory."""
    head = ["network", "score", "as it came", "decomposed", "trained further", "with TeMCO's passes"]
    head += ["outputs moved by the passes", "activations (MiB)", "with TeMCO's passes", "less (%)"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        sizes = [row.pool_bytes[form] / 2**20 for form in ("original", "skip-opt+fusion")]
        cells = [percent(score) for score in (row.original, row.before, row.after, row.optimised)]
        cells += [f"{row.difference:.1e}", *(f"{size:.2f}" for size in sizes)]
        lines.append(
            [row.network, " / ".join(row.original), *cells, f"{100 * (1 - sizes[1] / sizes[0]):.1f}"]
        )
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    bound, requests = OUTPUT_BOUND["fp32"], ", ".join(dict.fromkeys(row.request for row in rows))
    verdict = "within" if max(row.difference for row in rows) <= bound else "NOT within"
    return (
        f"{text}\n\n{samples:,} held-out pictures, {PICTURES} at once; {requests}, trained further for "
        f"{steps} steps of {BATCH} pictures. Outputs with and without the passes, in fp32, over the largest: "
        f"{verdict} the bound of {bound:.0e}."
    )


def page_accuracies() -> list[Accuracy]:
    """The rows of the page's table, which has shares in percent, top-1 and top-5."""

    def share(cell: str) -> float:
        return float(cell.rstrip("%")) / 100

    def shares(cell: str) -> dict[str, float]:
        """Accuracies of a cell by name; none for a dash."""
        names = [f"top-{top}" for top in TOPS]
        return {} if cell == "-" else dict(zip(names, map(share, cell.split(" / ")), strict=True))

    return [
        Accuracy(
            request=request if ":" in request else "",
            weights=share(weights),
            macs=share(macs),
            error_sum=0.0,
            error=0.0,
            before=shares(before),
            after=shares(after),
            optimised=shares(optimised),
        )
        for request, weights, macs, before, after, optimised, *_ in table_of(PAGE, "temco-accuracy")
    ]


def draw(rows: Sequence[Accuracy], path: Path) -> None:
    """Draw top-1 accuracy against the share of weights that is kept, before and after retraining."""
    values = [
        {"weights": row.weights, "accuracy": accuracy["top-1"], "method": method, "when": when}
        for method in METHODS
        for row in rows
        if row.request.startswith(f"{method}:")
        for when, accuracy in (("decomposed", row.before), ("trained further", row.after))
    ]
    x = {"field": "weights", "type": "quantitative", "title": "share of the weights that is kept"}
    x |= {"scale": {"type": "log", "nice": False, "padding": 12}, "axis": {"labelSeparation": 8}}
    y = {"field": "accuracy", "type": "quantitative", "title": "top-1 accuracy", "scale": {"domain": [0, 1]}}
    colour = {
        "field": "method",
        "type": "nominal",
        "scale": {"range": list(PALETTE)},
        "legend": legend_at_top(),
    }
    dashes = {"field": "when", "type": "nominal", "sort": ["trained further", "decomposed"]}
    lines = {
        "mark": "line",
        "encoding": {"x": x, "y": y, "color": colour, "strokeDash": {**dashes, "legend": legend_at_top()}},
    }
    points = {
        "mark": {"type": "circle", "opacity": 1},
        "encoding": {"x": x, "y": y, "color": colour, "detail": dashes},
    }
    original = {"mark": "rule", "encoding": {"y": {"datum": rows[0].before["top-1"]}}}
    title = {"text": NETWORK, "subtitle": "the line across is the network as it came"}
    picture = chart(
        width=520, height=300, title=title, data={"values": values}, layer=[lines, points, original]
    )
    pictures.save(path, picture, NETWORK)


def main() -> None:
    """Parse the command line; compute or read accuracies, print them, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("requests", nargs="*", metavar="METHOD:RANK", help="default: all methods and ranks")
    parser.add_argument(
        "--samples", type=int, default=SAMPLES, help="held-out pictures (default: %(default)s)"
    )
    parser.add_argument("--passes", action="store_true", help="three networks, with and without the passes")
    parser.add_argument(
        "--networks", default=",".join(TASKS), metavar="NAMES", help="with --passes (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, help=f"of the retraining (default: {STEPS}, with --passes {PASSES_STEPS})"
    )
    parser.add_argument(
        "--rows", type=Path, nargs="+", metavar="FILE", help="with --passes: the table of what --json printed"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where the picture is written")
    parser.add_argument("--of-page", action="store_true", help="with --plot: draw what the page has")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    if args.samples < 100 or args.samples % 100:
        parser.error(f"--samples {args.samples}: give a multiple of 100")
    if args.of_page:
        if not args.plot or args.requests:
            parser.error("--of-page draws what the page has: give --plot, and no METHOD:RANK")
        draw(page_accuracies(), args.plot)
        return
    if unknown := set(args.networks.split(",")) - set(TASKS):
        parser.error(f"--networks: {', '.join(sorted(unknown))} is none of {', '.join(TASKS)}")
    try:
        rows, text = (_passes if args.passes else _ranks)(args)
    except PimflowError as error:
        sys.exit(str(error))
    print(json.dumps([asdict(row) for row in rows]) if args.json else text)


def _progress(text: str) -> None:
    print(f"{text} …", file=sys.stderr)


def _ranks(args: argparse.Namespace) -> tuple[Sequence[Accuracy], str]:
    """Accuracies of `NETWORK` by rank, drawn if that is wanted."""
    requests = args.requests or [f"{method}:{rank}" for method in METHODS for rank in RANKS]
    steps = args.steps or STEPS
    rows = list(accuracies(system(), requests, samples=args.samples, steps=steps, progress=_progress))
    if args.plot:
        draw(rows, args.plot)
    return rows, table(rows, args.samples, steps)


def _passes(args: argparse.Namespace) -> tuple[Sequence[PassEffect], str]:
    """What the passes do to the networks."""
    (request,) = args.requests or [PAPER_REQUEST]
    steps, rows = args.steps or PASSES_STEPS, list[PassEffect]()
    for path in args.rows or ():
        rows += [PassEffect(**row) for row in json.loads(path.read_text(encoding="utf-8"))]
    for name in [] if args.rows else args.networks.split(","):
        _progress(name)
        rows.append(pass_effect(name, system(), samples=args.samples, steps=steps, request=request))
    return rows, passes_table(rows, args.samples, steps)


if __name__ == "__main__":
    main()
