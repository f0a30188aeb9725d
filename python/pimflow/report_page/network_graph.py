"""The network of a page: where its layers stand, and which feeds which; a script draws it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pimflow.report_page.blocks import Row

_COLUMN, _ROW = 190, 46  # distances of layers, in units of the drawing


def place_layers(regions: Sequence[Row]) -> list[dict[str, Any]]:
    """The layers of a network from top to bottom, each below those that it reads.

    Layers that are as deep as others stand beside these, in the order of what they read.

    Returns
    -------
    list of dict
        By layer: its ``name`` and ``mode``, its place ``x``, ``y``, and the numbers of those that it reads.
    """
    numbers = {row["name"]: number for number, row in enumerate(regions)}
    # Inputs of the network are no layers, and a changed file may name layers that come later.
    sources = [
        [numbers[name] for name in row["reads"] if numbers.get(name, number) < number]
        for number, row in enumerate(regions)
    ]
    depths: list[int] = []
    for layer_sources in sources:
        depths.append(1 + max((depths[source] for source in layer_sources), default=-1))
    columns = [0.0] * len(regions)
    for depth in sorted({*depths}):
        members = [number for number, layer_depth in enumerate(depths) if layer_depth == depth]
        wishes = {
            number: sum(columns[source] for source in sources[number]) / max(len(sources[number]), 1)
            for number in members
        }
        middle = sum(wishes.values()) / len(members)
        for place, number in enumerate(sorted(members, key=lambda number: wishes[number])):
            columns[number] = middle + place - (len(members) - 1) / 2
    return [
        {
            "name": row["name"],
            "mode": row["mode"],
            "x": round(columns[number] * _COLUMN),
            "y": depths[number] * _ROW,
            "reads": sources[number],
        }
        for number, row in enumerate(regions)
    ]
