"""Tables in Markdown and a picture of what `pimflow_comparison` and `pimflow_ablation` compute."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from papers.pimflow_ablation import PUBLISHED_CYCLES, PUBLISHED_KERNELS
from papers.pimflow_comparison import (
    ALL_ORDERS,
    CONFIGURATIONS,
    CONVENTIONS,
    NEWTON_PLUS,
    NEWTON_PLUS_PLUS,
    OURS,
    PIMFLOW,
    Row,
    mean_speedup,
    select,
)
from pimflow.host.charts import PALETTE, chart, legend_at_top, tooltip
from pimflow.host.pages import Chart

# The paper's figures by configuration: convolutions only, end to end; None where it gives none.
PUBLISHED: dict[str, dict[str, tuple[float | None, float | None]]] = {
    "paper: mobilenet-v2": {
        "Newton++": (1.365, None),
        "Pipeline": (1.413, None),
        "MD-DP": (1.436, None),
        "PIMFlow": (1.481, 1.38),
    },
    "paper: mean": {"PIMFlow": (1.30, 1.34)},
    "paper: most": {"PIMFlow": (1.48, 1.82)},
}
PUBLISHED_ENERGY = {"paper: mean": -0.26, "paper: most": -0.39}
PUBLISHED_COMMANDS = (1.20, 1.13)
PUBLISHED_SIZES = {"efficientnet-b0": 1.43, "efficientnet-b6": 1.07}
TERMS = {
    "paper": "paper accounting, `ramulator-pimflow`",
    "timing": "timing `strict`",
    "pim-launch": "submissions to PIM",
    "crossbar": "crossbar",
    "epilogue": "bias, activation, sums after PIM",
    "layout": "layout and padding before PIM",
}
KINDS = ("1x1", "FC", "k x k", "depthwise", "other")


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _pair(row: Row) -> str:
    return f"{row['convolutions_speedup']:.3f} / {row['speedup']:.3f}"


def _means(rows: Sequence[Row]) -> str:
    return f"{mean_speedup(rows, 'convolutions_speedup'):.3f} / {mean_speedup(rows):.3f}"


def _paper_cell(pair: tuple[float | None, float | None] | None) -> str:
    return " / ".join("-" if value is None else f"{value:.3f}" for value in pair) if pair else ""


def _order(rows: Iterable[Row], name: str) -> list[str]:
    return list(dict.fromkeys(row[name] for row in rows))


def speedups(rows: Sequence[Row], accounting: str, timing: str) -> str:
    """Speed-ups over the GPU alone under one convention: convolutions only / end to end."""
    rows = select(rows, accounting=accounting, timing=timing)
    names = [configuration.name for configuration in CONFIGURATIONS]
    lines = []
    for model in _order(rows, "model"):
        model_rows = {row["configuration"]: row for row in select(rows, model=model)}
        gpu_only_ms = model_rows[names[0]]["latency_gpu_only_ns"] / 1e6
        lines.append([model, f"{gpu_only_ms:.4f}", *(_pair(model_rows[name]) for name in names)])
    columns = {name: select(rows, configuration=name) for name in names}
    lines.append(["geometric mean", "", *(_means(column) for column in columns.values())])
    max_cells = ["most", ""]
    for column in columns.values():
        pair = (max(row[key] for row in column) for key in ("convolutions_speedup", "speedup"))
        max_cells.append(" / ".join(f"{value:.3f}" for value in pair))
    lines.append(max_cells)
    for label, published in PUBLISHED.items():
        lines.append([label, "", *(_paper_cell(published.get(name)) for name in names)])
    return markdown(["network", "GPU alone, ms", *names], lines)


def parts(rows: Sequence[Row]) -> str:
    """Latency in ms of convolutions and of all else, for the GPU alone and two configurations."""
    head = ["network", "accounting, timing", "GPU: convolutions", "else"]
    shown = (PIMFLOW.name, OURS.name)
    for name in shown:
        head += [f"{name}: convolutions", "else"]
    lines = []
    for accounting, timing in (CONVENTIONS[0], CONVENTIONS[-1]):
        for model in _order(rows, "model"):
            model_rows = select(rows, model=model, accounting=accounting, timing=timing)
            cells = [model, f"{accounting}, {timing}", *_split(model_rows[0], "_gpu_only")]
            for name in shown:
                cells += _split(select(model_rows, configuration=name)[0], "")
            lines.append(cells)
    return markdown(head, lines)


def _split(row: Row, side: str) -> list[str]:
    convolutions, all_ns = row[f"convolutions{side}_ns"], row[f"latency{side}_ns"]
    return [f"{convolutions / 1e6:.4f}", f"{(all_ns - convolutions) / 1e6:.4f}"]


def commands(rows: Sequence[Row]) -> str:
    """Geometric mean speed-ups by better command streams only, whole layers on PIM or the GPU."""
    lines = []
    pairs = ((NEWTON_PLUS, NEWTON_PLUS_PLUS), (NEWTON_PLUS_PLUS, ALL_ORDERS))
    for accounting, timing in CONVENTIONS:
        convention_rows = select(rows, accounting=accounting, timing=timing)
        cells = [f"{accounting}, {timing}"]
        for worse, better in pairs:
            a, b = (
                select(convention_rows, configuration=configuration.name) for configuration in (worse, better)
            )
            names = ("convolutions_speedup", "speedup")
            gains = [mean_speedup(b, key) / mean_speedup(a, key) for key in names]
            cells.append(" / ".join(f"{gain:.3f}" for gain in gains))
        cells.append(_means(select(convention_rows, configuration=NEWTON_PLUS_PLUS.name)))
        lines.append(cells)
    lines.append(["paper", _paper_cell(PUBLISHED_COMMANDS), "", ""])
    heads = [f"{better.name} over {worse.name}" for worse, better in pairs]
    return markdown(["accounting, timing", *heads, "Newton++ over the GPU alone"], lines)


def energy(rows: Sequence[Row], energy_rows: Sequence[Row]) -> str:
    """Change of energy against the GPU alone, end to end, and its causes.

    `energy_rows` are rows of `energies`.
    """
    lines = []
    for accounting, timing in CONVENTIONS:
        convention = {"accounting": accounting, "timing": timing}
        columns = {
            PIMFLOW.name: select(rows, configuration=PIMFLOW.name, **convention),
            "PIMFlow, buffer read once": select(energy_rows, configuration="read once", **convention),
            OURS.name: select(rows, configuration=OURS.name, **convention),
            "least energy": select(energy_rows, configuration="least energy", **convention),
        }
        for position, row in enumerate(columns[OURS.name]):
            changes = [f"{column[position]['energy_change']:+.1%}" for column in columns.values()]
            before = row["energy_gpu_only_pj"]
            runtime, work = (
                -row["savings_pj"][part] / before for part in ("shorter_runtime", "cheaper_work")
            )
            comp = row["energies_pj"].get("pim_comp", 0.0) / before
            cells = [row["model"], f"{accounting}, {timing}", f"{before / 1e9:.2f}", *changes]
            lines.append([*cells, f"{runtime:+.1%}", f"{work:+.1%}", f"{comp:.1%}"])
        means = [f"{statistics.mean(r['energy_change'] for r in column):+.1%}" for column in columns.values()]
        lines.append(["mean", f"{accounting}, {timing}", "", *means, "", "", ""])
    for label, change in PUBLISHED_ENERGY.items():
        lines.append([label, "", "", f"{change:+.0%}", *[""] * 6])
    head = ["network", "accounting, timing", "GPU alone, mJ", *columns]
    return markdown([*head, "of pimflow: by runtime", "by work", "its COMPs"], lines)


def shares(rows: Sequence[Row]) -> str:
    """Share of each kind of layer in the GPU's time."""
    lines = []
    for row in rows:
        matrix_share = row.get("1x1", 0.0) + row.get("FC", 0.0)
        lines.append([row["model"], *(f"{row.get(kind, 0.0):.1%}" for kind in KINDS), f"{matrix_share:.1%}"])
    return markdown(["network", *KINDS, "1x1 and FC"], [*lines, ["paper", *[""] * len(KINDS), "60-80 %"]])


