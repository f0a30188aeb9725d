"""Are speed-ups under other conventions found once, and for nothing else than what was asked?"""

from dataclasses import replace

from pimflow import frontend
from pimflow.api import other_conventions as module
from pimflow.api import prepare
from pimflow.api.other_conventions import other_conventions
from pimflow.api.search import place, speedups
from pimflow.core.plan import Choice
from pimflow.hardware import system
from pimflow.host.result_cache import ResultCache
from pimflow.placement import Costs, Goal, Profiling, search


def test_kept_for_the_same_question_only(tmp_path, monkeypatch):
    cache = ResultCache(tmp_path / "results.sqlite")
    network = frontend.load("toy")
    asked = []

    def counted(*args):
        asked.append(args)
        return speedups(*args)

    monkeypatch.setattr(module, "speedups", counted)

    def answers(on, goal, plan=None, cache=cache):
        graph = prepare.regions(network, on)
        other = prepare.with_other_copies(on)
        found = search(graph, on, Costs(on, Profiling(cache=cache)), goal)
        return other_conventions(found, plan and plan(found), prepare.regions(network, other), other)

    def on_gpu(found):
        choices = [Choice(region=name, mode="GPU", gpu_share=1.0) for name in found.doing]
        return replace(found.plan, choices=tuple(choices))

    plain = answers(system(), Goal(), cache=None)
    assert [answers(system(), Goal()) for _ in range(2)] == [plain, plain] and len(asked) == 2
    assert plain.without_launch > 1 and len(plain.terms) > 2

    faster = system().with_launches(gpu_ns=system().gpu.launch_ns, pim_ns=1.0)
    assert answers(faster, Goal()) != plain
    assert answers(system(), Goal(modes="gpu")) != plain
    assert answers(system(), Goal(), on_gpu) != plain
    assert len(asked) == 5

    # The list of terms ends with the plan that was found, which bounds may have changed.
    graph, costs = prepare.regions(network, system()), Costs(system(), Profiling(cache=cache))
    found = place(graph, system(), on_gpu(search(graph, system(), costs, Goal())), costs, Goal())
    other = prepare.with_other_copies(system())
    slower = other_conventions(found, None, prepare.regions(network, other), other)
    assert slower.terms[-1].latency_ns > plain.terms[-1].latency_ns
