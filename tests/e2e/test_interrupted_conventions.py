"""Is a compiled directory whole before other conventions are searched, whatever becomes of that?"""

import json
import re
import signal
import subprocess
import sys

import pytest
from command_line import error_line

import pimflow
from pimflow.commands.compile.conventions import ConventionSearch, convention_systems
from pimflow.commands.main import main
from pimflow.errors import ArtifactError, UsageError
from pimflow.host import directories

NAMES = tuple(convention_systems(pimflow.system()))
# A command whose third convention takes until it is interrupted.
COMMAND = f"""
import os, time
import pimflow.__main__
from pimflow.commands.compile.conventions import ConventionSearch
gain = ConventionSearch.gain

def slow(self, name):
    if name == {NAMES[2]!r}:
        os.write(2, b"the third\\n")
        time.sleep(60.0)
    return gain(self, name)

ConventionSearch.gain = slow
pimflow.__main__.run()
"""


def report_of(directory):
    return json.loads((directory / "report.json").read_text())


def names_of(report):
    return [convention["name"] for convention in report["conventions"]]


def test_a_directory_is_whole_before_and_says_what_is_missing(tmp_path, monkeypatch):
    out, states, gain = tmp_path / "toy", [], ConventionSearch.gain

    def inspect_then_gain(self, name):
        states.append(report_of(out))
        assert pimflow.run(out) and (out / "report.html").stat().st_size > 1000
        return gain(self, name)

    monkeypatch.setattr(ConventionSearch, "gain", inspect_then_gain)
    compiled = pimflow.compile("toy", out, conventions="no-launches")
    (before,) = states
    assert before["conventions"] == [] and before["accounting_terms"] == []
    assert tuple(before["conventions_missing"]) == NAMES
    after = report_of(out)
    assert after == json.loads(json.dumps(compiled.report.to_json()))
    assert names_of(after) == ["no-launches"] and after["conventions"][0]["gap"] == 0
    assert after["conventions_missing"] == [name for name in NAMES if name != "no-launches"]
    page = (out / "report.html").read_text()
    assert "launches set to zero" in page and f"Not searched: {', '.join(NAMES[:-1])}." in page

    complete = compiled.with_conventions()
    assert len(states) == len(NAMES)  # what it had was not searched again
    assert tuple(names_of(report_of(out))) == NAMES and complete.report.conventions.missing == ()
    assert "Not searched" not in (out / "report.html").read_text()
    assert not [path.name for path in out.iterdir() if path.name.startswith(".")]


@pytest.mark.long
def test_a_command_that_is_interrupted_has_printed_its_report(tmp_path):
    """And it says one line, with what is missing."""
    command = [sys.executable, "-c", COMMAND, "compile", "toy", "-o", "out", "--quiet"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=tmp_path, **streams)
    printed = [process.stdout.readline()]
    while printed[-1] and not printed[-1].startswith("wrote "):
        printed.append(process.stdout.readline())
    assert printed[-1] == "wrote     out\n"
    assert process.stderr.readline() == "the third\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    missing = ", ".join(NAMES[2:])
    assert (process.returncode, out) == (130, "")
    assert err == f"pimflow: interrupted: out is whole, and its report lacks {missing}\n"
    assert tuple(names_of(report_of(tmp_path / "out"))) == NAMES[:2]
    assert pimflow.run(tmp_path / "out")


@pytest.mark.long
@pytest.mark.parametrize("form", [[], ["--layers"], ["--json"]], ids=str)
def test_the_command_prints_what_was_asked_for(capsys, form):
    assert main(["compile", "toy", "--quiet", "--conventions", "pim-launch=0,no-launches", *form]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    if form == ["--json"]:
        assert names_of(json.loads(out)) == ["pim-launch=0", "no-launches"]
    else:
        heads, *lines = out.splitlines()[-3:]
        assert heads.split() == ["range", "speed-up", "with", "same", "plan", "searched", "again"]
        assert [line.strip().partition("  ")[0] for line in lines] == ["PIM launch 0", "launches set to zero"]
        assert all(len(re.findall(r"[0-9.]+x", line)) == 2 for line in lines)
    assert main(["compile", "toy", "--quiet", "--conventions", "none", *form]) == 0
    out, _ = capsys.readouterr()
    assert names_of(json.loads(out)) == [] if form == ["--json"] else "range" not in out


def test_unknown_names_are_refused_before_the_work(capsys):
    assert error_line(capsys, 2, "compile no-such-network --conventions launch").endswith(
        f"unknown convention 'launch'; known: none, all, {', '.join(NAMES)}\n"
    )
    with pytest.raises(UsageError, match="unknown convention 'launch'"):
        pimflow.compile("no-such-network", conventions="launch")
    with pytest.raises(UsageError, match="conventions is 'all', 'none' or names"):
        pimflow.compile("no-such-network", conventions=None)
    assert main(["compile", "toy", "--explain", "down.conv", "--conventions", "none"]) == 2


@pytest.mark.long
def test_a_report_of_another_network_is_not_replaced(tmp_path):
    compiled = pimflow.compile("toy", tmp_path / "out", conventions="none")
    pimflow.compile("toy", tmp_path / "out", conventions="none", modes="gpu")
    before = report_of(tmp_path / "out")
    with pytest.raises(
        ArtifactError, match=r"out: was written anew meanwhile; its report\.json is not replaced"
    ):
        compiled.with_conventions("pim-launch=0")
    assert report_of(tmp_path / "out") == before


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    kind = directories.DirectoryKind(name="a mark", mark="mark", seals=lambda _: {"mark": None, "said": None})
    (tmp_path / "mark").write_bytes(b"mine")
    (tmp_path / "said").write_bytes(b"before")
    for mark, said in ((b"other", b"before"), (b"mine", b"after")):
        if mark == b"other":
            with pytest.raises(ArtifactError, match="written anew"):
                directories.replace_unsealed(tmp_path, kind, "said", b"after", mark=mark)
        else:
            directories.replace_unsealed(tmp_path, kind, "said", b"after", mark=mark)
        assert (tmp_path / "said").read_bytes() == said
        assert sorted(path.name for path in tmp_path.iterdir()) == ["mark", "said"]
    with pytest.raises(ArtifactError, match="said cannot be written"):
        directories.replace_unsealed(tmp_path / "gone", kind, "said", b"after", mark=b"mine")
