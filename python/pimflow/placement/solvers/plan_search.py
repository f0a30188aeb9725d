"""The best plans of a network for a goal: queries to the label search, and evaluation of the answers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from pimflow.core.candidate import Candidate, CostTable
from pimflow.core.goal import EXHAUSTIVE
from pimflow.core.region_graph import RegionGraph
from pimflow.hardware import System
from pimflow.placement.solvers.capacity import bank_rows, channel_bytes, row_bytes
from pimflow.placement.solvers.evaluate import evaluate, static_pj_per_ns
from pimflow.placement.solvers.exhaustive import affordable_covers
from pimflow.placement.solvers.label_search import (
    ERROR,
    INFINITE,
    LATENCY,
    Criterion,
    Label,
    Labels,
    SearchQuery,
    search,
)
from pimflow.placement.solvers.objectives import ROUNDING, EvaluatedPlan, Goal, with_rounding
from pimflow.placement.solvers.plan_memory import PlanMemory
from pimflow.placement.solvers.problem import PlacementProblem


class PlanSearch:
    """Searches the plans of a network.

    Parameters
    ----------
    graph, table, system
        The network, its candidates and the system.
    progress : callable
        Called with how long the evaluation of all plans takes, before it starts.
    """

    def __init__(
        self,
        graph: RegionGraph,
        table: CostTable,
        system: System,
        goal: Goal,
        progress: Callable[[str], None] = lambda _: None,
    ):
        self.graph, self.table, self.system, self.goal = graph, table, system, goal
        self.progress = progress
        limits = system.gpu.kernel_limits(system.dtype)
        self.memory = PlanMemory(graph, system.dtype, table, goal.kernel_device, limits)
        self.problem = PlacementProblem(graph, table, self.memory, row_bytes(system))
        self.energy = Criterion(per_ns=static_pj_per_ns(system), per_pj=1.0)
        self._is_gpu_only = not any(
            c.uses_pim for candidates in table.candidates.values() for c in candidates
        )
        self._labels: dict[SearchQuery, Labels] = {}
        # By query without a bound on memory, the plans of minimum value that were searched.
        self._minima: dict[SearchQuery, list[tuple[float, EvaluatedPlan]]] = {}

    def with_goal(self, goal: Goal) -> PlanSearch:
        """The search of the same plans for another goal."""
        plan_search = copy.copy(self)
        plan_search.goal = goal
        return plan_search

    def best(self) -> EvaluatedPlan | None:
        """The best plan for the goal; None if no plan keeps to the bounds."""
        if self.goal.solver == EXHAUSTIVE:
            return self._exhaustive()
        if self.goal.objective == "memory":
            return self.smallest()
        if self.goal.objective == "edp":
            return self._min_product()
        return self.minimum(LATENCY if self.goal.objective == "latency" else self.energy)

    def minimum(self, criterion: Criterion, max_memory_bytes: float = math.inf) -> EvaluatedPlan | None:
        """The plan of minimum `criterion` within the bounds; None if there is none."""
        limit = min(self.goal.max_memory_bytes or math.inf, max_memory_bytes)
        minima = self._minima.setdefault(self._query((criterion,)), [])
        for larger_limit, plan in minima:
            if plan.memory_bytes <= limit <= larger_limit and not plan.gap:
                return plan  # no plan within the larger limit is better
        found_plan = self._best_fitting_plan(self._query((criterion,), limit))
        minima += [(limit, found_plan)] if found_plan else []
        return found_plan

    def smallest(self) -> EvaluatedPlan | None:
        """The fastest of the plans of minimum memory within the bounds."""
        plan = self._best_fitting_plan(replace(self._query(()), counts_memory=True, minimises_memory=True))
        return plan and self.minimum(LATENCY, plan.memory_bytes)

    def minimum_need(self, field: str) -> EvaluatedPlan | None:
        """The plan of minimum need of what the bound in `field` of a goal bounds (`objectives.BOUNDS`)."""
        criteria = self._criteria
        return self.minimum(criteria[field]) if field in criteria else self.smallest()

    @property
    def _criteria(self) -> dict[str, Criterion]:
        """By field of a goal, what it bounds."""
        return {"max_latency_ns": LATENCY, "max_energy_pj": self.energy, "max_error": ERROR}

    @property
    def latency_bound_ns(self) -> float:
        """A lower bound of the latency of all plans, whether or not they keep to the bounds."""
        unbounded = self.with_goal(Goal(search_seconds=self.goal.search_seconds))
        return self._solve(unbounded._query((LATENCY,))).bound

    def _query(self, criteria: tuple[Criterion, ...], max_memory_bytes: float = math.inf) -> SearchQuery:
        """The query for `criteria` within the bounds of the goal."""
        bounds = self.goal.bounds
        bounded_criteria = (
            replace(criterion, upper_bound=with_rounding(bounds[field]))
            for field, criterion in self._criteria.items()
            if field in bounds
        )
        return SearchQuery(
            criteria=(*criteria, *bounded_criteria),
            only_gpu=self._is_gpu_only,
            seconds=self.goal.search_seconds,
            counts_memory=not math.isinf(max_memory_bytes),
            max_memory_bytes=max_memory_bytes,
        )

    def _with_capacity(self, query: SearchQuery) -> SearchQuery:
        """`query`, restricted to plans that fit PIM's channels, plain memory included."""
        capacity = channel_bytes(self.system)
        rows = Criterion(per_row_byte=1.0, upper_bound=capacity)
        rows_and_filters = Criterion(per_row_byte=1.0, per_filter_byte=1.0)
        criteria = (*query.criteria, rows, rows_and_filters)
        return replace(query, criteria=criteria, counts_memory=True, capacity_bytes=capacity)

    def _solve(self, query: SearchQuery) -> Labels:
        if query not in self._labels:
            self._labels[query] = search(self.problem, query)
        return self._labels[query]

    def _answers(self, query: SearchQuery) -> list[tuple[SearchQuery, Labels]]:
        """The answers to `query` and, if memory counts, for plans without PIM, which have a single pool."""
        queries = [query]
        if query.counts_memory and not self._is_gpu_only:
            queries.append(replace(query, only_gpu=True))
        return [(pool_query, self._solve(pool_query)) for pool_query in queries]

    def _front_answers(
        self, criteria: tuple[Criterion, ...], known: Sequence[EvaluatedPlan], max_memory_bytes: float
    ) -> list[tuple[SearchQuery, Labels]]:
        """All plans that are Pareto-optimal in `criteria`; capacity counts unless all `known` ones fit."""
        query = replace(self._query(criteria, max_memory_bytes), front=True)
        return self._answers(query if all(map(self._fits_channels, known)) else self._with_capacity(query))

    def _best_fitting_plan(self, query: SearchQuery) -> EvaluatedPlan | None:
        """The best plan of those that fit PIM's channels, which are searched only if the best does not."""
        plan = self._best_plan(query)
        return plan if not plan or self._fits_channels(plan) else self._best_plan(self._with_capacity(query))

    def _best_plan(self, query: SearchQuery) -> EvaluatedPlan | None:
        answers = self._answers(query)
        bound = min(labels.bound for _, labels in answers)

        def value(label: Label) -> float:
            return label.pool_bytes if query.minimises_memory else label.values[0]

        plans = [(labels.plans[0], answered_query) for answered_query, labels in answers if labels.plans]
        if not plans:
            is_truncated = any(labels.dropped_bound < INFINITE for _, labels in answers)
            return self._small_plan(query, bound) if is_truncated and query.counts_memory else None
        label, best_query = min(plans, key=lambda pair: value(pair[0]))
        plan = self._certify(label, best_query)
        return replace(plan, value=value(label), bound=min(bound, value(label)))

    def _small_plan(self, query: SearchQuery, bound: float) -> EvaluatedPlan | None:
        """The plan of minimum memory, if all plans found when the time was up exceed the bound on it."""
        if query.minimises_memory:
            return None
        objective, *bounds = query.criteria
        plan = self._best_plan(replace(query, criteria=tuple(bounds), minimises_memory=True))
        if plan is None:
            return None
        value = self._value(objective, plan)
        return replace(plan, value=value, bound=min(bound, value))

    def _value(self, criterion: Criterion, plan: EvaluatedPlan) -> float:
        """A criterion of an evaluated plan."""
        latency_ns = plan.evaluation.latency_ns
        task_pj = plan.evaluation.energy_pj - self.energy.per_ns * latency_ns
        return criterion.value(latency_ns, task_pj, plan.candidates)

    def _certify(self, label: Label, query: SearchQuery) -> EvaluatedPlan:
        """Evaluate a plan, and check the search's figures: the evaluator shares no code with the search."""
        plan = self.evaluate_plan(label.candidates)
        for criterion, value in zip(query.criteria, label.values):
            if criterion.per_row_byte or criterion.per_filter_byte:
                continue
            evaluated_value = self._value(criterion, plan)
            tolerance = ROUNDING * plan.evaluation.energy_pj * criterion.per_pj
            if not math.isclose(evaluated_value, value, rel_tol=ROUNDING, abs_tol=tolerance):
                raise AssertionError(
                    f"the search says {value!r} of a plan that the evaluator gives {evaluated_value!r}"
                )
        has_overrides = any(map(self.memory.size_overrides_bytes, label.candidates))
        is_comparable = query.counts_memory and (query.only_gpu or plan.uses_pim) and not has_overrides
        if is_comparable and plan.memory_bytes != label.pool_bytes:
            raise AssertionError(f"the search says {label.pool_bytes} B of a plan of {plan.memory_bytes} B")
        return plan

    def evaluate_plan(self, candidates: tuple[Candidate, ...]) -> EvaluatedPlan:
        """The plan of `candidates`, evaluated."""
        return EvaluatedPlan(
            candidates=candidates,
            evaluation=evaluate(self.graph, candidates, self.table, self.system),
            memory_bytes=self.memory.pool_bytes(candidates),
        )

    def _exhaustive(self) -> EvaluatedPlan | None:
        covers = affordable_covers(self.graph, self.table, self.goal.search_seconds, self.progress)
        best = min(filter(self.allows, map(self.evaluate_plan, covers)), key=self.goal.rank, default=None)
        if best is None:
            return None
        value = best.memory_bytes if self.goal.objective == "memory" else self.goal.value(best.evaluation)
        return replace(best, value=value, bound=value)

    def allows(self, plan: EvaluatedPlan) -> bool:
        """Whether a plan keeps to all bounds, and fits PIM's channels."""
        return self.goal.allows(plan) and self._fits_channels(plan)

    def _fits_channels(self, plan: EvaluatedPlan) -> bool:
        rows = bank_rows(self.system, plan.candidates, plan.memory_bytes)
        return rows <= self.system.pim.usable_rows

    def _min_product(self) -> EvaluatedPlan | None:
        """The plan of minimum product of latency L and energy E.

        If E/L of all plans that may be best lies between two weights, a plan that is as good in both weighted
        sums has no greater product. These two sums are the criteria.
        """
        fastest, frugal = self.minimum(LATENCY), self.minimum(self.energy)
        if fastest is None or frugal is None:
            return None
        min_ns, min_pj = fastest.bound, frugal.bound
        memory_limit = self.goal.max_memory_bytes or math.inf
        best = min(fastest, frugal, key=self.goal.rank)
        middle = self.energy_latency_sum(self.goal.value(best.evaluation) / min_ns**2)
        quick_query = replace(self._query((middle,), memory_limit), max_labels=GOOD_PLAN_LABELS)
        if (good_plan := self._best_plan(quick_query)) and self._fits_channels(good_plan):
            best = min(best, good_plan, key=self.goal.rank)
        product = self.goal.value(best.evaluation)
        weights = (min_pj**2 / product, product / min_ns**2)
        criteria = tuple(
            replace(
                self.energy_latency_sum(per_ns),
                upper_bound=with_rounding(
                    max(per_ns * min_ns + product / min_ns, per_ns * product / min_pj + min_pj)
                ),
            )
            for per_ns in weights
        )

        def label_product(label: Label) -> float:
            """The product of a label's latency and energy."""
            energy_pj = label.values[0] - weights[0] * label.latency_ns
            return label.latency_ns * energy_pj

        bound = product
        for query, labels in self._front_answers(criteria, [best], memory_limit):
            label = min(labels.plans, key=label_product, default=None)
            if label is not None and label_product(label) < product:
                product = label_product(label)
                best = self._certify(label, query)
            if labels.dropped_bound < INFINITE:
                # Partial plans were dropped: of all plans with such a sum, the product is least at an end.
                sum_pj = labels.dropped_bound
                shortest_product = min_ns * (sum_pj - weights[0] * min_ns)
                longest_product = (sum_pj - min_pj) / weights[0] * min_pj
                bound = min(bound, max(min_ns * min_pj, min(shortest_product, longest_product)))
        return replace(best, value=product, bound=min(bound, product))

    def front(self, tolerance: float, max_memory_bytes: float = math.inf) -> list[EvaluatedPlan]:
        """Plans within the bounds, among them the Pareto front of latency and energy.

        For any plan there is one in the result that exceeds it by at most the share `tolerance` in both.
        """
        fastest = self.minimum(LATENCY, max_memory_bytes)
        frugal = self.minimum(self.energy, max_memory_bytes)
        if fastest is None or frugal is None:
            return []
        positions = len(self.graph.regions)
        ends = (
            (LATENCY, fastest.evaluation.latency_ns, frugal.evaluation.latency_ns),
            (self.energy, frugal.evaluation.energy_pj, fastest.evaluation.energy_pj),
        )
        criteria = tuple(
            replace(
                criterion, upper_bound=with_rounding(max_value), tolerance=tolerance * min_value / positions
            )
            for criterion, min_value, max_value in ends
        )
        memory_limit = min(self.goal.max_memory_bytes or math.inf, max_memory_bytes)
        answers = self._front_answers(criteria, [fastest, frugal], memory_limit)
        return [self._certify(label, query) for query, labels in answers for label in labels.plans]

    def energy_latency_sum(self, per_ns: float) -> Criterion:
        """The criterion of energy plus `per_ns` times the latency."""
        return replace(self.energy, per_ns=self.energy.per_ns + per_ns)


GOOD_PLAN_LABELS = 100  # at a position
