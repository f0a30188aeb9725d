"""Tables in Markdown and pictures of what `papers.taso_selection` computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from papers.pimflow_tables import markdown
from papers.taso_selection import MORE_TIME, POINTS, NetworkStudy, best_speedup, speedups
from pimflow.host.pages import Chart
from pimflow.primitive_selection.figures import (
    arrange_panels,
    families_view,
    front_view,
    memory_view,
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
CLAIM_TEXTS = {
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


def solve_times_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Table 1: solving times by number of layers."""
    head = [
        "as large as",
        "layers",
        "variables",
        "fastest, s of one core",
        f"front of {POINTS}, s",
        "time by PBQP, over it",
        "PBQP, s",
        "paper, s",
    ]
    lines = [
        [
            row["as"],
            str(row["layers"]),
            str(row["variables"]),
            f"{row['fastest_s']:.2f}",
            f"{row['front_s']:.1f}",
            *row["pbqp"].text(row["fastest_ns"]),
            f"{row['published_s']:.2f}",
        ]
        for row in rows
    ]
    return markdown(head, lines)


def networks_table(studies: Sequence[NetworkStudy], time_counts: Mapping[str, Mapping[str, int]]) -> str:
    """Layers and candidates of each network, how many times are measured, and solving times."""
    head = ["network", "primitives", "layers", "candidates", "times measured", "predicted"]
    head += ["layers of the fastest by a prediction", "fastest, s", "front, s"]
    head += ["time by PBQP, over it", "PBQP, s"]
    lines = []
    for study in studies:
        if study.problem.memory_model == "sum":
            counts = time_counts[study.network]
            cells = [study.network, study.library, str(study.layers), str(study.candidates)]
            cells += [
                str(counts["measured"]),
                str(counts["predicted"]),
                str(study.layers_by_prediction),
                f"{study.solve_seconds:.2f}",
                f"{study.front_seconds:.1f}",
                *study.pbqp.text(study.fastest.sums.time_ns),
            ]
            lines.append(cells)
    return markdown(head, lines)


def shares_table(studies: Sequence[NetworkStudy]) -> str:
    """Of one primitive everywhere: the share of the time that is predicted, and layers of another kind."""
    lines = []
    for study in studies:
        if study.problem.memory_model == "sum":
            kinds = {**{kind: study.kinds[kind] for kind in KINDS}, "fastest": study.fastest.sums}
            cells = [_share(sums) for sums in (*kinds.values(), study.smallest.sums)]
            lines.append([study.network, study.library, *cells])
    return markdown(["network", "primitives", *KINDS, "fastest", "least memory"], lines)


def _share(sums: Sums) -> str:
    return f"{sums.guessed_ns / sums.time_ns:.0%}" + (
        f", {len(sums.substituted)} layers" if sums.substituted else ""
    )


def everywhere_table(studies: Sequence[NetworkStudy]) -> str:
    """Figures 1 and 5: time and memory of one primitive everywhere, in both memory models."""
    lines = []
    for added, live in _model_pairs(studies):
        cells = [added.network, added.library]
        for kind in KINDS:
            cells.append(_both_models(added.kinds[kind], live.kinds[kind]))
        cells.append(_both_models(added.fastest.sums, live.fastest.sums))
        lines.append([*cells, *(_time_and_memory(study.smallest.sums) for study in (added, live))])
    head = ["network", "primitives", *KINDS, "fastest", "least memory: sum", "live"]
    return markdown(head, lines)


def _model_pairs(studies: Sequence[NetworkStudy]) -> list[tuple[NetworkStudy, NetworkStudy]]:
    """For every network and library, the studies in the paper's memory model and in ours."""
    by_model = {(e.network, e.library, e.problem.memory_model): e for e in studies}
    names = dict.fromkeys((study.network, study.library) for study in studies)
    return [(by_model[(*name, "sum")], by_model[(*name, "liveness")]) for name in names]


def _time_and_memory(sums: Sums) -> str:
    return f"{sums.time_ns / 1e6:.2f} / {sums.memory_bytes / MIB:.1f}"


