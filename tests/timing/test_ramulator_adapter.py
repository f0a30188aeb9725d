"""Does an installed Ramulator's clock reach the times, and does each of its failures end in one line?"""

import os
import re
import stat
import tarfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from calibration.ramulator_comparison import compare, table
from timing_programs import act_all, comp, loop, program, read, with_timing, write

from pimflow.commands.main import main
from pimflow.core.program import PimProgram
from pimflow.errors import ProfilerError, SpecError, TraceError
from pimflow.simulators.pim.timing import time_program
from pimflow.simulators.pim.trace import expand_to_pim
from pimflow.simulators.profiler import BuiltIn
from pimflow.simulators.ramulator.fork import Ramulator, parse_output

# What the fork, built from 8dbb92f, printed for GWRITE, four G_ACT, 32 COMP, READRES.
STORED = (Path(__file__).parent / "data/ramulator_output.txt").read_text()

# Counts what the fork counts; its clock is 7 cycles a line, 100 more where GWRITEs are not hidden.
FAKE = """#!/bin/sh
test "$2" = --mode=dram -a "$3" = --stats || exit 9
test -f "$1" || exit 8
grep -q "^ *standard = GDDR6" "$1" || exit 7
echo "$5" >> {log}
GWRITE=$(grep -c GWRITE "$5")
echo "GWRITE $GWRITE"
echo "G_ACT $(grep -c G_ACT "$5")"
echo "COMP $(grep -c COMP "$5")"
echo "READRES $(grep -c READRES "$5")"
echo "PREA 2"
echo "PRE 1"
echo "REF 4"
echo "                              Cycle"
echo "Cycle $(( $(wc -l < "$5") * 7 + ${{RAMULATOR_DISABLE_GWRITE_LATENCY_HIDING:-0}} * GWRITE * 100 ))"
"""
STREAM = (loop(3, write(), *act_all(), comp(32), read()),)
LINES = 3 * 38


def executable(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def fake(tmp_path):
    return executable(tmp_path / "ramulator", FAKE.format(log=tmp_path / "log"))


def runs(fake: str) -> int:
    return len((Path(fake).parent / "log").read_text().splitlines())


def test_stored_output():
    assert parse_output(STORED.splitlines(True)) == Counter(
        GWRITE=1, G_ACT=4, COMP=32, READRES=1, PREA=0, PRE=0, REF=0, Cycle=140
    )


@pytest.mark.parametrize("name", ["GWRITE", "G_ACT", "COMP", "READRES", "PREA", "PRE", "REF", "Cycle"])
def test_every_line_of_the_output_is_needed_once(name):
    lines = STORED.splitlines(True)
    named_line = next(line for line in lines if line.startswith(f"{name} ") and "energy" not in line)
    with pytest.raises(ProfilerError, match=f"no line '{name} <number>'"):
        parse_output(line for line in lines if line != named_line)
    with pytest.raises(ProfilerError, match=f"'{name}' twice"):
        parse_output([*lines, named_line])
    with pytest.raises(ProfilerError, match=f"no line '{name} <number>'"):
        parse_output([line.replace(named_line, f"{name} many\n") for line in lines])


def test_its_clock_is_the_time(newton, fake):
    stream_with_read = (*STREAM, read())
    result = Ramulator(fake).time_program(program(STREAM, stream_with_read, STREAM), newton)
    assert result.channel_cycles == (7 * LINES, 7 * (LINES + 1), 7 * LINES)
    assert result.cycles == 7 * (LINES + 1)
    assert result.time_ns == pytest.approx(7 * (LINES + 1) * 8 / 7)
    assert result.commands == {"GWRITE": 9, "G_ACT": 36, "COMP": 288, "READRES": 10, "PRE": 9, "REF": 12}
    assert (result.timing, result.pim, result.violations) == ("ramulator:ramulator", "newton-gddr6", None)
    built_in = time_program(program(STREAM, stream_with_read, STREAM), newton)
    assert result.gwrite_bursts == built_in.gwrite_bursts
    assert result.utilisation == pytest.approx(288 * 2 / (result.cycles * 3))


def test_the_same_text_runs_once(newton, fake):
    ramulator = Ramulator(fake)
    ramulator.time_program(program(STREAM, STREAM, (read(),)), newton)
    ramulator.time_program(program(STREAM), newton)
    assert runs(fake) == 2


def test_latency_hiding_is_its_environment_variable(newton, fake, monkeypatch):
    monkeypatch.setenv("RAMULATOR_DISABLE_GWRITE_LATENCY_HIDING", "1")
    assert Ramulator(fake).time_program(program(STREAM), newton).cycles == 7 * LINES
    assert (
        Ramulator(fake, gwrite_hiding=False).time_program(program(STREAM), newton).cycles == 7 * LINES + 300
    )


def test_a_trace_of_the_users(newton, fake, tmp_path):
    path = tmp_path / "x.pim"
    path.write_bytes(expand_to_pim(program(STREAM), 0) + b"READRES 1\n0x0 GWRITE_4 \n")
    result = Ramulator(fake).time_trace(path, newton)
    assert (result.cycles, result.commands["GWRITE"], result.gwrite_bursts) == (7 * (LINES + 2), 4, 128)
    path.write_text("0x0 NOP\n")
    with pytest.raises(TraceError, match=r"x\.pim:1: unknown command"):
        Ramulator(fake).time_trace(path, newton)


def test_it_leaves_nothing_behind(newton, fake, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.chdir(tmp_path)
    Ramulator(fake).time_program(program(STREAM), newton)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["log", "ramulator", "scratch"]


def test_a_device_that_the_fork_does_not_know(newton, fake):
    for other_spec, says in (
        (with_timing(newton, nRCDR=14), "has nRCDR 11, not 14"),
        (replace(newton, gangs=2), "has gangs 4, not 2"),
    ):
        with pytest.raises(SpecError, match=says):
            Ramulator(fake).time_trace("absent.pim", other_spec)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("#!/bin/sh\nexit 3\n", r"failed \(exit code 3\)$"),
        ("#!/bin/sh\necho one >&2; echo 'Bad mapping file' >&2; exit 1\n", "exit code 1: Bad mapping file"),
        ("#!/bin/sh\nkill -6 $$\n", "signal 6"),
        ("#!/bin/sh\necho hello\n", "no line 'GWRITE <number>'; is it the PIMFlow fork"),
        ("#!/bin/sh\nhead -c 4096 /dev/urandom\n", "no line 'GWRITE"),
        ("#!/bin/sh\nexec sleep 30\n", r"no end after 0\.5 s"),
        ("#!/no/such/interpreter\n", "cannot be run"),
        ("not a program", "cannot be run: Exec format error"),
        (f"#!/bin/sh\ncat <<'X'\n{STORED}X\n", "counts 1 GWRITE commands in a trace of 3"),
        (
            "#!/bin/sh\nprintf '%s\\n' 'GWRITE 3' 'G_ACT 12' 'COMP 96' 'READRES 3' 'PREA 0' 'PRE 0' 'REF 0' "
            "'Cycle 9'\n",
            "9 cycles are fewer than the commands issued",
        ),
    ],
)
def test_every_failure_is_one_line(newton, tmp_path, script, says):
    path = executable(tmp_path / "bad", script)
    with pytest.raises(ProfilerError, match=says) as raised:
        Ramulator(path, timeout_seconds=0.5).time_program(program(STREAM), newton)
    assert "\n" not in str(raised.value) and str(raised.value).startswith(f"ramulator '{path}': ")


