"""What the label search says of a drawn problem, and what every cover of it does."""

from pimflow.core.candidate import CostTable
from pimflow.core.region_graph import RegionGraph
from pimflow.placement.solvers.exhaustive import all_covers
from pimflow.placement.solvers.label_search import LATENCY, Criterion, Label, Labels, SearchQuery, search
from pimflow.placement.solvers.plan_memory import PlanMemory
from pimflow.placement.solvers.problem import PlacementProblem


def problem_of(graph: RegionGraph, table: CostTable) -> PlacementProblem:
    return PlacementProblem(graph, table, PlanMemory(graph, "fp32", table), row_size_bytes=1.0)


def labels(graph: RegionGraph, table: CostTable, criterion: Criterion = LATENCY, **question) -> Labels:
    """The answer to a question about `criterion`."""
    return search(problem_of(graph, table), SearchQuery(criteria=(criterion,), **question))


def best_label(graph: RegionGraph, table: CostTable, criterion: Criterion = LATENCY) -> Label:
    """The best plan, which the search has to have proved."""
    answer = labels(graph, table, criterion)
    (label,) = answer.plans
    assert answer.bound == label.values[0]
    return label


def min_value(graph: RegionGraph, table: CostTable, criterion: Criterion = LATENCY) -> float:
    """The least of every cover, by the evaluator."""
    covers = all_covers(graph, table)
    return min(criterion.value(latency_ns, energy_pj, cover) for cover, latency_ns, energy_pj in covers)
