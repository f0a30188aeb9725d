"""PIM times from an installed Ramulator: the PIMFlow authors' public fork.

It is run as ``ramulator CONFIG --mode=dram --stats FILE TRACE``, once for every distinct channel. It prints
the commands that it issued (``COMP N`` and so on), and then its clock as ``Cycle N``.

Source: github.com/akothen/PIMFlow_ramulator, ``src/Main.cpp`` (arguments), ``Controller::finish`` in
``src/Controller.h`` (output), ``configs/GDDR6-config.cfg``; github.com/yongwonshin/PIMFlow, ``pimflow``
(the environment variable), read 2026-11.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from pimflow.core.program import PimProgram
from pimflow.errors import ProfilerError, SpecError
from pimflow.hardware.pim import PimSpec
from pimflow.simulators.installed import InstalledSimulator
from pimflow.simulators.pim.expansion import command_counts, pim_text
from pimflow.simulators.pim.timing import TimingResult
from pimflow.simulators.pim.trace import blocks

TIMEOUT_SECONDS = 600.0
NO_HIDING = "RAMULATOR_DISABLE_GWRITE_LATENCY_HIDING"
CONFIG = """\
standard = GDDR6
channels = 1
ranks = 1
speed = GDDR6_3500
org = GDDR6_8Gb_x16
record_cmd_trace = off
print_cmd_trace = off
cpu_tick = 2
mem_tick = 1
early_exit = on
expected_limit_insts = 200000000
warmup_insts = 100000000
cache = no
translation = None
"""
# Latencies of GDDR6_3500, which are compiled in; it would time a device with others wrongly.
LATENCIES_CYCLES = {
    "nBL": 2,
    "nCCDS": 2,
    "nCL": 11,
    "nRCDR": 11,
    "nRP": 11,
    "nRC": 35,
    "nFAW": 17,
    "nRFC": 350,
    "nREFI": 1900,
}
ORGANISATION = {"gangs": 4, "banks_per_gang": 4, "columns_per_row": 32}
PRINTED = ("GWRITE", "G_ACT", "COMP", "READRES", "PREA", "PRE", "REF", "Cycle")
_SENT = ("GWRITE", "COMP", "READRES")


@dataclass(frozen=True)
class Ramulator:
    """A `PimProfiler` that runs the fork.

    Parameters
    ----------
    executable : str
        A path, or a name that is searched in ``PATH``.
    gwrite_hiding : bool
        Whether the fork hides the latency of a GWRITE.
    timeout_seconds : float
        For one channel.

    Raises
    ------
    ProfilerError
        If there is no such file, or it cannot be executed. When a program is timed: if it fails, exceeds the
        timeout, or does not print a clock and the right counts of commands.
    """

    executable: str
    gwrite_hiding: bool = True
    timeout_seconds: float = TIMEOUT_SECONDS
    _outputs: dict[bytes, Counter[str]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        path = Path(self.executable)
        if os.sep not in self.executable:
            path = Path(shutil.which(self.executable) or self.executable)
        if not path.exists():
            raise ProfilerError(f"ramulator '{self.executable}': there is no such file")
        if not path.is_file() or not os.access(path, os.X_OK):
            raise ProfilerError(f"ramulator '{self.executable}': not an executable file")
        object.__setattr__(self, "executable", str(path.resolve()))

    @property
    def name(self) -> str:
        return f"ramulator:{Path(self.executable).name}"

    @functools.cached_property
    def identity(self) -> str:
        """Its name, the digest of the executable, and the option: the key of stored results."""
        digest = hashlib.sha256(Path(self.executable).read_bytes()).hexdigest()
        return f"{self.name} {digest}" + ("" if self.gwrite_hiding else " without hiding")

    def require_device(self, pim: PimSpec) -> None:
        _check_device(pim)

    def time_program(self, program: PimProgram, pim: PimSpec) -> TimingResult:
        """Time every channel of a program; channels with equal traces are run once."""
        _check_device(pim)
        printed, bursts = [], []
        for channel in range(len(program.channels)):
            with tempfile.TemporaryDirectory(prefix="pimflow-") as folder:
                path, digest = _write(program, channel, Path(folder))
                sent = command_counts(replace(program, channels=(program.channels[channel],)))
                printed.append(self._time(path, digest, sent))
                bursts.append(sent["gwrite_bursts"])
        return self._result(printed, pim, bursts)

    def time_trace(
        self, path: str | os.PathLike[str], pim: PimSpec, progress: Callable[[float], None] = lambda _: None
    ) -> TimingResult:
        """Time the ``.pim`` trace of one channel; a GWRITE counts as a whole buffer."""
        _check_device(pim)
        for _ in blocks(path, progress):  # the fork aborts without a message on a malformed line
            pass
        sent = _count_lines(path)
        printed = self._time(Path(path).resolve(), None, sent)
        return self._result([printed], pim, [sent["GWRITE"] * pim.buffer_columns])

    def _time(self, trace: Path, digest: bytes | None, sent: Counter[str]) -> Counter[str]:
        if digest in self._outputs:
            return self._outputs[digest]
        printed = self._run(trace)
        for name in _SENT:
            if printed[name] != sent[name]:
                raise ProfilerError(
                    f"{self._who}: it counts {printed[name]} {name} commands in a trace of {sent[name]}"
                )
        if printed["Cycle"] < sum(sent[name] for name in _SENT):
            raise ProfilerError(f"{self._who}: {printed['Cycle']} cycles are fewer than the commands issued")
        if digest is not None:
            self._outputs[digest] = printed
        return printed

    def _run(self, trace: Path) -> Counter[str]:
        environment = {name: value for name, value in os.environ.items() if name != NO_HIDING}
        if not self.gwrite_hiding:
            environment[NO_HIDING] = "1"
        with tempfile.TemporaryDirectory(prefix="pimflow-") as folder:
            config, output = Path(folder, "config.cfg"), Path(folder, "output.txt")
            config.write_text(CONFIG, encoding="ascii")
            command = [self.executable, str(config), "--mode=dram", "--stats", f"{folder}/stats", str(trace)]
            simulator = InstalledSimulator(
                name=self._who, timeout_seconds=self.timeout_seconds, environment=environment
            )
            simulator.run(command, output)
            with output.open(encoding="utf-8", errors="replace") as lines:
                return parse_output(lines, self._who)

    @property
    def _who(self) -> str:
        return f"ramulator '{self.executable}'"

    def _result(self, channels: list[Counter[str]], pim: PimSpec, gwrite_bursts: list[int]) -> TimingResult:
        total = sum(channels, Counter())
        channel_cycles = tuple(channel["Cycle"] for channel in channels)
        cycles = max(channel_cycles)
        commands = tuple(_commands(channel) for channel in channels)
        return TimingResult(
            cycles=cycles,
            time_ns=cycles * pim.tCK_ns,
            commands=_commands(total),
            channel_commands=commands,
            timing=self.name,
            pim=pim.name,
            utilisation=total["COMP"] * pim.timing["nCCDS"] / (cycles * len(channels)),
            gwrite_bursts=sum(gwrite_bursts),
            channel_gwrite_bursts=tuple(gwrite_bursts),
            channel_write_bursts=(0,) * len(gwrite_bursts),  # a program with WRITEs is refused
            channel_cycles=channel_cycles,
            violations=None,
        )


def _commands(printed: Counter[str]) -> dict[str, int]:
    """Commands by canonical name; the fork counts PREs of one bank and of all banks separately."""
    commands = {name: printed[name] for name in ("GWRITE", "G_ACT", "COMP", "READRES")}
    return commands | {"PRE": printed["PREA"] + printed["PRE"], "REF": printed["REF"]}


def parse_output(lines: Iterable[str], who: str = "ramulator") -> Counter[str]:
    """Counts of commands and ``Cycle`` from the output of the fork.

    Raises
    ------
    ProfilerError
        If a required line is missing or appears twice.
    """
    printed: Counter[str] = Counter()
    seen = set()
    for line in lines:
        match = re.fullmatch(rf"({'|'.join(PRINTED)}) ([0-9]{{1,18}})", line.rstrip("\r\n"), re.ASCII)
        if match is None:
            continue
        if match[1] in seen:
            raise ProfilerError(f"{who}: it printed '{match[1]}' twice; is it the PIMFlow fork?")
        seen.add(match[1])
        printed[match[1]] = int(match[2])
    for name in PRINTED:
        if name not in seen:
            raise ProfilerError(f"{who}: it printed no line '{name} <number>'; is it the PIMFlow fork?")
    if not printed["Cycle"]:
        raise ProfilerError(f"{who}: it printed 0 cycles")
    return printed


def _write(program: PimProgram, channel: int, folder: Path) -> tuple[Path, bytes]:
    """Write the trace of one channel to a file; returns its path and the digest of its text."""
    path, digest = folder / "channel.pim", hashlib.sha256()
    with path.open("wb") as file:
        for text in pim_text(program, channel):
            digest.update(text)
            file.write(text)
    return path, digest.digest()


def _count_lines(path: str | os.PathLike[str]) -> Counter[str]:
    """Counts of commands of a well-formed trace."""
    counts: Counter[str] = Counter()
    with open(path, encoding="ascii") as file:
        for line in file:
            command = line if line.startswith("READRES") else line.split(maxsplit=1)[1]
            counts[next((name for name in _SENT if name in command), "G_ACT")] += 1
    return counts


def _check_device(pim: PimSpec) -> None:
    """Raise `SpecError` unless `pim` is the device that the fork is compiled for."""
    actual = {**pim.timing, **{name: getattr(pim, name) for name in ORGANISATION}}
    for name, value in (LATENCIES_CYCLES | ORGANISATION).items():
        if actual.get(name) != value:
            raise SpecError(
                f"pim '{pim.name}': Ramulator's device has {name} {value}, not {actual.get(name)}; "
                f"time it with --timing"
            )
