"""Are speed-ups under other conventions found once, and for nothing else than what was asked?"""

import sqlite3
from dataclasses import replace
from types import SimpleNamespace

import pytest

import pimflow
from pimflow import frontend
from pimflow.api import compile_steps, prepare
from pimflow.api.other_conventions import Asked, Share, other_conventions
from pimflow.api.search import place
from pimflow.core.plan import Choice
from pimflow.hardware import system
from pimflow.host import workers
from pimflow.host.executors import Processes, Serial
from pimflow.host.result_cache import ResultCache
from pimflow.placement import Costs, Goal, Profiling, search
from pimflow.simulators.gpu.learned_model import Learned
from pimflow.simulators.profiler import Analytic

ALONE = Serial()


def compared(network, found, plan=None, executor=ALONE, progress=print):
    other = prepare.with_other_copies(found.system)
    graph = prepare.regions(network, other)
    asked = Asked(searched=found, plan=plan, other_graph=graph, other_copies=other)
    with other_conventions(asked, executor, progress) as others:
        return others()


@pytest.mark.parametrize("sharing", ["partitioned", "time-shared"])
def test_processes_find_the_same_and_keep_the_same(tmp_path, monkeypatch, sharing):
    """And where all is kept, no process is started."""
    network, on, kept, told = frontend.load("toy"), system(channel_sharing=sharing), {}, []
    for executor in (ALONE, Processes(2), Processes(3)):
        path = tmp_path / f"{executor}.sqlite"
        costs = Costs(on, Profiling(cache=ResultCache(path), progress=lambda *_: None))
        found = search(prepare.regions(network, on), on, costs, Goal())
        others = compared(network, found, executor=executor, progress=told.append)
        with sqlite3.connect(path) as connection:
            kept[executor] = others, sorted(connection.execute("SELECT key FROM results"))
    assert all(each == kept[ALONE] for each in kept.values())
    assert len(told) == 2
    monkeypatch.setattr(workers, "_hired", None)
    assert compared(network, found, executor=executor, progress=told.append) == others and len(told) == 2


@pytest.mark.parametrize(
    ("changes", "beside"),
    [
        ({}, True),
        ({"select": "primitives"}, False),
        ({"in_c": True}, False),
        ({"gpu": Learned()}, False),
        ({"seconds": 0.5}, False),
    ],
    ids=str,
)
def test_no_process_disturbs_what_is_measured_or_takes_longer_than_it_saves(monkeypatch, changes, beside):
    asked = {"select": None, "in_c": False, "gpu": Analytic(), "seconds": 5.0} | changes
    profiling = Profiling(gpu=asked["gpu"], executor=Processes(2))
    job = SimpleNamespace(**asked, profiling=profiling, system=system(), plan=None, progress=print)
    prepared = SimpleNamespace(regions_for=str, given_for=str)
    placed = SimpleNamespace(searched=None, search_seconds=asked["seconds"])
    monkeypatch.setattr(compile_steps, "other_conventions", lambda _asked, executor, _progress: executor)
    assert compile_steps.compared(job, prepared, placed) == (Processes(2) if beside else Serial())


@pytest.mark.long
def test_a_compilation_is_the_same_with_processes_beside_it(monkeypatch):
    monkeypatch.setattr(compile_steps, "SHORT_SECONDS", 0.0)
    reports, told = [], []
    for executor in (Serial(), Processes(2)):
        profiling = Profiling(executor=executor)
        done = pimflow.compile("toy", profiling=profiling, progress=told.append)
        reports.append(replace(done.report, search_seconds=0.0, wall_seconds=0.0).to_json())
    assert reports[0] == reports[1]
    assert told.count("searching under other conventions") == 1


def test_kept_for_the_same_question_only(tmp_path, monkeypatch):
    cache = ResultCache(tmp_path / "results.sqlite")
    network = frontend.load("toy")
    asked = []

    def counted(share):
        asked.append(share)
        return find(share)

    find = Share.found
    monkeypatch.setattr(Share, "found", counted)

    def answers(on, goal, plan=None, cache=cache):
        graph = prepare.regions(network, on)
        found = search(graph, on, Costs(on, Profiling(cache=cache)), goal)
        return compared(network, found, plan and plan(found))

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
    slower = compared(network, found)
    assert slower.terms[-1].latency_ns > plain.terms[-1].latency_ns
