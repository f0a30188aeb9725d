"""Does everyone who works for a search give the same table, workers that die included?"""

import os
import signal
import time
from pathlib import Path

import pytest

from pimflow.commands.profile.profile import region_graph
from pimflow.commands.shared.options import NetworkOptions
from pimflow.errors import InfeasibleError, PimflowError, ProfilerError, UnknownNameError, UsageError
from pimflow.hardware import system
from pimflow.host.executors import Dask, Processes, Serial, parse_executor
from pimflow.placement import CandidateGenerator, Costs, Profiling, profile


def square(item: int) -> int:
    return item * item


def die_once(mark: str) -> str:
    """Takes its worker with it, the first time."""
    path = Path(mark)
    if path.name == "fatal" and not path.exists():
        path.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return mark


def die(_item: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def refuse(item: int) -> int:
    if item == 2:
        raise UsageError("no two")
    return item


def pid(_item: int) -> int:
    time.sleep(0.2)  # so that the other worker takes the other item
    return os.getpid()


def runs(process: int) -> bool:
    """Whether a process is there, and not only its exit code."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def too_large(item: int) -> None:
    raise InfeasibleError("item", item, 0, "bytes", ["less"])


def unknown(item: int) -> None:
    raise UnknownNameError("item", "one", ["two"])


@pytest.mark.parametrize("executor", [Serial(), Processes(1), Processes(2)], ids=str)
def test_every_item_comes_back_once(executor):
    items = list(range(7))
    assert sorted(executor.map(square, items)) == [(i, i * i) for i in items]
    assert list(executor.map(square, [])) == []


def test_what_a_worker_raises_is_raised_here():
    with pytest.raises(UsageError, match="no two"):
        list(Processes(2).map(refuse, [1, 2, 3]))


@pytest.mark.parametrize("refused", [too_large, unknown])
def test_errors_of_workers_are_those_of_this_process(refused):
    with pytest.raises(PimflowError) as here:
        refused(1)
    with pytest.raises(type(here.value)) as there:
        list(Processes(2).map(refused, [1, 1]))
    assert str(there.value) == str(here.value) and vars(there.value) == vars(here.value)


@pytest.mark.parametrize("executor", [Serial(), Processes(1), Processes(2)], ids=str)
def test_items_are_done_in_as_many_processes(executor):
    worker_ids = {process_id for _, process_id in executor.map(pid, [0, 1])} - {os.getpid()}
    assert len(worker_ids) == (2 if executor == Processes(2) else 0)


def test_workers_of_results_that_nobody_reads_leave():
    pids = [process_id for _, process_id in Processes(2).map(pid, [0, 1])]
    results = Processes(2).map(time.sleep, [0.0, 60.0])
    next(results)
    results.close()
    begin = time.monotonic()
    assert sorted(Processes(2).map(square, [1, 2])) == [(0, 1), (1, 4)]
    assert time.monotonic() - begin < 30
    until = time.monotonic() + 20
    while any(runs(process_id) for process_id in pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(runs(process_id) for process_id in pids)


def test_the_item_of_a_dead_worker_is_done_again(tmp_path):
    items = [str(tmp_path / name) for name in ("a", "fatal", "b")]
    assert sorted(Processes(2).map(die_once, items)) == list(enumerate(items))


def test_workers_that_die_again_and_again_are_given_up():
    with pytest.raises(ProfilerError, match="a worker process died"):
        list(Processes(2).map(die, [1, 2]))


@pytest.mark.parametrize(
    ("text", "jobs", "says"),
    [
        ("threads", None, "unknown executor"),
        ("processes", 0, "at least one"),
        ("dask://", None, "dask://HOST:PORT"),
        ("dask://here", None, "dask://HOST:PORT"),
        ("dask://here:8786", 2, "its own workers"),
    ],
)
def test_executors_that_there_are_not(text, jobs, says):
    with pytest.raises(UsageError, match=says):
        parse_executor(text, jobs)


def table(executor):
    graph = region_graph("toy", NetworkOptions(), None)
    target = system()
    return profile(graph, CandidateGenerator(graph, target, Costs(target, Profiling(executor=executor))))


@pytest.mark.long
def test_processes_give_the_same_table():
    assert table(Processes(2)) == table(Serial())


@pytest.mark.long
def test_a_cluster_that_loses_a_worker_gives_the_same_table():
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
    ) as cluster:
        address = cluster.scheduler_address.removeprefix("tcp://")
        executor = Dask(address)
        victim = next(iter(cluster.workers.values())).pid

        class Killing:
            """Kills a worker when the first result has come."""

            def map(self, function, items):
                for index, result in enumerate(executor.map(function, items)):
                    if not index:
                        os.kill(victim, signal.SIGKILL)
                    yield result

        assert table(Killing()) == table(Serial())


def test_a_scheduler_that_is_not_there(monkeypatch):
    pytest.importorskip("distributed")
    monkeypatch.setattr("pimflow.host.executors.CONNECT_SECONDS", 0.5)
    begin = time.monotonic()
    with pytest.raises(ProfilerError, match=r"dask://127\.0\.0\.1:9"):
        list(Dask("127.0.0.1:9").map(square, [1]))
    assert time.monotonic() - begin < 20


def test_little_work_starts_no_worker():
    items = list(range(5))
    pids = [result for _, result in Processes(2, serial_seconds=60.0).map(pid, items)]
    assert set(pids) == {os.getpid()}
    shared = dict(Processes(2, serial_seconds=0.1).map(pid, items))
    assert sorted(shared) == items and shared[0] == os.getpid() and shared[4] != os.getpid()
