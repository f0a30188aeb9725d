"""TASO's Table 1, Figures 1, 2, 5 to 10, and claims: ``reproduce_taso.py [--profile …] [--page] [MODEL…]``.

Prints tables in Markdown; ``--page`` writes those of docs/results_taso.md, and its pictures. ``--picture``
draws the pictures anew from the page's tables: of the first network only, and without families.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from papers import taso_selection, taso_tables
from papers.taso_selection import NETWORKS, NetworkStudy, Progress
from update_readme import ROOT, fill, table_of

from pimflow.commands.command_line import primitive_options
from pimflow.errors import PimflowError
from pimflow.host import pictures
from pimflow.host.files import replace_file
from pimflow.host.result_cache import ResultCache, default_path
from pimflow.primitive_selection import figures
from pimflow.primitive_selection.figures import MIB
from pimflow.primitive_selection.problem import SelectionResult, Sums
from pimflow.primitive_selection.search import Point

PAGE = ROOT / "docs" / "results_taso.md"
# Columns of the table of fronts: a library, and what is bounded.
FRONT_COLUMNS = (
    *(("all", "liveness"), ("all", "sum"), ("published", "liveness"), ("published", "sum")),
    *(("all", "workspace"), ("published", "workspace")),
)
EVERYWHERE = ("direct", "im2row", "im2col", "winograd", "fastest")  # columns of the table of one primitive
FRONTS, FIRST = ROOT / "docs" / "taso_fronts.svg", ROOT / "docs" / "taso_googlenet.svg"


def arguments() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of the zoo ({', '.join(NETWORKS)})")
    parser.add_argument(
        "--profile",
        default="measured",
        help="measured, predicted, mixed, or a file: see pimflow select; what a file does not have is "
        "predicted from it (default: %(default)s)",
    )
    parser.add_argument("--measure", metavar="N", type=int, help="primitives of each layer (default: all)")
    parser.add_argument("--device", metavar="NAME", help="the machine that a file's times are of")
    parser.add_argument("--cache", metavar="FILE|none", help="where times are kept (default: PIMFLOW_CACHE)")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the measured times, as a profile")
    parser.add_argument("--page", action="store_true", help="write docs/results_taso.md and its pictures")
    parser.add_argument("--picture", action="store_true", help="only draw the pictures again, from the page")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return parser


def reproduce(
    args: argparse.Namespace, say: Progress
) -> tuple[dict[str, Any], dict[str, str], Sequence[NetworkStudy]]:
    """Compute everything: figures as JSON, tables by mark, and the studies that pictures show."""
    cache = None if args.cache == "none" else ResultCache(args.cache or default_path())
    primitive_options.check_profile(args.profile)
    chosen = taso_selection.select_networks(
        args.models or NETWORKS,
        args.profile,
        device=args.device,
        measure=args.measure,
        cache=cache,
        say=say,
    )
    if args.output:
        taso_selection.merge_profiles(chosen).write(args.output)
    solved = taso_selection.solve_times(say)
    time_counts = {name: taso_selection.time_counts(selection) for name, selection in chosen.items()}
    studies = taso_selection.studies(chosen, say)
    say("sets of families")
    sets = taso_selection.sets_of_families(
        next(
            network_study
            for network_study in studies
            if (network_study.library, network_study.problem.memory_model) == ("all", "sum")
        )
    )
    plain = {
        "device": next(iter(chosen.values())).profile.device.name,
        "solve_times": [{**row, "pbqp": vars(row["pbqp"])} for row in solved],
        "times": time_counts,
        "studies": [taso_selection.json_form(network_study) for network_study in studies],
        "sets_of_families": sets,
    }
    return plain, taso_tables.tables(studies, solved, time_counts, sets), studies


def write_page(tables: dict[str, str], studies: Sequence[NetworkStudy]) -> None:
    """Write the tables of docs/results_taso.md, and draw its pictures."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in tables.items():
        text = fill(text, name, table)
    pictures.save(FRONTS, taso_tables.fronts_figure(studies), "TASO's Figures 6 to 9")
    first = taso_tables.network_figure(studies, studies[0].network)
    pictures.save(FIRST, first, "TASO's Figures 1, 2, 5 and 10")
    replace_file(PAGE, text.encode())