def _both_models(added: Sums, live: Sums) -> str:
    return f"{_time_and_memory(added)} / {live.memory_bytes / MIB:.1f}"


def largest_table(studies: Sequence[NetworkStudy]) -> str:
    """Figure 2: the footprint of the largest layer, MiB."""
    lines = []
    for added, _ in _model_pairs(studies):
        sums = [*(added.kinds[kind] for kind in KINDS), added.fastest.sums]
        min_workspace = added.workspace[0].selected.sums.workspace_bytes / MIB
        cells = [f"{layer_sums.workspace_bytes / MIB:.1f}" for layer_sums in sums]
        lines.append([added.network, added.library, *cells, f"{min_workspace:.1f}"])
    return markdown(["network", "primitives", *KINDS, "fastest", "least workspace"], lines)


def fronts_table(studies: Sequence[NetworkStudy], network: str) -> str:
    """Figure 6: the fronts of one network, each cell with budget (MiB), time and the greedy's time (ms)."""
    network_studies = [study for study in studies if study.network == network]
    columns = {f"{e.library}, {e.problem.memory_model}": e.memory for e in network_studies}
    columns |= {
        f"{e.library}, workspace": e.workspace for e in network_studies if e.problem.memory_model == "sum"
    }
    lines = []
    for number in range(max(map(len, columns.values()))):
        cells = [_point(points[number]) if number < len(points) else "" for points in columns.values()]
        lines.append([str(number + 1), *cells])
    return markdown(["", *columns], lines)


def _point(point: Point) -> str:
    greedy = f"{point.greedy.time_ns / 1e6:.2f}" if point.greedy else "none"
    return f"{point.budget_bytes / MIB:.1f}: {point.time_ns / 1e6:.2f}, {greedy}"


def greedy_table(studies: Sequence[NetworkStudy]) -> str:
    """Figure 10: the greedy's time over ours, on the fronts of memory and of workspace."""
    head = ["network", "primitives", "memory", "at the least", "most", "at, MiB", "of least to fastest"]
    head += ["greedy finds none", "workspace: most"]
    lines = []
    for study in studies:
        ratios, (max_ratio, point) = speedups(study.memory), best_speedup(study.memory)
        min_bytes, max_bytes = study.memory[0].budget_bytes, study.memory[-1].budget_bytes
        share = (point.budget_bytes - min_bytes) / max(1, max_bytes - min_bytes)
        lines.append(
            [
                *(study.network, study.library, study.problem.memory_model),
                "none" if ratios[0] is None else f"{ratios[0]:.2f}",
                *(f"{max_ratio:.2f}", f"{point.budget_bytes / MIB:.1f}", f"{share:.0%}"),
                f"{ratios.count(None)} of {len(ratios)}",
                f"{best_speedup(study.workspace)[0]:.2f}",
            ]
        )
    return markdown(head, lines)


def claims_table(studies: Sequence[NetworkStudy], network: str) -> str:
    """The claims of sections 5.2 and 5.3, of one network."""
    network_studies = [study for study in studies if study.network == network]
    rows = [study.claims for study in network_studies]
    lines = []
    for name, text in CLAIM_TEXTS.items():
        cells = [_figure(name, row[name]) for row in rows]
        lines.append([text, PUBLISHED[name], *cells])
    heads = [f"{study.library}, {study.problem.memory_model}" for study in network_studies]
    return markdown(["", "paper", *heads], lines)


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return "none"
    if name == "workspace_saved_bytes":
        return f"{value / MIB:.2f}"
    text = f"{value:.0f}" if name == "greedy_fails" else f"{value:.2f}"
    target = TARGETS.get(name)
    return f"{text} ({'met' if value >= target else 'not met'})" if target else text


