"""What a network gains under other conventions than its plan's: a search each, kept with the profiles."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from pimflow.api.prepare import with_other_copies
from pimflow.api.report import AccountingTerm, Convention, Report
from pimflow.core.plan import Plan
from pimflow.core.region import RegionGraph
from pimflow.core.typed_values import read_fields
from pimflow.errors import UsageError
from pimflow.hardware import System
from pimflow.hardware.systems import LAUNCHES
from pimflow.host.result_cache import COMPUTED_BY, code_digest, sources_digest
from pimflow.placement import Goal, Searched, apply, recharged, search
from pimflow.placement.candidates.cached import writes_caches
from pimflow.primitives.launches import computes
from pimflow.simulators.pim.timing import timings

# Modules whose code decides speed-ups, besides that which prices programs and kernels and searches.
SEARCHED_BY = (*COMPUTED_BY, "fusion", "primitives", "api.conventions")
LAUNCHES_NS = (500.0, 1000.0)  # of PIM, that are tried between nothing and the GPU's
MAX_SEARCH_SECONDS = 5.0  # of a question: up to eight conventions ask one or two, and build no plans
ALL, NONE = "all", "none"


class ConventionSystem(NamedTuple):
    """A convention as a report tells it, and the system that has it."""

    text: str
    system: System


def convention_systems(base: System) -> dict[str, ConventionSystem]:
    """By their names, as `--conventions` takes them, all conventions but those that `base` has itself."""
    gpu_ns, accounting = base.gpu.launch_ns, "paper" if base.accounting == "full" else "full"
    published = accounting == "paper" and "ramulator-pimflow" in timings(base.pim)
    timing = "ramulator-pimflow" if published else "strict"
    copies = with_other_copies(base)
    launches = next(name for name in LAUNCHES if name != base.launches)

    def with_pim_launch(pim_ns: float) -> System:
        return base.with_launches(gpu_ns=gpu_ns, pim_ns=pim_ns)

    systems = {
        "pim-launch=0": ConventionSystem("PIM launch 0", with_pim_launch(0.0)),
        **{
            f"pim-launch={ns:g}ns": ConventionSystem(f"PIM launch {ns:g} ns", with_pim_launch(ns))
            for ns in LAUNCHES_NS
        },
        "pim-launch=gpu": ConventionSystem("PIM launch as the GPU's", with_pim_launch(gpu_ns)),
        f"accounting={accounting}": ConventionSystem(
            f"accounting {accounting}, timing {timing}", replace(base, accounting=accounting, timing=timing)
        ),
        f"copies={copies.copies}": ConventionSystem(f"copies {copies.copies}", copies),
        f"launches={launches}": ConventionSystem(f"launches {launches}", replace(base, launches=launches)),
        "no-launches": ConventionSystem("launches set to zero", base.with_launches(gpu_ns=0.0, pim_ns=0.0)),
    }
    return {
        name: convention
        for name, convention in systems.items()
        if convention.system.identity != base.identity
    }


def convention_names(conventions: str | Sequence[str], base: System) -> tuple[str, ...]:
    """The conventions that ``none``, ``all`` or names, also in one text with commas, say.

    Raises
    ------
    UsageError
        For another name; it lists all.
    """
    known = convention_systems(base)
    if conventions in (ALL, NONE):
        return tuple(known) if conventions == ALL else ()
    names = conventions.split(",") if isinstance(conventions, str) else conventions
    for name in names:
        if name not in known:
            raise UsageError(f"unknown convention '{name}'; known: {', '.join([NONE, ALL, *known])}")
    return tuple(name for name in known if name in names)


@dataclass(frozen=True, kw_only=True)
class ConventionGain:
    """What a network gains under a convention.

    Attributes
    ----------
    speedup : float
    gap : float
        See `report.Convention`.
    terms : tuple of AccountingTerm
        Between both accountings, if the convention is the other one.
    """

    speedup: float
    gap: float
    terms: tuple[AccountingTerm, ...]


@dataclass(frozen=True, kw_only=True)
class ConventionSearch:
    """Searches a network under other conventions, once it has a plan.

    Attributes
    ----------
    searched : Searched
    plan : Plan, optional
        Applied under every convention; without one, each is a search.
    copies_graph : RegionGraph
        What is placed where parts of tensors are copied, or not, unlike in `searched`.
    copies_given : RegionGraph, optional
        The network as the user gave it there, if it was changed.
    """

    searched: Searched
    plan: Plan | None
    copies_graph: RegionGraph
    copies_given: RegionGraph | None

    def gain(self, name: str) -> ConventionGain:
        """Under a convention; what the cache of the profiles has of the same question is not searched.

        A gap depends on the machine: only what is proved is kept.
        """
        cache = self.searched.maker.costs.profiling.cache
        if cache is None:
            return self._gain(name)
        key, code = self._key(name), f"{code_digest()} {sources_digest(SEARCHED_BY)}"
        read = functools.partial(read_fields, ConventionGain, signed=True)
        gain: ConventionGain | None = cache.get([key], code, read=read).get(key)
        if gain is None:
            gain = self._gain(name)
            if gain.gap == 0:
                cache.put({key: asdict(gain)}, code)
        return gain

    def under(self, name: str) -> Searched:
        """Searched, or with the plan applied, under a convention, without bounds.

        Speed-ups are against the network as the user gave it.
        """
        searched, system = self.searched, self._system(name)
        goal, costs, (graph, given) = searched.goal, searched.maker.costs, self._graphs(system)
        if system.accounting != searched.system.accounting:
            costs = costs.on_system(system, replace(costs.profiling, pim=None))
        elif system.gpu != searched.system.gpu:
            costs = costs.on_system(system)  # kernels of two launches have the second in their time
        if self.plan is None:
            goal = Goal(
                objective=goal.objective,
                search_seconds=min(goal.search_seconds, MAX_SEARCH_SECONDS),
                modes=goal.modes,
                primitives=goal.primitives,
            )
            return search(graph, system, costs, goal, given)
        plan = self.plan.carried_to(graph, computes, system.views, writes_caches(system))
        if system.charges("channel-modes") != searched.system.charges("channel-modes"):
            plan = plan.in_channels_left()  # where tensors may lie differs
        return apply(graph, system, plan, costs, given=given, primitives=goal.primitives)

    def _gain(self, name: str) -> ConventionGain:
        base, searched = self.searched, self.under(name)
        terms: tuple[AccountingTerm, ...] = ()
        if searched.system.accounting != base.system.accounting:
            full = base.system.accounting == "full"
            terms = accounting_terms(*((searched, base) if full else (base, searched)))
        return ConventionGain(speedup=searched.speedup, gap=searched.gap, terms=terms)

    def _key(self, name: str) -> tuple[object, ...]:
        """What a gain is kept under."""
        searched, system, plan = self.searched, self._system(name), self.plan
        goal, key = searched.goal, tuple[object, ...]()
        if system.accounting != searched.system.accounting:
            # The list of terms ends, or begins, with the plan's times: bounds are in it.
            key = (searched.system.identity, searched.plan.to_json())
        return (
            "convention",
            tuple(graph and (graph.digest, graph.runs, graph.fusible) for graph in self._graphs(system)),
            (system.identity, searched.maker.costs.profilers),
            (goal.objective, goal.modes, goal.primitives),
            plan and plan.to_json(),
            *key,
        )

    def _system(self, name: str) -> System:
        return convention_systems(self.searched.system)[name].system

    def _graphs(self, system: System) -> tuple[RegionGraph, RegionGraph | None]:
        """What is placed on `system`, and the network as the user gave it, if it was changed."""
        if system.views != self.searched.system.views:
            return self.copies_graph, self.copies_given
        return self.searched.graph, self.searched.given


def with_gains(report: Report, base: System, gains: Mapping[str, ConventionGain]) -> Report:
    """`report` of a plan for `base` with what is gained under further conventions."""
    known = convention_systems(base)
    by_name = {convention.name: convention for convention in report.conventions} | {
        name: Convention(name=name, what=known[name].text, speedup=gain.speedup, gap=gain.gap)
        for name, gain in gains.items()
    }
    return replace(
        report,
        conventions=tuple(by_name[name] for name in known if name in by_name),
        conventions_missing=tuple(name for name in known if name not in by_name),
        accounting_terms=next((gain.terms for gain in gains.values() if gain.terms), report.accounting_terms),
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
