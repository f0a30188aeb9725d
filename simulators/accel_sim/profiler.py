"""GPU times from Accel-Sim: from existing logs, or by running an installed Accel-Sim.

Accel-Sim is run as ``accel-sim.out -trace kernelslist.g -config gpgpusim.config -config trace.config``, for
one kernel at a time, in a folder with copies of its configuration; ``-gpgpu_n_mem`` is the number of memory
channels. Its cycles include the launch, which a cost lists separately as `GpuSpec.launch_ns`.

Source: accel-sim/accel-sim-framework, ``README.md`` (arguments) and ``util/job_launching`` (the folder),
read 2026-11.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pimflow.core.candidate import Provenance
from pimflow.core.kernel import Kernel
from pimflow.errors import ProfilerError, SpecError, TraceError
from pimflow.hardware.gpu import GpuSpec
from pimflow.hardware.spec_text import fields_text
from pimflow.simulators.accel_sim.kernels import (
    DTYPE,
    KERNELS_LIST,
    SECOND_LAUNCHES,
    KernelTrace,
    kernel_name,
    launches,
    parse_kernel_name,
    write_kernel,
)
from pimflow.simulators.accel_sim.log import AccelSimLog, KernelLog, has_ended, read_log, with_power
from pimflow.simulators.accel_sim.scaling import SimulatedKernel, scale_cost
from pimflow.simulators.gpu.model import KernelCost, kernel_cost, require_wide_weights
from pimflow.simulators.installed import InstalledSimulator

if TYPE_CHECKING:
    from pimflow.simulators.gpu.model import KernelRequest

TIMEOUT_SECONDS = 6 * 3600.0  # a kernel of a large layer takes hours
EXECUTABLE = "accel-sim.out"
CONFIGURATIONS = ("gpgpusim.config", "trace.config")
MODEL = "SM75_RTX2060"  # the tested configuration that the GPU model was fitted to
_EXECUTABLE_FOLDERS = ("", "bin", "bin/release", "gpu-simulator/bin/release")
_CONFIGURATION_FOLDERS = (
    "",
    "config",
    "configs",
    f"configs/tested-cfgs/{MODEL}",
    f"gpu-simulator/configs/tested-cfgs/{MODEL}",
    f"gpu-simulator/gpgpu-sim/configs/tested-cfgs/{MODEL}",
    f"gpgpu-sim/configs/tested-cfgs/{MODEL}",
)
# of shared libraries in a checkout
_LIBRARY_FOLDERS = "lib", "gpu-simulator/gpgpu-sim/lib", "gpgpu-sim/lib"
_MAX_PARENTS = 4  # levels above an executable at which its configuration is searched
POWER_SUFFIX = ".power"  # instead of .log: AccelWattch's report of that run
# AccelWattch's components by part of the energy; all others count as arithmetic.
_COMPONENTS = {
    "gpu_dram": ("DRAMP", "MCP"),
    "gpu_l2": ("L2CP", "NOCP"),
    "gpu_leakage": ("STATICP", "IDLE_COREP"),
}
_CONSTANT = "CONSTP"  # left out: a plan adds constant power (`GpuSpec.energy`) for its whole latency
_LOG = re.compile(r"(?:.*\.(\d{1,6})|.*)\.log(?:\.gz)?", re.ASCII)
_DIGITS = 12


@dataclass(frozen=True)
class AccelSimLogs:
    """A `GpuProfiler` that reads logs of Accel-Sim in a directory.

    The log of a kernel is the one that has a kernel with its `kernel_name` and was run with the same number
    of memory channels. A kernel without a log costs what the GPU model gives, scaled by the errors of that
    model on the kernels with logs (`scaling`), and is marked as `Provenance.SCALED`. Where AccelWattch's
    report of the run lies beside the log, the kernel's energy comes from it.

    Parameters
    ----------
    directory : str
        With files ``*.log`` or ``*.log.gz``, and reports ``*.power`` of the same stem.

    Raises
    ------
    ProfilerError
        If it is no directory or holds no logs. In `costs`: if a kernel has two logs, takes fewer cycles than
        a launch, or ran other instructions than the trace of the kernel that its name says; if a log is of
        no kernel that pimflow emits, or no log is of this GPU and type.
    TraceError
        In `costs`: if a log is malformed, or its run was not complete.
    SpecError
        In `costs`: if a log is of another GPU.
    """

    directory: str
    name: str = field(init=False)
    computes: ClassVar[bool] = False
    primitives: ClassVar[bool] = False
    _runs: dict[tuple[str, int], list[tuple[Path, AccelSimLog]]] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )
    _references: dict[str, list[SimulatedKernel]] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not Path(self.directory).is_dir():
            raise ProfilerError(f"accel-sim-logs '{self.directory}': there is no such directory")
        if not self._files():
            raise ProfilerError(f"accel-sim-logs '{self.directory}': no file *.log or *.log.gz in it")
        reports = filter(None, map(_report, self._files()))
        object.__setattr__(self, "name", f"accel-sim-logs:{_digest([*self._files(), *reports])}")

    def costs(self, requests: Sequence[KernelRequest], gpu: GpuSpec, dtype: str) -> list[KernelCost]:
        """The cost of each request, in order; raises `UsageError` for kernels with narrow weights."""
        require_wide_weights(requests, "accel-sim-logs")
        if not self._runs:
            for path in self._files():
                self._read(path)
        references = self._references_on(gpu, dtype)
        return [self._cost(request.kernel, request.channels, gpu, dtype, references) for request in requests]

    def _references_on(self, gpu: GpuSpec, dtype: str) -> list[SimulatedKernel]:
        """Kernels with exactly one log, with their simulated costs and those of the GPU model."""
        key = repr((fields_text(dataclasses.replace(gpu, sources={})), dtype))
        if key not in self._references:
            references = []
            for (name, channels), runs in sorted(self._runs.items(), key=lambda item: item[0]):
                kernel = parse_kernel_name(name, dtype)
                if kernel is None or len(runs) > 1 or channels > gpu.memory_channels:
                    continue
                (path, log), modelled = runs[0], kernel_cost(kernel, gpu, dtype=dtype, channels=channels)
                trace = launches(kernel, gpu, dtype, channels)
                _require_trace(str(path), log, {launch.name: launch.instructions() for launch in trace})
                simulated = _simulation_cost(log, str(path), kernel, channels, gpu, dtype)
                references.append(
                    SimulatedKernel(
                        name=name, kernel=kernel, channels=channels, modelled=modelled, simulated=simulated
                    )
                )
            if self._runs and not references and all(len(runs) == 1 for runs in self._runs.values()):
                raise ProfilerError(
                    f"accel-sim-logs '{self.directory}': no log is of a kernel of {dtype} with at most "
                    f"{gpu.memory_channels} memory channels: leave the profiler out, or simulate such kernels"
                )
            self._references[key] = references
        return self._references[key]

    def _files(self) -> list[Path]:
        return sorted(path for path in Path(self.directory).iterdir() if _LOG.fullmatch(path.name))

    def _read(self, path: Path) -> None:
        log, report = read_log(path), _report(path)
        if report:
            log = with_power(log, report)
        match = _LOG.fullmatch(path.name)
        channels_in_name = int(match[1]) if match and match[1] else None
        channels = channels_in_name if log.channels is None else log.channels
        if channels is None:
            raise ProfilerError(f"{path}: says no -gpgpu_n_mem; call it <kernel>.<memory channels>.log")
        if channels_in_name not in (None, channels):
            raise ProfilerError(f"{path}: ran with {channels} memory channels, not with {channels_in_name}")
        for name, kernels in _kernel_groups(log.kernels):
            if parse_kernel_name(name, DTYPE) is None:
                raise ProfilerError(
                    f"{path}: '{name}' is no kernel whose trace pimflow writes, so its log is of no use: "
                    "remove the file, or simulate what pimflow trace writes"
                )
            part = dataclasses.replace(log, kernels=kernels)
            self._runs.setdefault((name, channels), []).append((path, part))

    def _cost(
        self, kernel: Kernel, channels: int, gpu: GpuSpec, dtype: str, references: Sequence[SimulatedKernel]
    ) -> KernelCost:
        name = kernel_name(kernel, dtype)
        runs = self._runs.get((name, channels), [])
        if not runs:
            modelled = kernel_cost(kernel, gpu, dtype=dtype, channels=channels)
            return scale_cost(name, kernel, channels, modelled, references)
        if len(runs) > 1:
            raise ProfilerError(
                f"{runs[1][0]}: kernel '{name}' with {channels} channels is in {runs[0][0]} too; keep one"
            )
        path, log = runs[0]
        return _simulation_cost(log, str(path), kernel, channels, gpu, dtype)


def _report(log: Path) -> Path | None:
    """AccelWattch's report of the run that wrote `log`; None if there is none."""
    report = log.with_name(log.name.removesuffix(".gz").removesuffix(".log") + POWER_SUFFIX)
    return report if report.is_file() else None


