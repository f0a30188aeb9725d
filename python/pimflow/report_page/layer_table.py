"""The table of layers of a page: figures of each, and its candidates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pimflow.report_page.blocks import Page, Row, column
from pimflow.report_page.charts import ROWS
from pimflow.report_page.stored import StoredPlan


def time_sources(*rows: Row) -> str:
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


def layer_table(page: Page, plan: StoredPlan) -> Iterator[str]:
    """The section of the layers."""
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
        "known": time_sources(row),
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
            texts.setdefault(time_sources(candidate), len(texts)),
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