def command_bounds(rows: Sequence[Row]) -> str:
    """Time of all layers on PIM, with small tiles for all, and without reading results."""
    head = ["network", "timing", "layers", "Newton++, all on PIM, ms", "small tiles for any layer, ms"]
    head += ["layers that gain", "no READRES at all", "READRESs take at most"]
    lines = []
    for row in rows:
        times = [
            f"{row[key] / 1e6:.4f}" if row[key] else "" for key in ("newton_ns", "small_ns", "unread_ns")
        ]
        share = f"{1 - row['unread_ns'] / row['newton_ns']:.1%}" if row["unread_ns"] else ""
        cells = [row["model"], row["timing"], str(row["layers"]), *times[:2], str(row["faster"])]
        lines.append([*cells, times[2], share])
    return markdown(head, lines)


def terms(rows: Sequence[Row]) -> str:
    """Speed-ups with each term of the accounting charged: means of all networks, then network by network."""
    lines = []
    for term in _order(rows, "term"):
        term_rows = select(rows, term=term)
        means = [_means([row[which] for row in term_rows]) for which in ("alone", "together")]
        lines.append([TERMS[term], *means, *(_pair(row["together"]) for row in term_rows)])
    head = ["charged", "mean, alone", "mean, with those above"]
    return markdown([*head, *(f"{model}, with those above" for model in _order(rows, "model"))], lines)


