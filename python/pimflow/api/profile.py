"""All that a search needs to know of networks, timed at once and kept."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
from onnx import external_data_helper

from pimflow import placement, zoo
from pimflow.core.plan import MODES
from pimflow.core.region import RegionGraph
from pimflow.core.stored_regions import stored_graph
from pimflow.hardware import System
from pimflow.host.result_cache import ResultCache, sources_digest
from pimflow.placement import Candidates, Costs, Profiling

if TYPE_CHECKING:
    from pimflow.frontend import Model

# What turns a model into regions.
READ_BY = ("core", "frontend", "fusion", "relay_passes", "zoo")


def profile(
    models: Sequence[str | os.PathLike[str]],
    target_system: System,
    profiling: Profiling,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    batch: int | None = None,
    *,
    fuse: bool = False,
) -> dict[str, Any]:
    """Time every candidate of `models`; what `profiling.cache` holds already is not timed again.

    Parameters
    ----------
    models : sequence of str or path
        Names of the zoo, ``.onnx`` or ``.pt2`` files.
    shapes : mapping of str to tuple of int, optional
        Shapes of inputs that the models leave open.
    batch : int, optional
        Inferences at once; see `frontend.load`.
    fuse : bool
        Whether groups of layers are candidates too; see `api.search.search`.

    Returns
    -------
    dict
        ``models``: a row each with its regions and candidates; ``layers`` and ``kernels``: how many
        results were ``kept`` and ``computed``; ``known``: GPU kernels by how they are known; seconds.
    """
    begin = time.perf_counter()
    profiling.require(target_system, MODES)
    costs = Costs(target_system, profiling)
    graphs = [
        region_graph(model, shapes or {}, profiling.cache, views=target_system.views, batch=batch, fuse=fuse)
        for model in models
    ]
    loaded = time.perf_counter()
    makers = [Candidates(graph, target_system, costs) for graph in graphs]
    # All networks' layers together, so that no worker waits at the end of one.
    costs.time_layers([layer for maker in makers for layer in maker.layers()])
    rows = []
    for graph, maker in zip(graphs, makers):
        table = placement.profile(graph, maker)
        rows.append(
            {
                "model": graph.name,
                "regions": len(graph.regions),
                "pim_capable": len(graph.regions) - len(table.refused),
                "candidates": sum(len(found) for found in table.candidates.values()),
            }
        )
    return {
        "models": rows,
        "gpu": target_system.gpu.name,
        "pim": target_system.pim.name,
        "gpu_profiler": profiling.gpu.name,
        "pim_profiler": costs.side.profiler.name,
        "layers": {"kept": costs.tally.kept["pim"], "computed": costs.tally.computed["pim"]},
        "kernels": {"kept": costs.tally.kept["gpu"], "computed": costs.tally.computed["gpu"]},
        "known": costs.known_kernels(),
        "cache": str(profiling.cache.path) if profiling.cache else None,
        "loading_seconds": loaded - begin,
        "seconds": time.perf_counter() - begin,
    }


def text(found: Mapping[str, Any]) -> str:
    """What `profile` returns, for people."""
    width = max(len(row["model"]) for row in found["models"])
    lines = [f"{'model':<{width}}  regions  PIM-capable  candidates"]
    lines += [
        f"{row['model']:<{width}}  {row['regions']:>7}  {row['pim_capable']:>11}  {row['candidates']:>10}"
        for row in found["models"]
    ]
    layers, kernels = found["layers"], found["kernels"]
    known = ", ".join(f"{count} {way}" for way, count in found["known"].items())
    lines += [
        f"pim       {layers['computed']} layers timed on {found['pim']} ({found['pim_profiler']}), "
        f"{layers['kept']} known before",
        f"gpu       {kernels['computed']} kernels timed on {found['gpu']} ({found['gpu_profiler']}), "
        f"{kernels['kept']} known before; {known}",
        f"time      {found['seconds']:.1f} s, {found['loading_seconds']:.1f} s of it to read the networks",
    ]
    if found["cache"]:
        lines.append(f"kept in   {found['cache']}")
    return "\n".join(lines)


def region_graph(
    model: Model,
    shapes: Mapping[str, tuple[int, ...]],
    cache: ResultCache | None,
    *,
    views: bool = True,
    batch: int | None = None,
    fuse: bool = False,
) -> RegionGraph:
    """The regions of a network, from `cache` if they were found before: reading one takes seconds.

    With `fuse`, those that groups may have are known (`RegionGraph.fusible`).
    """
    contents = _contents(model) if cache else None
    key = ("regions", sources_digest(READ_BY), contents, views, batch, fuse, tuple(sorted(shapes.items())))
    kept = cache.get([key]) if cache and contents else {}
    if key in kept:
        return stored_graph(kept[key])
    from pimflow import frontend
    from pimflow.fusion.kernels.relax_formulas import regions_of

    network = frontend.load(model, shapes, batch)
    graph = regions_of(network.module, network.name, views=views, fuse=fuse)
    if cache and contents:
        cache.put({key: dataclasses.asdict(graph)})
    return graph


def _contents(model: Model) -> str | None:
    """Digest of all that a network's regions depend on; None if that is not one file."""
    if not isinstance(model, str | os.PathLike):
        return None
    embedded = isinstance(model, str) and model in zoo.names()
    path = zoo.GRAPHS / f"{model}.onnx" if embedded else Path(model)
    try:
        if path.suffix == ".onnx" and not embedded and _has_external_data(path):
            return None
        return f"{path.stem} {hashlib.sha256(path.read_bytes()).hexdigest()}"
    except Exception:  # whoever loads it says what is wrong
        return None


def _has_external_data(path: Path) -> bool:
    proto = onnx.load(path, load_external_data=False)
    return any(external_data_helper.uses_external_data(tensor) for tensor in proto.graph.initializer)
