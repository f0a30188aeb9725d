"""Kill and interrupt commands at random times, and check what they leave: a table of docs/validation.md.

Times are uniform over the duration of a command, from when it handles signals. A killed command prints
nothing; an interrupted one prints one line and exits with 130. Neither may leave processes, files outside of
the cache, or a cache that cannot be read. With ``--counts``, a run continues where the last one stopped.

With ``--start-up``, commands are interrupted 0 to 200 ms after their process starts, also while Python starts
and they do not handle signals yet: that is another table.

    python scripts/kill_commands.py --times 100 [--counts FILE] --update docs/validation.md
    python scripts/kill_commands.py --start-up --update docs/validation.md
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from update_readme import fill

from pimflow.host.files import replace_file

COMMANDS = (
    "compile toy -o out --jobs 2 --quiet",
    "profile toy --jobs 2 --quiet",
    "sweep toy --set pim_channels=8,16 --jobs 2 -o out --quiet",
    "memory toy --quiet",
    "fuse squeezenet-1.1 --quiet",
    "trace conv:1x64x28x28,64,1x1 --format pim -o out --quiet",
    "simulate layer.pimprog --json",
    "generate tiny-lm --tokens 3,4 -n 2 --context 16 --jobs 2 --quiet",
)
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM}
FLAWS = ("traceback", "hang", "exit code", "stderr", "orphan", "litter", "half-written", "cache")
EARLY = "devices newton-gddr6"
EARLY_MS = range(0, 205, 5)
LEAVE_SECONDS = 5.0  # until workers must have exited
HANG_SECONDS = 120.0
INTERRUPTED = 130
INTERRUPT_MESSAGE = "pimflow: interrupted\n"
LACKS = re.compile(r"pimflow: interrupted: out is whole, and its report lacks [^\n]*\n")  # some conventions
OUTCOMES = ("130 and one line", "no word, by the signal", "Python's traceback", "through", "other")


@dataclass(frozen=True, kw_only=True)
class CommandOutcome:
    """What a command did.

    Attributes
    ----------
    flaws : tuple of str
        Kinds of what should not be.
    seconds : float
        From when it took signals.
    finished : bool
        It was through before the signal came.
    """

    flaws: tuple[str, ...] = ()
    seconds: float = 0.0
    finished: bool = False
    detail: str = ""


def takes_signals(pid: int) -> bool:
    """Whether a process has a handler for SIGTERM, by Linux's status file."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return True  # it is gone
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> signal.SIGTERM - 1 & 1) or "State:\tZ" in "\n".join(lines)


def session_members(leader: int) -> list[int]:
    """Processes of a session, but its leader."""
    listed = ["ps", "-o", "pid=", "-s", str(leader)]
    done = subprocess.run(listed, capture_output=True, text=True, check=False)
    return [pid for pid in map(int, done.stdout.split()) if pid != leader]


