"""The page of a compiled directory."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pimflow.core.rewrite import Mode
from pimflow.report_page import charts, timeline_chart
from pimflow.report_page.blocks import Page, column, escape, items
from pimflow.report_page.charts import GPU_ONLY
from pimflow.report_page.layer_table import layer_table, time_sources
from pimflow.report_page.network_graph import place_layers
from pimflow.report_page.resources import energy_section, memory_section, programs_section, streams_weights
from pimflow.report_page.stored import StoredPlan, translate_errors

ACCOUNTED = "as accounted"
KINDS = ("same plan", "searched again")  # plans whose speed-up under a convention is shown


def render_page(directory: Path, name: str = "") -> bytes:
    """Write the page of a compiled directory; `name` is its later name, if it is still a temporary one.

    Raises
    ------
    ArtifactError
        If it is no compiled directory, is damaged, or is of another version.
    """
    plan = StoredPlan.load(directory, name)
    with translate_errors(directory):
        return _page(plan)


def _page(plan: StoredPlan) -> bytes:
    report = plan.report
    page = Page(title=f"{report['model']} on {report['system']} - pimflow")
    page.add("timeline", "Timeline", *_timeline(page, plan))
    page.add("network", "Network", *_network(page, report))
    page.add("layers", "Layers", *layer_table(page, plan))
    page.add("speedups", "Speed-up by convention", *_conventions(page, report))
    page.add("roofline", "Roofline", *_roofline(page, report))
    page.add("energy", "Energy", *energy_section(page, plan))
    if report.get("front"):
        page.add("front", "Front", *_front(page, report["front"]))
    if any(row["programs"] for row in report["regions"]):
        page.add("programs", "PIM programs", *programs_section(page, report))
    page.add("memory", "Memory", *memory_section(page, report))
    page.add("checks", "Checks and assumptions", *_checks(page, plan))
    page.add("reproduce", "Reproduce it", *_reproduce(plan))
    return page.render(_head(plan))


def cards(rows: list[tuple[str, str, str, str]]) -> str:
    """HTML cards of figures; rows are a title, the figure, a remark, and the CSS class of the figure."""
    return (
        '<div class="cards">'
        + "".join(
            f'<div class="card"><span>{escape(title)}</span><b class="{kind}">{escape(figure)}</b>'
            f"<span>{escape(remark)}</span></div>"
            for title, figure, remark, kind in rows
        )
        + "</div>"
    )


def speedup_range(report: dict[str, Any]) -> str:
    """The smallest and the largest speed-up of all conventions; empty if only one was searched."""
    best = (again or same for _, same, again in conventions(report))
    ratios = [ratio for ratio in best if ratio is not None]
    return f"{min(ratios):.2f}x to {max(ratios):.2f}x" if len(ratios) > 1 else ""


def conventions(report: dict[str, Any]) -> list[tuple[str, float | None, float | None]]:
    """Speed-ups by convention, of the same plan and searched again; that of the plan first."""
    other_conventions = [
        (_short_name(entry["what"]), entry["same_plan"], entry["searched_again"])
        for entry in report["conventions"]
    ]
    own = f"{ACCOUNTED} ({report['accounting']}, {report['timing']})"
    return [(own, report["speedup"], report["speedup"]), *other_conventions]


def by_kind(report: dict[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Speed-ups by convention and by one of `KINDS`, as far as they are known."""
    for label, *speedups in conventions(report):
        for kind, speedup in zip(KINDS, speedups):
            if speedup is not None:
                yield label, kind, speedup


def _short_name(convention: str) -> str:
    return convention.replace("accounting ", "").replace("timing ", "")


def _head(plan: StoredPlan) -> str:
    report = plan.report
    digests = "".join(
        f"<dt>{label}</dt><dd><code>{escape(d)}</code></dd>" for label, d in plan.digests.items()
    )
    devices = (
        f"{report['gpu']} ({report['gpu_channels']} channels) and "
        f"{report['pim']} ({report['pim_channels']} channels), {report['channel_sharing']}, "
        f"{report['dtype']}, accounting {report['accounting']}, timing {report['timing']}, "
        f"launches {report['launches']}. PIM is simulated."
    )
    return (
        f"<h1>{escape(report['model'])} on {escape(report['system'])}</h1>"
        f"<p class='faint'>{escape(devices)}</p>"
        f"{cards(_figures(report))}"
        f"<details><summary class='note'>digests</summary><dl>{digests}</dl></details>"
    )