def _kernel_groups(kernels: Iterable[KernelLog]) -> list[tuple[str, tuple[KernelLog, ...]]]:
    """The launches of each kernel, by name: a second launch belongs to the kernel before it."""
    groups: list[tuple[str, tuple[KernelLog, ...]]] = []
    for kernel in kernels:
        if groups and kernel.name in [groups[-1][0] + end for end in SECOND_LAUNCHES]:
            groups[-1] = (groups[-1][0], (*groups[-1][1], kernel))
        else:
            groups.append((kernel.name, (kernel,)))
    return groups


def _require_trace(who: str, log: AccelSimLog, instructions: Mapping[str, int]) -> None:
    """Raise `ProfilerError` unless a log is of a trace with these launches, by name their instructions."""
    names = [kernel.name for kernel in log.kernels]
    if names != list(instructions):
        raise ProfilerError(f"{who}: it ran {', '.join(names)} instead of {', '.join(instructions)}")
    for kernel in log.kernels:
        if kernel.instructions != instructions[kernel.name]:
            raise ProfilerError(
                f"{who}: it counts {kernel.instructions} instructions of '{kernel.name}', whose trace has "
                f"{instructions[kernel.name]}: it is of another kernel"
            )


def _simulation_cost(
    log: AccelSimLog, who: str, kernel: Kernel, channels: int, gpu: GpuSpec, dtype: str
) -> KernelCost:
    """The cost of a kernel from its run: simulated time and traffic, with the demands of the model."""
    for option, actual, expected in (
        ("-gpgpu_clock_domains", log.clock_mhz, gpu.clock_mhz),
        ("SMs (-gpgpu_n_clusters)", log.sms, gpu.sms),
    ):
        if actual is not None and abs(actual - expected) > 1e-6 * expected:
            raise SpecError(f"{who}: ran with {option} {actual:g}; gpu '{gpu.name}' has {expected:g}")
    total_ns = log.cycles / gpu.clock_mhz * 1e3
    if total_ns < gpu.launch_ns * (1 - 1e-4):  # the launch is rounded in the GPU's file
        raise ProfilerError(
            f"{who}: {log.cycles} cycles are fewer than the launch of gpu '{gpu.name}', "
            f"{gpu.launch_ns * gpu.clock_mhz / 1e3:.0f}: set -gpgpu_kernel_launch_latency to the GPU's"
        )
    return dataclasses.replace(
        kernel_cost(kernel, gpu, dtype=dtype, channels=channels),
        launch_ns=gpu.launch_ns,
        execution_ns=max(0.0, total_ns - gpu.launch_ns),
        dram_bytes=float(log.dram_bytes),
        l2_bytes=sum(
            kernel_log.l2_gb_s * kernel_log.cycles / gpu.clock_mhz * 1e3 for kernel_log in log.kernels
        ),
        provenance=Provenance.SIMULATED,
        energies_pj=_energies_pj(log, who, gpu),
    )


