"""Reads logs of Accel-Sim and power reports of AccelWattch.

Files are read line by line, so that they need not fit in memory; files that end in ``.gz`` are decompressed.

Source: logs that Accel-Sim printed (GPGPU-Sim 4.2.0); accel-sim/gpgpu-sim_distribution,
``src/accelwattch/gpgpu_sim_wrapper.cc`` (``print_power_kernel_stats``), read 2026-11.
"""

from __future__ import annotations

import gzip
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pimflow.errors import TraceError

SENTINEL = "GPGPU-Sim: *** exit detected ***"
DRAM_UNIT_BYTES = 32  # that it counts as one DRAM read or write
_NUMBER = r"-?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|nan)"
_WHOLE = r"\d{1,18}"
# field -> (start of its line, pattern of its value)
_FIELDS = {
    "launch_uid": ("kernel_launch_uid", _WHOLE),
    "cycles": ("gpu_sim_cycle", _WHOLE),
    "instructions": ("gpu_sim_insn", _WHOLE),
    "ipc": ("gpu_ipc", _NUMBER),
    "total_cycles": ("gpu_tot_sim_cycle", _WHOLE),
    "total_instructions": ("gpu_tot_sim_insn", _WHOLE),
    "occupancy": ("gpu_occupancy", _NUMBER),
    "l2": ("L2_BW", _NUMBER),
    "reads": ("total dram reads", _WHOLE),
    "writes": ("total dram writes", _WHOLE),
}
_BY_START = {start: field for field, (start, _) in _FIELDS.items()}
_VALUES = {
    field: re.compile(rf"{re.escape(start)} *= *({value})(?:%| GB/Sec)?", re.ASCII)
    for field, (start, value) in _FIELDS.items()
}
_OPTIONS = {
    "-gpgpu_n_mem": "channels",
    "-gpgpu_clock_domains": "clock_mhz",
    "-gpgpu_n_clusters": "clusters",
    "-gpgpu_n_cores_per_cluster": "cores",
}
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True, kw_only=True)
class KernelLog:
    """One kernel of a run.

    Attributes
    ----------
    launch_uid : int
        Its number in the run, from 1.
    cycles : int
        Cycles of the core clock, launch included.
    instructions : int
        Instructions of threads: those of a warp count once a lane.
    ipc : float
        Instructions a cycle.
    occupancy : float
        Share of an SM's warp slots in use, over the SMs that had any warp.
    l2_gb_s : float
        Traffic between the SMs and the L2.
    dram_read_bytes, dram_write_bytes : int
        Writes that allocate in the L2 count as reads too.
    power : KernelPower, optional
        Where AccelWattch's report of the run is known.
    """

    name: str
    launch_uid: int
    cycles: int
    instructions: int
    ipc: float
    occupancy: float
    l2_gb_s: float
    dram_read_bytes: int
    dram_write_bytes: int
    power: KernelPower | None = None


@dataclass(frozen=True, kw_only=True)
class KernelPower:
    """One kernel of an AccelWattch report.

    Attributes
    ----------
    components_w : dict of str to float
        Its parts, by AccelWattch's names (``DRAMP``, ``L2CP``, ``STATICP``, …).
    run_average_w : float
        Average power of all kernels up to this one, inclusive.
    """

    name: str
    average_w: float
    components_w: dict[str, float]
    run_average_w: float


@dataclass(frozen=True, kw_only=True)
class AccelSimLog:
    """The log of a complete run.

    Attributes
    ----------
    channels : int, optional
        ``-gpgpu_n_mem`` of the configuration that the log repeats; None if it does not.
    clock_mhz : float, optional
        Clock of the cores.
    build : str
        Versions and commits at the top of the log; empty if there are none.
    """

    kernels: tuple[KernelLog, ...]
    channels: int | None = None
    clock_mhz: float | None = None
    sms: int | None = None
    build: str = ""

    @property
    def cycles(self) -> int:
        """Cycles of all kernels."""
        return sum(kernel.cycles for kernel in self.kernels)

    @property
    def dram_bytes(self) -> int:
        """DRAM traffic of all kernels, in both directions."""
        return sum(kernel.dram_read_bytes + kernel.dram_write_bytes for kernel in self.kernels)


