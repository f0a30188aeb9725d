"""Tables in Markdown and pictures of what `papers.taso_selection` computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from papers.pimflow_tables import markdown
from papers.taso_selection import MORE_TIME, POINTS, Study, best_speedup, speedups
from pimflow.host.pages import Chart
from pimflow.primitive_selection.figures import (
    families_view,
    front_view,
    memory_view,
    panelled,
    speedups_view,
    times_view,
)
from pimflow.primitive_selection.problem import Sums
from pimflow.primitive_selection.search import Point

MIB = 2**20
KINDS = ("direct", "im2row", "im2col", "winograd")
# What sections 5.2 and 5.3 say of GoogLeNet on a Cortex-A15, by `papers.taso_selection.claims`.
PUBLISHED = {
    "memory_for_15_percent": "2.2",
    "memory_at_most": "",
    "time_at_a_third": "< 0.5 s more",
    "time_of_direct": "much slower",
    "memory_of_direct": "similar",
    "memory_as_fast_as_im2row": "",
    "memory_as_fast_as_im2col": "2",
    "memory_as_fast_as_winograd": "",
    "workspace_saved_bytes": "about 10 MB",
    "workspace_step": "1.4",
    "over_greedy": "8",
    "workspace_over_greedy": "",
    "greedy_fails": "",
}
SAID = {
    "memory_for_15_percent": "less memory than the fastest for 15 % more time, times",
    "memory_at_most": "less memory than the fastest for any time, times",
    "time_at_a_third": "time within a third of the fastest's memory, over the fastest's",
    "time_of_direct": "time of direct everywhere, over that of the least memory",
    "memory_of_direct": "memory of direct everywhere, over the least",
    "memory_as_fast_as_im2row": "less memory than im2row everywhere, in its time, times",
    "memory_as_fast_as_im2col": "less memory than im2col everywhere, in its time, times",
    "memory_as_fast_as_winograd": "less memory than Winograd everywhere, in its time, times",
    "workspace_saved_bytes": "less workspace than the fastest for 5 % more time (A, B), MiB",
    "workspace_step": "faster with 10 % more workspace at most (C, D), times",
    "over_greedy": "over greedy within a memory budget, at most, times",
    "workspace_over_greedy": "over greedy within a workspace, at most, times",
    "greedy_fails": "memory budgets of the front that greedy does not keep",
}
TARGETS = {"memory_for_15_percent": 2.2, "over_greedy": 8.0}


def solve_times(rows: Sequence[Mapping[str, Any]]) -> str:
    """Table 1: solving times by number of layers."""
    head = [
        "as large as",
        "layers",
        "variables",
        "fastest, s of one core",
        f"front of {POINTS}, s",
        "paper, s",
    ]
    lines = [
        [
            row["as"],
            str(row["layers"]),
            str(row["variables"]),
            f"{row['fastest_s']:.2f}",
            f"{row['front_s']:.1f}",
            f"{row['published_s']:.2f}",
        ]
        for row in rows
    ]
    return markdown(head, lines)


def networks(found: Sequence[Study], known: Mapping[str, Mapping[str, int]]) -> str:
    """Layers and candidates of each network, how many times are measured, and solving times."""
    head = ["network", "layers", "candidates", "times measured", "predicted"]
    head += ["layers of the fastest by a prediction", "fastest, s", "front, s"]
    lines = []
    for each in found:
        if (each.library, each.problem.memory_model) == ("all", "sum"):
            counts = known[each.network]
            cells = [each.network, str(each.layers), str(each.candidates), str(counts["measured"])]
            cells += [
                str(counts["predicted"]),
                str(each.guessed),
                f"{each.solve_seconds:.2f}",
                f"{each.front_seconds:.1f}",
            ]
            lines.append(cells)
    return markdown(head, lines)


def everywhere(found: Sequence[Study]) -> str:
    """Figures 1 and 5: time and memory of one primitive everywhere, in both memory models."""
    lines = []
    for added, live in _pairs(found):
        cells = [added.network, added.library]
        for kind in KINDS:
            cells.append(_three(added.kinds[kind], live.kinds[kind]))
        cells.append(_three(added.fastest.sums, live.fastest.sums))
        lines.append([*cells, *(_two(each.smallest.sums) for each in (added, live))])
    head = ["network", "primitives", *KINDS, "fastest", "least memory: sum", "live"]
    return markdown(head, lines)


def _pairs(found: Sequence[Study]) -> list[tuple[Study, Study]]:
    """For every network and library, the studies in the paper's memory model and in ours."""
    by_model = {(e.network, e.library, e.problem.memory_model): e for e in found}
    names = dict.fromkeys((each.network, each.library) for each in found)
    return [(by_model[(*name, "sum")], by_model[(*name, "liveness")]) for name in names]