def strike(options: str, layer: Path, cache: Path, stop: int | None, delay_seconds: float) -> CommandOutcome:
    """Run a command in an empty folder, and signal it `delay_seconds` after it handles signals."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as scratch:
        shutil.copy(layer, folder)
        environment = {**os.environ, "PIMFLOW_CACHE": str(cache), "TMPDIR": scratch}
        process = subprocess.Popen(
            [sys.executable, "-m", "pimflow", *options.split()],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        while not takes_signals(process.pid):
            time.sleep(0.001)
        begin, finished = time.monotonic(), True
        try:
            _, message = process.communicate(timeout=delay_seconds if stop else HANG_SECONDS)
        except subprocess.TimeoutExpired:
            finished = False
            if stop == signal.SIGINT:
                os.killpg(process.pid, stop)  # as a terminal does
            else:
                process.send_signal(stop or signal.SIGKILL)
            try:
                _, message = process.communicate(timeout=HANG_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return CommandOutcome(flaws=("hang",), detail=f"{options}: hangs after signal {stop}")
        seconds = time.monotonic() - begin
        deadline = time.monotonic() + LEAVE_SECONDS
        while session_members(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        flaws = [*_message_flaws(process.returncode, message, finished, stop)]
        if session_members(process.pid):
            flaws.append("orphan")
            os.killpg(process.pid, signal.SIGKILL)
        leftovers = _leftovers((folder, scratch), {layer.name, "out"}, stop)
        if leftovers:
            flaws.append("litter")
        out = Path(folder) / "out"
        if out.exists() and options.startswith("compile") and not (out / "interface.json").exists():
            flaws.append("half-written")
        if not _is_whole(cache):
            flaws.append("cache")
        detail = (
            f"{options}: {stop!r} after {delay_seconds:.3f} s, code {process.returncode}, {leftovers}: "
            f"{message}"
        )
        return CommandOutcome(flaws=tuple(flaws), seconds=seconds, finished=finished, detail=detail)


def _leftovers(folders: tuple[str, str], expected: set[str], stop: int | None) -> list[str]:
    """Names of files that a command left beside `expected`."""
    names = {path.name for folder in folders for path in Path(folder).iterdir()} - expected
    if stop == signal.SIGKILL:  # the next run for this place removes it: host/directories.py
        names = {name for name in names if not name.startswith(".out.new.")}
    return sorted(names)


def _message_flaws(code: int, message: str, finished: bool, stop: int | None) -> list[str]:
    """What is wrong with an exit code and stderr; 0 is right also where the signal came at the very end."""
    if "Traceback" in message or "Exception ignored" in message:
        return ["traceback"]
    right = {0: ""}
    if not finished:
        right |= {-stop: ""} if stop == signal.SIGKILL else {INTERRUPTED: INTERRUPT_MESSAGE}
    if code not in right:
        return ["exit code"]
    return [] if message == right[code] or (code == INTERRUPTED and LACKS.fullmatch(message)) else ["stderr"]


def _is_whole(cache: Path) -> bool:
    if not cache.exists():
        return True
    with sqlite3.connect(cache) as file:
        return file.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def interrupt_at_start(command: Sequence[str], delay_seconds: float, folder: Path) -> tuple[bool, str]:
    """Interrupt a starting command: whether it already handled signals, and its outcome."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    time.sleep(delay_seconds)
    took_signals = takes_signals(process.pid)
    process.send_signal(signal.SIGINT)
    _, message = process.communicate(timeout=HANG_SECONDS)
    outcome = early_outcome(process.returncode, message)
    if outcome == OUTCOMES[-1]:
        print(f"after {delay_seconds * 1e3:.0f} ms: code {process.returncode}: {message}", file=sys.stderr)
    return took_signals, outcome


def early_outcome(code: int, message: str) -> str:
    """Which of `OUTCOMES` an exit code and stderr are."""
    outcomes = {
        (INTERRUPTED, INTERRUPT_MESSAGE): OUTCOMES[0],
        (-signal.SIGINT, ""): OUTCOMES[1],
        (0, ""): OUTCOMES[3],
    }
    if (code, message) in outcomes:
        return outcomes[code, message]
    is_python = "Traceback (most recent call last)" in message or message.startswith("Fatal Python error")
    return OUTCOMES[2] if is_python else OUTCOMES[4]