def memory_for_time_table(studies: Sequence[NetworkStudy]) -> str:
    """Memory that 15 % more time saves, beside the most that any selection saves."""
    head = ["network", "primitives", "memory", "fastest, MiB", f"for {MORE_TIME:.0%} more time"]
    head += ["times less", "least, MiB", "times less at most", "of what any choice saves"]
    lines = []
    for study in studies:
        fastest_bytes, min_bytes = study.fastest.sums.memory_bytes, study.smallest.sums.memory_bytes
        ratio = study.claims["memory_for_15_percent"]
        assert ratio is not None
        slower_bytes = fastest_bytes / ratio
        share = (
            (fastest_bytes - slower_bytes) / (fastest_bytes - min_bytes) if fastest_bytes > min_bytes else 1.0
        )
        cells = [study.network, study.library, study.problem.memory_model, f"{fastest_bytes / MIB:.1f}"]
        cells += [
            f"{slower_bytes / MIB:.1f}",
            f"{ratio:.2f}",
            f"{min_bytes / MIB:.1f}",
            f"{fastest_bytes / min_bytes:.2f}",
        ]
        lines.append([*cells, f"{share:.0%}"])
    return markdown(head, lines)


def sets_of_families(rows: Sequence[Mapping[str, Any]], shown: int = 5) -> str:
    """The sets of families with which 15 % more time saves most memory, and the set of all families."""
    head = ["families", "fastest, ms", "MiB", f"for {MORE_TIME:.0%} more time, MiB", "times less"]
    all_families = max(rows, key=lambda row: len(row["families"]))
    lines = []
    for row in [*rows[:shown], all_families]:
        sizes = [row["memory_bytes"] / MIB, row["kept_bytes"] / MIB]
        names = "all" if row is all_families else ", ".join(row["families"])
        cells = [names, f"{row['time_ns'] / 1e6:.2f}", *(f"{size:.1f}" for size in sizes)]
        lines.append([*cells, f"{sizes[0] / sizes[1]:.2f}"])
    return markdown(head, lines)


def fronts_figure(studies: Sequence[NetworkStudy]) -> Chart:
    """Figures 6 to 9: the paper's library in its memory model, all primitives in ours, and workspaces."""
    shown = (("published", "sum", "memory"), ("all", "liveness", "memory"), ("published", "sum", "workspace"))
    by_key = {(e.network, e.library, e.problem.memory_model): e for e in studies}
    panels = []
    for network in dict.fromkeys(study.network for study in studies):
        for library, model, over in shown:
            panel_study = by_key[network, library, model]
            points = panel_study.memory if over == "memory" else panel_study.workspace
            label = model if over == "memory" else over
            panels.append(front_view(points, over, panel_study.kinds, f"{network}, {library}: {label}"))
    return arrange_panels("", panels, len(shown))


def network_figure(studies: Sequence[NetworkStudy], network: str) -> Chart:
    """Figures 1, 2, 5 and 10 of one network, and its choices by family."""
    by_library = {
        (study.library, study.problem.memory_model): study for study in studies if study.network == network
    }
    panels = []
    for study in (by_library["published", "sum"], by_library["all", "liveness"]):
        kinds = {**study.kinds, "least memory": study.smallest.sums}
        panels += [
            times_view(kinds, f"{study.library} primitives: time"),
            memory_view(kinds, f"{study.library} primitives: {study.problem.memory_model}"),
            speedups_view(study.memory),
            families_view(study.memory, "memory"),
        ]
    return arrange_panels(network, panels, 4)


def tables(
    studies: Sequence[NetworkStudy],
    times: Sequence[Mapping[str, Any]],
    time_counts: Mapping[str, Mapping[str, int]],
    sets: Sequence[Mapping[str, Any]],
) -> dict[str, str]:
    """All tables, by the names of their marks in docs/results_taso.md."""
    network = studies[0].network
    return {
        "taso solve times": solve_times_table(times),
        "taso networks": networks_table(studies, time_counts),
        "taso everywhere": everywhere_table(studies),
        "taso shares": shares_table(studies),
        "taso largest layers": largest_table(studies),
        "taso fronts": fronts_table(studies, network),
        "taso greedy": greedy_table(studies),
        "taso memory for time": memory_for_time_table(studies),
        "taso families": sets_of_families(sets),
        "taso claims": claims_table(studies, network),
    }
