"""Draw docs/timeline.svg: the first layers of a network on the GPU alone, and as the plan runs them.

Layers have numbers, the same in all rows: a layer that is split or in a pipeline stands in two rows.
"""

from matplotlib.figure import Figure
from update_readme import ROOT

import pimflow
from pimflow.core.candidate import Event
from pimflow.host import pictures

PICTURE = ROOT / "docs" / "timeline.svg"
NETWORK, LAYERS = "mobilenet-v2", 15
COLOURS = {"GPU": "#9aa7b5", "PIM": "#e8833a", "SPLIT": "#3b82c4", "PIPELINE": "#5aa469"}
TOLD = {
    "GPU": "GPU",
    "PIM": "in memory (PIM)",
    "SPLIT": "split: both devices at once",
    "PIPELINE": "pipeline: one device hands rows to the other",
}
NARROWEST_US = 1.6  # a bar in which a number fits


def drawn(events: list[Event], numbers: dict[str, int]) -> list[tuple[float, float, list[int]]]:
    """Start, duration and numbers of the bars of `events` that belong to numbered layers."""
    bars = []
    for event in events:
        own = sorted(numbers[name] for name in event.regions if name in numbers)
        if own:
            start_us, took_us = event.start_ps / 1e6, (event.end_ps - event.start_ps) / 1e6
            bars.append((start_us, took_us, own))
    return bars


def figure() -> Figure:
    """The picture, of a search of this moment."""
    found = pimflow.search(NETWORK)
    names = [region.name for region in found.graph.regions][:LAYERS]
    numbers = {name: place for place, name in enumerate(names, 1)}
    modes = {numbers[name]: found.plan.choice(name).mode for name in names}
    alone, plan = found.baseline.timeline.events, found.evaluation.timeline.events
    gpu, pim = found.system.gpu_channels, found.system.pim_channels
    rows = [
        (f"GPU alone\n{gpu + pim} channels", [e for e in alone if e.resource == "gpu"]),
        (f"plan: GPU\n{gpu} channels", [e for e in plan if e.resource == "gpu"]),
        ("plan: crossbar", [e for e in plan if e.resource == "crossbar"]),
        (f"plan: PIM\n{pim} channels", [e for e in plan if e.resource == "pim"]),
    ]
    whole = Figure(figsize=(11, 3.6), layout="constrained")
    axes = whole.add_subplot()
    places = (3.4, 2.0, 1.0, 0.0)
    for place, (_, events) in zip(places, rows):
        for start_us, took_us, own in drawn(events, numbers):
            colour = COLOURS["GPU" if place == places[0] else modes[own[0]]]
            axes.broken_barh(
                [(start_us, took_us)], (place - 0.36, 0.72), facecolors=colour, edgecolor="white", lw=0.5
            )
            if took_us > NARROWEST_US:
                middle = (start_us + took_us / 2, place)
                told = f"{own[0]}-{own[-1]}" if own[1:] else f"{own[0]}"
                axes.annotate(told, middle, ha="center", va="center", fontsize=8)
    axes.set_yticks(places, [label for label, _ in rows])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("time (us)")
    axes.set_xlim(left=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    patches = [axes.barh(-9, 0, color=colour, label=TOLD[mode]) for mode, colour in COLOURS.items()]
    axes.set_ylim(-0.6, 4.0)
    whole.legend(handles=patches, loc="outside upper center", ncols=4, fontsize=9, frameon=False)
    return whole


def main() -> None:
    title = f"The first {LAYERS} layers of {NETWORK}, on the GPU alone and on both devices"
    pictures.save(PICTURE, figure(), title)


if __name__ == "__main__":
    main()
