"""The page of a sweep: the best points, heat maps, which setting matters, all points, those that failed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from statistics import fmean, pvariance

from pimflow.commands.sweep.sweep_chart import design_space
from pimflow.commands.sweep.sweep_rows import SweepRow
from pimflow.host.charts import category, chart, layer, legend_at_top, number, tooltip
from pimflow.host.pages import Chart
from pimflow.report_page.blocks import Page, column, escape, items

MAX_MAPS = 6  # pairs of settings that have a heat map


def render_sweep(rows: Sequence[SweepRow]) -> bytes:
    """Write the page of a sweep."""
    page = Page(title="design space - pimflow")
    models = list(dict.fromkeys(row.model for row in rows))
    names = [name for name in rows[0].settings if len({row.settings[name] for row in rows}) > 1]
    page.add("best", "Best by network", *_best(page, rows, models))
    if len(names) > 1:
        page.add("maps", "Speed-up by two settings", *_maps(page, rows, names))
    if names:
        page.add("curves", "Speed-up by setting", *_curves(page, rows, names))
        page.add("sensitivity", "Which setting matters", *_sensitivity(page, rows, models, names))
    page.add("space", "Latency and energy", page.chart("space", design_space(rows)))
    columns = [*_columns(rows), column("front", "front", filter="list")]
    page.add("points", "Points", page.table("points", columns, list(map(_cells, rows))))
    failed = [
        f"{row.model}, {', '.join(f'{name} {value}' for name, value in row.settings.items())}: {row.error}"
        for row in rows
        if row.error
    ]
    if failed:
        page.add("failed", f"{len(failed)} points without a plan", items(failed))
    settings = ", ".join(
        f"{name} ({len({row.settings[name] for row in rows})} values)" for name in rows[0].settings
    )
    head = f"<h1>Design space of {escape(', '.join(models))}</h1><p class='faint'>{escape(settings)}</p>"
    return page.render(head)


def _best(page: Page, rows: Sequence[SweepRow], models: Sequence[str]) -> Iterator[str]:
    best = []
    for model in models:
        planned = [row for row in rows if row.model == model and row.figures]
        for what, key in (
            ("latency", lambda row: row.figures.latency_ns),
            ("energy", lambda row: row.figures.energy_pj),
            ("speed-up", lambda row: -row.figures.speedup),
        ):
            if planned:
                best.append({"what": f"best {what}", **_cells(min(planned, key=key))})
    yield page.table("best", [column("what", "what", least=110), *_columns(rows)], best)


def _columns(rows: Sequence[SweepRow]) -> list[dict[str, object]]:
    return [
        column("network", "model", filter="list", least=110),
        *(column(name, f"set_{place}", filter="list") for place, name in enumerate(rows[0].settings)),
        column("GPU alone, ms", "gpu_only", digits=4),
        column("latency, ms", "latency", digits=4),
        column("speed-up", "speedup", digits=3),
        column("energy, mJ", "energy", digits=2),
        *([column("report", "report", link=True)] if any(row.report for row in rows) else []),
    ]


def _cells(row: SweepRow) -> dict[str, object]:
    cells: dict[str, object] = {
        "model": row.model,
        "front": "yes" if row.pareto else "",
        "report": row.report,
    }
    cells |= {f"set_{place}": str(value) for place, value in enumerate(row.settings.values())}
    if row.figures:
        cells |= {
            "gpu_only": row.figures.latency_gpu_only_ns / 1e6,
            "latency": row.figures.latency_ns / 1e6,
            "speedup": row.figures.speedup,
            "energy": row.figures.energy_pj / 1e9,
        }
    return cells


def _maps(page: Page, rows: Sequence[SweepRow], names: Sequence[str]) -> Iterator[str]:
    yield '<p class="note">The best speed-up over all other settings.</p>'
    pairs = list(itertools.combinations(names, 2))
    for place, (first, second) in enumerate(pairs[:MAX_MAPS]):
        values = [
            {"model": model, "x": x, "y": y, "speedup": speedup}
            for (model, x, y), speedup in _best_speedups(rows, first, second).items()
        ]
        yield page.chart(f"map-{place}", _heat_map(values, first, second))
    if len(pairs) > MAX_MAPS:
        yield f'<p class="note">{len(pairs) - MAX_MAPS} more pairs are in the table of points.</p>'


def _best_speedups(rows: Sequence[SweepRow], *names: str) -> dict[tuple[str, ...], float]:
    """The best speed-up by network and values of some settings, over all others."""
    best: dict[tuple[str, ...], float] = {}
    for row in rows:
        if row.figures:
            key = (row.model, *(str(row.settings[name]) for name in names))
            best[key] = max(round(row.figures.speedup, 4), best.get(key, 0.0))
    return best


def _heat_map(values: Sequence[Chart], first: str, second: str) -> Chart:
    x, y = category("x", sort=None, title=first), category("y", sort=None, title=second)
    scale = {"scheme": {"name": "blues", "extent": [0, 0.6]}}  # dark text is read on all
    fields = tooltip(("model", "network"), ("x", first), ("y", second), ("speedup", "speed-up", ".3f"))
    layers = [
        layer("rect", x=x, y=y, color=number("speedup", title="speed-up", scale=scale), tooltip=fields),
        layer({"type": "text", "color": "#1b1f24"}, x=x, y=y, text=number("speedup", format=".2f")),
    ]
    return chart(
        data={"values": list(values)},
        facet={"column": category("model", title=None, sort=None)},
        spec={"width": {"step": 58}, "height": {"step": 26}, "layer": layers},
    )


def _curves(page: Page, rows: Sequence[SweepRow], names: Sequence[str]) -> Iterator[str]:
    yield '<p class="note">The best speed-up at each value of a setting, over all others.</p>'
    for place, name in enumerate(names):
        speedups = _best_speedups(rows, name)
        values = [{"model": model, "x": x, "speedup": speedup} for (model, x), speedup in speedups.items()]
        lines = layer(
            {"type": "line", "point": True, "tooltip": True},
            x=category("x", sort=None, title=name, axis={"labelAngle": 0}),
            y=number("speedup", title="speed-up", scale={"zero": False}),
            color=category("model", sort=None, legend=legend_at_top(4)),
        )
        yield page.chart(f"curve-{place}", chart(width=900, height=180, data={"values": values}, **lines))


def variance_shares(rows: Sequence[SweepRow], names: Sequence[str]) -> dict[str, float]:
    """By setting, the share of the variance of speed-ups that its values explain by themselves.

    This is the variance of the means at each of its values, over the variance of all points (the first-order
    index of Sobol, on the grid of the sweep). The rest is in combinations of settings.
    """
    planned = [row for row in rows if row.figures]
    speedups = [row.figures.speedup for row in planned if row.figures]
    total = pvariance(speedups) if len(speedups) > 1 else 0.0
    shares: dict[str, float] = {}
    for name in names:
        groups: dict[object, list[float]] = {}
        for row, speedup in zip(planned, speedups):
            groups.setdefault(row.settings[name], []).append(speedup)
        mean = fmean(speedups) if speedups else 0.0
        between = sum(len(g) * (fmean(g) - mean) ** 2 for g in groups.values()) / max(len(speedups), 1)
        shares[name] = between / total if total else 0.0
    return shares


def _sensitivity(
    page: Page, rows: Sequence[SweepRow], models: Sequence[str], names: Sequence[str]
) -> Iterator[str]:
    yield (
        '<p class="note">How much of the variance of the speed-ups the values of a setting explain by '
        "themselves; what is missing to 100 % is in combinations.</p>"
    )
    table = []
    for model in models:
        shares = variance_shares([row for row in rows if row.model == model], names)
        table += [
            {"model": model, "setting": name, "share": 100 * share}
            for name, share in sorted(shares.items(), key=lambda item: -item[1])
        ]
    columns = [
        column("network", "model", filter="list"),
        column("setting", "setting", grows=2),
        column("share, %", "share", digits=1),
    ]
    yield page.table("sensitivity", columns, table)
