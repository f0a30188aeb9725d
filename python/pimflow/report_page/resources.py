"""Sections of a page about what a plan takes: energy, time of PIM, memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pimflow.host.charts import chart
from pimflow.memory.plot import pool_view
from pimflow.placement.solvers.evaluate import STATIC
from pimflow.report_page import charts
from pimflow.report_page.blocks import Page, escape, items
from pimflow.report_page.charts import GPU_ONLY
from pimflow.report_page.stored import StoredPlan
from pimflow.report_page.timeline_chart import PS_DIGITS

_METRICS = ("multipliers", "bus", "rows", "refresh")


def energy_section(page: Page, plan: StoredPlan) -> Iterator[str]:
    """The section of energy, by its consumers and over time."""
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
                    "time": round(end_us, PS_DIGITS),
                    "mj": round((taken_pj + static_pj * end_us / latency_us) / 1e9, 6),
                }
            )
    return steps


def programs_section(page: Page, report: dict[str, Any]) -> Iterator[str]:
    """The section of PIM programs, if there are any."""
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


def memory_section(page: Page, report: dict[str, Any]) -> Iterator[str]:
    """The section of memory of tensors and weights."""
    memory = report["memory"]
    smallest = (
        "no pool of these tensors is smaller"
        if memory["optimal"]
        else f"no pool of them is below {memory['lower_bound_bytes'] / 1e6:.3f} MB"
    )
    pool, weights = (f"{memory[name] / 1e6:.3f} MB" for name in ("pool_bytes", "weight_bytes"))
    place, boxes = ("copied into it", ", or a weight,") if streams_weights(report) else ("beside it", ",")
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


def streams_weights(report: Mapping[str, Any]) -> bool:
    """Whether weights are copied from the host's memory; reports of older versions do not say it."""
    return report.get("weights") == "streamed"