def test_what_cannot_be_executed(tmp_path):
    with pytest.raises(ProfilerError, match="there is no such file"):
        Ramulator(str(tmp_path / "absent"))
    with pytest.raises(ProfilerError, match="not an executable file"):
        Ramulator(str(tmp_path))
    (tmp_path / "plain").write_text("")
    with pytest.raises(ProfilerError, match="not an executable file"):
        Ramulator(str(tmp_path / "plain"))


def test_a_bare_name_is_looked_for(fake, monkeypatch):
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(fake).parent), os.environ["PATH"]]))
    assert Ramulator("ramulator") == Ramulator(fake)
    assert Ramulator("ramulator").identity == Ramulator(fake).identity != Ramulator(fake, False).identity


def test_the_engines_are_a_profiler_too(newton):
    for timing in ("strict", "ramulator-pimflow"):
        assert BuiltIn(timing).name == timing
        assert BuiltIn(timing).time_program(program(STREAM), newton) == time_program(
            program(STREAM), newton, timing
        )


# Prints what the fork, built from 8dbb92f, printed for that trace: scripts/compare_ramulator.py recorded it.
REPLAY = """#!/bin/sh
cat {folder}/$(sha256sum < "$5" | cut -c1-64)${{RAMULATOR_DISABLE_GWRITE_LATENCY_HIDING:+.not-hidden}}
"""


@pytest.mark.long
def test_recorded_output_is_what_the_built_in_rules_say(newton, tmp_path):
    with tarfile.open(Path(__file__).parent / "data/ramulator_recorded.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    replay = executable(tmp_path / "ramulator", REPLAY.format(folder=tmp_path))
    paths = sorted(tmp_path.glob("*.pimprog"))
    programs = [("recorded", p.name, PimProgram.from_json(p.read_text())) for p in paths]
    comparisons = compare(replay, programs, newton)
    assert len(comparisons) == 2 * len(programs) == 36
    assert [c for c in comparisons if not (c.cycles_agree and c.counts_agree)] == []
    assert max(comparison.simulated.commands["REF"] for comparison in comparisons) > 4
    hidden = [comparison.simulated.cycles for comparison in comparisons if comparison.gwrite_hiding]
    shown = [comparison.simulated.cycles for comparison in comparisons if not comparison.gwrite_hiding]
    assert sum(hidden) < sum(shown)
    rows = table(comparisons).splitlines()[2:]
    assert rows == [
        f"| recorded | {said} | 18 | 72 | {sum(cycles)} | 18 | 18 |"
        for said, cycles in (("hidden", hidden), ("not hidden", shown))
    ]


def test_a_clock_that_differs_is_said(newton, fake):
    comparisons = compare(fake, [("mine", "stream", program(STREAM))], newton)
    assert [comparison.cycles_agree for comparison in comparisons] == [False, False]
    assert table(comparisons).splitlines()[2].endswith("| 0 | 0 |")


def test_the_command_compares_a_layer_in_each_loop_order(fake, capsys):
    command = ["compare-simulator", "fc:64,32", "--pim-channels", "2", "--quiet", "--profiler"]
    assert main([*command, f"pim=ramulator:{fake}"]) == 0
    *rows, last = capsys.readouterr().out.splitlines()
    assert len(rows) > 1 and all(re.search(r": \d+ cycles, simulated \d+ \(", row) for row in rows)
    assert last == f"{len(rows)} programs, 0 with equal cycles"