def _two(sums: Sums) -> str:
    return f"{sums.time_ns / 1e6:.2f} / {sums.memory_bytes / MIB:.1f}"


def _three(added: Sums, live: Sums) -> str:
    return f"{_two(added)} / {live.memory_bytes / MIB:.1f}"


def largest(found: Sequence[Study]) -> str:
    """Figure 2: the footprint of the largest layer, MiB."""
    lines = []
    for added, _ in _pairs(found):
        sums = [*(added.kinds[kind] for kind in KINDS), added.fastest.sums]
        least = added.workspace[0].selected.sums.workspace_bytes / MIB
        cells = [f"{each.workspace_bytes / MIB:.1f}" for each in sums]
        lines.append([added.network, added.library, *cells, f"{least:.1f}"])
    return markdown(["network", "primitives", *KINDS, "fastest", "least workspace"], lines)


def fronts(found: Sequence[Study], network: str) -> str:
    """Figure 6: the fronts of one network, each cell with budget (MiB), time and the greedy's time (ms)."""
    own = [each for each in found if each.network == network]
    columns = {f"{e.library}, {e.problem.memory_model}": e.memory for e in own}
    columns |= {f"{e.library}, workspace": e.workspace for e in own if e.problem.memory_model == "sum"}
    lines = []
    for number in range(max(map(len, columns.values()))):
        cells = [_point(points[number]) if number < len(points) else "" for points in columns.values()]
        lines.append([str(number + 1), *cells])
    return markdown(["", *columns], lines)


def _point(point: Point) -> str:
    greedy = f"{point.greedy.time_ns / 1e6:.2f}" if point.greedy else "none"
    return f"{point.budget_bytes / MIB:.1f}: {point.selected.sums.time_ns / 1e6:.2f}, {greedy}"


def greedy(found: Sequence[Study]) -> str:
    """Figure 10: the greedy's time over ours, on the fronts of memory and of workspace."""
    head = ["network", "primitives", "memory", "at the least", "most", "at, MiB", "of least to fastest"]
    head += ["greedy finds none", "workspace: most"]
    lines = []
    for each in found:
        ratios, (most, point) = speedups(each.memory), best_speedup(each.memory)
        least, largest_bytes = each.memory[0].budget_bytes, each.memory[-1].budget_bytes
        share = (point.budget_bytes - least) / max(1, largest_bytes - least)
        lines.append(
            [
                *(each.network, each.library, each.problem.memory_model),
                "none" if ratios[0] is None else f"{ratios[0]:.2f}",
                *(f"{most:.2f}", f"{point.budget_bytes / MIB:.1f}", f"{share:.0%}"),
                f"{ratios.count(None)} of {len(ratios)}",
                f"{best_speedup(each.workspace)[0]:.2f}",
            ]
        )
    return markdown(head, lines)


def claimed(found: Sequence[Study], network: str) -> str:
    """The claims of sections 5.2 and 5.3, of one network."""
    own = [each for each in found if each.network == network]
    rows = [each.claims for each in own]
    lines = []
    for name, said in SAID.items():
        cells = [_figure(name, row[name]) for row in rows]
        lines.append([said, PUBLISHED[name], *cells])
    heads = [f"{each.library}, {each.problem.memory_model}" for each in own]
    return markdown(["", "paper", *heads], lines)


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return "none"
    if name == "workspace_saved_bytes":
        return f"{value / MIB:.2f}"
    text = f"{value:.0f}" if name == "greedy_fails" else f"{value:.2f}"
    target = TARGETS.get(name)
    return f"{text} ({'met' if value >= target else 'not met'})" if target else text


