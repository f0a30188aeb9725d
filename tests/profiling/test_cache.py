"""Does what was found survive kills, other processes, full disks and damaged files?"""

import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

import pimflow
from pimflow.commands.compile.conventions import SPEEDUP_MODULES
from pimflow.commands.profile.profile import REGION_MODULES
from pimflow.commands.serve.step_costs import STEP_MODULES
from pimflow.host import result_cache as cache_module
from pimflow.host.result_cache import CODE_PACKAGES, ResultCache, default_path, sources_digest
from pimflow.primitive_selection import gpu_model_times
from pimflow.primitive_selection.measuring import IN_C, MEASURED
from pimflow.primitive_selection.network_time import BUILT_BY

WRITER = """
import sys, time
from pimflow.host.result_cache import ResultCache
cache = ResultCache(sys.argv[1])
for i in range(int(sys.argv[3])):
    cache.put({(sys.argv[2], i): [i, "x" * 100]})
    print(i, flush=True)
assert not cache.flaw, cache.flaw
"""


HOLDER = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1])
connection.execute("BEGIN EXCLUSIVE")
print(1, flush=True)
time.sleep(0.5)
connection.commit()
"""


def writer(path: Path, name: str, count: int) -> subprocess.Popen:
    command = [sys.executable, "-c", WRITER, str(path), name, str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_values_come_back_and_others_do_not(tmp_path):
    cache = ResultCache(tmp_path / "deep" / "er" / "profiles.sqlite")
    many = {("key", i): {"value": i / 3} for i in range(1500)}
    cache.put(many)
    cache.close()
    reopened = ResultCache(tmp_path / "deep" / "er" / "profiles.sqlite")
    assert reopened.get([*many, ("key", -1)]) == many
    assert reopened.get([]) == {} and reopened.flaw == ""


def test_what_other_code_computed_is_not_taken(tmp_path, monkeypatch):
    cache = ResultCache(tmp_path / "c")
    cache.put({"key": 1})
    monkeypatch.setattr(cache_module, "code_digest", lambda: "other")
    assert cache.get(["key"]) == {}


def test_results_that_other_code_decides_outlive_ours(tmp_path, monkeypatch):
    cache = ResultCache(tmp_path / "c")
    cache.put({"key": 1}, "compiler 1")
    monkeypatch.setattr(cache_module, "code_digest", lambda: "other")
    assert cache.get(["key"], "compiler 1") == {"key": 1}
    assert cache.get(["key"], "compiler 2") == cache.get(["key"]) == {}


def test_the_digest_tells_packages_apart():
    assert sources_digest(("core",)) != sources_digest(("hardware",)) != sources_digest()
    assert sources_digest(("core.region",)) != sources_digest(("core.liveness",))


def test_the_digest_covers_subfolders(tmp_path, monkeypatch):
    """A change at any depth of a package makes old results unusable; so does moving a file."""
    package = tmp_path / "layered"
    (package / "inner" / "learned").mkdir(parents=True)
    files = ["__init__.py", "inner/__init__.py", "inner/deep.py", "inner/learned/model.ubj.xz"]
    for name in files:
        (package / name).write_text("")

    def digest():
        sources_digest.cache_clear()
        return sources_digest(("layered",))

    monkeypatch.setattr(pimflow, "__path__", [*pimflow.__path__, str(tmp_path)])
    digests = {digest()}
    for name in files:
        (package / name).write_text("x = 1\n")
        digests.add(digest())
    (package / "inner" / "deep.py").rename(package / "deep.py")
    digests.add(digest())
    assert len(digests) == len(files) + 2


PARTS = {
    "cache": CODE_PACKAGES,
    "regions": REGION_MODULES,
    "steps of a server": STEP_MODULES,
    "other conventions": SPEEDUP_MODULES,
    "primitives": MEASURED,
    "primitives in C": IN_C,
    "modelled primitives": gpu_model_times.COMPUTED_BY,
    "kernels of a network": BUILT_BY,
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_every_part_of_a_digest_is_there(parts):
    """The parts are strings: a file that was moved must not leave one behind."""
    assert sources_digest(parts) != sources_digest(parts[:-1])


def test_a_part_that_is_not_there_is_no_digest():
    with pytest.raises(LookupError, match="nowhere"):
        sources_digest(("core", "nowhere"))


@pytest.mark.long
def test_two_processes_at_once_lose_nothing(tmp_path):
    path = tmp_path / "c"
    writers = [writer(path, name, 60) for name in ("a", "b")]
    assert [process.wait(timeout=120) for process in writers] == [0, 0]
    keys = [(name, i) for name in ("a", "b") for i in range(60)]
    assert ResultCache(path).get(keys) == {(name, i): [i, "x" * 100] for name, i in keys}


def test_a_kill_loses_nothing_that_was_there(tmp_path):
    path = tmp_path / "c"
    killed = writer(path, "a", 10**6)
    done = [int(killed.stdout.readline()) for _ in range(5)]
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    cache = ResultCache(path)
    assert len(cache.get([("a", i) for i in done])) == 5
    cache.put({"after": 1})
    assert cache.get(["after"]) == {"after": 1} and cache.flaw == ""


@pytest.mark.parametrize("damage", ["no database", "cut"])
def test_a_damaged_file_is_left_alone_and_said(tmp_path, damage):
    path = tmp_path / "c"
    ResultCache(path).put({("key", i): "x" * 1000 for i in range(100)})
    contents = path.read_bytes()
    damaged = b"no database at all" * 100 if damage == "no database" else contents[: len(contents) // 3]
    path.write_bytes(damaged)
    cache = ResultCache(path)
    cache.get([("key", i) for i in range(100)])
    cache.put({"key": 1})
    assert str(path) in cache.flaw and "delete it" in cache.flaw and "\n" not in cache.flaw
    assert path.read_bytes() == damaged


DAMAGED = [None, 7, b"\xff\xfe", "null", "[]", '{"another": "shape"}', "", "0" * 16 + " 1"]


@pytest.mark.parametrize("value", DAMAGED, ids=repr)
def test_a_damaged_value_is_computed_again(tmp_path, value):
    """Whatever stands there: nobody reads a value of another shape, or of another key."""
    path = tmp_path / "c"
    ResultCache(path).put({"damaged": {"cycles": 1}, "other": {"cycles": 2}})
    with sqlite3.connect(path) as file:
        keys = dict(file.execute("SELECT value, key FROM results"))
        damaged, intact = (next(text for text in keys if f'"cycles": {n}' in text) for n in (1, 2))
        file.execute("UPDATE results SET value = ? WHERE key = ?", (value, keys[damaged]))
    cache = ResultCache(path)
    assert cache.get(["damaged", "other"]) == {"other": {"cycles": 2}}
    assert str(path) in cache.flaw and "damaged" in cache.flaw and "\n" not in cache.flaw
    with sqlite3.connect(path) as file:
        file.execute("UPDATE results SET value = ? WHERE key = ?", (intact, keys[damaged]))
    assert cache.get(["damaged"]) == {}
    cache.put({"damaged": {"cycles": 1}})
    reopened = ResultCache(path)
    assert reopened.get(["damaged"]) == {"damaged": {"cycles": 1}} and reopened.flaw == ""


def test_a_full_disk_costs_the_results_and_no_more(tmp_path):
    cache = ResultCache(tmp_path / "c")
    cache.put({"before": 1})
    pages = cache._connection.execute("PRAGMA page_count").fetchone()[0]
    cache._connection.execute(f"PRAGMA max_page_count={pages}")  # what SQLite calls full
    cache.put({("key", i): "x" * 1000 for i in range(100)})
    assert "full" in cache.flaw
    cache.put({"more": 1})
    assert cache.get(["before", "more"]) == {"before": 1}
    assert ResultCache(tmp_path / "c").get(["before", "more"]) == {"before": 1}


def test_a_file_that_cannot_be_written_is_read(tmp_path):
    ResultCache(tmp_path / "c").put({"before": 1})
    cache = ResultCache(tmp_path / "c")
    cache._connection.execute("PRAGMA query_only=ON")  # as on a file system that is read-only
    cache.put({"more": 1})
    assert "readonly" in cache.flaw and str(tmp_path / "c") in cache.flaw
    assert cache.get(["before", "more"]) == {"before": 1}


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    cache = ResultCache(tmp_path / "file" / "c")
    cache.put({"key": 1})
    assert cache.get(["key"]) == {} and str(tmp_path / "file" / "c") in cache.flaw


def test_the_place_is_the_users_choice(monkeypatch, tmp_path):
    monkeypatch.setenv("PIMFLOW_CACHE", str(tmp_path / "mine"))
    assert default_path() == tmp_path / "mine"
    monkeypatch.delenv("PIMFLOW_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "pimflow" / "profiles.sqlite"


def test_a_long_writer_is_waited_for(tmp_path):
    path = tmp_path / "c"
    cache = ResultCache(path)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE)
    holder.stdout.readline()
    begin = time.monotonic()
    cache.put({"key": 1})
    assert time.monotonic() - begin > 0.2 and cache.flaw == ""
    holder.wait()


def test_a_held_file_is_waited_for_once(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_module, "WAIT_SECONDS", 0.3)
    path = tmp_path / "c"
    holder = sqlite3.connect(path)
    holder.execute("BEGIN EXCLUSIVE")
    begin = time.monotonic()
    caches = [ResultCache(path) for _ in range(100)]
    for cache in caches:
        cache.put({"key": 1})
        assert cache.get(["key"]) == {} and "locked" in cache.flaw
    assert 0.2 < time.monotonic() - begin < 100 * 0.3 / 2
    holder.rollback()


def test_a_writer_that_stays_is_waited_for_once(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_module, "WAIT_SECONDS", 0.3)
    cache = ResultCache(tmp_path / "c")
    cache.put({"before": 1})
    holder = sqlite3.connect(tmp_path / "c")
    holder.execute("BEGIN IMMEDIATE")
    begin = time.monotonic()
    for key in range(100):
        cache.put({key: key})
    assert 0.2 < time.monotonic() - begin < 100 * 0.3 / 2
    assert cache.get(["before"]) == {"before": 1} and "locked" in cache.flaw
    holder.rollback()