def read_lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, str]]:
    """Lines of a text file, which may be gzipped, with their numbers from 1."""
    path = Path(path)
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8", errors="replace") as file:
            yield from enumerate(file, 1)
    except (OSError, EOFError) as error:  # gzip raises both on a file that was cut off
        raise TraceError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def read_log(path: str | os.PathLike[str]) -> AccelSimLog:
    """Read the log of a run.

    Raises
    ------
    TraceError
        With file and line, if it is malformed, or if the run was not complete.
    """
    reader, number, is_complete = _LogReader(path), 0, False
    for number, line in read_lines(path):
        if line[:4] in _STARTS:
            reader.take_line(number, line.rstrip())
        elif match := _BUILD.match(line.lstrip()):
            reader.build.append(" ".join(filter(None, match.groups())))
        elif line.startswith(SENTINEL):
            is_complete = True
    if not is_complete:
        raise TraceError(f"{path}: no line '{SENTINEL}': the run was interrupted; run Accel-Sim again")
    reader.finish_kernel(number)
    if not reader.kernels:
        raise TraceError(f"{path}: no line 'kernel_name = …': Accel-Sim ran no kernel")
    return reader.log()


def has_ended(path: str | os.PathLike[str]) -> bool:
    """Whether a log has the line that ends a run.

    The line decides, not the exit status: ``main`` of Accel-Sim returns 0, that of PIMFlow's branch returns
    1. Source: ``gpu-simulator/main.cc`` of accel-sim/accel-sim-framework and of its fork for PIMFlow.
    """
    return any(line.startswith(SENTINEL) for _, line in read_lines(path))


_BUILD = re.compile(
    r"(Accel-Sim) \[build accelsim-commit-([0-9a-f]{7})"
    r"|\*\*\* (GPGPU-Sim) Simulator Version (\S+)  \[build gpgpu-sim_git-commit-([0-9a-f]{7})",
    re.ASCII,
)
_STARTS = {"kernel_name"[:4], "-gpgpu"[:4], *(start[:4] for start in _BY_START)}


class _LogReader:
    """Reads a log line by line, and collects its complete kernels."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = path
        self.kernels: list[KernelLog] = []
        self.options: dict[str, str] = {}
        self.build: list[str] = []
        self.name = ""
        self.statistics: dict[str, str] = {}
        self.totals_before = dict.fromkeys(("total_cycles", "total_instructions", "reads", "writes"), 0)

    def take_line(self, number: int, line: str) -> None:
        """Read a line that begins like an option, a kernel's name or a statistic."""
        if line.startswith("-gpgpu"):
            words = line.split()
            if words[0] in _OPTIONS and len(words) > 1:
                self.options[_OPTIONS[words[0]]] = words[1]
            return
        start = line.partition("=")[0].strip()
        if start == "kernel_name":
            self.finish_kernel(number)
            self.name = line.partition("=")[2].strip()
            if not self.name:
                raise TraceError(f"{self.path}:{number}: a kernel without a name")
        elif start in _BY_START:
            self._take_statistic(number, _BY_START[start], line)

    def _take_statistic(self, number: int, field: str, line: str) -> None:
        match = _VALUES[field].fullmatch(line)
        if not match:
            raise TraceError(f"{self.path}:{number}: malformed: {line[:_SHOWN_CHARACTERS]!r}")
        if not self.name:
            raise TraceError(f"{self.path}:{number}: '{_FIELDS[field][0]}' before the first kernel")
        if field in self.statistics:
            raise TraceError(f"{self.path}:{number}: '{_FIELDS[field][0]}' twice for '{self.name}'")
        self.statistics[field] = match[1]

    def finish_kernel(self, number: int) -> None:
        """Add the kernel whose statistics end before line `number` to the complete ones."""
        if not self.name:
            return
        for field, (start, _) in _FIELDS.items():
            if field not in self.statistics:
                raise TraceError(f"{self.path}:{number}: kernel '{self.name}' has no line '{start} = …'")
        statistics = self.statistics
        values: dict[str, Any] = {
            field: int(statistics[field]) for field in ("launch_uid", "cycles", "instructions")
        }
        # Totals and DRAM counts accumulate over the kernels.
        increments = {
            field: int(statistics[field]) - total_before for field, total_before in self.totals_before.items()
        }
        if (increments["total_cycles"], increments["total_instructions"]) != (
            values["cycles"],
            values["instructions"],
        ):
            raise TraceError(
                f"{self.path}:{number}: kernel '{self.name}' does not add up to gpu_tot_sim_cycle and "
                f"gpu_tot_sim_insn: a kernel is missing before it, or several ran at once"
            )
        if values["cycles"] == 0 or min(increments.values()) < 0:
            raise TraceError(f"{self.path}:{number}: kernel '{self.name}' has no cycles, or counts shrank")
        self.totals_before = {field: int(statistics[field]) for field in self.totals_before}
        self.kernels.append(
            KernelLog(
                name=self.name,
                **values,
                ipc=_float(statistics["ipc"]),
                occupancy=_float(statistics["occupancy"]) / 100,
                l2_gb_s=_float(statistics["l2"]),
                dram_read_bytes=increments["reads"] * DRAM_UNIT_BYTES,
                dram_write_bytes=increments["writes"] * DRAM_UNIT_BYTES,
            )
        )
        self.name, self.statistics = "", {}

    def log(self) -> AccelSimLog:
        """The log of the lines read so far."""
        try:
            options = {name: float(text.split(":")[0]) for name, text in self.options.items()}
        except ValueError as error:
            raise TraceError(f"{self.path}: malformed option of the configuration: {error}") from None
        sms = options.get("clusters")
        return AccelSimLog(
            kernels=tuple(self.kernels),
            channels=int(options["channels"]) if "channels" in options else None,
            clock_mhz=options.get("clock_mhz"),
            sms=None if sms is None else int(sms * options.get("cores", 1)),
            build=", ".join(self.build),
        )


