"""``pimflow simulate``: what it says about a file, good or bad."""

import json
import os
import re
import signal
import subprocess
import sys
import tracemalloc
from dataclasses import replace

import pytest
from timing_programs import act, act_all, comp, loop, program, read, store, write

from pimflow.commands import main
from pimflow.commands.command_line import output
from pimflow.core.kernel import ConvGeometry
from pimflow.hardware.pim import PimSpec
from pimflow.hardware.reader import SPECS
from pimflow.simulators.pim import trace
from pimflow.simulators.pim.expansion import command_counts
from pimflow.simulators.pim.timing import issue_program, issue_trace, time_program, time_trace
from pimflow.simulators.pim.trace import expand_to_pim

BLOCK = (write(), *act_all(), comp(32), read())
TEXT = expand_to_pim(program(BLOCK), 0)


def simulate(capsys, path, *options):
    code = main.main(["simulate", str(path), *options])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (TEXT + b"0x00000", ":39: the last line does not end in a newline: '0x00000'"),
        (TEXT + b"READRES", ":39: the last line does not end in a newline: 'READRES'"),
        (b"\x7fELF\x00\x01\n" * 9, ":1: missing address or command: "),
        (TEXT.replace(b"\n", b"\r\n"), ":2: the line ends in CRLF, not LF: "),
        (TEXT + b"0x00000000 MAC_ABK\n", ":39: unknown command: '0x00000000 MAC_ABK'"),
        (TEXT + b"0x20000000 COMP\n", ":39: address is beyond 29 bits: '0x20000000 COMP'"),
        (TEXT + b"\n" + TEXT, ":39: blank line: ''"),
    ],
    ids=("truncated", "no newline", "binary", "CRLF", "unknown", "address", "blank"),
)
@pytest.mark.parametrize("block_bytes", (1 << 22, 100))
def test_bad_traces(capsys, tmp_path, monkeypatch, text, says, block_bytes):
    monkeypatch.setattr(trace, "_BLOCK_BYTES", block_bytes)
    path = tmp_path / "bad.pim"
    path.write_bytes(text)
    code, out, err = simulate(capsys, path)
    assert (code, out) == (3, "")
    assert err.startswith(f"pimflow: error: {path}{says}") and err.count("\n") == 1


def test_a_directory_is_told_where_its_programs_are(capsys, tmp_path):
    code, out, err = simulate(capsys, tmp_path)
    assert (code, out) == (2, "") and "a directory; give a program in it, of 'programs'" in err


def test_a_line_without_end(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "_BLOCK_BYTES", 1000)
    path = tmp_path / "bad.pim"
    path.write_bytes(TEXT + b"\0" * 5000)
    code, _, err = simulate(capsys, path)
    assert code == 3 and f"{path}:39: a line of more than 1000 bytes" in err and len(err) < 400


def test_what_the_device_lacks_has_a_line(capsys, tmp_path):
    small = tmp_path / "small.toml"
    text = (SPECS / "pim/newton-gddr6.toml").read_text(encoding="utf-8")
    small.write_text(text.replace("value = 16384", "value = 100"), encoding="utf-8")
    assert PimSpec.load(small).rows_per_bank == 100
    path = tmp_path / "row.pim"
    path.write_bytes(TEXT + b"0x%08x COMP\n" % (100 << 11))
    code, _, err = simulate(capsys, path, "--pim", str(small))
    assert code == 3 and f"{path}:39: row 100 is out of range: the device has 100" in err


def test_an_empty_trace_is_valid(capsys, tmp_path):
    path = tmp_path / "empty.pim"
    path.write_bytes(b"")
    for timing, cycles in (("strict", 0), ("ramulator-pimflow", 1)):
        code, out, err = simulate(capsys, path, "--timing", timing, "--json")
        assert (code, err, json.loads(out)["cycles"]) == (0, "", cycles)


def test_reads_of_an_empty_latch_are_a_warning(capsys, tmp_path):
    path = tmp_path / "reads.pim"
    path.write_bytes(b"READRES\n" + TEXT + b"READRES\nREADRES\n")
    for timing in ("strict", "ramulator-pimflow"):
        code, out, err = simulate(capsys, path, "--json", "--timing", timing)
        assert code == 0 and json.loads(out)["empty_reads"] == 3
        assert err.startswith("pimflow: warning: 3 READRES of an empty latch") and err.count("\n") == 1
    path.write_bytes(TEXT)
    assert simulate(capsys, path)[2] == ""


def test_bars_and_quiet(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "_BLOCK_BYTES", len(TEXT))
    monkeypatch.setattr(output, "BAR_DELAY_SECONDS", 0)
    path = tmp_path / "long.pim"
    path.write_bytes(TEXT * 20)
    code, _, err = simulate(capsys, path)
    assert code == 0 and err == "pimflow: simulating …\n"
    assert simulate(capsys, path, "--quiet")[2] == ""


@pytest.mark.parametrize("timing", ("strict", "ramulator-pimflow"))
@pytest.mark.parametrize("block_bytes", (17, 101, 5000))
def test_blocks_change_nothing(monkeypatch, timing, block_bytes):
    spec, text = PimSpec.load("newton-gddr6"), TEXT * 150
    expected = time_trace(text, spec, timing)
    monkeypatch.setattr(trace, "_BLOCK_BYTES", block_bytes)
    assert time_trace(text, spec, timing) == expected
    assert (trace.Trace.read(text).words == trace.Trace.read(TEXT).words.tolist() * 150).all()