def _energies_pj(log: AccelSimLog, who: str, gpu: GpuSpec) -> dict[str, float] | None:
    """Energy by part: average power, less the constant power, times time; None without a power report."""
    energies_pj = dict.fromkeys(("gpu_arithmetic", *_COMPONENTS), 0.0)
    for kernel in log.kernels:
        if kernel.power is None:
            return None
        time_ns, watts = kernel.cycles / gpu.clock_mhz * 1e3, kernel.power.components_w
        parts_w = {part: sum(watts.get(n, 0.0) for n in names) for part, names in _COMPONENTS.items()}
        rest_w = kernel.power.average_w - watts.get(_CONSTANT, 0.0) - sum(parts_w.values())
        if rest_w < -1e-3 * kernel.power.average_w:
            raise ProfilerError(f"{who}: the power of '{kernel.name}' is less than its components add up to")
        for part, part_w in {"gpu_arithmetic": max(rest_w, 0.0), **parts_w}.items():
            energies_pj[part] += part_w * time_ns * 1e3
    return energies_pj


@dataclass(frozen=True)
class AccelSim:
    """A `GpuProfiler` that runs an installed Accel-Sim on the traces of `simulators.accel_sim.kernels`.

    Parameters
    ----------
    path : str
        ``accel-sim.out``, or a directory with it in ``bin`` and with ``gpgpusim.config`` and
        ``trace.config`` in ``config``, such as a checkout of the framework, or the folder of a checkout.
    timeout_seconds : float
        For one kernel.

    Raises
    ------
    ProfilerError
        If the executable or its configuration does not exist. In `costs`: if a shared library is missing, the
        log is not that of a complete run, the run exceeds the timeout, or the log is of other kernels. The
        exit status does not matter.
    """

    path: str
    timeout_seconds: float = TIMEOUT_SECONDS
    name: str = field(init=False)
    computes: ClassVar[bool] = False
    primitives: ClassVar[bool] = False
    executable: Path = field(init=False)
    configurations: tuple[Path, Path] = field(init=False)
    libraries: tuple[Path, ...] = field(init=False)
    _logs: dict[tuple[str, int], AccelSimLog] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        executable, roots = self._find_executable()
        configurations = tuple(self._find_configuration(name, roots) for name in CONFIGURATIONS)
        object.__setattr__(self, "executable", executable)
        object.__setattr__(self, "configurations", configurations)
        libraries = tuple(root / place for root in roots for place in _LIBRARY_FOLDERS)
        object.__setattr__(self, "libraries", libraries)
        object.__setattr__(self, "name", f"accel-sim:{_digest([executable, *configurations])}")

    def costs(self, requests: Sequence[KernelRequest], gpu: GpuSpec, dtype: str) -> list[KernelCost]:
        """A cost for each request; raises `UsageError` for narrow weights."""
        require_wide_weights(requests, "accel-sim")
        return [self._cost(request.kernel, request.channels, gpu, dtype) for request in requests]

    @property
    def _who(self) -> str:
        return f"accel-sim '{self.path}'"

    def _find_executable(self) -> tuple[Path, list[Path]]:
        path = Path(shutil.which(self.path) or self.path if os.sep not in self.path else self.path)
        if path.is_dir():
            candidates = [path / place / EXECUTABLE for place in _EXECUTABLE_FOLDERS]
            roots = [path]
        else:
            candidates, roots = [path], list(path.resolve().parents)[:_MAX_PARENTS]
        executable = next((candidate for candidate in candidates if candidate.is_file()), None)
        if executable is None:
            problem = f"no {EXECUTABLE} in it or its bin" if path.is_dir() else "there is no such file"
            raise ProfilerError(f"{self._who}: {problem}")
        if not os.access(executable, os.X_OK):
            raise ProfilerError(f"{self._who}: '{executable}' is not an executable file")
        return executable.resolve(), roots

    def _find_configuration(self, name: str, roots: Sequence[Path]) -> Path:
        for root in roots:
            for place in _CONFIGURATION_FOLDERS:
                if (root / place / name).is_file():
                    return (root / place / name).resolve()
        raise ProfilerError(
            f"{self._who}: no {name} next to it or in its config; add the file of the GPU there"
        )

    def _cost(self, kernel: Kernel, channels: int, gpu: GpuSpec, dtype: str) -> KernelCost:
        log = self.log(kernel, channels, gpu, dtype)
        return _simulation_cost(log, self._who, kernel, channels, gpu, dtype)

    def log(self, kernel: Kernel, channels: int, gpu: GpuSpec, dtype: str) -> AccelSimLog:
        """Its log of a kernel with so many memory channels; a kernel is run only once."""
        key = (kernel_name(kernel, dtype), channels)
        if key not in self._logs:
            self._logs[key] = self._run(kernel, channels, gpu, dtype)
        return self._logs[key]

    def _run(self, kernel: Kernel, channels: int, gpu: GpuSpec, dtype: str) -> AccelSimLog:
        with tempfile.TemporaryDirectory(prefix="pimflow-") as name:
            folder = Path(name)
            traces, output = folder / "traces", folder / "output.log"
            traces.mkdir()
            try:
                emitted = write_kernel(kernel, gpu, dtype, channels, traces)
                self._configure(folder, channels)
            except OSError as error:
                raise ProfilerError(f"{self._who}: {folder}: {error.strerror or error}") from error
            command = [str(self.executable), "-trace", str(traces / KERNELS_LIST)]
            for configuration in CONFIGURATIONS:
                command += ["-config", str(folder / configuration)]
            simulator = InstalledSimulator(
                name=self._who,
                timeout_seconds=self.timeout_seconds,
                is_complete=has_ended,
                libraries=self.libraries,
            )
            simulator.run(command, output)
            try:
                log = read_log(output)
            except TraceError as error:
                raise ProfilerError(f"{self._who}: {str(error).replace(f'{name}{os.sep}', 'its ')}") from None
            self._check(log, emitted, channels)
            return log

    def _configure(self, folder: Path, channels: int) -> None:
        """Copy the configuration and the files beside it, since it refers to some (interconnect, power)."""
        for configuration in self.configurations:
            for path in configuration.parent.iterdir():
                if path.is_file() and path.suffix in (".config", ".icnt", ".xml"):
                    shutil.copyfile(path, folder / path.name)
        for configuration in self.configurations:
            shutil.copyfile(configuration, folder / configuration.name)
        options = (folder / CONFIGURATIONS[0]).read_text(encoding="utf-8", errors="replace")
        options = re.sub(r"^[ \t]*-gpgpu_n_mem[ \t].*$", "", options, flags=re.M)
        (folder / CONFIGURATIONS[0]).write_text(f"{options}\n-gpgpu_n_mem {channels}\n", encoding="utf-8")

    def _check(self, log: AccelSimLog, emitted: KernelTrace, channels: int) -> None:
        _require_trace(self._who, log, dict(zip(emitted.launches, emitted.instructions)))
        if log.channels not in (None, channels):
            raise ProfilerError(f"{self._who}: it ran with {log.channels} memory channels, not {channels}")


def _digest(paths: Iterable[Path]) -> str:
    """Digest of the names, sizes and modification times of files on which results depend."""
    digest = hashlib.sha256()
    for path in paths:
        status = path.stat()
        digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:_DIGITS]