def gains(rows: Sequence[Row]) -> str:
    """Speed-ups with each step by which this search goes beyond the paper's."""
    lines = [[row["term"], _pair(row["paper"]), _pair(row["full"])] for row in rows]
    return markdown(["searched", "paper, ramulator-pimflow", "full, strict"], lines)


def gpu_side(rows: Sequence[Row]) -> str:
    """Speed-ups with launches or executions of the GPU as published."""
    names = {
        "as here": "as here",
        "launches": f"as many launches as {PUBLISHED_KERNELS} kernels have",
        "executions": "executions as long as published",
        "both": f"both: the published baseline, {PUBLISHED_CYCLES:,} cycles",
        "no launches": "launches of the GPU take no time",
    }
    lines = [
        [
            names[row["way"]],
            f"{row['kernels'] * row['launch_ns'] / 1e6:.4f}",
            f"{row['execution_factor']:.2f} x",
            f"{row['latency_gpu_only_ns'] / 1e6:.4f}",
            _pair(row),
            f"{row['energy_change']:+.1%}",
            f"{row['energy_change_read_once']:+.1%}",
        ]
        for row in rows
    ]
    head = ["GPU", "launches, ms", "executions", "GPU alone, ms", "speed-up", "energy", "buffer read once"]
    return markdown(head, lines)


def sizes(rows: Sequence[Row]) -> str:
    """Speed-ups of networks of growing size: convolutions only / end to end."""
    conventions = list(dict.fromkeys((row["accounting"], row["timing"]) for row in rows))
    names = _order(rows, "configuration")
    lines = []
    for model in _order(rows, "model"):
        cells = [model]
        model_rows = select(rows, model=model)
        cells.append(f"{model_rows[0]['latency_gpu_only_ns'] / 1e6:.4f}")
        for accounting, timing in conventions:
            for name in names:
                (row,) = select(model_rows, accounting=accounting, timing=timing, configuration=name)
                cells.append(_pair(row))
        published = PUBLISHED_SIZES.get(model)
        lines.append([*cells, "" if published is None else f"{published:.2f}"])
    heads = [f"{name}: {', '.join(convention)}" for convention in conventions for name in names]
    return markdown(["network", "GPU alone, ms", *heads, "paper"], lines)


def figure(rows: Sequence[Row]) -> Chart:
    """Speed-ups end to end by network and configuration, a panel a convention."""
    models, names = _order(rows, "model"), _order(rows, "configuration")
    values = []
    for accounting, timing in CONVENTIONS:
        convention_rows = select(rows, accounting=accounting, timing=timing)
        title = f"{accounting} accounting, {timing}"
        for name in names:
            column = select(convention_rows, configuration=name)
            points = [(row["model"], row["speedup"]) for row in column]
            if len(column) > 1:
                points.append(("mean", mean_speedup(column)))
            values += [
                {"convention": title, "configuration": name, "network": model, "speedup": speedup}
                for model, speedup in points
            ]
    x: Chart = {"field": "network", "type": "nominal", "sort": [*models, "mean"], "title": None}
    x["axis"] = {"labelAngle": -25, "labelLimit": 120}
    y: Chart = {"field": "speedup", "type": "quantitative", "title": "speed-up, end to end"}
    offset: Chart = {"field": "configuration", "type": "nominal", "sort": names}
    colours = {"domain": names, "range": list(PALETTE[: len(names)])}
    colour: Chart = {"field": "configuration", "type": "nominal", "scale": colours, "legend": legend_at_top()}
    shown = tooltip(("network", "network"), ("configuration", "by"), ("speedup", "speed-up", ".3f"))
    bars: Chart = {"x": x, "xOffset": offset, "y": y, "color": colour, "tooltip": shown}
    unit_line: Chart = {"y": {"datum": 1.0}}
    return chart(
        data={"values": values},
        facet={"field": "convention", "type": "nominal", "sort": None, "title": None},
        columns=2,
        spec={
            "width": 420,
            "height": 220,
            "layer": [
                {"mark": "bar", "encoding": bars},
                {"mark": {"type": "rule", "strokeDash": [5, 4]}, "encoding": unit_line},
            ],
        },
    )
