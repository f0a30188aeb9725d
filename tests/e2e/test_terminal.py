"""What does a command say on a terminal: how long a step takes, in lines of its width; and for shells?"""

import argparse
import subprocess

import pytest
from command_line import error_line, run, run_json

from pimflow.commands.command_line import steps, streams
from pimflow.host.result_cache import ResultCache

TEXT = "memory    9 tensors in one pool, of which some are small\n  a line with a-long-word\nshort"


def test_lines_are_no_wider_than_the_terminal():
    lines = streams.wrapped(TEXT, 30).split("\n")
    assert max(map(len, lines)) <= 30 and lines[-1] == "short"
    assert lines[0] == "memory    9 tensors in one" and lines[1].startswith(" " * 10 + "pool")
    assert streams.wrapped(TEXT, 80) == TEXT


def test_a_step_says_how_long_it_takes_as_it_did_before(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(steps.time, "monotonic", lambda: now[0])
    finished = []
    names = {"parser": argparse.ArgumentParser(prog="pimflow compile"), "cache": str(tmp_path / "cache")}
    args = argparse.Namespace(**names, model="toy")
    for expected in ("searching … ", "searching … about 8 s left"):
        clock = steps.StepClock(args, lambda *step: finished.append(step))
        clock.begin("searching")
        assert clock.line() == expected
        now[0] += 8.0
        assert clock.line() == "searching … 8 s"
        clock.end()
    assert finished == [("searching", 8.0)] * 2
    other = steps.StepClock(argparse.Namespace(**names, model="other"), lambda *_: None)
    other.begin("searching")
    assert other.line() == "searching … "


@pytest.mark.long
def test_verbose_tells_the_time_of_each_step(capsys):
    code, _, err = run(capsys, "compile toy -v --conventions none")
    lines = err.splitlines()
    assert code == 0 and "pimflow: verifying …" in lines
    assert lines[lines.index("pimflow: verifying …") + 1].startswith("pimflow: verifying: ")


def test_the_cache_is_shown_and_cleared(capsys, tmp_path):
    path = tmp_path / "cache"
    assert run_json(capsys, "cache", "--cache", path)["results"] == 0 and not path.exists()
    cache = ResultCache(path)
    cache.put({"a": 1, "b": 2})
    assert run(capsys, "cache size", "--cache", path)[1] == f"{path.stat().st_size}\n"
    assert run_json(capsys, "cache clear", "--cache", path)["results"] == 2
    assert cache.get(["a"]) == {} and run_json(capsys, "cache list", "--cache", path)["results"] == 0
    path.write_text("no cache at all")
    assert "is no cache, or damaged" in error_line(capsys, 3, "cache", "--cache", path)
    assert "unknown action 'clean'; did you mean clear?" in error_line(capsys, 2, "cache clean")


def test_a_shell_completes_commands_and_options(capsys, tmp_path):
    pytest.importorskip("shtab")
    script = run_json(capsys, "completion bash")["script"]
    complete = "COMP_WORDS=(pimflow compl) COMP_CWORD=1; _shtab_pimflow; echo ${COMPREPLY[@]}"
    done = subprocess.run(["bash", "-c", f"{script}\n{complete}"], capture_output=True, text=True, check=True)
    assert {"completion"} == {*done.stdout.split()}
    assert "--objective" in script
    assert "unknown shell 'bahs'; did you mean bash?" in error_line(capsys, 2, "completion bahs")