def traded(found: Sequence[Study]) -> str:
    """Memory that 15 % more time saves, beside the most that any selection saves."""
    head = ["network", "primitives", "memory", "fastest, MiB", f"for {MORE_TIME:.0%} more time"]
    head += ["times less", "least, MiB", "times less at most", "of what any choice saves"]
    lines = []
    for each in found:
        quick, least = each.fastest.sums.memory_bytes, each.smallest.sums.memory_bytes
        ratio = each.claims["memory_for_15_percent"]
        assert ratio is not None
        kept = quick / ratio
        share = (quick - kept) / (quick - least) if quick > least else 1.0
        cells = [each.network, each.library, each.problem.memory_model, f"{quick / MIB:.1f}"]
        cells += [f"{kept / MIB:.1f}", f"{ratio:.2f}", f"{least / MIB:.1f}", f"{quick / least:.2f}"]
        lines.append([*cells, f"{share:.0%}"])
    return markdown(head, lines)


def sets_of_families(rows: Sequence[Mapping[str, Any]], shown: int = 5) -> str:
    """The sets of families with which 15 % more time saves most memory, and the set of all families."""
    head = ["families", "fastest, ms", "MiB", f"for {MORE_TIME:.0%} more time, MiB", "times less"]
    whole = max(rows, key=lambda row: len(row["families"]))
    lines = []
    for row in [*rows[:shown], whole]:
        taken = [row["memory_bytes"] / MIB, row["kept_bytes"] / MIB]
        names = "all" if row is whole else ", ".join(row["families"])
        cells = [names, f"{row['time_ns'] / 1e6:.2f}", *(f"{size:.1f}" for size in taken)]
        lines.append([*cells, f"{taken[0] / taken[1]:.2f}"])
    return markdown(head, lines)


def figure_of_fronts(found: Sequence[Study]) -> Chart:
    """Figures 6 to 9: the paper's library in its memory model, all primitives in ours, and workspaces."""
    shown = (("published", "sum", "memory"), ("all", "liveness", "memory"), ("published", "sum", "workspace"))
    by_key = {(e.network, e.library, e.problem.memory_model): e for e in found}
    panels = []
    for network in dict.fromkeys(each.network for each in found):
        for library, model, over in shown:
            own = by_key[network, library, model]
            points = own.memory if over == "memory" else own.workspace
            what = model if over == "memory" else over
            panels.append(front_view(points, over, own.kinds, f"{network}, {library}: {what}"))
    return panelled("", panels, len(shown))


def figure_of_network(found: Sequence[Study], network: str) -> Chart:
    """Figures 1, 2, 5 and 10 of one network, and its choices by family."""
    own = {(each.library, each.problem.memory_model): each for each in found if each.network == network}
    panels = []
    for each in (own["published", "sum"], own["all", "liveness"]):
        kinds = {**each.kinds, "least memory": each.smallest.sums}
        panels += [
            times_view(kinds, f"{each.library} primitives: time"),
            memory_view(kinds, f"{each.library} primitives: {each.problem.memory_model}"),
            speedups_view(each.memory),
            families_view(each.memory, "memory"),
        ]
    return panelled(network, panels, 4)


def tables(
    found: Sequence[Study],
    times: Sequence[Mapping[str, Any]],
    known: Mapping[str, Mapping[str, int]],
    sets: Sequence[Mapping[str, Any]],
) -> dict[str, str]:
    """All tables, by the names of their marks in docs/results_taso.md."""
    network = found[0].network
    return {
        "taso solve times": solve_times(times),
        "taso networks": networks(found, known),
        "taso everywhere": everywhere(found),
        "taso largest layers": largest(found),
        "taso fronts": fronts(found, network),
        "taso greedy": greedy(found),
        "taso memory for time": traded(found),
        "taso families": sets_of_families(sets),
        "taso claims": claimed(found, network),
    }
