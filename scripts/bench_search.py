"""How long questions to the search take: ``bench_search.py [--networks NETWORK…] [--budgets] [--write]``.

Times are CPU seconds of one process on this machine, without a cache of profiles. Each question goes to a new
search, which has no earlier results. ``--budgets`` asks the least memory and memory budgets only. ``--write``
puts the table into docs/speed.md.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from update_readme import SPEED, fill

import pimflow
from pimflow.commands.compile.conventions import ConventionSearch, convention_systems
from pimflow.commands.shared import prepare
from pimflow.commands.shared.options import NetworkOptions
from pimflow.placement import CandidateGenerator, Costs, Goal, Profiling, SearchResult, profile, search
from pimflow.placement.solvers.front import TOLERANCE, front
from pimflow.placement.solvers.objectives import EvaluatedPlan
from pimflow.placement.solvers.plan_search import PlanSearch

Answer = TypeVar("Answer")
NETWORKS = ("mobilenet-v2", "resnet-50", "googlenet")
OBJECTIVES = ("latency", "energy", "edp")
SHARES = (0.25, 0.5, 0.75)  # budgets between the minimum memory and that of the fastest plan


@dataclass
class Clock:
    """CPU seconds by question, in order, and the largest gap of a plan."""

    rows: dict[str, str]
    gap: float = 0.0

    def measure(self, label: str, ask: Callable[[], Answer]) -> Answer:
        """Call `ask`, and store its seconds as a row; return its result."""
        begin_s = time.process_time()
        answer = ask()
        self.rows[label] = f"{time.process_time() - begin_s:.2f}"
        print(f"{label}: {self.rows[label]} s", file=sys.stderr, flush=True)
        if isinstance(answer, EvaluatedPlan):
            self.gap = max(self.gap, answer.gap)
        return answer


def fresh_search(search_result: SearchResult, goal: Goal) -> PlanSearch:
    """A search without earlier results, whose problem exists as arrays."""
    plans = PlanSearch(search_result.graph, search_result.table, search_result.system, goal)
    plans.problem.native  # noqa: B018
    return plans


def seconds(network: str, budgets_only: bool = False) -> dict[str, str]:
    """CPU seconds of each question for a network, or of those with memory."""
    system, clock = pimflow.system(), Clock(rows={})
    prepared = prepare.prepare(prepare.load(network, NetworkOptions()), NetworkOptions(), system)
    regions, costs, goal = prepared.regions, Costs(system, Profiling()), Goal()
    clock.rows["regions"] = str(len(regions.regions))
    generator = CandidateGenerator(regions, system, costs, goal.modes, goal.primitives)
    table = clock.measure("cost table", lambda: profile(regions, generator))
    clock.rows["candidates"] = str(sum(map(len, table.candidates.values())))
    search_result = search(regions, system, costs, goal)
    if budgets_only:
        ask_budgets(clock, search_result)
        clock.rows["largest gap"] = f"{100 * clock.gap:.2f} %"
        return clock.rows
    clock.measure("cost table as arrays", lambda: fresh_search(search_result, goal))
    for objective in OBJECTIVES:
        plans = fresh_search(search_result, Goal(objective=objective))
        clock.measure(f"least {objective}", plans.best)
    ask_conventions(clock, prepared, search_result)
    ask_budgets(clock, search_result)
    plans = fresh_search(search_result, goal)
    pairs = clock.measure("front of latency and energy", lambda: plans.front(TOLERANCE))
    clock.rows["… plans"] = str(len(pairs))
    plans = fresh_search(search_result, goal)
    points = clock.measure("… with memory, at 8 budgets more", lambda: front(plans, None))
    clock.rows["… plans with memory"] = str(len(points))
    clock.rows["largest gap"] = f"{100 * clock.gap:.2f} %"
    return clock.rows


def ask_conventions(clock: Clock, prepared: prepare.PreparedNetwork, search_result: SearchResult) -> None:
    """Time the minimum latency under each convention of a report: tables, then searches."""
    copies = prepare.with_other_copies(search_result.system)
    conventions = ConventionSearch(
        search_result=search_result,
        plan=None,
        copies_graph=prepared.regions_for(copies),
        copies_original=prepared.original_regions_for(copies),
    )
    names = list(convention_systems(search_result.system))
    label = f"{len(names)} other conventions"
    results = clock.measure(
        f"{label}, with their tables", lambda: [conventions.search_under(name) for name in names]
    )
    searches = [fresh_search(result, result.goal) for result in results]
    clock.measure(f"{label}, least latency", lambda: [plans.best() for plans in searches])


def ask_budgets(clock: Clock, search_result: SearchResult) -> None:
    """Time the minimum latency within budgets between the minimum memory and that of the fastest plan."""
    smallest = clock.measure("least memory", fresh_search(search_result, Goal(objective="memory")).best)
    fastest = fresh_search(search_result, Goal()).best()
    if smallest is None or fastest is None:
        raise AssertionError(f"no plan for '{search_result.graph.name}' without bounds")
    min_bytes, fastest_bytes = smallest.memory_bytes, fastest.memory_bytes
    for share in SHARES:
        plans = fresh_search(
            search_result, Goal(max_memory_bytes=min_bytes + share * (fastest_bytes - min_bytes))
        )
        clock.measure(f"least latency, memory {100 * share:.0f} % of the way", plans.best)


def table_text(networks: Sequence[str], columns: Sequence[dict[str, str]]) -> str:
    """A Markdown table: one row for each question, one column for each network."""
    lines = [f"| CPU seconds | {' | '.join(networks)} |", f"|{'---|' * (len(networks) + 1)}"]
    lines += [
        f"| {question} | {' | '.join(column[question] for column in columns)} |" for question in columns[0]
    ]
    return "\n".join(lines)


def main() -> None:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--networks", nargs="+", default=NETWORKS, help="default: %(default)s")
    parser.add_argument("--budgets", action="store_true", help="ask the least memory and budgets only")
    parser.add_argument("--write", action="store_true", help="write the table to docs/speed.md")
    args = parser.parse_args()
    if args.budgets and args.write:
        parser.error("--write takes all questions: leave out --budgets")
    text = table_text(args.networks, [seconds(network, args.budgets) for network in args.networks])
    print(text)
    if args.write:
        SPEED.write_text(fill(SPEED.read_text(encoding="utf-8"), "search", text), encoding="utf-8")


if __name__ == "__main__":
    main()
