"""Does a command that is killed or interrupted at any moment leave nothing behind, and say one line?"""

import os
import signal
import subprocess
import sys
import time

import pytest
from length import long_but

from pimflow.commands.main import main
from pimflow.errors import UsageError
from pimflow.host import directories, interrupts

MARKED = directories.DirectoryKind(name="a mark", mark="mark", seals=lambda _: {"mark": None})
SIGNALS = (signal.SIGINT, signal.SIGTERM)
WORKERS = """
import time
from pimflow.host.executors import Processes
print("begins", flush=True)
list(Processes(2).map(time.sleep, [60.0, 60.0]))
"""
COMMAND = """
import sys, types
import pimflow.__main__
from pimflow.commands import main
from pimflow.errors import PimflowError
import signal

def work(argv):
{work}

main._run = work
pimflow.__main__.run()
"""
# What libraries make of an interrupt.
LOST = {
    "another error": """
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt as error:
        raise ImportError("initialization failed") from error
""",
    "one of ours": """
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt as error:
        raise PimflowError("cannot be read") from error
""",
    "a destructor": """
    class Held:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)
    held = Held()
    del held
    while True:
        pass
""",
    "code made at run time": """
    exec("signal.raise_signal(signal.SIGINT)", {"signal": signal})
""",
    "a warning of C++ code": """
    import os
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        os.write(2, b"Warning: BlockBuilder destroyed")
""",
    "what is hidden meanwhile": """
    import os
    from pimflow.host import stderr
    try:
        with stderr.hidden():
            signal.raise_signal(signal.SIGINT)
    finally:
        os.write(2, b"Warning: BlockBuilder destroyed")
""",
    "nothing": """
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        return 0, ""
""",
}


def members(session: int) -> list[str]:
    """The processes of a session."""
    listed = ["ps", "-o", "pid=,args=", "-s", str(session)]
    return subprocess.run(listed, capture_output=True, text=True, check=False).stdout.splitlines()


def ends_in_time(session: int, seconds: float = 20.0) -> bool:
    """Whether a session ends within a while."""
    until = time.monotonic() + seconds
    while members(session):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.long
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("after", long_but(["start"], ["start", "import", "work"]))
def test_workers_end_with_their_parent(tmp_path, stop, after):
    """While they start, import and work: nobody is left, nothing in a folder, and stderr is the parent's."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", WORKERS], env=environment, **streams)
    assert process.stdout.readline() == "begins\n"
    if after != "start":
        until = time.monotonic() + 60
        min_members = 2 if after == "import" else 3  # the parent, a worker, the one that forks from it
        while len(members(process.pid)) < min_members and time.monotonic() < until:
            time.sleep(0.05)
    os.killpg(process.pid, stop) if stop == signal.SIGINT else process.send_signal(stop)
    _, err = process.communicate(timeout=60)  # a worker that lived on would hold the pipe
    assert process.returncode == -stop
    # Without the command's handler, Python says what interrupted the parent; nobody else says anything.
    assert err.count("Traceback") == (stop == signal.SIGINT) and err.count("KeyboardInterrupt") <= 1, err
    assert ends_in_time(process.pid)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("work", LOST.values(), ids=LOST)
def test_an_interrupt_is_130_and_one_line_whatever_a_library_makes_of_it(tmp_path, work):
    command = [sys.executable, "-c", COMMAND.format(work=work)]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (process.returncode, process.stderr) == (130, "pimflow: interrupted\n")


@pytest.mark.parametrize("stop", SIGNALS)
def test_signals_are_remembered_and_handlers_come_back(stop):
    before = [signal.getsignal(signum) for signum in SIGNALS]
    with interrupts.command_interrupts() as running:
        with pytest.raises(KeyboardInterrupt), interrupts.defer_interrupts():
            signal.raise_signal(stop)
        assert running.interrupted
    assert [signal.getsignal(signum) for signum in SIGNALS] == before


def test_what_is_ignored_stays_ignored(monkeypatch):
    """As in ``nohup pimflow …``."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts.command_interrupts() as running:
            signal.raise_signal(signal.SIGINT)
        assert not running.interrupted and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_errors_of_commands_that_nobody_interrupts_stay(monkeypatch, capsys):
    def raise_usage_error(_argv):
        raise UsageError("not this")

    monkeypatch.setattr("pimflow.commands.parser.parse", raise_usage_error)
    assert main([]) == 2 and capsys.readouterr().err == "pimflow: error: not this\n"


def test_the_reference_tells_nobody(tmp_path):
    """ONNX Runtime writes a file of its own, and sends what it finds, unless it is told not to."""
    code = "import pimflow, onnxruntime"
    environment = {name: value for name, value in os.environ.items() if "TELEMETRY" not in name}
    subprocess.run([sys.executable, "-c", code], check=True, env={**environment, "TMPDIR": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []


def test_the_next_run_removes_what_a_killed_one_left(tmp_path, monkeypatch):
    """But not what another run is writing, nor what it has just made."""
    monkeypatch.setattr(directories, "_MIN_STALE_SECONDS", 0.0)
    leftover = tmp_path / ".out.new.0123456789ab"
    (leftover / "programs").mkdir(parents=True)
    beside = tmp_path / ".other.new.0123456789ab"
    beside.mkdir()
    with directories.new_directory(tmp_path / "out", MARKED) as first:
        assert not leftover.exists() and beside.exists()
        with directories.new_directory(tmp_path / "out", MARKED) as second:
            assert first.exists()
            (second / "mark").touch()
        monkeypatch.setattr(directories, "_MIN_STALE_SECONDS", 60.0)
        leftover.mkdir()
        (first / "mark").touch()
    with directories.new_directory(tmp_path / "out", MARKED) as third:
        assert leftover.exists()
        (third / "mark").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([leftover.name, beside.name, "out"])
