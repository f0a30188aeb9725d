"""Which device does what: candidates, costs, solvers, the best plan (PIMFlow); without TVM."""

from pimflow.placement.best_plan import SearchResult, profile, search
from pimflow.placement.candidates.candidates import CandidateGenerator
from pimflow.placement.costs.costs import Costs, Profiling
from pimflow.placement.plan_application import apply, reevaluate
from pimflow.placement.solvers.evaluate import Evaluation
from pimflow.placement.solvers.objectives import Goal

__all__ = [
    "CandidateGenerator",
    "Costs",
    "Evaluation",
    "Goal",
    "Profiling",
    "SearchResult",
    "apply",
    "profile",
    "reevaluate",
    "search",
]
