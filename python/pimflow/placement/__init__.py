"""Which device does what: candidates, costs, solvers, the best plan (PIMFlow); without TVM."""

from pimflow.placement.best_plan import Searched, profile, search
from pimflow.placement.candidates.candidates import Candidates
from pimflow.placement.costs.costs import Costs, Profiling
from pimflow.placement.given_plan import apply, recharged
from pimflow.placement.solvers.evaluate import Evaluation
from pimflow.placement.solvers.objectives import Goal

__all__ = [
    "Candidates",
    "Costs",
    "Evaluation",
    "Goal",
    "Profiling",
    "Searched",
    "apply",
    "profile",
    "recharged",
    "search",
]
