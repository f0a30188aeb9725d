"""Time all candidates of networks for later searches, and cache the times."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
from onnx import external_data_helper

from pimflow import placement, zoo
from pimflow.commands.shared.arguments import public
from pimflow.commands.shared.options import NetworkOptions
from pimflow.core.candidate import CostTable
from pimflow.core.json_form import JsonTree, json_form
from pimflow.core.region_graph import RegionGraph
from pimflow.core.rewrite import MODES
from pimflow.hardware import System
from pimflow.host.result_cache import ResultCache, sources_digest
from pimflow.placement import CandidateGenerator, Costs, Evaluation, Goal, Profiling

if TYPE_CHECKING:
    from pimflow.frontend import Model

# Modules whose code turns a model into regions: the cache key of regions depends on it.
REGION_MODULES = ("core", "frontend", "fusion", "relay_passes", "zoo")


@dataclass(frozen=True, kw_only=True)
class ProfiledNetwork:
    """Numbers of regions and candidates of a network."""

    model: str
    regions: int
    pim_capable: int
    candidates: int

    @classmethod
    def from_table(cls, graph: RegionGraph, table: CostTable) -> ProfiledNetwork:
        """From the regions and the candidates of a network."""
        regions = len(graph.regions)
        return cls(
            model=graph.name,
            regions=regions,
            pim_capable=regions - len(table.unsupported_reasons),
            candidates=sum(map(len, table.candidates.values())),
        )


@dataclass(frozen=True, kw_only=True)
class ResultCounts:
    """Numbers of results that were cached before, and that were computed."""

    kept: int
    computed: int


@dataclass(frozen=True, kw_only=True)
class ProfileReport(JsonTree):
    """Numbers of candidates and times of a profiling run.

    Attributes
    ----------
    layers, kernels : Counts
        Timed layers on PIM, and kernels on the GPU.
    known : dict of str to int
        GPU kernels by how their times are known.
    """

    models: tuple[ProfiledNetwork, ...]
    gpu: str
    pim: str
    gpu_profiler: str
    pim_profiler: str
    layers: ResultCounts
    kernels: ResultCounts
    known: dict[str, int]
    cache: str | None
    loading_seconds: float
    seconds: float

    def text(self) -> str:
        """The report as text."""
        width = max(len(network.model) for network in self.models)
        lines = [f"{'model':<{width}}  regions  PIM-capable  candidates"]
        lines += [
            f"{network.model:<{width}}  {network.regions:>7}  {network.pim_capable:>11}  "
            f"{network.candidates:>10}"
            for network in self.models
        ]
        sources = ", ".join(f"{count} {source}" for source, count in self.known.items())
        lines += [
            f"pim       {self.layers.computed} layers timed on {self.pim} ({self.pim_profiler}), "
            f"{self.layers.kept} known before",
            f"gpu       {self.kernels.computed} kernels timed on {self.gpu} ({self.gpu_profiler}), "
            f"{self.kernels.kept} known before; {sources}",
            f"time      {self.seconds:.1f} s, {self.loading_seconds:.1f} s of it to read the networks",
        ]
        if self.cache:
            lines.append(f"kept in   {self.cache}")
        return "\n".join(lines)


@public(NetworkOptions)
def profile(
    models: Sequence[str | os.PathLike[str]],
    system: System,
    profiling: Profiling,
    *,
    options: NetworkOptions | None = None,
    **keywords: Any,
) -> ProfileReport:
    """Time every candidate of `models`, except those that `profiling.cache` has already.

    Parameters
    ----------
    models : sequence of str or path
        Names of the zoo, ``.onnx`` or ``.pt2`` files.
    options : NetworkOptions, optional
        Rewrites of the networks before a search; with ``where=pays`` candidates of original and decomposed
        layers are timed.
    **keywords
        Fields that replace those of `options`.
    """
    begin = time.perf_counter()
    options = NetworkOptions.from_keywords(keywords, options)
    profiling.require(system, MODES)
    costs = Costs(system, profiling)
    graphs = [search_inputs(model, system, options, costs)[0] for model in models]
    load_end = time.perf_counter()
    generators = [(graph, CandidateGenerator(graph, system, costs)) for graph in graphs]
    # Layers of all networks in one call, so that no worker is idle at the end of a network.
    costs.time_layers([layer for _, generator in generators for layer in generator.layers()])
    tally = costs.tally
    return ProfileReport(
        models=tuple(
            ProfiledNetwork.from_table(graph, placement.profile(graph, generator))
            for graph, generator in generators
        ),
        gpu=system.gpu.name,
        pim=system.pim.name,
        gpu_profiler=profiling.gpu.name,
        pim_profiler=profiling.pim_profiler(system).name,
        layers=ResultCounts(kept=tally.cached["pim"], computed=tally.computed["pim"]),
        kernels=ResultCounts(kept=tally.cached["gpu"], computed=tally.computed["gpu"]),
        known=costs.kernel_counts(),
        cache=str(profiling.cache.path) if profiling.cache else None,
        loading_seconds=load_end - begin,
        seconds=time.perf_counter() - begin,
    )


def search_inputs(
    model: Model, target_system: System, options: NetworkOptions, costs: Costs, goal: Goal | None = None
) -> tuple[RegionGraph, RegionGraph | None, Evaluation | None]:
    """The regions to place, those of the original network if it differs, and `Prepared.mixture`."""
    if not options.rewrites:
        return region_graph(model, options, costs.profiling.cache, views=target_system.uses_views), None, None
    from pimflow.commands.shared import prepare

    network = prepare.load(model, options)
    request = prepare.PreparationRequest(costs=costs, goal=goal)
    prepared = prepare.prepare(network, options, target_system, request)
    return prepared.regions, prepared.original_regions_for(target_system), prepared.mixture


def region_graph(
    model: Model, options: NetworkOptions, cache: ResultCache | None, *, views: bool = True
) -> RegionGraph:
    """The regions of a network, from `cache` if they are there, since loading takes seconds.

    Of `options` those for loading matter, and `fuse`, which adds the regions that may be fused in groups
    (`RegionGraph.fusible`).
    """
    contents = _contents(model) if cache else None
    load_options = (options.batch, options.context, options.fuse)
    named_options = (tuple(sorted((mapping or {}).items())) for mapping in (options.shapes, options.states))
    values = tuple(sorted((name, repr(array.tolist())) for name, array in (options.values or {}).items()))
    key = ("regions", sources_digest(REGION_MODULES), contents, views, *load_options, *named_options, values)
    stored = cache.get([key], read=RegionGraph.from_table) if cache and contents else {}
    if key in stored:
        graph: RegionGraph = stored[key]
        return graph
    from pimflow.commands.shared import prepare
    from pimflow.fusion.kernels.relax_formulas import regions_of

    network = prepare.load(model, options)
    graph = regions_of(network.module, network.name, views=views, fuse=options.fuse)
    if cache and contents:
        cache.put({key: json_form(graph)})
    return graph


def _contents(model: Model) -> str | None:
    """Digest of the file that a network's regions depend on; None if it is not exactly one file."""
    if not isinstance(model, str | os.PathLike):
        return None
    if isinstance(model, str) and model in zoo.decoder_names():
        return None  # code generates their graphs
    embedded = isinstance(model, str) and model in zoo.names()
    path = zoo.GRAPHS / f"{model}.onnx" if embedded else Path(model)
    try:
        if path.suffix == ".onnx" and not embedded and _has_external_data(path):
            return None
        return f"{path.stem} {hashlib.sha256(path.read_bytes()).hexdigest()}"
    except Exception:  # loading raises the error
        return None


def _has_external_data(path: Path) -> bool:
    proto = onnx.load(path, load_external_data=False)
    return any(external_data_helper.uses_external_data(tensor) for tensor in proto.graph.initializer)
