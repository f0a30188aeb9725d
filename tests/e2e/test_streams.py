"""Does a command end as it should, whatever becomes of its standard streams?"""

import contextlib
import io
import os
import subprocess
import sys

import pytest

from pimflow.commands import parser
from pimflow.commands.command_line import output, streams
from pimflow.commands.main import main
from pimflow.errors import UsageError

ARGS = parser.parse(["compile", "toy"])

TABLE = "id,lower,upper,size\na,0,2,64\nb,1,3,64\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "buffers.csv").write_text(TABLE)
    return tmp_path


def run(folder, **options) -> subprocess.Popen:
    """`pimflow memory` in a process, which says on stderr that it plans."""
    command = [sys.executable, "-m", "pimflow", "memory", "buffers.csv", "-o", "plan.csv"]
    return subprocess.Popen(command, cwd=folder, text=True, **options)


def broken_pipe() -> int:
    """The writing end of a pipe whose reader has gone."""
    read, write = os.pipe()
    os.close(read)
    return write


@pytest.mark.long
def test_streams_that_were_closed_before(folder):
    """What is written must not get their numbers: TVM and C write to them."""
    process = run(folder, preexec_fn=lambda: [os.close(number) for number in (0, 1, 2)])
    assert process.wait(timeout=60) == 0
    lines = (folder / "plan.csv").read_text().splitlines()
    assert lines[0] == "id,lower,upper,size,offset" and len(lines) == 3


def test_results_that_cannot_be_written_are_an_error(folder):
    with open("/dev/full", "w") as full:
        process = run(folder, stdout=full, stderr=subprocess.PIPE)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 3
    error = "pimflow: error: standard output cannot be written: No space left on device"
    assert err.splitlines()[-1] == error


def test_readers_that_have_gone_stop_nothing(folder):
    process = run(folder, stdout=broken_pipe(), stderr=broken_pipe())
    assert process.wait(timeout=60) == 0
    assert (folder / "plan.csv").exists()


def test_progress_that_nobody_reads():
    with open(broken_pipe(), "w") as pipe:
        progress = streams.LossyStream(pipe)
        for _ in range(3):
            print("planning …" * 10000, file=progress, flush=True)


def test_what_a_terminal_cannot_say_is_a_question_mark():
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with contextlib.redirect_stdout(narrow), streams.buffer_results():
        print("13.20 → 15.44 us \udcff")
    assert narrow.buffer.getvalue() == b"13.20 ? 15.44 us ?\n"


@pytest.mark.parametrize("error", [UsageError("no"), KeyboardInterrupt()])
def test_of_a_command_that_fails_nothing_is_printed(capsys, error):
    with pytest.raises(type(error)), streams.buffer_results():
        print("half of it")
        raise error
    assert capsys.readouterr().out == ""


def test_an_error_is_one_line_whatever_names_hold(capsys):
    assert main(["compile", "toy\nb\x1b[31m.onnx"]) == 3
    err = capsys.readouterr().err
    assert "toy\\nb\\x1b[31m.onnx" in err.splitlines()[-1] and "\x1b" not in err


STEERING = "conv\x1b[2J\x1b]0;title\x07\r\x9b1A\u202egnp"  # clears the screen, turns text round


def test_names_do_not_steer_a_terminal(capsys):
    with streams.buffer_results():
        print(f"{STEERING}\tname\nmore \u200d\u00e9")
    output.warn(STEERING)
    with output.status(ARGS) as progress:
        progress(STEERING)
    out, err = capsys.readouterr()
    assert out.count("\n") == 2 and "\tname" in out and "\u200d\u00e9" in out
    for text in (out, err):
        assert not set(text) & set("\x1b\x07\r\x9b\u202e")
        assert r"\x1b[2J" in text and r"\u202e" in text


def test_names_are_no_markup_of_rich(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(output, "BAR_DELAY_SECONDS", -1)
    with contextlib.redirect_stderr(terminal):
        with output.bar("[/name][red]timed", ARGS) as advance:
            advance(0.5)
        with output.status(ARGS) as progress:
            progress("[/name][red]read\x07")
    assert "[/name][red]timed" in terminal.getvalue() and "\x07" not in terminal.getvalue()