def test_memory_does_not_grow_with_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "_BLOCK_BYTES", 1 << 16)
    path, spec = tmp_path / "long.pim", PimSpec.load("newton-gddr6")
    path.write_bytes(TEXT * 10_000)
    tracemalloc.start()
    try:
        time_trace(path, spec)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 5_000_000 and peak_bytes < 1_000_000


def test_per_channel_counts_add_up():
    spec = PimSpec.load("newton-gddr6")
    result = time_program(program(BLOCK, (), BLOCK * 70), spec)
    assert [c["COMP"] for c in result.channel_commands] == [32, 0, 32 * 70]
    assert result.channel_commands[2]["REF"] > 0
    for name, count in result.commands.items():
        assert sum(commands[name] for commands in result.channel_commands) == count


def interrupt_text(process: subprocess.Popen) -> str:
    """What it says on stderr. Python sees a signal just before a read only after it: users press again."""
    for _ in range(10):
        process.send_signal(signal.SIGINT)
        try:
            return process.communicate(timeout=2)[1]
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError("not to be interrupted")


@pytest.mark.long
def test_interrupt(tmp_path):
    """While it waits for a trace that is still being written."""
    path = tmp_path / "endless.pim"
    os.mkfifo(path)
    command = [sys.executable, "-m", "pimflow", "simulate", str(path)]
    # The pipe opens once the other side reads.
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process, path.open("wb") as pipe:
        pipe.write(TEXT)
        pipe.flush()
        assert interrupt_text(process) == "pimflow: interrupted\n"
    assert process.returncode == 130


def test_a_program_that_nobody_could_expand(capsys, tmp_path):
    path = tmp_path / "long.pimprog"
    path.write_text(program((loop(1 << 20, loop(1 << 20, *BLOCK)),)).to_json(), encoding="utf-8")
    code, out, err = simulate(capsys, path, "--json")
    assert (code, err) == (0, "")
    row = json.loads(out)
    assert row["commands"]["COMP"] == 32 << 40 and row["timing_violations"] is None
    (channel,) = row["channels"]
    assert (channel["cycles"], channel["commands"]) == (row["cycles"], row["commands"])
    energy_pj = row["energy_pj"]
    assert channel["energy_pj"] == energy_pj and min(energy_pj.values()) > 0
    assert "legality not checked: a channel has more than" in simulate(capsys, path)[1]


def test_the_first_violations_are_named(tmp_path, capsys):
    """Rule, command and clock, of COMPs on a row that the second G_ACT of a gang left closed."""
    path = tmp_path / "wrong.pim"
    lines = TEXT.decode().splitlines(keepends=True)
    column = next(line for line in lines if line.endswith(" COMP\n"))
    other_row = f"0x{int(column.split()[0], 16) + (1 << 11):08x} COMP\n"
    path.write_text("".join(lines[:-1]) + other_row * 9 + lines[-1])
    code, out, _ = simulate(capsys, path)
    assert code == 0 and "9 timing violations\n" in out
    pattern = r"^  command (\d+) \(COMP at clock (\d+)\): row 1 is not open in every bank$"
    named = re.findall(pattern, out, re.MULTILINE)
    assert len(named) == 5 and named == sorted(named, key=lambda violation: int(violation[1]))
    _, out, _ = simulate(capsys, path, "--json")
    row = json.loads(out)
    assert row["timing_violations"] == 9 and len(row["first_violations"]) == 5 and row["added"] is None


def test_words_of_a_trace_are_issued_as_the_program_they_are_of(tmp_path):
    """The clocks that violations are named by are those that the times are from."""
    device = PimSpec.load("newton-gddr6")
    blocks = (loop(40, *act_all(), write(), comp(32), read()),)
    words = trace.Trace.read(expand_to_pim(program(blocks), 0)).words
    assert (issue_trace(words, device) == issue_program(program(blocks), device, 0)).all()


def test_commands_that_the_device_adds_are_told_apart(tmp_path, capsys):
    """`pimflow trace` counts the program's commands, `pimflow simulate` those that are issued."""
    path = tmp_path / "long.pimprog"
    long = program((loop(400, *act_all(), write(), comp(32), read()),))
    path.write_text(long.to_json())
    code, out, _ = simulate(capsys, path, "--json", "--pim", "newton-gddr6")
    row = json.loads(out)
    program_counts = command_counts(long)
    assert code == 0 and row["added"]["REF"] > 0 and row["added"]["G_ACT"] >= 0
    assert {name: count - row["added"][name] for name, count in row["commands"].items()} == {
        name: program_counts[name] for name in row["commands"]
    }
    _, out, _ = simulate(capsys, path, "--pim", "newton-gddr6")
    assert f"  of these the device adds {row['added']['G_ACT']} G_ACT" in out or not row["added"]["G_ACT"]
    assert f"{row['added']['PRE']} PRE, {row['added']['REF']} REF; the others are the program's" in out


def test_a_program_that_appends_to_a_cache(capsys, tmp_path):
    """Only one of two channels writes; what it stores stands where products do."""
    act_and_store = (act(0), store(bursts=4))
    source = program(act_and_store, ())
    source = replace(source, geometry=ConvGeometry(n=1, h=1, w=1, c=64, oc=1), pixel_end=1)
    path = tmp_path / "append.pimprog"
    path.write_text(source.to_json())
    code, out, _ = simulate(capsys, path)
    assert code == 0 and "1 WRITE" in out and "uJ: write" in out
    assert "0 timing violations" in out and "each of 64 elements stored once" in out
    path.write_text(replace(source, channels=((act(0), store(bursts=3)), ())).to_json())
    assert "of 64 elements 16 missing" in simulate(capsys, path)[1]
