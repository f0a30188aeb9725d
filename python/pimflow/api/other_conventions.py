"""What a network gains under other conventions: each takes a search; results are kept with the profiles."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from pimflow.api.report import AccountingTerm, Convention, OtherConventions
from pimflow.core.plan import Plan
from pimflow.core.region import RegionGraph
from pimflow.core.typed_values import read_fields
from pimflow.hardware import System
from pimflow.hardware.systems import LAUNCHES
from pimflow.host import executors
from pimflow.host.executors import Executor
from pimflow.host.result_cache import COMPUTED_BY, code_digest, sources_digest
from pimflow.placement import Costs, Goal, Searched, apply, recharged, search
from pimflow.placement.candidates.cached import writes_caches
from pimflow.primitives.launches import computes
from pimflow.simulators.pim.timing import timings

# Modules whose code decides speed-ups, besides that which prices programs and kernels and searches.
SEARCHED_BY = (*COMPUTED_BY, "fusion", "primitives", "api.other_conventions")
BETWEEN_NS = (500.0, 1000.0)  # launches of PIM that are tried between nothing and the GPU's
WITHOUT_LAUNCH = "no launches"
# About how long their searches take, beside 1 of the others: PIM is timed anew, and more states are searched.
WORK = {"accounting": 3, "launches": 4}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A network that was searched, and how it lies where copies are made elsewhere.

    Attributes
    ----------
    searched : Searched
    plan : Plan, optional
        Applied under every convention; without one, each is searched anew.
    other_graph, other_copies, other_given
        What a search places with other copies, on which system, and the network as the user gave it there,
        if it was changed.
    """

    searched: Searched
    plan: Plan | None
    other_graph: RegionGraph
    other_copies: System
    other_given: RegionGraph | None = None

    def key(self) -> tuple[object, ...]:
        """What results are kept under."""
        searched, plan = self.searched, self.plan
        goal, graphs = searched.goal, (searched.graph, searched.given, self.other_graph, self.other_given)
        return (
            "conventions",
            tuple(None if graph is None else (graph.digest, graph.runs, graph.fusible) for graph in graphs),
            (searched.system.identity, self.other_copies.identity, searched.maker.costs.profilers),
            (goal.objective, goal.modes, goal.primitives),
            None if plan is None else plan.to_json(),
            searched.plan.to_json(),  # whose times end the list of terms: bounds are in it
        )

    def systems(self) -> dict[str, System]:
        """By convention, the system that has it."""
        base = self.searched.system
        gpu_ns = base.gpu.launch_ns
        other = "paper" if base.accounting == "full" else "full"
        timing = "ramulator-pimflow" if other == "paper" else "strict"
        timing = timing if timing in timings(base.pim) else "strict"
        between = [ns for ns in BETWEEN_NS if ns != base.pim_launch_ns]
        launches = next(each for each in LAUNCHES if each != base.launches)
        return {
            "PIM launch 0": base.with_launches(gpu_ns=gpu_ns, pim_ns=0.0),
            **{f"PIM launch {ns:g} ns": base.with_launches(gpu_ns=gpu_ns, pim_ns=ns) for ns in between},
            "PIM launch as the GPU's": base.with_launches(gpu_ns=gpu_ns, pim_ns=gpu_ns),
            f"accounting {other}, timing {timing}": replace(base, accounting=other, timing=timing),
            f"copies {self.other_copies.copies}": self.other_copies,
            f"launches {launches}": replace(base, launches=launches),
            WITHOUT_LAUNCH: base.with_launches(gpu_ns=0.0, pim_ns=0.0),
        }

    def shares(self, count: int) -> list[Share]:
        """All conventions, in at most `count` shares that take about as long."""
        work = {what: WORK.get(what.split()[0], 1) for what in self.systems()}
        shares: list[list[str]] = [[] for _ in range(min(count, len(work)))]
        for what in sorted(work, key=lambda each: -work[each]):
            min(shares, key=lambda share: sum(work[each] for each in share)).append(what)
        return [Share(asked=self, whats=tuple(share)) for share in shares]

    def under(self, what: str) -> Searched:
        """Searched, or with the plan applied, under a convention, without bounds.

        Speed-ups are against the network as the user gave it.
        """
        searched, other = self.searched, self.systems()[what]
        own, costs, graph, given = searched.goal, searched.maker.costs, searched.graph, searched.given
        if other is self.other_copies:
            graph, given = self.other_graph, self.other_given
        if other.accounting != searched.system.accounting:
            costs = Costs(other, replace(costs.profiling, pim=None))
        elif other.gpu != searched.system.gpu:
            costs = costs.on_system(other)  # kernels of two launches have the second in their time
        if self.plan is None:
            goal = Goal(
                objective=own.objective,
                search_seconds=own.search_seconds,
                modes=own.modes,
                primitives=own.primitives,
            )
            return search(graph, other, costs, goal, given)
        plan = self.plan.carried_to(graph, computes, other.views, writes_caches(other))
        if other.charges("channel-modes") != searched.system.charges("channel-modes"):
            plan = plan.in_channels_left()  # where tensors may lie differs
        return apply(graph, other, plan, costs, given=given, primitives=own.primitives)


