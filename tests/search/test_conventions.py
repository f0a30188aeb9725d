"""Are speed-ups under other conventions found once, and for nothing else than what was asked?"""

from dataclasses import replace

import pytest

from pimflow import frontend
from pimflow.commands.compile import conventions
from pimflow.commands.compile.conventions import ConventionSearch, convention_names, convention_systems
from pimflow.commands.shared import prepare
from pimflow.core.plan import Choice
from pimflow.errors import UsageError
from pimflow.hardware import system
from pimflow.host.result_cache import ResultCache
from pimflow.placement import Costs, Goal, Profiling, apply, search
from pimflow.placement.best_plan import with_lower_bound

NETWORK = frontend.load("toy")


def convention_search(search_result, plan=None):
    copies_graph = prepare.regions(NETWORK, prepare.with_other_copies(search_result.system))
    return ConventionSearch(
        search_result=search_result, plan=plan, copies_graph=copies_graph, copies_original=None
    )


def search_network(target_system, goal, cache):
    graph = prepare.regions(NETWORK, target_system)
    return search(graph, target_system, Costs(target_system, Profiling(cache=cache)), goal)


def gpu_plan(search_result):
    choices = [Choice(regions=(name,)) for name in search_result.candidate_by_region]
    return replace(search_result.plan, choices=tuple(choices))


@pytest.fixture
def cache(tmp_path):
    return ResultCache(tmp_path / "results.sqlite")


@pytest.fixture
def under(monkeypatch):
    """The names of the conventions that were searched."""
    names, find = [], ConventionSearch.search_under

    def record(self, name):
        names.append(name)
        return find(self, name)

    monkeypatch.setattr(ConventionSearch, "search_under", record)
    return names


def test_names_are_none_all_or_some_in_the_order_of_a_report():
    base = system()
    all_names = tuple(convention_systems(base))
    assert convention_names("all", base) == all_names and convention_names("none", base) == ()
    assert convention_names("no-launches,pim-launch=0", base) == ("pim-launch=0", "no-launches")
    assert convention_names(["copies=made"], base) == ("copies=made",)
    for wrong in ("launch", "pim-launch=0,", ""):
        with pytest.raises(
            UsageError, match=f"unknown convention '.*'; known: none, all, {', '.join(all_names)}$"
        ):
            convention_names(wrong, base)


@pytest.mark.parametrize(
    ("changes", "own"),
    [
        ({"accounting": "paper"}, "accounting=paper"),
        ({"copies": "made"}, "copies=made"),
        ({"launches": "ahead"}, "launches=ahead"),
    ],
)
def test_what_a_system_has_itself_is_no_other_convention(changes, own):
    names = convention_systems(system(**changes))
    assert own in convention_systems(system()) and own not in names
    assert len(names) == len(convention_systems(system()))


@pytest.mark.long
def test_each_is_kept_by_itself_and_for_the_same_question_only(cache, under):
    def gains(target_system, goal, names, plan=None, cache=cache):
        search_result = search_network(target_system, goal, cache)
        comparison = convention_search(search_result, plan and plan(search_result))
        return {name: comparison.gain(name) for name in names}

    names = convention_names("all", system())
    plain = gains(system(), Goal(), names, cache=None)
    assert under == list(names)
    assert all(1 <= gain.same_plan <= gain.searched_again + 1e-9 for gain in plain.values() if not gain.terms)
    assert plain["no-launches"].searched_again > 1 and len(plain["accounting=paper"].terms) > 2
    assert not any(gain.terms for name, gain in plain.items() if name != "accounting=paper")

    under.clear()
    assert gains(system(), Goal(), names[:2]) == {name: plain[name] for name in names[:2]}
    assert [gains(system(), Goal(), names) for _ in range(2)] == [plain, plain]
    assert under == list(names)  # the two cached ones were not searched again

    under.clear()
    some = ("pim-launch=0", "copies=made")
    faster = system().with_launches(gpu_ns=system().gpu.launch_ns, pim_ns=1.0)
    assert gains(faster, Goal(), some)["copies=made"] != plain["copies=made"]
    assert gains(system(), Goal(modes="gpu"), some)["copies=made"] != plain["copies=made"]
    assert gains(system(), Goal(), some, gpu_plan)["copies=made"] != plain["copies=made"]
    assert under == ["copies=made", *some, *some]  # with launches of 0 it is the same system


def test_a_given_plan_is_not_searched_again(cache):
    best = search_network(system(), Goal(), cache)
    given = convention_search(best, best.plan).gain("pim-launch=gpu")
    found = convention_search(best).gain("pim-launch=gpu")
    assert given.searched_again is None
    assert given.same_plan == found.same_plan <= found.searched_again


def test_terms_end_with_the_plan_that_was_found(cache):
    """Bounds may have changed it."""
    best = search_network(system(), Goal(), cache)
    slower = with_lower_bound(apply(best.graph, system(), gpu_plan(best), best.costs))
    terms = [convention_search(item).gain("accounting=paper").terms for item in (best, slower)]
    assert [t[-1].latency_ns for t in terms] == [best.evaluation.latency_ns, slower.evaluation.latency_ns]
    assert terms[0][-1].latency_ns < terms[1][-1].latency_ns


@pytest.mark.long
@pytest.mark.parametrize(("asked", "given"), [(0.5, 0.5), (60.0, conventions.MAX_SEARCH_SECONDS)])
def test_a_search_has_a_time_limit_and_unproved_results_are_not_stored(cache, monkeypatch, asked, given):
    goals, find = [], conventions.search

    def search_with_gap(graph, target_system, costs, goal, graph_given):
        goals.append(goal)
        return replace(find(graph, target_system, costs, goal, graph_given), gap=0.25)

    monkeypatch.setattr(conventions, "search", search_with_gap)
    comparison = convention_search(search_network(system(), Goal(search_seconds=asked), cache))
    assert [comparison.gain("pim-launch=0").gap for _ in range(2)] == [0.25, 0.25]
    assert [goal.search_seconds for goal in goals] == [given, given]
