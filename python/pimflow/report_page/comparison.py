"""The page of several compiled directories side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from pimflow.core.rewrite import MODES, Mode
from pimflow.report_page import charts, timeline_chart
from pimflow.report_page.blocks import Page, Row, column, escape
from pimflow.report_page.charts import GPU_ONLY
from pimflow.report_page.page import ACCOUNTED, KINDS, by_kind, conventions, speedup_range
from pimflow.report_page.stored import StoredPlan, translate_errors

_MODES = tuple(mode.value for mode in MODES)


def render_comparison(directories: Sequence[Path]) -> bytes:
    """Write the page; raises `ArtifactError` for a directory that is not compiled, or by another version."""
    plans: dict[str, StoredPlan] = {}
    for directory in directories:
        plan = StoredPlan.load(directory)
        plans[_unique_name(plan.name, plans)] = plan
    for directory, (name, plan) in zip(directories, plans.items()):
        with translate_errors(directory):  # render each alone, so that an error names its directory
            _page({name: plan})
    return _page(plans)


def _unique_name(name: str, plans: dict[str, StoredPlan]) -> str:
    """`name`, with a number where another directory has it too."""
    number = sum(known_name == name or known_name.startswith(f"{name} (") for known_name in plans)
    return f"{name} ({number + 1})" if number else name


def _page(plans: dict[str, StoredPlan]) -> bytes:
    page = Page(title=f"{', '.join(plans)} - pimflow")
    page.add("figures", "Figures", *_figures(page, plans))
    page.add("timeline", "Timelines", *_timelines(page, plans))
    page.add("layers", "Layers", *_layers(page, plans))
    page.add("speedups", "Speed-up by convention", *_conventions(page, plans))
    energies_pj = {name: plan.report["energies_pj"] for name, plan in plans.items()}
    page.add("energy", "Energy", page.chart("energy", charts.energy(energies_pj)))
    names = ", ".join(plans)
    return page.render(f"<h1>{escape(names)}</h1><p class='faint'>{len(plans)} plans side by side</p>")


def _figures(page: Page, plans: dict[str, StoredPlan]) -> Iterator[str]:
    rows: list[Row] = []

    def add(label: str, figure: Any) -> None:
        """Add a row with the figure that `figure` takes from each report."""
        figures = {f"plan{number}": figure(plan.report) for number, plan in enumerate(plans.values())}
        rows.append({"what": label, **figures})

    add("network", lambda r: r["model"])
    add("devices", lambda r: f"{r['gpu']} + {r['pim']}")
    add("channels, GPU + PIM", lambda r: f"{r['gpu_channels']} + {r['pim_channels']}, {r['channel_sharing']}")
    add("accounting, timing, launches", lambda r: f"{r['accounting']}, {r['timing']}, {r['launches']}")
    add("latency, ms", lambda r: f"{r['latency_ns'] / 1e6:.4f}")
    add("latency of the GPU alone, ms", lambda r: f"{r['latency_gpu_only_ns'] / 1e6:.4f}")
    add("speed-up", lambda r: f"{r['speedup']:.3f}x")
    add("speed-up by convention", lambda r: speedup_range(r) or "not searched")
    add("energy, mJ", lambda r: f"{r['energy_pj'] / 1e9:.2f}")
    add("energy of the GPU alone, mJ", lambda r: f"{r['energy_gpu_only_pj'] / 1e9:.2f}")
    add("pool, MB", lambda r: f"{r['memory']['pool_bytes'] / 1e6:.3f}")
    add("weights on PIM, MB", lambda r: f"{r['weight_bytes'] / 1e6:.3f}")
    for mode in _MODES:
        add(f"layers {mode}", lambda r, mode=mode: str(sum(row["mode"] == mode for row in r["regions"])))
    add("verified", lambda r: "yes" if r["verified"] else "no")
    add("searched for", lambda r: f"{r['objective']} by {r['solver']}")
    columns = [column("", "what", least=150)]
    columns += [column(name, f"plan{number}", least=110) for number, name in enumerate(plans)]
    yield page.table("figures", columns, rows)


def _timelines(page: Page, plans: dict[str, StoredPlan]) -> Iterator[str]:
    """All timelines on one scale; a baseline that several plans share is shown once."""
    bars, seen = [], set()
    for name, plan in plans.items():
        baseline = tuple(bar for bar in plan.bars if bar.row == GPU_ONLY)
        is_repeated = baseline in seen
        seen.add(baseline)
        bars += [
            replace(bar, row=f"{name}: {bar.row}")
            for bar in plan.bars
            if not (is_repeated and bar.row == GPU_ONLY)
        ]
    longest_ns = max(plan.report["latency_ns"] for plan in plans.values())
    yield (
        '<div class="controls"><input id="timeline-search" type="search" placeholder="search a layer" '
        'aria-label="search a layer"></div>'
    )
    yield page.chart("timeline", timeline_chart.timeline(bars, longest_ns / 1e3, is_searchable=True))


def _layers(page: Page, plans: dict[str, StoredPlan]) -> Iterator[str]:
    names = list(dict.fromkeys(row["name"] for plan in plans.values() for row in plan.report["regions"]))
    by_plan = [{row["name"]: row for row in plan.report["regions"]} for plan in plans.values()]
    rows: list[Row] = []
    for name in names:
        line: dict[str, Any] = {"name": name}
        layer_rows = [plan_layers.get(name) for plan_layers in by_plan]
        for number, row in enumerate(layer_rows):
            if row is not None:
                first = row["covers"][0] == name
                line[f"mode{number}"] = _mode_text(row)
                line[f"us{number}"] = row["latency_ns"] / 1e3 if first else None
        line["same"] = (
            "same" if len({_mode_text(row) if row else "" for row in layer_rows}) == 1 else "differs"
        )
        rows.append(line)
    columns: list[object] = [column("layer", "name", filter="text", least=150, frozen=True)]
    columns.append(column("mode", "same", filter="list", least=90))
    for number, name in enumerate(plans):
        columns.append(column(name, f"mode{number}", filter="text", least=110))
        columns.append(column("us", f"us{number}", digits=2, least=70))
    yield page.table("layers", columns, rows)


def _mode_text(row: Row) -> str:
    share = row["gpu_share"]
    return f"SPLIT {share:.2f} {row['axis']}" if row["mode"] == Mode.SPLIT else str(row["mode"])


def _conventions(page: Page, plans: dict[str, StoredPlan]) -> Iterator[str]:
    values: list[Row] = []
    for name, plan in plans.items():
        accounted_label = conventions(plan.report)[0][0]
        for label, kind, speedup in by_kind(plan.report):
            label = ACCOUNTED if label == accounted_label else label
            values.append({"what": label, "plan": f"{name}, {kind}", "x": speedup})
    title = "speed-up over the GPU alone"
    yield page.chart("conventions", charts.bar_groups(values, "what", "plan", "x", title, ".3f"))
    columns = [column("", "what", least=150)]
    for number, name in enumerate(plans):
        columns += [column(f"{name}, {kind}", f"{kind}{number}", least=110) for kind in KINDS]
    columns += [column(f"geometric mean, {kind}", f"mean {kind}", least=110) for kind in KINDS]
    yield page.table("speedups", columns, _speedup_rows(values, list(plans)))


def _speedup_rows(values: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """A row for each convention: speed-ups by plan and kind, and their geometric means over all plans."""
    rows: list[Row] = []
    for label in dict.fromkeys(str(value["what"]) for value in values):
        cells: dict[str, str] = {}
        speedups = {value["plan"]: float(value["x"]) for value in values if value["what"] == label}
        for kind in KINDS:
            plan_speedups = {
                n: speedups[key] for n, name in enumerate(names) if (key := f"{name}, {kind}") in speedups
            }
            cells |= {f"{kind}{number}": f"{speedup:.3f}x" for number, speedup in plan_speedups.items()}
            if len(plan_speedups) == len(names):
                cells[f"mean {kind}"] = f"{geometric_mean(plan_speedups.values()):.3f}x"
        rows.append({"what": label, **cells})
    return rows
