"""Region graphs, read back from JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pimflow.core.attention import Attention
from pimflow.core.region import ConvGeometry, Region, RegionGraph


def stored_graph(plain: Mapping[str, Any]) -> RegionGraph:
    """The graph that `dataclasses.asdict` made into `plain`, whether it went through JSON since or not."""
    regions = tuple(_region(region) for region in plain["regions"])
    optional = ("runs", "fusible", "kept_outputs")
    more = {name: _frozen(list(plain.get(name, ()))) for name in optional}
    return RegionGraph(name=plain["name"], regions=regions, outputs=tuple(plain["outputs"]), **more)


def _region(plain: Mapping[str, Any]) -> Region:
    fields = {name: _frozen(value) for name, value in plain.items()}
    for kind in ("geometry", "pooling"):
        if plain.get(kind) is not None:
            geometry = {name: _frozen(value) for name, value in plain[kind].items()}
            fields[kind] = ConvGeometry(**geometry)
    if plain.get("attention") is not None:
        fields["attention"] = Attention.from_json(plain["attention"])
    fields["parts"] = tuple(_region(part) for part in plain.get("parts", ()))
    return Region(**fields)


def _frozen(value: Any) -> Any:
    """`value` with JSON's lists made into tuples again."""
    return tuple(_frozen(each) for each in value) if isinstance(value, list) else value