def _float(text: str) -> float:
    """A rate; Accel-Sim prints ``nan`` for 0/0."""
    value = float(text)
    return 0.0 if math.isnan(value) else value


def read_power_report(path: str | os.PathLike[str]) -> tuple[KernelPower, ...]:
    """Read an AccelWattch power report.

    Raises
    ------
    TraceError
        With file and line, if it is malformed or ends within a kernel.
    """
    kernels: list[KernelPower] = []
    name, average, number = "", None, 0
    components: dict[str, float] = {}
    for number, line in read_lines(path):
        start, _, text = (part.strip() for part in line.partition("="))
        if start == "kernel_name":
            if name:
                raise TraceError(f"{path}:{number}: kernel '{name}' has no line 'gpu_tot_avg_power = …'")
            name, average, components = text, None, {}
        elif start == "kernel_avg_power":
            average = _watts(path, number, text)
        elif match := re.fullmatch(r"gpu_avg_([A-Z0-9_]+P),?", start):  # the others are counts of events
            components[match[1]] = _watts(path, number, text)
        elif start == "gpu_tot_avg_power":
            if not name or average is None:
                raise TraceError(f"{path}:{number}: a total without 'kernel_name' and 'kernel_avg_power'")
            total = _watts(path, number, text)
            kernels.append(
                KernelPower(name=name, average_w=average, components_w=components, run_average_w=total)
            )
            name = ""
    if name or not kernels:
        problem = f"ends within kernel '{name}'" if name else "holds no kernel: not an AccelWattch report"
        raise TraceError(f"{path}:{number}: {problem}")
    return tuple(kernels)


def with_power(log: AccelSimLog, path: str | os.PathLike[str]) -> AccelSimLog:
    """`log` with the power of its kernels from AccelWattch's report `path`.

    Raises
    ------
    TraceError
        If the report is malformed, or belongs to other kernels.
    """
    powers = read_power_report(path)
    names = [kernel.name for kernel in log.kernels]
    if [power.name for power in powers] != names:
        raise TraceError(f"{path}: is not the report of the run, whose kernels are {', '.join(names)}")
    kernels = (replace(kernel, power=power) for kernel, power in zip(log.kernels, powers))
    return replace(log, kernels=tuple(kernels))


def _watts(path: str | os.PathLike[str], number: int, text: str) -> float:
    if not re.fullmatch(_NUMBER, text, re.ASCII) or math.isnan(float(text)) or float(text) < 0:
        raise TraceError(f"{path}:{number}: no power in watts: {text[:_SHOWN_CHARACTERS]!r}")
    return float(text)