def start_up_table() -> tuple[str, int]:
    """Interrupt commands early: the table, and the number of wrong outcomes."""
    header = ("command", "took signals", "runs", *OUTCOMES)
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    bad = 0
    commands = {
        "`pimflow`": [str(Path(sys.executable).with_name("pimflow"))],
        "`python -m pimflow`": [sys.executable, "-m", "pimflow"],
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, command in commands.items():
            outcome_counts: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
            for delay_ms in EARLY_MS:
                took_signals, outcome = interrupt_at_start(
                    [*command, *EARLY.split()], delay_ms / 1e3, Path(folder)
                )
                outcome_counts[took_signals][outcome] += 1
                if outcome == OUTCOMES[4] or (took_signals and outcome not in (OUTCOMES[0], OUTCOMES[3])):
                    bad += 1
                    print(f"{name} after {delay_ms} ms: {outcome}", file=sys.stderr, flush=True)
            for took_signals, counts in outcome_counts.items():
                runs = (counts.total(), *(counts[kind] for kind in OUTCOMES))
                lines.append(
                    f"| {' | '.join(map(str, (name, 'yes' if took_signals else 'not yet', *runs)))} |"
                )
    return "\n".join(lines), bad


def attack(
    times: int, seed: int, kinds: Sequence[str], commands: Sequence[str], path: Path | None
) -> tuple[str, int]:
    """Signal commands at random times: the table, and the number of wrong outcomes.

    Parameters
    ----------
    path : Path, optional
        Counts by signal of earlier runs, to which those of this run are added.
    """
    counts = json.loads(path.read_text(encoding="utf-8")) if path and path.exists() else {}
    header = ("signal", "runs", "struck in time", *FLAWS)
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    bad = 0
    with tempfile.TemporaryDirectory() as name:
        layer = _program(Path(name))
        seconds = {entry: _full_run_seconds(entry, layer, Path(name)) for entry in commands}
        for kind in kinds:
            kind_counts = Counter(counts.get(kind, {}))
            while kind_counts["struck in time"] < times:
                turn = kind_counts["runs"]
                options = commands[turn % len(commands)]
                delay_seconds = random.Random(f"{seed} {kind} {turn}").uniform(0, seconds[options])
                outcome = strike(options, layer, Path(name) / "cache", SIGNALS[kind], delay_seconds)
                kind_counts.update({"runs": 1, "struck in time": not outcome.finished})
                kind_counts.update(outcome.flaws)
                if outcome.flaws:
                    bad += 1
                    print(f"{', '.join(outcome.flaws)}: {outcome.detail}", file=sys.stderr, flush=True)
                if path:
                    replace_file(path, json.dumps(counts | {kind: kind_counts}, indent=1).encode())
            counts[kind] = dict(kind_counts)
            lines.append(f"| {' | '.join(map(str, (kind, *(kind_counts[entry] for entry in header[1:]))))} |")
            print(lines[-1], flush=True)
    lines += ["", f"Commands, in turn: {', '.join(f'`{entry}`' for entry in commands)}."]
    return "\n".join(lines), bad


def main(argv: Sequence[str] | None = None) -> int:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=10, metavar="N", help="signals that strike in time")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--only", metavar="TEXT", default="", help="commands that contain it")
    parser.add_argument("--signals", nargs="+", default=["SIGKILL", "SIGINT"], choices=SIGNALS)
    parser.add_argument("--counts", type=Path, metavar="FILE", help="go on from these counts, and store them")
    parser.add_argument("--start-up", action="store_true", help="interrupt commands that just begin")
    parser.add_argument("--update", type=Path, metavar="PAGE", help="write the table there too")
    args = parser.parse_args(argv)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background: children inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if args.start_up_table:
        table, bad = start_up_table()
        print(table)
    else:
        commands = [options for options in COMMANDS if args.only in options]
        table, bad = attack(args.times, args.seed, args.signals, commands, args.counts)
    if args.update:
        text = args.update.read_text(encoding="utf-8")
        args.update.write_text(
            fill(text, "start-up" if args.start_up_table else "kills", table), encoding="utf-8"
        )
    return 1 if bad else 0


def _program(folder: Path) -> Path:
    """Write a ``.pimprog`` of one layer."""
    command = [sys.executable, "-m", "pimflow", "trace", "conv:1x64x28x28,64,1x1", "--format", "pimprog"]
    subprocess.run([*command, "-o", str(folder / "made"), "--quiet"], check=True, stdout=subprocess.DEVNULL)
    (program,) = (folder / "made").rglob("*.pimprog")
    return Path(shutil.copy(program, folder / "layer.pimprog"))


def _full_run_seconds(options: str, layer: Path, folder: Path) -> float:
    """Seconds of a command with an empty cache, without a signal."""
    with tempfile.TemporaryDirectory(dir=folder) as empty:
        outcome = strike(options, layer, Path(empty) / "cache", None, 0.0)
    if outcome.flaws:
        raise SystemExit(f"{outcome.flaws}, undisturbed: {outcome.detail}")
    return outcome.seconds


if __name__ == "__main__":
    sys.exit(main())