@dataclass(frozen=True, kw_only=True)
class Share:
    """Conventions that one process searches, one after the other."""

    asked: Asked
    whats: tuple[str, ...]

    def found(self) -> tuple[dict[str, float], tuple[AccountingTerm, ...]]:
        """Their speed-ups, and the terms between both accountings, if one of them is the other one."""
        searched = self.asked.searched
        speedups: dict[str, float] = {}
        terms: tuple[AccountingTerm, ...] = ()
        for what in self.whats:
            found = self.asked.under(what)
            speedups[what] = found.speedup
            if found.system.accounting != searched.system.accounting:
                full = searched.system.accounting == "full"
                terms = accounting_terms(*((found, searched) if full else (searched, found)))
        return speedups, terms


@contextlib.contextmanager
def other_conventions(
    asked: Asked, executor: Executor, progress: Callable[[str], None]
) -> Iterator[Callable[[], OtherConventions]]:
    """Gives what the network gains under other conventions, which processes of `executor` find meanwhile.

    Without such processes it is found before the block begins. With them, `progress` is told that the rest is
    waited for. What the cache of the profiles has of the same networks and systems is not searched.
    """
    cache, code, key = asked.searched.maker.costs.profiling.cache, "", asked.key()
    if cache is not None:
        code = f"{code_digest()} {sources_digest(SEARCHED_BY)}"
        read = functools.partial(read_fields, OtherConventions, signed=True)
        known = cache.get([key], code, read=read).get(key)
        if known is not None:
            yield lambda: known
            return
    shares = asked.shares(executors.beside(executor) or 1)
    with executors.begun(executor, Share.found, shares) as results:

        def found() -> OtherConventions:
            if executors.beside(executor):
                progress("searching under other conventions")
            others = _joined(asked, [result for _, result in results])
            if cache is not None:
                cache.put({key: dataclasses.asdict(others)}, code)
            return others

        yield found


def _joined(
    asked: Asked, results: Sequence[tuple[dict[str, float], tuple[AccountingTerm, ...]]]
) -> OtherConventions:
    found = {what: speedup for speedups, _ in results for what, speedup in speedups.items()}
    without_launch = found[WITHOUT_LAUNCH]
    told = [what for what in asked.systems() if what != WITHOUT_LAUNCH]
    return OtherConventions(
        without_launch=without_launch,
        conventions=tuple(Convention(what=what, speedup=found[what]) for what in told),
        terms=next((terms for _, terms in results if terms), ()),
    )


def accounting_terms(lesser: Searched, full: Searched) -> tuple[AccountingTerm, ...]:
    """From what the plan of `lesser` takes as it accounts to what that of `full` takes, a term at a time.

    The plan of `lesser` is charged one thing after another; last comes what the search gains once it knows
    all of them.
    """
    system, costs = lesser.system, lesser.maker.costs
    terms = [AccountingTerm(term=f"accounting {system.accounting}", latency_ns=lesser.evaluation.latency_ns)]

    def add(term: str) -> None:
        found = recharged(lesser, system, costs)
        terms.append(AccountingTerm(term=term, latency_ns=found.latency_ns))

    if system.timing != full.system.timing:
        system, costs = replace(system, timing=full.system.timing), full.maker.costs
        add(f"timing {system.timing}")
    for charge in system.chargeable:
        if not system.charges(charge):
            system = replace(system, accounting=f"{system.accounting}+{charge}")
            add(charge)
    if len(terms) > 1:
        terms.append(AccountingTerm(term="searched again", latency_ns=full.evaluation.latency_ns))
    return tuple(terms)
