"""The best mixed plan of a network for a goal."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

from pimflow.core.candidate import Candidate, CostTable
from pimflow.core.channel_sets import IN_ALL, IN_LEFT, lying
from pimflow.core.plan import MODES
from pimflow.core.region import RegionGraph
from pimflow.errors import InfeasibleError
from pimflow.hardware import System
from pimflow.host.result_cache import ResultCache
from pimflow.placement.solvers.bank_rows import plain_rows, row_bytes, rows_taken, uses_plain_memory
from pimflow.placement.solvers.evaluate import Evaluation, evaluate, static_pj_per_ns
from pimflow.placement.solvers.ilp import solve_whole
from pimflow.placement.solvers.objectives import (
    BOUNDS,
    EDP_GAP,
    ROUNDING,
    SOLVERS,
    EvaluatedPlan,
    Goal,
    enough,
)
from pimflow.placement.solvers.plan_memory import MemoryLimit, PlanMemory, sums_at_once
from pimflow.placement.solvers.program import NEAR, Bound
from pimflow.placement.solvers.segments import is_serial
from pimflow.placement.solvers.solutions import Solutions
from pimflow.placement.solvers.ways import LATENCY, Solution, Weights

LEAST_ERROR = Weights(per_ns=0.0, per_error=1.0)
MOST_APART = 250  # candidates of a network whose sets of channels are all searched: of 900, that takes 14 s


class Minimiser:
    """Finds the best mixed plan of a network.

    Parameters
    ----------
    graph, table, system
        What is searched.
    goal : Goal
    cache : ResultCache, optional
        Keeps solutions for other processes.
    """

    def __init__(
        self,
        graph: RegionGraph,
        table: CostTable,
        system: System,
        goal: Goal,
        cache: ResultCache | None = None,
    ):
        self.graph, self.table, self.system, self.goal = graph, table, system, goal
        self.solutions = Solutions(graph, table, cache)
        self.memory = PlanMemory(graph, system.dtype, table)
        self.static_pj_per_ns = static_pj_per_ns(system)
        self.energy = Weights(per_ns=self.static_pj_per_ns, per_pj=1.0)
        self._solved: dict[Weights, EvaluatedPlan | None] = {}

    def in_memory(self, at_most: float) -> Minimiser:
        """The same search within less memory."""
        most = min(at_most, self.goal.max_memory_bytes or math.inf)
        goal = replace(self.goal, max_memory_bytes=None if math.isinf(most) else most)
        within = Minimiser(self.graph, self.table, self.system, goal)
        within.solutions, within.memory, within._solved = self.solutions, self.memory, self._solved
        return within

    def unbounded(self, weights: Weights) -> EvaluatedPlan:
        """The best plan whatever the bounds."""
        plan = self._free(weights)
        assert plan  # the GPU alone needs no other candidates
        return plan

    def _free(self, weights: Weights) -> EvaluatedPlan | None:
        """The same; None if no candidates of the table go together."""
        if weights not in self._solved:
            solution = self._solution(weights)
            self._solved[weights] = solution and self._evaluated(solution)
        return self._solved[weights]

    def _solution(self, weights: Weights, limit: MemoryLimit | None = None) -> Solution | None:
        return self._by(self.goal.solver_for(self.graph, self.table), weights, limit)

    def _by(self, solver: str, weights: Weights, limit: MemoryLimit | None = None) -> Solution | None:
        table = self._table if limit else self.table
        solve = functools.partial(SOLVERS[solver], self.graph, table, weights, limit)
        return self.solutions.solved(solver, weights, solve, limit)

    @property
    def _table(self) -> CostTable:
        """Candidates of plans within the bounds."""
        return self.table if self.goal.max_memory_bytes is None else self._in_little_memory

    @functools.cached_property
    def _in_little_memory(self) -> CostTable:
        return sums_at_once(self.table)

    @property
    def latency_bound_ns(self) -> float:
        """A lower bound of the latency of all mixed plans."""
        if self.goal.solver_for(self.graph, self.table) == "dp" and not is_serial(self.graph):
            found = self._by("ilp", LATENCY)
            assert found  # as in `unbounded`
            return found.bound
        return self.unbounded(LATENCY).solution.bound

    def allows(self, plan: EvaluatedPlan) -> bool:
        """Whether a plan keeps to all bounds."""
        kept = self._fits(plan) and self._near(plan) and self._stored(plan)
        return kept and self.goal.allows(plan.evaluation)

    def _near(self, plan: EvaluatedPlan) -> bool:
        return self.goal.max_error is None or plan.error <= self.goal.max_error + ROUNDING

    def _fits(self, plan: EvaluatedPlan) -> bool:
        return plan.memory_bytes <= (self.goal.max_memory_bytes or math.inf)

    def _stored(self, plan: EvaluatedPlan) -> bool:
        return rows_taken(self.system, self.memory, plan.solution.candidates) <= self.system.pim.rows_to_use

    def within(self, weights: Weights) -> EvaluatedPlan | None:
        """The best plan within the bounds; None if there is none."""
        free = self.unbounded(weights)
        if self.allows(free):
            return free
        limit = self._limit
        plan = self._sharing(weights, limit) if limit else free
        if plan is None or self.allows(plan):
            return plan
        best = plan if limit and not self._fits(plan) else self._bounded(weights, free, limit)
        if best and limit and not self._fits(best):
            return self._in_several_sets(weights, free, best, limit)
        return best

    def _sharing(self, weights: Weights, limit: MemoryLimit) -> EvaluatedPlan | None:
        """The best plan within a limit, if tensors of all sets of channels shared one region."""
        free = self._free(weights)
        if free is None or self.memory.live_bytes(free.solution.candidates) <= limit.at_most:
            return free
        solution = self._solution(weights, limit)
        return solution and self._evaluated(solution)

    def _in_several_sets(
        self, weights: Weights, free: EvaluatedPlan, relaxed: EvaluatedPlan, limit: MemoryLimit
    ) -> EvaluatedPlan | None:
        """The best plan found within a limit of memory that sets of channels count for apart.

        `relaxed` is the best if all tensors shared one region, and breaks the limit. Plans are sought that
        have their larger tensors in one set: with smaller ones anywhere; if that is too much, with all there.
        Of few candidates, if no plan is as good as `relaxed`, the whole network is one program besides.
        """
        bound, found = relaxed.solution.bound, list[EvaluatedPlan]()
        spare_bytes = limit.at_most - self.memory.live_bytes(relaxed.solution.candidates)

        def near() -> bool:
            return any(plan.solution.value <= bound * (1 + NEAR) for plan in found)

        for channels in (IN_LEFT, IN_ALL):
            for anywhere_bytes in () if near() else dict.fromkeys((spare_bytes / 2, 0)):
                plan = self._mostly_in(channels, anywhere_bytes, weights, limit)
                if plan and self.allows(plan):
                    found.append(plan)
                    break
        if not near() and sum(map(len, self.table.candidates.values())) <= MOST_APART:
            several = self._bounded(weights, free, replace(limit, apart=True))
            found += [several] if several and self.allows(several) else []
        best = min(found, key=lambda plan: plan.solution.value, default=None)
        return best and replace(best, solution=replace(best.solution, bound=min(bound, best.solution.value)))

    def _mostly_in(
        self, channels: str, anywhere_bytes: float, weights: Weights, limit: MemoryLimit
    ) -> EvaluatedPlan | None:
        """The best plan whose results of more than `anywhere_bytes` lie in one set of channels.

        A region that has no candidate for that has all of its own. The plan may break the limit.
        """

        def allowed(candidate: Candidate) -> bool:
            stored = lying(candidate).items()
            elsewhere = (name for name, own in stored if own != channels and not candidate.passes_on(name))
            return all(self.memory.size_bytes(name) <= anywhere_bytes for name in elsewhere)

        left = {name: tuple(filter(allowed, each)) or each for name, each in self.table.candidates.items()}
        table = replace(self.table, candidates=left)
        part = Minimiser(self.graph, table, self.system, self.goal, self.solutions.cache)
        plan = part._sharing(weights, limit)
        kept = plan is None or self.allows(plan) or not self._fits(plan)
        return plan if kept else part._bounded(weights, plan, limit)

    def _bounded(
        self, weights: Weights, free: EvaluatedPlan, limit: MemoryLimit | None
    ) -> EvaluatedPlan | None:
        """The same where a bound binds that no part of the network can answer for by itself."""
        bounds = []
        if self.goal.max_latency_ns:
            bounds.append(Bound(at_most=self.goal.max_latency_ns, per_ns=1.0))
        if self.goal.max_energy_pj:
            per_ns = self.static_pj_per_ns
            bounds.append(Bound(at_most=self.goal.max_energy_pj, per_ns=per_ns, per_pj=1.0))
        # The program scales rows by their bounds, of which the next two may be 0: a region counts 1 more.
        count = len(self.graph.regions)
        if self.goal.max_error is not None:
            bounds.append(Bound(at_most=self.goal.max_error + count, of=lambda c: c.error + len(c.covers)))
        candidates = self.table.candidates.values()
        most = sum(max((c.placed_rows for c in each), default=0) for each in candidates)
        rows = self.system.pim.rows_to_use
        if most > rows:
            stored = [Bound(at_most=rows + count, of=lambda c: c.placed_rows + len(c.covers))]
        else:
            stored = []
        if self._stored(free) or not any(map(uses_plain_memory, free.solution.candidates)):
            plan = self._whole(self._table, weights, [*bounds, *stored], limit)
            if plan is None or self._stored(plan):
                return plan
        return self._beside_plain_memory(weights, bounds, stored, limit)

    def _whole(
        self, table: CostTable, weights: Weights, bounds: Sequence[Bound], limit: MemoryLimit | None
    ) -> EvaluatedPlan | None:
        solution = solve_whole(self.graph, table, weights, bounds, limit)
        return solution and self._evaluated(solution)

    def _beside_plain_memory(
        self, weights: Weights, bounds: Sequence[Bound], stored: Sequence[Bound], limit: MemoryLimit | None
    ) -> EvaluatedPlan | None:
        """The best plan whose weights on PIM fit beside what its channels hold as plain memory.

        Either they hold nothing but PIM's. Or all that the GPU reads may lie there, and the pool: how large
        that is depends on the plan, so each that is too large leaves less to the next.
        """
        plans: list[EvaluatedPlan | None] = []
        apart = {
            name: tuple(c for c in found if not uses_plain_memory(c))
            for name, found in self._table.candidates.items()
        }
        if all(apart.values()):
            table = replace(self.table, candidates=apart)
            plans.append(self._whole(table, weights, [*bounds, *stored], limit))
        count, pool_bytes = len(self.graph.regions), 0
        per_byte = 1 / (row_bytes(self.system) * self.system.pim_channels)
        plan: EvaluatedPlan | None = None
        while plan is None or not self._stored(plan):
            left = (
                self.system.pim.rows_to_use - plain_rows(self.system, pool_bytes) - 1
            )  # the sum's fraction is a row
            rows = Bound(
                at_most=left + count, of=lambda c: c.placed_rows + c.filter_bytes * per_byte + len(c.covers)
            )
            plan = self._whole(self._table, weights, [*bounds, rows], limit) if left >= 0 else None
            if plan is None:
                break
            pool_bytes = max(pool_bytes, plan.memory_bytes)
        found = [each for each in (*plans, plan) if each]
        return min(found, key=lambda each: each.solution.value, default=None)

    @property
    def _limit(self) -> MemoryLimit | None:
        most = self.goal.max_memory_bytes
        return None if most is None else MemoryLimit(memory=self.memory, at_most=most)

    def _evaluated(self, solution: Solution) -> EvaluatedPlan:
        return EvaluatedPlan(
            solution=solution,
            evaluation=evaluate(self.graph, solution.candidates, self.table, self.system),
            memory_bytes=self.memory.of(solution.candidates),
        )

    def best(self) -> EvaluatedPlan | None:
        """The best plan for the goal; None if there is none within the bounds."""
        if self.goal.objective == "latency":
            return self.within(LATENCY)
        if self.goal.objective == "energy":
            return self.within(self.energy)
        return self._smallest() if self.goal.objective == "memory" else self._least_product()

    def _smallest(self) -> EvaluatedPlan | None:
        """The fastest of the plans that take the least memory within the bounds."""
        sizes = [*self.memory.sizes(self._in_little_memory), self.goal.max_memory_bytes or math.inf]
        low, high, best = 0, len(sizes), None
        number = 0  # the least there is does, unless there are bounds
        while low < high:
            plan = self.in_memory(sizes[number]).within(LATENCY)
            if plan:
                best, high = plan, number
            else:
                low = number + 1
            number = (low + high) // 2
        smaller = best
        while smaller:  # what no candidate takes by itself may be between two sizes
            best, smaller = smaller, self.in_memory(smaller.memory_bytes - 1).within(LATENCY)
        return best

    def _least_product(self) -> EvaluatedPlan | None:
        """The least product of latency and energy.

        A product has its least value at a corner of the convex hull of all plans' latencies and energies,
        and each corner has the least weighted sum for some weights: from the fastest and the most frugal
        plan on, the corners between two known ones are looked for with the weights of the line through both.
        """
        fastest, frugal = self.within(LATENCY), self.within(self.energy)
        if fastest is None or frugal is None:
            return None
        best = min(fastest, frugal, key=self.goal.rank)
        # No plan lies beyond these lines, a * latency + b * energy = c.
        first = (1.0, 0.0, fastest.evaluation.latency_ns)
        last = (0.0, 1.0, frugal.evaluation.energy_pj)
        between = [(fastest, first, frugal, last)]
        while between:
            left, left_line, right, right_line = between.pop()
            enough = self.goal.value(best.evaluation) * (1 - EDP_GAP)
            corner = math.prod(_crossing(left_line, right_line)) < enough and self.corner(left, right)
            if corner:
                middle, line = corner
                best = min(best, middle, key=self.goal.rank)
                between += [(left, left_line, middle, line), (middle, line, right, right_line)]
        return best

    def corner(self, left: EvaluatedPlan, right: EvaluatedPlan) -> tuple[EvaluatedPlan, Line] | None:
        """The plan that lies farthest below the line through two, from the faster one on, and its own line.

        None if no plan lies below it.
        """
        a, b = left.evaluation, right.evaluation
        longer_ns, saved_pj = b.latency_ns - a.latency_ns, a.energy_pj - b.energy_pj
        if longer_ns <= ROUNDING * a.latency_ns or saved_pj <= ROUNDING * b.energy_pj:
            return None
        pj_per_ns = saved_pj / longer_ns
        middle = self.within(Weights(per_ns=pj_per_ns + self.static_pj_per_ns, per_pj=1.0))
        if middle is None:
            return None
        c = middle.evaluation
        least = c.energy_pj + pj_per_ns * c.latency_ns
        below = least < (a.energy_pj + pj_per_ns * a.latency_ns) * (1 - ROUNDING)
        return (middle, (pj_per_ns, 1.0, least)) if below else None

    def unreachable(self, gpu_only: Evaluation, alone: Minimiser | None = None) -> InfeasibleError:
        """The error if no plan keeps to the bounds: what the nearest plan needs, and what can be met.

        `alone` finds plans of the GPU alone, which has all channels, where these have errors of their own.
        """
        goal, graph = self.goal, self.graph
        free = replace(goal, **dict.fromkeys(BOUNDS))  # weights still have to fit into PIM's rows
        fastest_ns = min(self._under(free, LATENCY, gpu_only).latency_ns, gpu_only.latency_ns)
        least_pj = min(self._under(free, self.energy, gpu_only).energy_pj, gpu_only.energy_pj)
        more = ["more PIM channels (--pim-channels)"]
        if goal.modes != MODES:
            more.append("more modes (--modes)")
        if goal.max_memory_bytes:
            least = self.memory.least(self._in_little_memory)
            if least > goal.max_memory_bytes:
                levers = (f"--memory-budget {least}B", *more)
                return InfeasibleError(
                    f"memory of '{graph.name}'", least, goal.max_memory_bytes, "bytes", levers
                )
        if goal.max_latency_ns and goal.max_latency_ns < fastest_ns:
            levers = (f"--max-latency {enough(fastest_ns, 'us', 1e3)}", *more)
            return InfeasibleError(
                f"latency of '{graph.name}'", fastest_ns, goal.max_latency_ns, "ns", levers
            )
        if goal.max_energy_pj and goal.max_energy_pj < least_pj:
            levers = (f"--max-energy {enough(least_pj, 'uJ', 1e6)}", *more)
            return InfeasibleError(f"energy of '{graph.name}'", least_pj, goal.max_energy_pj, "pJ", levers)
        if goal.max_error is not None:
            others = replace(goal, max_error=None)
            tables = [self.table, *([alone.table] if alone else [])]
            found = [Minimiser(graph, each, self.system, others).within(LEAST_ERROR) for each in tables]
            if errors := [plan.error for plan in found if plan]:
                within = "" if others.unbounded else " within the other bounds"
                levers = (f"--max-error {enough(min(errors), '', 1.0)}", *(more if within else ()))
                return InfeasibleError(
                    f"error of '{graph.name}'{within}", min(errors), goal.max_error, "", levers
                )
        if goal.max_memory_bytes:
            return self._unreachable_in_memory(gpu_only, ["more memory (--memory-budget)", *more])
        frugal = self._under(replace(goal, max_energy_pj=None), self.energy, gpu_only)
        quick = self._under(replace(goal, max_latency_ns=None), LATENCY, gpu_only)
        within_pj = min(e.energy_pj for e in (frugal, gpu_only) if self._fast_enough(e))
        within_ns = min(e.latency_ns for e in (quick, gpu_only) if self._frugal_enough(e))
        return InfeasibleError(
            f"energy of '{graph.name}' within {goal.max_latency_ns:g} ns",
            within_pj,
            goal.max_energy_pj or math.inf,
            "pJ",
            (
                f"--max-energy {enough(within_pj, 'uJ', 1e6)}",
                f"--max-latency {enough(within_ns, 'us', 1e3)}",
                *more,
            ),
        )

    def _unreachable_in_memory(self, gpu_only: Evaluation, more: list[str]) -> InfeasibleError:
        """The error if each bound can be met alone, but not the one on memory together with another."""
        goal, where = self.goal, f"of '{self.graph.name}' within {self.goal.max_memory_bytes:.0f} bytes"
        within = replace(goal, max_latency_ns=None, max_energy_pj=None)
        if goal.max_latency_ns:
            quick_ns = self._under(within, LATENCY, gpu_only).latency_ns
            levers = (f"--max-latency {enough(quick_ns, 'us', 1e3)}", *more)
            return InfeasibleError(f"latency {where}", quick_ns, goal.max_latency_ns, "ns", levers)
        least_pj = self._under(within, self.energy, gpu_only).energy_pj
        levers = (f"--max-energy {enough(least_pj, 'uJ', 1e6)}", *more)
        return InfeasibleError(f"energy {where}", least_pj, goal.max_energy_pj or 0.0, "pJ", levers)

    def _under(self, goal: Goal, weights: Weights, gpu_only: Evaluation) -> Evaluation:
        """The evaluation of the best mixed plan for another goal, or `gpu_only` if none reaches that."""
        plan = Minimiser(self.graph, self.table, self.system, goal).within(weights)
        return plan.evaluation if plan else gpu_only

    def _fast_enough(self, evaluation: Evaluation) -> bool:
        return replace(self.goal, max_energy_pj=None).allows(evaluation)

    def _frugal_enough(self, evaluation: Evaluation) -> bool:
        return replace(self.goal, max_latency_ns=None).allows(evaluation)


Line = tuple[float, float, float]


def _crossing(one: Line, other: Line) -> tuple[float, float]:
    """Where two lines a * x + b * y = c meet."""
    (a, b, c), (d, e, f) = one, other
    determinant = a * e - b * d
    if not determinant:  # of one slope, they leave nothing between them
        return math.inf, math.inf
    return (c * e - b * f) / determinant, (a * f - c * d) / determinant