def _sums(ms: str, memory_mib: str, largest_mib: str) -> Sums:
    """Time and sizes of one selection, parsed from cells of the page."""
    sizes = {"memory_bytes": memory_mib, "workspace_bytes": largest_mib}
    size_fields = {name: round(float(mib) * MIB) for name, mib in sizes.items()}
    layer_fields = dict.fromkeys(("memory_layer", "workspace_layer", "time_layer"), "")
    return Sums(time_ns=float(ms) * 1e6, **size_fields, **layer_fields, transforms=())


def _kinds(network: str, library: str, model: str) -> dict[str, Sums]:
    """Sums of one primitive everywhere, by primitive, from the page's tables."""

    def cells(name: str) -> list[str]:
        """The figures of the row of this network and library in a table of the page."""
        (cells_of_row,) = (row for row in table_of(PAGE, name) if row[:2] == [network, library])
        return cells_of_row[2:]

    times, largest, kinds = cells("taso everywhere"), cells("taso largest layers"), {}
    for name, cell, largest_mib in zip(EVERYWHERE, times, largest):
        ms, in_sum, live = cell.split(" / ")
        kinds[name] = _sums(ms, in_sum if model == "sum" else live, largest_mib)
    ms, mib = times[5 if model == "sum" else 6].split(" / ")
    return {**kinds, "least memory": _sums(ms, mib, largest[5])}


def _points(bounded: tuple[str, str]) -> list[Point]:
    """One column of the page's table of fronts; a selection is assumed to use all of its budget."""
    points = []
    for _, *cells in table_of(PAGE, "taso fronts"):
        cell = dict(zip(FRONT_COLUMNS, cells, strict=True))[bounded]
        if cell:
            budget, _, times = cell.partition(": ")
            sizes = ("0", budget) if bounded[1] == "workspace" else (budget, "0")
            ours, greedy = times.split(", ")
            selected = SelectionResult(choice={}, sums=_sums(ours, *sizes), value=0.0, gap=0.0)
            greedy_sums = None if greedy == "none" else _sums(greedy, *sizes)
            points.append(
                Point(selected=selected, budget_bytes=round(float(budget) * MIB), greedy=greedy_sums)
            )
    return points


def draw_page() -> None:
    """Draw the pictures of the first network from the page's tables."""
    network, panels = next(iter(NETWORKS)), []
    for library, model in (("published", "sum"), ("all", "liveness"), ("published", "workspace")):
        over = "workspace" if model == "workspace" else "memory"
        kinds = _kinds(network, library, "sum" if over == "workspace" else model)
        del kinds["least memory"]  # it begins the front
        title = f"{network}, {library}: {model}"
        panels.append(figures.front_view(_points((library, model)), over, kinds, title))
    pictures.save(FRONTS, figures.arrange_panels("", panels, 3), "TASO's Figures 6 to 9")
    panels = []
    for library, model in (("published", "sum"), ("all", "liveness")):
        kinds = _kinds(network, library, model)
        panels += [
            figures.times_view(kinds, f"{library} primitives: time"),
            figures.memory_view(kinds, f"{library} primitives: {model}"),
            figures.speedups_view(_points((library, model))),
        ]
    pictures.save(FIRST, figures.arrange_panels(network, panels, 3), "TASO's Figures 1, 2, 5 and 10")


def main() -> None:
    """Parse the command line; print tables or JSON, and write the page or pictures."""
    parser = arguments()
    args = parser.parse_args()
    if args.picture:
        draw_page()
        return
    if args.page and args.models:
        parser.error("the page has the networks of the paper; leave out MODEL")
    say = (lambda _: None) if args.quiet else (lambda text: print(text, file=sys.stderr))
    try:
        plain, tables, studies = reproduce(args, say)
        if args.page:
            write_page(tables, studies)
    except PimflowError as error:
        print(f"reproduce_taso: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    if args.json:
        print(json.dumps(plain, indent=1))
    else:
        print("\n\n".join(f"{name}\n\n{table}" for name, table in tables.items()))


if __name__ == "__main__":
    main()
