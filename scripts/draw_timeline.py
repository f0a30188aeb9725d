"""Draw docs/timeline.svg: the first layers of a network on the GPU alone, and as the plan runs them.

Layers have numbers, the same in all rows: a layer that is split or in a pipeline stands in two rows.
"""

from collections.abc import Iterator
from typing import Any

from update_readme import ROOT

import pimflow
from pimflow.core.candidate import Event
from pimflow.core.rewrite import MODES, Mode
from pimflow.host import pictures

PICTURE = ROOT / "docs" / "timeline.svg"
NETWORK, LAYERS = "mobilenet-v2", 15
TITLE = f"The first {LAYERS} layers of {NETWORK}, on the GPU alone and on both devices"
COLOURS = {
    "GPU": "#9aa7b5",
    "in memory (PIM)": "#e8833a",
    "split: both devices at once": "#3b82c4",
    "pipeline: one device hands rows to the other": "#5aa469",
}
MODE_LABELS = dict(zip(MODES, COLOURS))
NARROWEST_US = 1.6  # a bar in which a number fits


def bars(
    row: str, events: list[Event], numbers: dict[str, int], modes: dict[int, Mode]
) -> Iterator[dict[str, Any]]:
    """A bar for each of `events` that belongs to numbered layers."""
    for event in events:
        layers = sorted(numbers[name] for name in event.regions if name in numbers)
        if not layers:
            continue
        start_us, end_us = event.start_ps / 1e6, event.end_ps / 1e6
        number = f"{layers[0]}-{layers[-1]}" if layers[1:] else f"{layers[0]}"
        wide = end_us - start_us > NARROWEST_US
        yield {
            "row": row,
            "start": start_us,
            "end": end_us,
            "middle": (start_us + end_us) / 2,
            "layers": number if wide else "",
            "mode": MODE_LABELS[modes[layers[0]]],
        }


def chart() -> dict[str, Any]:
    """Search the network, and return the picture in Vega-Lite's grammar."""
    search_result = pimflow.search(NETWORK)
    names = [region.name for region in search_result.graph.regions][:LAYERS]
    numbers = {name: place for place, name in enumerate(names, 1)}
    modes = {numbers[name]: search_result.plan.choice(name).mode for name in names}
    gpu_only, plan = search_result.baseline.timeline.events, search_result.evaluation.timeline.events
    gpu, pim = search_result.system.gpu_channels, search_result.system.pim_channels
    plan_channels = f"{gpu} or {gpu + pim}" if search_result.system.is_time_shared else str(gpu)
    rows = {
        f"GPU alone, {gpu + pim} channels": [e for e in gpu_only if e.resource == "gpu"],
        f"plan: GPU, {plan_channels} channels": [e for e in plan if e.resource == "gpu"],
        "plan: crossbar": [e for e in plan if e.resource == "crossbar"],
        f"plan: PIM, {pim} channels": [e for e in plan if e.resource == "pim"],
    }
    gpu_modes = dict.fromkeys(modes, Mode.GPU)
    first = next(iter(rows))
    values = [
        bar
        for row, events in rows.items()
        for bar in bars(row, events, numbers, gpu_modes if row == first else modes)
    ]
    y = {"field": "row", "type": "nominal", "sort": list(rows), "title": None}
    colour = {
        "field": "mode",
        "type": "nominal",
        "scale": {"domain": list(COLOURS), "range": list(COLOURS.values())},
        "legend": {"title": None, "orient": "top", "columns": 4, "labelLimit": 400},
    }
    across = {"field": "start", "type": "quantitative", "title": "time (us)"}
    return {
        "width": 860,
        "height": {"step": 48},
        "data": {"values": values},
        "encoding": {"y": {**y, "axis": {"labelLimit": 300, "ticks": False, "domain": False}}},
        "layer": [
            {
                "mark": {"type": "bar", "stroke": "white", "strokeWidth": 0.6, "height": {"band": 0.8}},
                "encoding": {"x": across, "x2": {"field": "end"}, "color": colour},
            },
            {
                "mark": {"type": "text", "fontSize": 11, "color": "black"},
                "encoding": {
                    "x": {"field": "middle", "type": "quantitative"},
                    "text": {"field": "layers", "type": "nominal"},
                },
            },
        ],
    }


def main() -> None:
    pictures.save(PICTURE, chart(), TITLE)


if __name__ == "__main__":
    main()
