"""What a network gains under other conventions, kept with the profiles: each takes a search."""

from __future__ import annotations

import dataclasses

from pimflow.api.report import OtherConventions
from pimflow.api.search import speedups
from pimflow.core.plan import Plan
from pimflow.core.region import RegionGraph
from pimflow.core.typed_values import from_fields
from pimflow.hardware import System
from pimflow.host.result_cache import COMPUTED_BY, code_digest, sources_digest
from pimflow.placement import Searched

# Modules whose code decides speed-ups, besides that which prices programs and kernels and searches.
SEARCHED_BY = (*COMPUTED_BY, "fusion", "primitives", "api.search", "api.other_conventions")


def other_conventions(
    searched: Searched,
    plan: Plan | None,
    other_graph: RegionGraph,
    other_copies: System,
    other_given: RegionGraph | None = None,
) -> OtherConventions:
    """`api.search.speedups`, unless the cache of the profiles has them of the same networks and systems."""
    cache = searched.maker.costs.profiling.cache
    if cache is None:
        return speedups(searched, plan, other_graph, other_copies, other_given)
    goal, graphs = searched.goal, (searched.graph, searched.given, other_graph, other_given)
    key = (
        "conventions",
        tuple(None if graph is None else (graph.digest, graph.runs, graph.fusible) for graph in graphs),
        (searched.system.identity, other_copies.identity, searched.maker.costs.profilers),
        (goal.objective, goal.modes, goal.primitives),
        None if plan is None else plan.to_json(),
        searched.plan.to_json(),  # whose times end the list of terms: bounds are in it
    )
    code = f"{code_digest()} {sources_digest(SEARCHED_BY)}"
    kept = cache.get([key], code).get(key)
    if kept is not None:
        return from_fields(OtherConventions, kept)
    found = speedups(searched, plan, other_graph, other_copies, other_given)
    cache.put({key: dataclasses.asdict(found)}, code)
    return found