def _figures(report: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """The rows of the `cards` at the top."""
    violations = report["timing_violations"]
    legal = "legality not judged" if violations is None else f"{violations} illegal commands"
    samples = f" on {report['samples']} samples" if report.get("samples", 1) > 1 else ""
    check_text = f"{report['regions_verified']} PIM layers and the outputs{samples}; {legal}"
    range_text = speedup_range(report)
    faster, saving = report["speedup"], 1 - report["energy_pj"] / report["energy_gpu_only_pj"]
    return [
        (
            "latency",
            f"{report['latency_ns'] / 1e6:.4f} ms",
            f"GPU alone: {report['latency_gpu_only_ns'] / 1e6:.4f} ms",
            "",
        ),
        (
            "energy",
            f"{report['energy_pj'] / 1e9:.2f} mJ",
            f"GPU alone: {report['energy_gpu_only_pj'] / 1e9:.2f} mJ ({-100 * saving:+.1f} %)",
            "",
        ),
        (
            "speed-up",
            f"{faster:.3f}x",
            f"{range_text} by convention" if range_text else "no other convention searched",
            "good" if faster > 1 else "",
        ),
        (
            "verified",
            "yes" if report["verified"] else "no",
            check_text,
            "good" if report["verified"] else "bad",
        ),
        ("times are", time_sources(*report["regions"]) or "analytic", "of all layers", "words"),
    ]


def _timeline(page: Page, plan: StoredPlan) -> Iterator[str]:
    yield (
        '<div class="controls"><input id="timeline-search" type="search" placeholder="search a layer" '
        'aria-label="search a layer"><button type="button" data-zoom="0.5" aria-label="zoom in">+</button>'
        '<button type="button" data-zoom="2" aria-label="zoom out">&minus;</button>'
        '<button type="button" data-zoom="0">whole</button>'
        '<span class="note">drag to move; Ctrl and wheel to zoom; click a task for its layer; '
        "keys: / searches; + and - zoom, 0 shows all</span></div>"
    )
    yield page.chart(
        "timeline", timeline_chart.timeline(plan.bars, plan.report["latency_ns"] / 1e3, is_searchable=True)
    )
    yield f'<p class="note">“{GPU_ONLY}” is {escape(plan.report["baseline"])}.</p>'


def _conventions(page: Page, report: dict[str, Any]) -> Iterator[str]:
    yield (
        '<div class="two"><div><p class="note">“same plan” is this plan, charged as the convention says; '
        "“searched again” is the best plan there.</p>"
    )
    values = [{"what": what, "kind": kind, "x": speedup} for what, kind, speedup in by_kind(report)]
    title = "speed-up over the GPU alone"
    yield page.chart("conventions", charts.bar_groups(values, "what", "kind", "x", title, ".3f"))
    gaps = [
        f"{_short_name(entry['what'])} {100 * entry['gap']:.2f} %"
        for entry in report["conventions"]
        if entry["gap"]
    ]
    if gaps:
        text = f"Another plan may be better there, by at most: {', '.join(gaps)}."
        yield f'<p class="note">{escape(text)}</p>'
    if report["conventions_missing"]:
        text = f"Not searched: {', '.join(report['conventions_missing'])}."
        yield f'<p class="note">{escape(text)}</p>'
    yield "</div><div>"
    terms = [(entry["term"], entry["latency_ns"]) for entry in report["accounting_terms"]]
    if len(terms) > 1:
        yield (
            '<p class="note">The plan that is best under the first accounting, charged one thing after '
            "another; last, what the search gains once it knows them all. The dashed line is the GPU "
            "alone.</p>"
        )
        yield page.chart("waterfall", charts.waterfall(terms, report["latency_gpu_only_ns"]))
    elif terms:
        yield '<p class="note">There is nothing between this accounting and the full one.</p>'
    yield "</div></div>"


def _network(page: Page, report: dict[str, Any]) -> Iterator[str]:
    modes = list(dict.fromkeys(row["mode"] for row in report["regions"]))
    swatches = "".join(f'<span class="swatch {_mode_class(mode)}"></span>{escape(mode)} ' for mode in modes)
    yield (
        '<div class="controls"><input id="network-search" type="search" placeholder="search a layer" '
        'aria-label="search a layer of the network"><button type="button" data-scale="0.8" '
        'aria-label="enlarge">+</button><button type="button" data-scale="1.25" aria-label="reduce">&minus;'
        f'</button><button type="button" data-scale="0">whole</button><span class="note">{swatches}· drag to '
        "move; Ctrl and wheel to zoom; click a layer for its row</span></div>"
    )
    page.graph = [{**layer, "kind": _mode_class(layer["mode"])} for layer in place_layers(report["regions"])]
    yield '<div id="network" class="network" tabindex="0" aria-label="the network as a graph"></div>'


def _mode_class(mode: str) -> str:
    """The class of a mode in the style."""
    classes: dict[str, str] = {Mode.GPU: "on-gpu", Mode.PIM: "on-pim"}  # a changed file may have another mode
    return classes.get(mode, "on-both")


def _roofline(page: Page, report: dict[str, Any]) -> Iterator[str]:
    points = [
        {
            "layer": row["name"],
            "mode": row["mode"],
            "macs_per_byte": row["macs"] / row["operand_bytes"],
            # Not by its latency: what is computed beside another layer has none.
            "macs_per_ns": row["macs"] / busy_ns,
        }
        for row in report["regions"]
        if (busy_ns := max(row["busy_ns"]["gpu"], row["busy_ns"]["pim"]))
        and row["macs"]
        and row["operand_bytes"]
        and len(row["covers"]) == 1
    ]
    yield (
        '<p class="note">Each dot is a layer of the plan: what it computes while its device is busy. Lines '
        "are what the GPU with all memory channels, and the channels with PIM, can do at most: by their "
        "multipliers, or by what their memory gives them. A point on PIM may be above the GPU's line.</p>"
    )
    yield page.chart("roofline", charts.roofline(points, report["rooflines"]))


def _front(page: Page, points: Sequence[dict[str, Any]]) -> Iterator[str]:
    rows = [
        {
            "plan": point["plan"],
            "latency": point["latency_ns"] / 1e6,
            "energy": point["energy_pj"] / 1e9,
            "pool": point["memory_bytes"] / 1e6,
        }
        for point in points
    ]
    yield '<p class="note">Plans of which none is as good as another in latency, energy and memory.</p>'
    yield page.chart("front", charts.front(rows))


def _checks(page: Page, plan: StoredPlan) -> Iterator[str]:
    report = plan.report
    outputs = [
        f"output {index}: off by {output['relative_error']:.2e} of its largest value; bound "
        f"{output['bound']:.2e}"
        for index, output in enumerate(report["outputs"])
    ]
    violations = report["timing_violations"]
    legality_text = (
        "Commands were not judged: this timing is the published one, which is not legal."
        if violations is None
        else f"{violations} commands issued illegally ({report['timing_violations_of']})."
    )
    yield f"<p>{escape(legality_text)}</p>{items(outputs)}"
    rules = report["violations_by_rule"]
    if rules:
        rows = [{"rule": rule, "count": count} for rule, count in rules.items()]
        columns = [
            column("rule", "rule", least=180, grows=4),
            column("violations", "count", digits=0, least=110),
        ]
        table = page.table("rules", columns, rows)
        yield f"<h3>Violations by rule: {len(rules)} rules were judged</h3>{table}"
    assumed = items(report["assumed"]) if report["assumed"] else "<p>none</p>"
    yield f"<h3>Assumed values that touch the result</h3>{assumed}"


def _reproduce(plan: StoredPlan) -> Iterator[str]:
    report = plan.report
    options = {
        "--gpu": report["gpu"],
        "--pim": report["pim"],
        "--pim-channels": report["pim_channels"],
        "--dtype": report["dtype"],
        "--accounting": report["accounting"],
        "--timing": report["timing"],
        **({"--scheduling": report["scheduling"]} if {*report["modes"]} - {"gpu"} else {}),
        "--copies": report["copies"],
        "--padding": report["padding"],
        **({"--splits": report["splits"]} if "split" in report["modes"] else {}),
        "--channel-sharing": report["channel_sharing"],
        "--launches": report["launches"],
        **(
            {"--weights": "streamed", "--copy-ahead": report["copy_ahead"]} if streams_weights(report) else {}
        ),
        "--objective": report["objective"],
        "--modes": ",".join(report["modes"]),
        "--target": report["gpu_part"]["target"],
    }
    flags = " ".join(f"{flag} {shlex.quote(str(value))}" for flag, value in options.items())
    flags += "".join(f" --pin {shlex.quote(f'{layer}={how}')}" for layer, how in report["pins"].items())
    command = f"pimflow compile {shlex.quote(report['model'])} {flags} -o {shlex.quote(plan.name)}"
    lines = [
        command,
        f"pimflow run {shlex.quote(plan.name)}",
        f"pimflow timeline {shlex.quote(plan.name)} --perfetto trace.json",
        f"pimflow report {shlex.quote(plan.name)}",
    ]
    yield f"<pre>{escape(chr(10).join(lines))}</pre>"
    yield (
        '<p class="note">With devices of your own, name their files. The same inputs give the same digests, '
        "which stand at the top.</p>"
    )
