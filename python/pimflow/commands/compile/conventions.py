"""Speed-ups of a network under other conventions than its plan's: one search each, cached with profiles."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pimflow.commands.compile.options import ALL, NONE
from pimflow.commands.shared.plan_report import AccountingTerm, Convention, ConventionsReport
from pimflow.commands.shared.prepare import with_other_copies
from pimflow.commands.shared.report import Report
from pimflow.core.json_form import report_from
from pimflow.core.plan import Plan
from pimflow.core.region_graph import RegionGraph
from pimflow.core.typed_values import read_fields
from pimflow.errors import UsageError
from pimflow.hardware import System
from pimflow.hardware.systems import LAUNCHES
from pimflow.host.result_cache import CODE_PACKAGES, code_digest, sources_digest
from pimflow.placement import Goal, SearchResult, apply, reevaluate, search
from pimflow.placement.candidates.pim_attention import can_write_caches
from pimflow.placement.candidates.substitutions import SUBSTITUTIONS
from pimflow.placement.plan_application import plan_evaluation
from pimflow.primitives.launches import can_compute
from pimflow.simulators.pim.timing import timings

# Modules whose code determines speed-ups, beside those that compute costs and search (`COMPUTED_BY`).
SPEEDUP_MODULES = (*CODE_PACKAGES, "fusion", "primitives", "commands.compile.conventions")
LAUNCHES_NS = (500.0, 1000.0)  # PIM launch times to search, between 0 and the GPU's
MAX_SEARCH_SECONDS = 3.0  # of a search: there are up to eight conventions, and their plans are not built


class ConventionSystem(NamedTuple):
    """The text of a convention in reports, and the system under that convention."""

    text: str
    system: System


def convention_systems(base: System) -> dict[str, ConventionSystem]:
    """All conventions that differ from those of `base`, by the names that `--conventions` takes."""
    gpu_ns, accounting = base.gpu.launch_ns, "paper" if base.accounting == "full" else "full"
    uses_published_timing = accounting == "paper" and "ramulator-pimflow" in timings(base.pim)
    timing = "ramulator-pimflow" if uses_published_timing else "strict"
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
    """Parse ``none``, ``all``, or names, as a list or in one text with commas, into names of conventions.

    Raises
    ------
    UsageError
        For an unknown name; the message lists the known ones.
    """
    systems = convention_systems(base)
    if conventions in (ALL, NONE):
        return tuple(systems) if conventions == ALL else ()
    names = conventions.split(",") if isinstance(conventions, str) else conventions
    for name in names:
        if name not in systems:
            raise UsageError(f"unknown convention '{name}'; known: {', '.join([NONE, ALL, *systems])}")
    return tuple(name for name in systems if name in names)


@dataclass(frozen=True, kw_only=True)
class ConventionGain:
    """The speed-ups of a network under a convention.

    Attributes
    ----------
    same_plan, searched_again : float or None
    gap : float
        See `plan_report.Convention`.
    terms : tuple of AccountingTerm
        The steps between both accountings, if the convention is the other accounting.
    """

    same_plan: float | None
    searched_again: float | None
    gap: float
    terms: tuple[AccountingTerm, ...]


@dataclass(frozen=True, kw_only=True)
class ConventionSearch:
    """Searches a network under other conventions, once it has a plan.

    Attributes
    ----------
    plan : Plan, optional
        Plan to apply under every convention, in place of searches.
    copies_graph : RegionGraph
        The regions under the other setting of `System.copies` than that of `search_result`.
    copies_original : RegionGraph, optional
        The regions of the original network under that setting, if the network was rewritten.
    """

    search_result: SearchResult
    plan: Plan | None
    copies_graph: RegionGraph
    copies_original: RegionGraph | None

    def gain(self, name: str) -> ConventionGain:
        """The gain under a convention, from the profile cache if it is there.

        Only gains with a gap of 0 are cached, since a gap depends on the speed of the machine. Nothing is
        cached if substitutions are registered, since the cache does not know their code.
        """
        cache = self.search_result.costs.profiling.cache
        if cache is None or SUBSTITUTIONS:
            return self._gain(name)
        key, code = self._key(name), f"{code_digest()} {sources_digest(SPEEDUP_MODULES)}"
        read = functools.partial(read_fields, ConventionGain, signed=True)
        gain: ConventionGain | None = cache.get([key], code, read=read).get(key)
        if gain is None:
            gain = self._gain(name)
            if gain.gap == 0:
                cache.put({key: gain}, code)
        return gain

    def search_under(self, name: str) -> SearchResult:
        """Search, or apply the plan, under a convention, without bounds.

        Speed-ups are over the original network.
        """
        search_result, system = self.search_result, self._system(name)
        goal, costs, (graph, original) = search_result.goal, search_result.costs, self._graphs(system)
        if system.accounting != search_result.system.accounting:
            costs = costs.with_system(system, replace(costs.profiling, pim=None))
        elif system.gpu != search_result.system.gpu:
            costs = costs.with_system(system)  # the time of a kernel with two launches includes the second
        if self.plan is None:
            goal = Goal(
                objective=goal.objective,
                search_seconds=min(goal.search_seconds, MAX_SEARCH_SECONDS),
                modes=goal.modes,
                pins=goal.pins,
                primitives=goal.primitives,
            )
            return search(graph, system, costs, goal, original)
        plan = self._transfer_plan(self.plan, graph, system)
        return apply(graph, system, plan, costs, Goal(primitives=goal.primitives), original)

    def _transfer_plan(self, plan: Plan, graph: RegionGraph, system: System) -> Plan:
        """`plan` for the regions of a convention, and for where tensors may lie there."""
        plan = plan.to_graph(graph, can_compute, system.uses_views, can_write_caches(system))
        if system.charges("channel-modes") != self.search_result.system.charges("channel-modes"):
            return plan.with_gpu_channels()
        return plan

    def _gain(self, name: str) -> ConventionGain:
        base, search_result = self.search_result, self.search_under(name)
        terms: tuple[AccountingTerm, ...] = ()
        if search_result.system.accounting != base.system.accounting:
            full = base.system.accounting == "full"
            terms = accounting_terms(*((search_result, base) if full else (base, search_result)))
        if self.plan is not None:
            return ConventionGain(
                same_plan=search_result.speedup, searched_again=None, gap=search_result.gap, terms=terms
            )
        plan = self._transfer_plan(base.plan, search_result.graph, search_result.system)
        evaluation, searched_again = plan_evaluation(search_result, plan), search_result.speedup
        same_plan = search_result.baseline.latency_ns / evaluation.latency_ns if evaluation else None
        if same_plan and search_result.goal.objective == "latency":
            # Its splits may not be candidates under the convention.
            searched_again = max(searched_again, same_plan)
        return ConventionGain(
            same_plan=same_plan, searched_again=searched_again, gap=search_result.gap, terms=terms
        )

    def _key(self, name: str) -> tuple[object, ...]:
        """The cache key of a gain."""
        search_result, system, plan = self.search_result, self._system(name), self.plan
        goal, key = search_result.goal, tuple[object, ...]()
        if system.accounting != search_result.system.accounting:
            # The terms begin or end with the latency of the plan, which depends on the goal's bounds.
            key = (search_result.system.identity, search_result.plan.to_json())
        return (
            "convention",
            tuple(graph and (graph.digest, graph.runs, graph.fusible) for graph in self._graphs(system)),
            (system.identity, search_result.costs.profilers),
            (goal.objective, goal.modes, goal.pins, goal.primitives),
            plan and plan.to_json(),
            *key,
        )

    def _system(self, name: str) -> System:
        return convention_systems(self.search_result.system)[name].system

    def _graphs(self, system: System) -> tuple[RegionGraph, RegionGraph | None]:
        """The regions that are placed on `system`, and those of the original network if it was rewritten."""
        if system.uses_views != self.search_result.system.uses_views:
            return self.copies_graph, self.copies_original
        return self.search_result.graph, self.search_result.original


def with_gains(report: Report, base: System, gains: Mapping[str, ConventionGain]) -> Report:
    """Return `report`, of a plan for `base`, with the gains under further conventions."""
    systems, earlier = convention_systems(base), report.conventions
    by_name = {convention.name: convention for convention in earlier.searched} | {
        name: report_from(Convention, gain, name=name, what=systems[name].text)
        for name, gain in gains.items()
    }
    conventions = ConventionsReport(
        searched=tuple(by_name[name] for name in systems if name in by_name),
        missing=tuple(name for name in systems if name not in by_name),
        accounting_terms=next(
            (gain.terms for gain in gains.values() if gain.terms), earlier.accounting_terms
        ),
    )
    return replace(report, conventions=conventions)


def accounting_terms(partial: SearchResult, full: SearchResult) -> tuple[AccountingTerm, ...]:
    """Latencies from the accounting of `partial` to that of `full`, one more charge at each step.

    The plan of `partial` stays the same while charges are added. The last term is the plan of `full`: its
    difference is what a search gains that knows all charges.
    """
    system, costs = partial.system, partial.costs
    terms = [AccountingTerm(term=f"accounting {system.accounting}", latency_ns=partial.evaluation.latency_ns)]

    def add(term: str) -> None:
        """Append the latency of the plan of `partial` under the current system and costs."""
        evaluation = reevaluate(partial, system, costs)
        terms.append(AccountingTerm(term=term, latency_ns=evaluation.latency_ns))

    if system.timing != full.system.timing:
        system, costs = replace(system, timing=full.system.timing), full.costs
        add(f"timing {system.timing}")
    for charge in system.available_charges:
        if not system.charges(charge):
            system = replace(system, accounting=f"{system.accounting}+{charge}")
            add(charge)
    if len(terms) > 1:
        terms.append(AccountingTerm(term="searched again", latency_ns=full.evaluation.latency_ns))
    return tuple(terms)
