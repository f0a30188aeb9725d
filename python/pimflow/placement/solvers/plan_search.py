"""The best plans of a network for a goal: queries to the label search, and evaluation of the answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pimflow.core.candidate import Candidate, CostTable
from pimflow.core.region import RegionGraph
from pimflow.hardware import System
from pimflow.placement.solvers.capacity import channel_bytes, row_bytes, rows_taken
from pimflow.placement.solvers.evaluate import evaluate, static_pj_per_ns
from pimflow.placement.solvers.exhaustive import Rank, solve_exhaustive
from pimflow.placement.solvers.label_search import INFINITE, Label, Labels, Question, search
from pimflow.placement.solvers.objectives import EXHAUSTIVE, ROUNDING, EvaluatedPlan, Goal
from pimflow.placement.solvers.plan_memory import PlanMemory
from pimflow.placement.solvers.problem import PlacementProblem
from pimflow.placement.solvers.solution import ERROR, LATENCY, Criterion, Solution


@dataclass(frozen=True, kw_only=True)
class FrontLabel:
    """A plan of a front, with the figures of the label search."""

    latency_ns: float
    energy_pj: float
    memory_bytes: int
    label: Label = field(repr=False)
    question: Question = field(repr=False)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return self.label.candidates


class PlanSearch:
    """Searches the plans of a network.

    Parameters
    ----------
    graph, table, system
        The network, its candidates and the system.
    goal : Goal
    """

    def __init__(self, graph: RegionGraph, table: CostTable, system: System, goal: Goal):
        self.graph, self.table, self.system, self.goal = graph, table, system, goal
        self.memory = PlanMemory(graph, system.dtype, table)
        self.problem = PlacementProblem(graph, table, self.memory, row_bytes(system) * system.pim_channels)
        self.energy = Criterion(per_ns=static_pj_per_ns(system), per_pj=1.0)
        self._only_gpu = all(c.rewrite.mode == "GPU" for each in table.candidates.values() for c in each)
        self._labels: dict[object, Labels] = {}

    def with_goal(self, goal: Goal) -> PlanSearch:
        """The search of the same plans for another goal."""
        other = object.__new__(PlanSearch)
        other.__dict__.update(self.__dict__, goal=goal)
        return other

    def best(self) -> EvaluatedPlan | None:
        """The best plan for the goal; None if no plan keeps to the bounds."""
        if self.goal.solver == EXHAUSTIVE:
            return self._exhaustive()
        if self.goal.objective == "memory":
            return self.smallest()
        if self.goal.objective == "edp":
            return self._least_product()
        return self.minimum(LATENCY if self.goal.objective == "latency" else self.energy)

    def minimum(self, criterion: Criterion, max_memory_bytes: float = math.inf) -> EvaluatedPlan | None:
        """The plan of minimum `criterion` within the bounds; None if there is none."""
        most = min(self.goal.max_memory_bytes or math.inf, max_memory_bytes)
        question = self._question([criterion], max_memory_bytes=most)
        plan = self._answer(question)
        if plan and not self._is_stored(plan):
            plan = self._answer(self._in_capacity(question))
        return plan

    def smallest(self) -> EvaluatedPlan | None:
        """The fastest of the plans of minimum memory within the bounds."""
        question = replace(self._question([]), counts_memory=True, minimises_memory=True)
        plan = self._answer(question)
        if plan and not self._is_stored(plan):
            plan = self._answer(self._in_capacity(question))
        return plan and self.minimum(LATENCY, plan.memory_bytes)

    @property
    def latency_bound_ns(self) -> float:
        """A lower bound of the latency of all plans, whether or not they keep to the bounds."""
        return self._ask(self._unbounded([LATENCY])).bound

    def unbounded(self, criterion: Criterion) -> EvaluatedPlan:
        """The best plan without bounds."""
        plan = self._answer(self._unbounded([criterion]))
        assert plan  # the GPU alone needs no other candidates
        return plan

    def _unbounded(self, criteria: Sequence[Criterion]) -> Question:
        return Question(criteria=criteria, only_gpu=self._only_gpu, seconds=self.goal.search_seconds)

    def _question(self, criteria: Sequence[Criterion], max_memory_bytes: float = math.inf) -> Question:
        """The query for `criteria` within the bounds of the goal."""
        goal, bounds = self.goal, list[Criterion]()
        if goal.max_latency_ns:
            bounds.append(replace(LATENCY, at_most=goal.max_latency_ns * (1 + ROUNDING)))
        if goal.max_energy_pj:
            bounds.append(replace(self.energy, at_most=goal.max_energy_pj * (1 + ROUNDING)))
        if goal.max_error is not None:
            bounds.append(replace(ERROR, at_most=goal.max_error + ROUNDING))
        question = self._unbounded([*criteria, *bounds])
        if math.isinf(max_memory_bytes):
            return question
        return replace(question, counts_memory=True, max_memory_bytes=max_memory_bytes)

    def _in_capacity(self, question: Question) -> Question:
        """`question`, restricted to plans that fit PIM's channels, plain memory included."""
        capacity = channel_bytes(self.system)
        rows = Criterion(per_row_byte=1.0, at_most=capacity)
        held = Criterion(per_row_byte=1.0, per_filter_byte=1.0)
        criteria = [*question.criteria, rows, held]
        return replace(question, criteria=criteria, counts_memory=True, capacity_bytes=capacity)

    def _ask(self, question: Question) -> Labels:
        key = (tuple(question.criteria), *(getattr(question, name) for name in _QUESTION_FIELDS))
        if key not in self._labels:
            self._labels[key] = search(self.problem, question)
        return self._labels[key]

    def _by_pools(self, question: Question) -> list[Question]:
        """`question` and, if memory counts, that for plans without PIM, which have a single pool."""
        if not question.counts_memory or self._only_gpu:
            return [question]
        return [question, replace(question, only_gpu=True)]

    def _answer(self, question: Question) -> EvaluatedPlan | None:
        answers = [(asked, self._ask(asked)) for asked in self._by_pools(question)]
        bound = min(labels.bound for _, labels in answers)

        def value(label: Label) -> float:
            return label.pool_bytes if question.minimises_memory else label.values[0]

        plans = [(labels.plans[0], each) for each, labels in answers if labels.plans]
        if not plans:
            is_cut = any(labels.dropped_bound < INFINITE for _, labels in answers)
            return self._small_plan(question, bound) if is_cut and question.counts_memory else None
        label, answered = min(plans, key=lambda pair: value(pair[0]))
        solution = Solution(candidates=label.candidates, value=value(label), bound=min(bound, value(label)))
        return self._certified(solution, label, answered)

    def _small_plan(self, question: Question, bound: float) -> EvaluatedPlan | None:
        """The plan of minimum memory, if all plans found when the time was up exceed the bound on it."""
        if question.minimises_memory:
            return None
        objective, *bounds = question.criteria
        plan = self._answer(replace(question, criteria=bounds, minimises_memory=True))
        if plan is None:
            return None
        latency_ns, static_pj = plan.evaluation.latency_ns, self.energy.per_ns * plan.evaluation.latency_ns
        candidates = plan.solution.candidates
        value = objective.value(latency_ns, plan.evaluation.energy_pj - static_pj, candidates)
        return replace(plan, solution=Solution(candidates=candidates, value=value, bound=min(bound, value)))

    def _certified(self, solution: Solution, label: Label, question: Question) -> EvaluatedPlan:
        """Evaluate a plan, and check the search's figures: the evaluator shares no code with the search."""
        plan = self.evaluated(solution)
        evaluation = plan.evaluation
        static_pj = self.energy.per_ns * evaluation.latency_ns
        for criterion, value in zip(question.criteria, label.values):
            if criterion.per_row_byte or criterion.per_filter_byte:
                continue
            said = criterion.value(evaluation.latency_ns, evaluation.energy_pj - static_pj, label.candidates)
            spare = SAME * evaluation.energy_pj * criterion.per_pj
            if not math.isclose(said, value, rel_tol=SAME, abs_tol=spare):
                raise AssertionError(f"the search says {value!r} of a plan that the evaluator gives {said!r}")
        changed = any(map(self.memory.changed_bytes, label.candidates))
        mixed = question.only_gpu or any(c.rewrite.mode != "GPU" for c in label.candidates)
        if question.counts_memory and mixed and not changed and plan.memory_bytes != label.pool_bytes:
            raise AssertionError(f"the search says {label.pool_bytes} B of a plan of {plan.memory_bytes} B")
        return plan

    def evaluated(self, solution: Solution) -> EvaluatedPlan:
        """Evaluate `solution`."""
        return EvaluatedPlan(
            solution=solution,
            evaluation=evaluate(self.graph, solution.candidates, self.table, self.system),
            memory_bytes=self.memory.of(solution.candidates),
        )

    def _exhaustive(self) -> EvaluatedPlan | None:
        def rank(candidates: tuple[Candidate, ...], latency_ns: float, task_pj: float) -> Rank | None:
            """The sort key of a plan; None if it exceeds a bound."""
            plan = self.evaluated(Solution(candidates=candidates, value=0.0, bound=0.0))
            return self.goal.rank(plan) if self.allows(plan) else None

        candidates = solve_exhaustive(self.graph, self.table, rank)
        if candidates is None:
            return None
        plan = self.evaluated(Solution(candidates=candidates, value=0.0, bound=0.0))
        value = plan.memory_bytes if self.goal.objective == "memory" else self.goal.value(plan.evaluation)
        return replace(plan, solution=Solution(candidates=candidates, value=value, bound=value))

    def allows(self, plan: EvaluatedPlan) -> bool:
        """Whether a plan keeps to all bounds."""
        goal = self.goal
        small = plan.memory_bytes <= (goal.max_memory_bytes or math.inf)
        near = goal.max_error is None or plan.error <= goal.max_error + ROUNDING
        return small and near and self._is_stored(plan) and goal.allows(plan.evaluation)

    def _is_stored(self, plan: EvaluatedPlan) -> bool:
        rows = rows_taken(self.system, self.memory, plan.solution.candidates)
        return rows <= self.system.pim.rows_to_use

    def _least_product(self) -> EvaluatedPlan | None:
        """The plan of minimum product of latency L and energy E.

        If E/L of all plans that may be best lies between two weights, a plan that is as good in both weighted
        sums has no greater product. These two sums are the criteria.
        """
        fastest, frugal = self.minimum(LATENCY), self.minimum(self.energy)
        if fastest is None or frugal is None:
            return None
        least_ns, least_pj = fastest.solution.bound, frugal.solution.bound
        plans = [fastest, frugal]
        between = self.minimum(self.weighted(min(map(self.goal.rank, plans))[1] / least_ns**2))
        plans += [between] if between else []
        best = min(plans, key=self.goal.rank)
        product = self.goal.value(best.evaluation)
        weights = (least_pj**2 / product, product / least_ns**2)
        criteria = [
            replace(
                self.weighted(per_ns),
                at_most=max(per_ns * least_ns + product / least_ns, per_ns * product / least_pj + least_pj)
                * (1 + ROUNDING),
            )
            for per_ns in weights
        ]
        question = self._question(criteria, max_memory_bytes=self.goal.max_memory_bytes or math.inf)
        question = replace(question, front=True)
        if not self._is_stored(best):
            question = self._in_capacity(question)

        def product_of(label: Label) -> float:
            """The product of a label's latency and energy."""
            energy_pj = label.values[0] - weights[0] * label.latency_ns
            return label.latency_ns * energy_pj

        bound = product
        for asked in self._by_pools(question):
            labels = self._ask(asked)
            label = min(labels.plans, key=product_of, default=None)
            if label is not None and product_of(label) < product:
                product = product_of(label)
                best = self._certified(replace(best.solution, candidates=label.candidates), label, asked)
            if labels.dropped_bound < INFINITE:
                # Partial plans were dropped: of all plans with such a sum, the product is least at an end.
                sum_pj = labels.dropped_bound
                shortest = least_ns * (sum_pj - weights[0] * least_ns)
                longest = (sum_pj - least_pj) / weights[0] * least_pj
                bound = min(bound, max(least_ns * least_pj, min(shortest, longest)))
        solution = Solution(candidates=best.solution.candidates, value=product, bound=min(bound, product))
        return replace(best, solution=solution)

    def front(self, tolerance: float, max_memory_bytes: float = math.inf) -> list[FrontLabel]:
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
        criteria = [
            replace(criterion, at_most=most * (1 + ROUNDING), tolerance=tolerance * least / positions)
            for criterion, least, most in ends
        ]
        most_bytes = min(self.goal.max_memory_bytes or math.inf, max_memory_bytes)
        question = replace(self._question(criteria, most_bytes), front=True)
        if not (self._is_stored(fastest) and self._is_stored(frugal)):
            question = self._in_capacity(question)
        return [
            FrontLabel(
                latency_ns=label.latency_ns,
                energy_pj=label.values[1],
                memory_bytes=self.memory.of(label.candidates),
                label=label,
                question=asked,
            )
            for asked in self._by_pools(question)
            for label in self._ask(asked).plans
        ]

    def front_plan(self, plan: FrontLabel) -> EvaluatedPlan:
        """Evaluate a plan of a front."""
        solution = Solution(candidates=plan.label.candidates, value=plan.latency_ns, bound=plan.latency_ns)
        return self._certified(solution, plan.label, plan.question)

    def weighted(self, per_ns: float) -> Criterion:
        """The criterion of energy plus `per_ns` times the latency."""
        return replace(self.energy, per_ns=self.energy.per_ns + per_ns)


SAME = 1e-9
_QUESTION_FIELDS = (
    "counts_memory",
    "minimises_memory",
    "only_gpu",
    "front",
    "max_memory_bytes",
    "capacity_bytes",
    "seconds",
)
