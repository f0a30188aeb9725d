"""Our models beside an installed simulator: PIM programs in Ramulator, GPU kernels in Accel-Sim."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean

from pimflow.commands.shared.search import search
from pimflow.commands.simulate.kernel_traces import KernelTraceRequest, trace_request
from pimflow.compiler.interface import Interface
from pimflow.core.candidate import Provenance
from pimflow.core.json_form import JsonTree
from pimflow.core.layer_text import parse_layer
from pimflow.core.program import PimProgram
from pimflow.errors import UsageError
from pimflow.hardware import PimSpec, System
from pimflow.pim_backend.programs.lowering import ProgramRequest, lower
from pimflow.pim_backend.programs.schedule import schedules
from pimflow.simulators.accel_sim.kernels import kernel_name
from pimflow.simulators.gpu.model import kernel_cost
from pimflow.simulators.pim.timing import TimingResult, time_program
from pimflow.simulators.profiler import GpuProfiler
from pimflow.simulators.ramulator.fork import Ramulator

TIMING = "ramulator-pimflow"  # the built-in rules that the fork of Ramulator has


@dataclass(frozen=True, kw_only=True)
class ProgramTimes:
    """Times of a program by the built-in rules and in Ramulator.

    Attributes
    ----------
    source, name : str
        Where the program comes from, a network or a layer, and its name there.
    """

    source: str
    name: str
    gwrite_hiding: bool
    built_in: TimingResult
    simulated: TimingResult

    @property
    def cycles_agree(self) -> bool:
        """Whether the cycles of every channel are equal."""
        return self.built_in.channel_cycles == self.simulated.channel_cycles

    @property
    def counts_agree(self) -> bool:
        """Whether all command counts of every channel are equal, refreshes and precharges included."""
        return self.built_in.channel_commands == self.simulated.channel_commands


def program_times(
    programs: Iterable[tuple[str, str, PimProgram]], pim: PimSpec, simulator: Ramulator
) -> Iterator[ProgramTimes]:
    """Time every (source, name, program) by the built-in rules and in Ramulator.

    Raises
    ------
    ProfilerError, SpecError
        As `Ramulator`.
    """
    for source, name, program in programs:
        yield ProgramTimes(
            source=source,
            name=name,
            gwrite_hiding=simulator.gwrite_hiding,
            built_in=time_program(program, pim, TIMING, simulator.gwrite_hiding),
            simulated=simulator.time_program(program, pim),
        )


@dataclass(frozen=True, kw_only=True)
class ProgramRow:
    """Cycles of a program on its slowest channel."""

    program: str
    cycles: int
    simulated_cycles: int
    counts_agree: bool


@dataclass(frozen=True, kw_only=True)
class KernelRow:
    """Times of a GPU kernel, launch included, by the GPU model and by the simulator."""

    kernel: str
    layers: tuple[str, ...]
    gpu_channels: int
    modelled_ns: float
    simulated_ns: float

    @property
    def ratio(self) -> float:
        """Modelled over simulated time."""
        return self.modelled_ns / self.simulated_ns


@dataclass(frozen=True, kw_only=True)
class SimulatorComparison(JsonTree):
    """What ``pimflow compare-simulator`` prints.

    Attributes
    ----------
    left_out : int
        Kernels that were not simulated: they have no log, or take too long by the GPU model.
    """

    source: str
    simulators: tuple[str, ...]
    programs: tuple[ProgramRow, ...]
    kernels: tuple[KernelRow, ...]
    left_out: int

    def text(self) -> str:
        """The rows, and a line on all of them."""
        lines = [
            f"{row.program}: {row.cycles} cycles, simulated {row.simulated_cycles} "
            f"({row.cycles / row.simulated_cycles:.3f}x)"
            + ("" if row.counts_agree else "; other counts of commands")
            for row in self.programs
        ]
        lines += [
            f"{row.kernel} on {row.gpu_channels} channels ({', '.join(row.layers)}): "
            f"{row.modelled_ns / 1e3:.2f} us, simulated {row.simulated_ns / 1e3:.2f} us ({row.ratio:.3f}x)"
            for row in self.kernels
        ]
        if self.programs:
            same = sum(row.cycles == row.simulated_cycles for row in self.programs)
            lines.append(f"{len(self.programs)} programs, {same} with equal cycles")
        if self.kernels:
            ratios = [row.ratio for row in self.kernels]
            lines.append(
                f"{len(self.kernels)} kernels: the GPU model says {geometric_mean(ratios):.3f} of the "
                f"simulated time (geometric mean; {min(ratios):.3f} to {max(ratios):.3f})"
            )
        if self.left_out:
            lines.append(f"{self.left_out} kernels were not simulated")
        return "\n".join(lines)


def compare_simulator(
    source: str,
    system: System,
    *,
    gpu: GpuProfiler | None = None,
    pim: Ramulator | None = None,
    max_cycles: int | None = None,
    progress: Callable[[float], None] = lambda _: None,
) -> SimulatorComparison:
    """Compare the models with simulators on a network, a layer or a compiled directory.

    Parameters
    ----------
    source : str
        A network, a layer by its shape, or what ``pimflow compile -o`` wrote.
    gpu : GpuProfiler, optional
        Accel-Sim, or its logs: each GPU kernel of `source`, with all memory channels and with the GPU's own.
    pim : Ramulator, optional
        Each PIM program: of the directory, of the network's plan under accounting ``paper`` and the timing
        ``ramulator-pimflow``, or of the layer in each loop order.
    max_cycles : int, optional
        Kernels that take more cycles by the GPU model are left out.
    progress : callable
        Called with the share of kernels that is done.

    Raises
    ------
    UsageError
        Without any simulator, or with a GPU profiler that is none; else see `trace_request`.
    ProfilerError, SpecError, TraceError
        As the simulators.
    """
    system = replace(system, timing=TIMING, accounting="paper")
    if gpu is None and pim is None:
        raise UsageError("name a simulator: --profiler gpu=accel-sim:PATH or pim=ramulator:PATH")
    if gpu is not None and gpu.computes:
        raise UsageError(f"profiler gpu={gpu.name} computes times, and simulates nothing")
    programs = program_times(_programs(source, system), system.pim, pim) if pim else iter(())
    program_rows = tuple(
        ProgramRow(
            program=times.name,
            cycles=times.built_in.cycles,
            simulated_cycles=times.simulated.cycles,
            counts_agree=times.counts_agree,
        )
        for times in programs
    )
    request = trace_request(source, system) if gpu else None
    kernel_rows = tuple(_kernel_rows(request, gpu, max_cycles, progress)) if request and gpu else ()
    return SimulatorComparison(
        source=source,
        simulators=tuple(simulator.name for simulator in (gpu, pim) if simulator),
        programs=program_rows,
        kernels=kernel_rows,
        left_out=len(request.layers) - len(kernel_rows) if request else 0,
    )


def _kernel_rows(
    request: KernelTraceRequest,
    simulator: GpuProfiler,
    max_cycles: int | None,
    progress: Callable[[float], None],
) -> Iterator[KernelRow]:
    """The kernels that `simulator` simulated; it may give times of others by a model."""
    gpu, dtype = request.gpu, request.dtype
    for number, (kernel_request, layers) in enumerate(request.layers.items()):
        progress(number / len(request.layers))
        kernel, channels = kernel_request.kernel, kernel_request.channels
        modelled = kernel_cost(kernel, gpu, dtype=dtype, channels=channels)
        if max_cycles is not None and modelled.total_ns * gpu.clock_mhz / 1e3 > max_cycles:
            continue
        (cost,) = simulator.costs([kernel_request], gpu, dtype)
        if cost.provenance is Provenance.SIMULATED:
            yield KernelRow(
                kernel=kernel_name(kernel, dtype),
                layers=tuple(layers),
                gpu_channels=channels,
                modelled_ns=modelled.total_ns,
                simulated_ns=cost.total_ns,
            )
    progress(1.0)


def _programs(source: str, system: System) -> Iterator[tuple[str, str, PimProgram]]:
    if Path(source).is_dir():
        directory = Path(source)
        Interface.load(directory)
        for path in sorted((directory / "programs").glob("*.pimprog")):
            yield source, path.stem, PimProgram.from_json(path.read_text(encoding="utf-8"))
    elif ":" in source and not Path(source).exists():
        yield from layer_programs(source, system.pim, system.dtype, system.pim_channels)
    else:
        for name, program in search(source, system).programs().items():
            yield source, name, program


def layer_programs(
    text: str, pim: PimSpec, dtype: str, channels: int
) -> Iterator[tuple[str, str, PimProgram]]:
    """The programs of a layer, by its shape, in each loop order."""
    layer = parse_layer(text)
    for order in schedules(layer, pim, dtype):
        program = lower(ProgramRequest(text, layer, order), pim, dtype=dtype, channels=channels)
        yield text, str(order), program
