"""The page of a compiled directory."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pimflow.core.rewrite import Mode
from pimflow.host.charts import chart
from pimflow.memory.plot import pool_view
from pimflow.placement.solvers.evaluate import STATIC
from pimflow.report_page import charts
from pimflow.report_page.blocks import Page, Row, column, escape, items
from pimflow.report_page.charts import GPU_ONLY, ROWS
from pimflow.report_page.network_graph import place_layers
from pimflow.report_page.stored import StoredPlan, translate_errors

ACCOUNTED = "as accounted"
KINDS = ("same plan", "searched again")  # plans whose speed-up under a convention is shown
_METRICS = ("multipliers", "bus", "rows", "refresh")


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
    page.add("layers", "Layers", *_layers(page, plan))
    page.add("speedups", "Speed-up by convention", *_conventions(page, report))
    page.add("roofline", "Roofline", *_roofline(page, report))
    page.add("energy", "Energy", *_energy(page, plan))
    if report.get("front"):
        page.add("front", "Front", *_front(page, report["front"]))
    if any(row["programs"] for row in report["regions"]):
        page.add("programs", "PIM programs", *_programs(page, report))
    page.add("memory", "Memory", *_memory(page, report))
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
        ("times are", _time_sources(*report["regions"]) or "analytic", "of all layers", "words"),
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
        "timeline", charts.timeline(plan.bars, plan.report["latency_ns"] / 1e3, is_searchable=True)
    )
    yield f'<p class="note">“{GPU_ONLY}” is {escape(plan.report["baseline"])}.</p>'


def _time_sources(*rows: Row) -> str:
    """Sources of the times of layers by resource: ``PIM simulated, channels analytic and simulated``."""
    texts = []
    for resource in ("pim", "gpu", "crossbar", "channels"):
        sources = sorted({row["known"][resource] for row in rows if resource in row["known"]})
        if sources:
            texts.append(f"{ROWS.get(resource, resource)} {' and '.join(sources)}")
    return ", ".join(texts)


def _shape(row: Row) -> str:
    inputs = " + ".join("x".join(map(str, shape)) for shape in row["input_shapes"])
    return f"{inputs} → {'x'.join(map(str, row['output_shape']))}"


def _layers(page: Page, plan: StoredPlan) -> Iterator[str]:
    longest = max(len(row["name"]) for row in plan.report["regions"])
    columns = [
        # Names differ at their ends, so that most are shown whole, at 8 pixels a letter.
        column("layer", "name", filter="text", least=min(max(150, 8 * longest), 300), grows=2, frozen=True),
        column("mode", "mode", filter="list", least=92),
        column("GPU share", "share", least=66, digits=2),
        column("shape", "shape", filter="text", least=130, grows=2),
        column("MACs, M", "macs", digits=2, least=74),
        column("bytes, kB", "kb", digits=1, least=78),
        column("GPU alone, us", "before", digits=2, least=78),
        column("plan, us", "after", digits=2, least=74),
        column("GPU busy, us", "gpu_busy", digits=2, least=74),
        column("GPU idle, us", "gpu_idle", digits=2, least=74),
        column("PIM busy, us", "pim_busy", digits=2, least=74),
        column("PIM idle, us", "pim_idle", digits=2, least=74),
        column("saved, us", "saved", digits=2, least=74),
        column("energy, uJ", "energy", digits=2, least=78),
        column("was, uJ", "energy_before", digits=2, least=74),
        column("known", "known", filter="text", least=120, grows=2),
        column("why", "why", filter="text", least=140, grows=3),
    ]
    texts: dict[str, int] = {}
    rows = [_layer_row(plan, row, texts) for row in plan.report["regions"]]
    yield (
        '<p class="note">Click a row for its candidates, loop order and commands. Layers that are done '
        "together have their time and energy at the first. Energy is that of the tasks, without constant "
        "power.</p>"
    )
    yield page.table(
        "layers", columns, rows, details=True, detail_columns=CANDIDATE_COLUMNS, texts=list(texts)
    )


def _layer_row(plan: StoredPlan, row: Row, texts: dict[str, int]) -> Row:
    first = row["covers"][0] == row["name"]
    after = row["latency_ns"] / 1e3 if first else None
    before = row["latency_gpu_only_ns"] / 1e3
    leader_text = f"with {row['covers'][0]}" if not first else ""
    figures = {
        "name": row["name"],
        "mode": row["mode"],
        "share": row["gpu_share"],
        "shape": _shape(row),
        "macs": row["macs"] / 1e6 or None,
        "kb": row["operand_bytes"] / 1e3,
        "before": before,
        "after": after,
        "gpu_busy": row["busy_ns"]["gpu"] / 1e3 if first else None,
        "gpu_idle": row["idle_ns"]["gpu"] / 1e3 if first else None,
        "pim_busy": row["busy_ns"]["pim"] / 1e3 if first else None,
        "pim_idle": row["idle_ns"]["pim"] / 1e3 if first else None,
        "saved": before - after if after is not None and len(row["covers"]) == 1 else None,
        "energy": row["energy_pj"] / 1e6 if first else None,
        "energy_before": row["energy_gpu_only_pj"] / 1e6,
        "known": _time_sources(row),
        "why": leader_text or row["reason"],
    }
    rounded = {name: round(x, 6) if isinstance(x, float) else x for name, x in figures.items()}
    return rounded | {"details": list(_details(plan, row, texts))}


# Of the candidates of a layer; the first value of a row says whether it is the plan's. Texts that repeat are
# numbered: they are half of the page of a large network.
CANDIDATE_COLUMNS = (
    column("candidate", "name"),
    column("us", "us", digits=2),
    column("uJ", "uj", digits=2),
    column("moved, kB", "kb", digits=1),
    column("known", "known", numbered=True),
    column("loop order", "schedule", numbered=True),
)


def _details(plan: StoredPlan, row: Row, texts: dict[str, int]) -> Iterator[dict[str, Any]]:
    description = f"{' + '.join(row['operators'])}. {row['mode']}"
    description += f", split along {row['axis']}" if row["axis"] else ""
    description += f", primitive {row['primitive']}" if row["primitive"] else ""
    description += f". Loop order: {row['schedule']}" if row["schedule"] else ""
    yield {"title": row["name"], "text": f"{description}."}
    if row["reason"]:
        yield {"text": f"Why: {row['reason']}."}
    candidates = [
        [
            candidate["chosen"],
            candidate["name"]
            + (f" of {len(candidate['covers'])} layers" if len(candidate["covers"]) > 1 else ""),
            round(candidate["latency_ns"] / 1e3, 4),
            round(candidate["energy_pj"] / 1e6, 4),
            round(candidate["moved_bytes"] / 1e3, 2),
            texts.setdefault(_time_sources(candidate), len(texts)),
            texts.setdefault(candidate["schedule"], len(texts)),
        ]
        for candidate in row["candidates"]
    ]
    yield {"title": "Candidates, each by itself; the plan's is marked", "rows": candidates}
    for program in row["programs"]:
        counts = ", ".join(f"{count} {name}" for name, count in program["commands"].items() if count)
        yield {
            "title": f"{program['file']}: {program['cycles']} cycles ({program['timing']})",
            "text": f"{counts}. The first channel begins:",
            "pre": plan.first_commands(program["file"]),
        }


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


def _energy(page: Page, plan: StoredPlan) -> Iterator[str]:
    report = plan.report
    saved = {name: pj / 1e9 for name, pj in report["savings_pj"].items()}
    yield (
        f'<p class="note">Saved {saved["total"]:+.2f} mJ: {saved["shorter_runtime"]:+.2f} mJ by shorter '
        f"runtime (constant power), {saved['cheaper_work']:+.2f} mJ by cheaper work.</p>"
    )
    by_plan = {GPU_ONLY: report["energies_gpu_only_pj"], "plan": report["energies_pj"]}
    yield '<div class="two"><div>'
    yield page.chart("energy", charts.energy(by_plan))
    yield '</div><div><p class="note">Energy taken so far, over time.</p>'
    yield page.chart("energy-over-time", charts.over_time(energy_over_time(plan)))
    yield "</div></div>"


def energy_over_time(plan: StoredPlan) -> list[dict[str, Any]]:
    """Energy in mJ that has been taken by a time in us, of the GPU alone and of the plan.

    The energy of a layer counts when its last task ends, constant power as time goes on.
    """
    report, steps = plan.report, list[dict[str, Any]]()
    for name, is_baseline, energies_pj, latency_ns, key in (
        (GPU_ONLY, True, report["energies_gpu_only_pj"], report["latency_gpu_only_ns"], "energy_gpu_only_pj"),
        ("plan", False, report["energies_pj"], report["latency_ns"], "energy_pj"),
    ):
        ends_us: dict[str, float] = {}
        for bar in plan.bars:
            if (bar.row == GPU_ONLY) == is_baseline:
                for layer in bar.layer_names:
                    ends_us[layer] = max(bar.end_us, ends_us.get(layer, 0.0))
        static_pj = sum(energies_pj.get(part, 0.0) for part in STATIC)
        taken_pj, latency_us = 0.0, latency_ns / 1e3
        steps.append({"plan": name, "time": 0.0, "mj": 0.0})
        rows = [
            (min(ends_us.get(row["name"], latency_us), latency_us), row[key]) for row in report["regions"]
        ]
        for end_us, energy_pj in [*sorted(rows), (latency_us, 0.0)]:
            taken_pj += energy_pj
            steps.append(
                {
                    "plan": name,
                    "time": round(end_us, charts.PS_DIGITS),
                    "mj": round((taken_pj + static_pj * end_us / latency_us) / 1e9, 6),
                }
            )
    return steps


def _programs(page: Page, report: dict[str, Any]) -> Iterator[str]:
    programs = [program for row in report["regions"] for program in row["programs"]]
    names = [program["name"] for program in programs]
    shares = [
        {
            "row": program["name"],
            "column": metric,
            "share": program[metric],
            "more": f"{program['cycles']} cycles, {program['time_ns'] / 1e3:.3f} us",
        }
        for program in programs
        for metric in _METRICS
        if program[metric] is not None
    ]
    channels = [
        {
            "row": program["name"],
            "column": str(channel),
            "share": round(cycles / max(program["cycles"], 1), 4),
            "more": f"{cycles} cycles",
        }
        for program in programs
        for channel, cycles in enumerate(program["channel_cycles"])
    ]
    timings = sorted({program["timing"] for program in programs})
    yield (
        f'<p class="note">By the engine {escape(", ".join(timings))}. Shares of the clocks in which '
        "the multipliers work, data is on the bus, and refreshes stop the banks; and of the columns of "
        "opened rows that are used.</p>"
    )
    yield '<div class="two"><div>'
    yield page.chart("utilisation", charts.shares_chart(shares, _METRICS, names, "what"))
    yield '</div><div><p class="note">Balance: how long each channel works, of the longest.</p>'
    numbers = [str(n) for n in range(max(len(program["channel_cycles"]) for program in programs))]
    yield page.chart("channels", charts.shares_chart(channels, numbers, names, "channel"))
    yield "</div></div>"


def _memory(page: Page, report: dict[str, Any]) -> Iterator[str]:
    memory = report["memory"]
    smallest = (
        "no pool of these tensors is smaller"
        if memory["optimal"]
        else f"no pool of them is below {memory['lower_bound_bytes'] / 1e6:.3f} MB"
    )
    pool, weights = (f"{memory[name] / 1e6:.3f} MB" for name in ("pool_bytes", "weight_bytes"))
    place, boxes = ("copied into it", ", or a weight,") if _streams(report) else ("beside it", ",")
    yield (
        f'<p class="note">{escape(memory["tensors"])} tensors in one pool of {pool} ({smallest}) on '
        f"{escape(memory['target'])}; {weights} of weights {place}. Each box is the result of a layer{boxes} "
        f"while it is needed.{_regions(memory.get('regions', ()))}</p>"
    )
    placed = [
        (entry["name"], entry["begin"], entry["end"], entry["offset_bytes"], entry["size_bytes"])
        for entry in memory["placed"]
    ]
    view = pool_view(placed, memory["pool_bytes"], memory["lower_bound_bytes"])
    yield page.chart("memory", chart(width=charts.WIDTH, height=360, **view))
    if memory["copies"]:
        copied = [
            f"{entry['layer']}: {entry['size_bytes']} B, {entry['reason']}" for entry in memory["copies"]
        ]
        yield f"<details><summary>{len(copied)} copies of parts</summary>{items(copied)}</details>"


def _regions(regions: Sequence[dict[str, Any]]) -> str:
    """Sizes of the pool by set of memory channels, if there are several."""
    if not regions:
        return ""
    names = {"left": "channels left to the GPU", "all": "all channels", "pim": "channels with PIM"}
    sizes = [f"{names[region['channels']]}, {region['size_bytes'] / 1e6:.3f} MB" for region in regions]
    return f" Each set of channels has a region of its own: {'; '.join(sizes)}."


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


def _streams(report: Mapping[str, Any]) -> bool:
    """Whether weights are copied from the host's memory; reports of older versions do not say it."""
    return report.get("weights") == "streamed"


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
        **({"--weights": "streamed", "--copy-ahead": report["copy_ahead"]} if _streams(report) else {}),
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
